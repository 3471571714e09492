import pytest
import torch

import cutlass_ops as co
from cutlass_ops.declare.device import Device
from cutlass_ops.declare.problem import Problem
from cutlass_ops.epilogue import builtin, composed
from cutlass_ops.run.call import call_at, check_call, signature_of

H100, A100 = Device((9, 0), 132), Device((8, 0), 108)


def matrix(rows, cols, *, ld=None):
    """Return a 16-byte aligned BF16 matrix with a leading dimension."""
    buffer = torch.zeros(rows * (ld or cols) + 8, dtype=torch.bfloat16)
    start = -(buffer.data_ptr() // 2) % 8
    return buffer[start : start + rows * (ld or cols)].view(rows, ld or cols)[:, :cols]


def signature(m, n, k, device=H100, *, out=None, residual=None):
    inputs = {"bias": torch.zeros(n, dtype=torch.bfloat16)}
    graph = builtin.bias_relu.graph
    if residual is not None:
        graph, inputs["residual"] = builtin.bias_relu_residual.graph, residual
    call = check_call(graph, matrix(m, k), matrix(n, k).t(), inputs, out, None)
    return signature_of(call, device)


def test_aligned_operands_are_all_for_tma():
    found = signature(64, 128, 256, out=matrix(64, 128), residual=matrix(64, 128))
    assert [str(t) for t in (found.a, found.b, found.d)] == ["bf16.row", "bf16.col", "bf16.row"]
    assert found.inputs[1].aligned


def test_an_odd_extent_stops_what_is_written_by_tma_but_not_what_is_read():
    out, residual = matrix(64, 127, ld=136), matrix(64, 127, ld=136)
    found = signature(64, 127, 256, out=out, residual=residual)
    assert found.a.aligned
    assert found.b.aligned
    assert found.inputs[1].aligned
    assert found.d.alignment == 1
    even = signature(64, 124, 256, out=matrix(64, 124, ld=136))
    assert even.d.alignment == 4


def test_an_odd_k_with_padded_rows_is_read_by_tma():
    call = check_call(
        builtin.identity.graph, matrix(64, 255, ld=256), matrix(128, 255, ld=256).t(), {}, matrix(64, 128), None
    )
    found = signature_of(call, H100)
    assert found.a.aligned
    assert found.b.aligned
    assert not signature_of(call, A100).a.aligned  # there, whole accesses must divide the extent


def test_one_misaligned_operand_takes_tma_from_all():
    call = check_call(builtin.identity.graph, matrix(64, 255), matrix(128, 255, ld=256).t(), {}, None, None)
    found = signature_of(call, H100)
    assert found.a.alignment == 1
    assert found.b.alignment == 1


@pytest.mark.parametrize(("m", "expected"), [(64, "col"), (63, "col.align1")])
def test_a_column_major_output(m, expected):
    out = matrix(128, m, ld=72).t()
    found = signature(m, 128, 256, out=out)
    assert str(found.d) == f"bf16.{expected}"


def test_launch_order_is_kept_by_a_spec_but_makes_no_other_kernel():
    config, order = co.Sm90Config(co.ThreadblockShape(128, 128, 64)), co.TileOrder("along_n", swizzle=4)
    types = {"a": "bf16.row", "b": "bf16.col", "d": "bf16.row"}
    plain, ordered = (co.KernelSpec(**types, epilogue=builtin.identity, config=config, order=o) for o in (None, order))
    assert plain == ordered
    assert hash(plain) == hash(ordered)
    assert plain.to_json() == ordered.to_json()
    assert (plain.order, ordered.order) == (co.TileOrder(), order)


def test_misaligned_tensors_of_one_call_share_an_alignment():
    out, residual = matrix(64, 126, ld=130), matrix(64, 126, ld=132)
    found = signature(64, 126, 256, out=out, residual=residual)
    assert found.d.alignment == 2
    assert found.inputs[1].alignment == 2
    assert found.inputs[0].alignment == 1  # a vector has none
    call = check_call(builtin.identity.graph, matrix(64, 254), matrix(128, 254, ld=255).t(), {}, None, None)
    found = signature_of(call, H100)
    assert (found.a.alignment, found.b.alignment) == (1, 1)
    assert found.d.aligned


def test_further_tiles_take_the_dtype_of_a_given_d():
    @co.epilogue
    def saved(acc):
        return {"d": co.relu(acc), "pre": acc}

    out = torch.empty(64, 128)
    call = check_call(saved.graph, matrix(64, 256), matrix(256, 128), {}, out, None)
    assert [t.dtype for t in call.outputs] == [torch.float32, torch.float32]


# ---- A second product of A ------------------------------------------------------------------------------------------


def gated_signature(b, up, k, device=H100):
    return signature_of(check_call(composed.swiglu.graph, matrix(64, k), b, {"up": up}, None, None), device)


def test_a_product_is_typed_as_b_is():
    found = gated_signature(matrix(128, 256).t(), matrix(128, 256, ld=264).t(), 256)
    assert str(found.b) == "bf16.col"
    assert found.inputs == (found.b,)
    assert gated_signature(matrix(256, 128), matrix(256, 128), 256).inputs[0].major == "row"
    spec = found.spec(co.Sm90Config(co.ThreadblockShape(64, 64, 64)))
    assert spec.inputs == (spec.b,)


@pytest.mark.parametrize("device", [H100, A100])
@pytest.mark.parametrize("swapped", [False, True])
def test_of_b_and_a_product_the_lower_alignment_counts_for_both(device, swapped):
    weights = [matrix(128, 256).t(), matrix(128, 256, ld=258).t()]
    found = gated_signature(*(weights[::-1] if swapped else weights), 256, device)
    assert found.b.alignment == 2
    assert found.inputs == (found.b,)
    assert found.a.alignment == 8  # its accesses are its own


def test_weights_of_different_majors_are_refused():
    with pytest.raises(ValueError, match=r"b is col-major, up is row-major: both weights need the same major"):
        gated_signature(matrix(128, 256).t(), matrix(256, 128), 256)


def test_weights_that_can_be_read_either_way_take_the_major_of_the_other():
    # One column: its memory is a column or 256 rows of one element.
    either, rows = matrix(256, 1), matrix(256, 1, ld=8)
    assert str(gated_signature(either, rows, 256).b) == "bf16.row.align1"
    assert str(gated_signature(either, either, 256).b) == "bf16.col"


def test_a_spec_types_a_product_as_b_unless_told_otherwise():
    config = co.Sm90Config(co.ThreadblockShape(64, 64, 64))
    declared = {"a": "bf16.row", "b": "bf16.col", "d": "f32.row", "epilogue": composed.swiglu, "config": config}
    spec = co.KernelSpec(**declared)
    assert [str(t) for t in spec.inputs] == ["bf16.col"]
    assert co.KernelSpec.from_json(spec.to_json()) == spec
    other = co.KernelSpec(**declared, inputs={"up": "bf16.row.align2"})
    assert [str(t) for t in other.inputs] == ["bf16.row.align2"]


@pytest.mark.parametrize("major", ["row", "col"])
def test_a_call_without_data_has_a_product_of_bs_major(major):
    call = call_at(composed.swiglu.graph, Problem(64, 128, 256), "bf16", "row", major)
    assert call.arguments.inputs["up"].shape == (256, 128)
    assert call.arguments.inputs["up"].stride() == call.arguments.b.stride()
    assert signature_of(call, H100).inputs[0].major == major
