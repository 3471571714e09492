"""From tensors to operand types: alignments and majors, folding of batches, outputs and their overlaps."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import cutlass_ops as co
from cutlass_ops.base.dtypes import bf16, f16
from cutlass_ops.declare.device import Device
from cutlass_ops.declare.problem import Problem
from cutlass_ops.operand.call import call_at, check_call, signature_of
from cutlass_ops.operand.inputs import integer
from cutlass_ops.operand.matrices import Matrix, alike
from cutlass_ops.operand.operands import check_arguments
from cutlass_ops.operand.outputs import check_overlap
from cutlass_ops.operand.tensors import element_type, fold, overlap
from tests.strategies import PATIENT

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
MISSING = object()


@co.epilogue
def full(acc, bias: co.Row, scale: co.Col, residual: co.Tile, alpha: co.Scalar):
    pre = acc * scale + bias
    return {"d": pre * alpha + residual, "pre": pre, "row": co.sum(pre, dim=1), "col": co.max(pre, dim=0)}


def strided(shape, strides, offset=0, dtype=BF16):
    """A view at an offset, in elements, from an address that is a multiple of 16 bytes."""
    last = sum((extent - 1) * stride for extent, stride in zip(shape, strides, strict=True))
    memory = torch.zeros(offset + last + 1, dtype=dtype)
    assert memory.data_ptr() % 16 == 0
    return memory.as_strided(shape, strides, offset)


# ---- Majors and alignments ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "strides", "offset", "dtype", "operand"),
    [
        ((64, 64), (64, 1), 0, BF16, "bf16.row"),
        ((64, 64), (1, 64), 0, BF16, "bf16.col"),
        ((64, 64), (72, 1), 0, F16, "f16.row"),
        ((64, 64), (68, 1), 0, BF16, "bf16.row.align4"),
        ((64, 64), (66, 1), 0, BF16, "bf16.row.align2"),
        ((64, 63), (63, 1), 0, BF16, "bf16.row.align1"),
        ((64, 64), (64, 1), 8, BF16, "bf16.row"),
        ((64, 64), (64, 1), 4, BF16, "bf16.row.align4"),
        ((64, 64), (64, 1), 2, BF16, "bf16.row.align2"),
        ((64, 64), (64, 1), 1, BF16, "bf16.row.align1"),
        ((64, 64), (1, 66), 0, BF16, "bf16.col.align2"),
        ((64, 64), (64, 1), 0, F32, "f32.row"),
        ((64, 64), (66, 1), 0, F32, "f32.row.align2"),
        ((64, 64), (64, 1), 1, F32, "f32.row.align1"),
        # A slice: its own extent does not count, only where its rows begin.
        ((64, 63), (64, 1), 0, BF16, "bf16.row"),
        # One row or one column can be read either way: the better aligned one.
        ((1, 64), (64, 1), 0, BF16, "bf16.row"),
        ((1, 63), (63, 1), 0, BF16, "bf16.row"),
        ((64, 1), (1, 1), 0, BF16, "bf16.col"),
        ((64, 1), (64, 1), 0, BF16, "bf16.row"),
        ((1, 1), (1, 1), 0, BF16, "bf16.row"),
        ((1, 1), (7, 3), 1, BF16, "bf16.row.align1"),
    ],
)
def test_the_type_of_a_tensor(shape, strides, offset, dtype, operand):
    x = strided(shape, strides, offset, dtype)
    assert str(Matrix("x", x, element_type("x", x)).layout().operand) == str(co.Operand.of(operand))


@PATIENT
@given(
    rows=st.integers(1, 33),
    cols=st.integers(1, 33),
    slack=st.integers(0, 17),
    offset=st.integers(0, 17),
    col_major=st.booleans(),
    dtype=st.sampled_from([BF16, F32]),
)
def test_the_alignment_divides_every_address_that_a_kernel_computes(rows, cols, slack, offset, col_major, dtype):
    runs, length = (cols, rows) if col_major else (rows, cols)
    ld = length + slack
    x = strided((rows, cols), (1, ld) if col_major else (ld, 1), offset, dtype)
    found = Matrix("x", x, element_type("x", x)).layout()
    size = found.operand.alignment * x.element_size()
    assert size in (2, 4, 8, 16)
    outer = 0 if found.operand.major == "row" else 1
    starts = [x.select(outer, i).data_ptr() for i in range(x.shape[outer])]
    assert all(start % size == 0 for start in starts)
    # The largest such power of two, of the two readings if both are possible.
    if runs > 1 and length > 1:
        assert found.operand.major == ("col" if col_major else "row")
        assert size == 16 or any(start % (2 * size) for start in starts)
    vector = found.for_vector_access()
    assert x.shape[1 - outer] % vector.alignment == 0
    assert vector.alignment <= found.operand.alignment
    assert vector.alignment == math.gcd(found.operand.alignment, x.shape[1 - outer])
    assert (vector.dtype, vector.major) == (found.operand.dtype, found.operand.major)


@pytest.mark.parametrize(
    "strides",
    [(2, 2), (128, 2), (0, 1), (1, 0), (0, 0), (63, 1), (1, 63)],
    ids=["both", "every other", "expanded rows", "expanded columns", "one value", "rows overlap", "columns overlap"],
)
def test_memory_that_no_kernel_can_address_is_refused(strides):
    x = torch.zeros(64 * 128 + 128, dtype=BF16).as_strided((64, 64), strides)
    with pytest.raises(ValueError, match=r"^weight has shape \(64, 64\) and strides .*weight\.contiguous\(\)"):
        Matrix("weight", x, bf16).layout()


@pytest.mark.parametrize("dtype", [torch.int16, torch.int64, torch.uint8, torch.bool, torch.complex64])
def test_other_element_types_are_refused_by_name(dtype):
    with pytest.raises(
        TypeError, match=rf"^bias is {dtype}: use one of torch.float16, torch.bfloat16, torch.float32, torch.float8"
    ):
        element_type("bias", torch.zeros(1, dtype=dtype))
    with pytest.raises(TypeError, match=r"^a is .*: use one of torch.float16, torch.bfloat16$"):
        element_type("a", torch.zeros(1, dtype=dtype), (f16, bf16))


# ---- B and a product's matrix ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("b", "up", "operand"),
    [
        (((64, 1), 0), ((64, 1), 0), "bf16.row"),
        (((1, 64), 0), ((1, 72), 0), "bf16.col"),
        (((64, 1), 0), ((66, 1), 0), "bf16.row.align2"),
        (((64, 1), 4), ((66, 1), 0), "bf16.row.align2"),
        (((64, 1), 1), ((64, 1), 0), "bf16.row.align1"),
    ],
)
def test_weights_share_major_and_alignment(b, up, operand):
    for one, two in ((b, up), (up, b)):
        tensors = [strided((64, 64), *x) for x in (one, two)]
        assert str(alike([Matrix(n, x, bf16) for n, x in zip(("b", "up"), tensors, strict=True)]).operand) == operand


def test_a_products_matrix_that_no_kernel_can_address_is_refused_by_name():
    with pytest.raises(ValueError, match=r"^up has shape \(64, 64\) and strides .*up\.contiguous\(\)"):
        alike([Matrix("b", strided((64, 64), (64, 1)), bf16), Matrix("up", strided((64, 64), (128, 2)), bf16)])


# ---- The problem --------------------------------------------------------------------------------------------------


def arguments(m=6, n=10, k=8, batch=None, **changed):
    lead = (m,) if batch is None else batch
    values = {
        "a": torch.zeros(*lead, k, dtype=BF16),
        "b": torch.zeros(k, n, dtype=BF16),
        "bias": torch.zeros(n, dtype=BF16),
        "scale": torch.zeros(lead, dtype=F32),
        "residual": torch.zeros(*lead, n, dtype=F16),
        "alpha": 2,
    } | changed
    return {name: value for name, value in values.items() if value is not MISSING}


def checked_of(**values):
    a, b = values.pop("a"), values.pop("b")
    return check_arguments(full.graph, a, b, values)


@pytest.mark.parametrize("batch", [(), (3,), (2, 3), (2, 1, 3), (0, 4), (1, 1)])
def test_leading_dimensions_are_folded_into_m(batch):
    values = arguments(batch=batch)
    found = checked_of(**values)
    m = math.prod(batch)
    assert found.problem.m == m
    assert found.a.shape == (m, 8)
    assert found.inputs["scale"].shape == (m,)
    assert found.inputs["residual"].shape == (m, 10)
    assert found.a.data_ptr() == values["a"].data_ptr()
    assert [found.output_shape(o) for o in full.graph.outputs] == [(*batch, 10), (*batch, 10), batch, (10,)]
    assert [found.flat_shape(o) for o in full.graph.outputs] == [(m, 10), (m, 10), (m,), (10,)]


META = torch.zeros(8, 10, dtype=BF16, device="meta")
REFUSED = {
    "a is no tensor": ({"a": [[1.0]]}, TypeError, r"^a must be a torch\.Tensor, not list"),
    "b is no tensor": ({"b": None}, TypeError, r"^b must be a torch\.Tensor, not NoneType"),
    "a in FP32": ({"a": torch.zeros(6, 8)}, TypeError, r"^a is torch\.float32, .* take math='tf32'"),
    "b in FP32": ({"b": torch.zeros(8, 10)}, TypeError, r"^b is torch\.float32"),
    "a and b differ": (
        {"b": torch.zeros(8, 10, dtype=F16)},
        TypeError,
        r"^b is torch\.float16 and a is torch\.bfloat16",
    ),
    "K differs": ({"b": torch.zeros(7, 10, dtype=BF16)}, ValueError, r"^a \(6, 8\) and b \(7, 10\).*same K$"),
    "b is a weight": ({"b": torch.zeros(10, 8, dtype=BF16)}, ValueError, r"b looks like a weight .*: pass b\.t\(\)"),
    "K differs in batches": ({"b": torch.zeros(2, 7, 10, dtype=BF16)}, ValueError, r"^a \(6, 8\) and b \(2, 7, 10\)"),
    "a is 0-d": ({"a": torch.zeros((), dtype=BF16)}, ValueError, r"^a \(\) and b"),
    "a is sparse": ({"a": torch.zeros(6, 8, dtype=BF16).to_sparse()}, TypeError, r"^a has layout .*a\.to_dense\(\)"),
    "devices differ": ({"b": META}, ValueError, r"^b is on meta and a is on cpu"),
    "bias on another device": ({"bias": META[0]}, ValueError, r"^bias is on meta and a is on cpu"),
    "bias in FP64": ({"bias": torch.zeros(10, dtype=torch.float64)}, TypeError, r"^bias is torch\.float64"),
    "bias of M": ({"bias": torch.zeros(6)}, ValueError, r"^bias has shape \(6,\): as a Row it must have shape \(10,\)"),
    "bias as a matrix": ({"bias": torch.zeros(2, 10)}, ValueError, r"^bias has shape \(2, 10\): as a Row"),
    "bias as a number in a tensor": ({"bias": torch.zeros(1)}, ValueError, r"^bias has shape \(1,\): as a Row"),
    "bias strided": ({"bias": torch.zeros(20)[::2]}, ValueError, r"^bias has stride 2: call bias\.contiguous\(\)"),
    "bias a number": ({"bias": 1.0}, TypeError, r"^bias must be a torch\.Tensor, not float"),
    "scale of N": ({"scale": torch.zeros(10)}, ValueError, r"^scale has shape \(10,\): as a Col .* \(6,\)"),
    "scale as a row": ({"scale": torch.zeros(1, 6)}, ValueError, r"^scale has shape \(1, 6\)"),
    "residual as a row": ({"residual": torch.zeros(10)}, ValueError, r"^residual has shape \(10,\): as a Tile"),
    "residual transposed": ({"residual": torch.zeros(10, 6)}, ValueError, r"^residual .* \(6, 10\) for a result"),
    "alpha of two elements": ({"alpha": torch.zeros(2)}, ValueError, r"^alpha has shape \(2,\): a Scalar must have"),
    "alpha a truth value": (
        {"alpha": True},
        TypeError,
        r"^alpha must be a number or a tensor of one element, not bool",
    ),
    "alpha a string": ({"alpha": "1"}, TypeError, r"^alpha must be a number or a tensor of one element, not str"),
    "alpha a tensor of truth values": ({"alpha": torch.tensor(1 < 2)}, TypeError, r"^alpha is torch\.bool"),
    "bias missing": ({"bias": MISSING}, TypeError, r"bias is missing"),
    "an unknown input": ({"gain": 1.0}, TypeError, r"gain is unknown"),
}


@pytest.mark.parametrize(("changed", "error", "message"), REFUSED.values(), ids=REFUSED)
def test_arguments_that_do_not_fit_are_named(changed, error, message):
    with pytest.raises(error, match=message):
        co.gemm(epilogue=full, **arguments(**changed))


BROADCAST = {
    "bias of stride 0": ("bias", lambda: torch.randn(10)[:1].expand(10), True),
    "bias of shape (1, N)": ("bias", lambda: torch.randn(1, 10), False),
    "bias of shape (1, N) and stride 0": ("bias", lambda: torch.randn(1, 1).expand(1, 10), True),
    "scale of shape (M, 1)": ("scale", lambda: torch.randn(6, 1), False),
    "scale of stride 0": ("scale", lambda: torch.randn(1).expand(6), True),
    "residual along rows": ("residual", lambda: torch.randn(1, 10), True),
    "residual along columns": ("residual", lambda: torch.randn(6, 1), True),
    "residual of one element": ("residual", lambda: torch.randn(1, 1), True),
    "residual expanded along rows": ("residual", lambda: torch.randn(10).expand(6, 10), True),
    "residual expanded along columns": ("residual", lambda: torch.randn(6, 1).expand(6, 10), True),
    "residual as it should be": ("residual", lambda: torch.randn(6, 10), False),
}


@pytest.mark.parametrize(("name", "draw", "copied"), BROADCAST.values(), ids=BROADCAST)
def test_what_is_broadcast_has_its_full_shape_and_memory_of_its_own(name, draw, copied):
    given = draw()
    found = checked_of(**arguments(**{name: given}))
    value = found.inputs[name]
    full = {"bias": (10,), "scale": (6,), "residual": (6, 10)}[name]
    assert value.shape == full
    assert value.is_contiguous()
    shown = given[..., 0] if name == "scale" and given.ndim == 2 else given
    assert torch.equal(value, shown.expand(full) if shown.ndim == len(full) else shown.reshape(full))
    assert found.copied == ((name,) if copied else ())
    assert found.spread == ((name,) if given.shape != full else ())


def test_a_batch_is_broadcast_as_well():
    found = checked_of(**arguments(batch=(2, 3), scale=torch.ones(2, 3, 1), residual=torch.ones(2, 1, 10)))
    assert found.inputs["scale"].shape == (6,)
    assert found.inputs["residual"].shape == (6, 10)
    assert found.copied == ("residual",)


@pytest.mark.parametrize(
    ("value", "found"),
    [
        (7, 7),
        (-(2**63), -(2**63)),
        (np.int32(5), 5),
        (torch.tensor(2**63 - 1), 2**63 - 1),
        (torch.tensor([9], dtype=torch.uint8), 9),
    ],
)
def test_an_integer_is_any_whole_number_of_64_bits(value, found):
    assert integer("seed", value) == found
    assert type(integer("seed", value)) is int


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        (2**63, ValueError, r"^seed is 9223372036854775808: an Integer has 64 bits"),
        (1.0, TypeError, r"^seed must be an int or a tensor of one whole number, not float"),
        (True, TypeError, r"^seed must be an int .* not bool"),
        ("1", TypeError, r"^seed must be an int .* not str"),
        (torch.tensor(1.0), TypeError, r"^seed is torch\.float32: an Integer is a whole number"),
        (torch.tensor(1 < 2), TypeError, r"^seed is torch\.bool"),
        (torch.zeros(2, dtype=torch.int64), ValueError, r"^seed has shape \(2,\): an Integer has one element"),
    ],
)
def test_what_is_no_whole_number_is_refused(value, error, message):
    with pytest.raises(error, match=message):
        integer("seed", value)


def test_folding_needs_no_copy_or_is_refused():
    x = torch.zeros(4, 3, 8, dtype=BF16)
    assert fold("x", x, (12, 8)).data_ptr() == x.data_ptr()
    assert fold("x", x[:, :, :5], (12, 5)).stride() == (8, 1)
    with pytest.raises(ValueError, match=r"^x has shape \(3, 4, 8\) and strides \(8, 24, 1\).*x\.contiguous\(\)"):
        fold("x", x.transpose(0, 1), (12, 8))
    # A gap after each slice of three rows.
    with pytest.raises(ValueError, match="cannot be viewed"):
        fold("x", torch.zeros(4, 5, 8)[:, :3], (12, 8))


# ---- Outputs ------------------------------------------------------------------------------------------------------


def call_of(out=None, out_dtype=None, **changed):
    values = arguments(**changed)
    a, b = values.pop("a"), values.pop("b")
    return check_call(full.graph, a, b, values, out, out_dtype)


BAD_OUT = {
    "a list": ([torch.zeros(6, 10)], TypeError, r"^out must be a tensor or a mapping .*, not list"),
    "an unknown name": ({"e": torch.zeros(6, 10)}, ValueError, r"^out names e: the outputs are d, pre, row, col"),
    "wrong shape": (
        torch.zeros(10, 6, dtype=BF16),
        ValueError,
        r"^out has shape \(10, 6\): it must have shape \(6, 10\)",
    ),
    "wrong dtype": (torch.zeros(6, 10, dtype=torch.float64), TypeError, r"^out is torch\.float64"),
    "wrong device": (torch.zeros(6, 10, device="meta"), ValueError, r"^out is on meta and a is on cpu"),
    "no tensor": ({"d": 3}, TypeError, r"^out must be a torch\.Tensor, not int"),
    "a short row": ({"row": torch.zeros(5)}, ValueError, r"^out\['row'\] has shape \(5,\)"),
    "a row for a column": ({"col": torch.zeros(6)}, ValueError, r"^out\['col'\] has shape \(6,\).* \(10,\)"),
    "requires grad": (torch.zeros(6, 10, requires_grad=True), ValueError, r"^out requires grad"),
}


@pytest.mark.parametrize(("out", "error", "message"), BAD_OUT.values(), ids=BAD_OUT)
def test_outputs_that_do_not_fit_are_named(out, error, message):
    with pytest.raises(error, match=message):
        co.gemm(epilogue=full, **arguments(), out=out)


def test_out_dtype_must_be_one_that_d_can_have_and_agree_with_out():
    with pytest.raises(TypeError, match=r"^out_dtype is torch\.float64: use torch\.float16"):
        call_of(out_dtype=torch.float64)
    with pytest.raises(TypeError, match=r"^out is torch\.float32, and out_dtype asks for torch\.bfloat16"):
        call_of(torch.zeros(6, 10), BF16)
    for call in (call_of(torch.zeros(6, 10)), call_of(torch.zeros(6, 10), F32), call_of(out_dtype=F32)):
        assert [x.dtype for x in call.outputs[:2]] == [F32, F32]  # further tiles have D's type


# ---- Signatures ---------------------------------------------------------------------------------------------------

H100, A100 = Device((9, 0), 132), Device((8, 0), 108)


def signature(device=H100, *, m=64, n=64, k=64, out=None, **changed):
    """The operand types of a call, each as text; A is row-major, B a transposed weight, every pointer aligned."""
    values = arguments(m, n, k, b=torch.zeros(n, k, dtype=BF16).t()) | changed
    a, b = values.pop("a"), values.pop("b")
    found = signature_of(check_call(full.graph, a, b, values, out, None), device)
    names = [i.name for i in full.graph.inputs] + [o.name for o in full.graph.outputs[1:]]
    types = {"a": found.a, "b": found.b, "d": found.d} | dict(zip(names, (*found.inputs, *found.outputs), strict=True))
    return {name: str(operand) for name, operand in types.items()}


def test_a_signature_holds_every_type():
    vector = {"bias": "bf16.row.align1", "scale": "f32.row.align1", "alpha": "f32.row.align1"}
    reductions = {"row": "f32.row.align1", "col": "f32.row.align1"}
    matrices = {"a": "bf16.row", "b": "bf16.col", "d": "bf16.row", "residual": "f16.row", "pre": "bf16.row"}
    assert signature() == matrices | vector | reductions
    assert signature(A100) == matrices | vector | reductions


@pytest.mark.parametrize("width", [63, 62, 60])
def test_what_tma_loads_may_end_anywhere_and_what_it_stores_may_not(width):
    # All rows begin at multiples of 16 bytes; those of D and of the residual end in between.
    whole = torch.zeros(64, 128, dtype=BF16)
    step = math.gcd(width, 8)
    found = signature(n=width, residual=whole[:, 64 : 64 + width], out=whole[:, :width])
    assert (found["a"], found["b"], found["residual"]) == ("bf16.row", "bf16.col", "bf16.row")
    assert found["d"] == f"bf16.row.align{step}"
    assert found["pre"] == f"bf16.row.align{step}"


@pytest.mark.parametrize("name", ["a", "b"])
def test_one_misaligned_operand_makes_all_of_them_vector_accesses(name):
    odd = torch.zeros(64 * 72 + 1, dtype=BF16)[1:].view(64, 72)
    operand = odd[:, :64] if name == "a" else odd[:, :64].t()
    other = "b" if name == "a" else "a"
    found = signature(n=62, k=64, **{name: operand[:, :62] if name == "b" else operand})
    assert found[name].endswith(".align1")
    assert not found[other].endswith(".align1")
    # On the other path a residual's accesses are whole ones as well.
    assert found["residual"] == "f16.row.align2"


def test_misaligned_results_share_an_alignment():
    out, residual = torch.zeros(64, 130, dtype=BF16)[:, :126], torch.zeros(64, 132, dtype=BF16)[:, :126]
    found = signature(n=126, out=out, residual=residual)
    assert (found["d"], found["residual"]) == ("bf16.row.align2", "bf16.row.align2")


@pytest.mark.parametrize(("m", "expected"), [(64, "bf16.col"), (63, "bf16.col.align1")])
def test_a_column_major_output(m, expected):
    assert signature(m=m, n=128, out=torch.zeros(128, 72, dtype=BF16)[:, :m].t())["d"] == expected


def test_on_older_devices_extents_count_for_every_operand():
    a = torch.zeros(64, 72, dtype=BF16)[:, :66]
    b = torch.zeros(64, 72, dtype=BF16)[:, :66].t()
    assert signature(k=66, a=a, b=b)["a"] == "bf16.row"
    assert signature(A100, k=66, a=a, b=b)["a"] == "bf16.row.align2"
    assert signature(A100, k=66, a=a, b=b)["b"] == "bf16.col.align2"


# ---- Overlaps -----------------------------------------------------------------------------------------------------


def addresses(x):
    """Every byte that a tensor occupies."""
    ranges = (range(extent) for extent in x.shape)
    starts = (
        x.data_ptr() + x.element_size() * sum(i * s for i, s in zip(index, x.stride(), strict=True))
        for index in itertools.product(*ranges)
    )
    return {start + byte for start in starts for byte in range(x.element_size())}


@st.composite
def windows(draw):
    """A block of a row-major 12 by 16 buffer, perhaps of every other row, perhaps seen transposed."""
    top, left = draw(st.integers(0, 11)), draw(st.integers(0, 15))
    height, width = draw(st.integers(1, 12 - top)), draw(st.integers(1, 16 - left))
    return (slice(top, top + height, draw(st.integers(1, 2))), slice(left, left + width)), draw(st.booleans())


@PATIENT
@given(windows(), windows())
def test_sharing_an_element_is_always_found(first, second):
    whole = torch.zeros(12, 16, dtype=BF16)
    x, y = (whole[at].t() if transposed else whole[at] for at, transposed in (first, second))
    if addresses(x) & addresses(y):
        assert overlap(x, y)
        assert overlap(y, x)


@PATIENT
@given(st.integers(1, 15), st.integers(0, 11), st.booleans(), st.booleans())
def test_parts_of_one_buffer_that_share_nothing_are_told_apart(cut, top, transposed, swapped):
    whole = torch.zeros(12, 16, dtype=BF16)
    pairs = [(whole[:, :cut], whole[:, cut:]), (whole[0::2, :cut], whole[1::2, :cut])]
    if top:
        pairs.append((whole[:top], whole[top:]))
    for x, y in pairs:
        if transposed:
            x, y = x.t(), y.t()
        if swapped:
            x, y = y, x
        assert not addresses(x) & addresses(y)
        assert not overlap(x, y)


def test_a_window_that_runs_into_the_next_row_is_found():
    memory = torch.zeros(200, dtype=BF16)
    x, y = memory.as_strided((6, 4), (16, 1)), memory.as_strided((6, 8), (16, 1), 12)
    assert addresses(x) & addresses(y)
    assert overlap(x, y)
    assert overlap(y, x)
    assert not overlap(x, memory.as_strided((6, 8), (16, 1), 8))


def overlap_check(out, name="d", **changed):
    values = arguments(n=8, residual=torch.zeros(6, 8, dtype=BF16)) | changed
    a, b = values.pop("a"), values.pop("b")
    checked = check_arguments(full.graph, a, b, values)
    fresh = [torch.zeros(checked.flat_shape(o), dtype=F32) for o in full.graph.outputs]
    position = [o.name for o in full.graph.outputs].index(name)
    fresh[position] = out
    check_overlap(full.graph, checked, fresh)


@pytest.mark.parametrize("name", ["a", "b", "bias", "scale"])
def test_an_output_must_not_share_memory_with_an_input(name):
    memory = torch.zeros(64, dtype=BF16)
    views = {"a": memory[:48].view(6, 8), "b": memory.view(8, 8), "bias": memory[40:48], "scale": memory[40:46]}
    with pytest.raises(ValueError, match=rf"^out shares memory with {name}: pass a separate tensor$"):
        overlap_check(memory[:48].view(6, 8), **{name: views[name]})


def test_a_tile_may_be_overwritten_in_place_only():
    memory = torch.zeros(7, 16, dtype=BF16)
    tile = memory[:6, :8]
    for name in ("d", "pre"):
        overlap_check(tile, name, residual=tile)
    for other in (memory[1:7, :8], memory[:6, 1:9], memory.view(-1)[:48].view(6, 8), tile.view(torch.float16)):
        with pytest.raises(ValueError, match=r"^out shares memory with residual.*same strides and dtype"):
            overlap_check(other, residual=tile)


def test_outputs_must_not_share_memory_with_each_other():
    d = torch.zeros(6, 8, dtype=BF16)
    with pytest.raises(ValueError, match=r"^out\['pre'\] shares memory with out"):
        call_of({"d": d, "pre": d}, n=8)
    sums = torch.zeros(14)
    with pytest.raises(ValueError, match=r"^out\['col'\] shares memory with out\['row'\]"):
        call_of({"row": sums[:6], "col": sums[5:13]}, n=8)
    assert call_of({"row": sums[:6], "col": sums[6:]}, n=8).outputs[3].shape == (8,)


def test_one_buffer_can_hold_outputs_side_by_side():
    both = torch.zeros(6, 20, dtype=BF16)
    call = call_of({"d": both[:, :10], "pre": both[:, 10:]})
    assert [t.stride() for t in call.outputs[:2]] == [(20, 1), (20, 1)]


# ---- A product among the inputs -----------------------------------------------------------------------------------


@co.epilogue
def gated(acc, bias: co.Row, up: co.Product):
    return co.silu(acc + bias) * up


def checked_gated(**changed):
    values = {
        "a": torch.zeros(2, 3, 8, dtype=BF16), "b": torch.zeros(8, 10, dtype=BF16),
        "bias": torch.zeros(10), "up": torch.zeros(8, 10, dtype=BF16),
    } | changed  # fmt: skip
    a, b = values.pop("a"), values.pop("b")
    return check_arguments(gated.graph, a, b, values)


@pytest.mark.parametrize(
    ("up", "error", "message"),
    [
        (torch.zeros(8, 10), TypeError, "^up is torch.float32 and b is torch.bfloat16: a Product must have"),
        (torch.zeros(8, 9, dtype=BF16), ValueError, r"^up has shape \(8, 9\): .* b's shape \(K, N\), \(8, 10\)$"),
        (torch.zeros(10, 8, dtype=BF16), ValueError, r"^up has shape \(10, 8\): .* pass up\.t\(\)$"),
        (torch.zeros(8, 10, dtype=BF16, device="meta"), ValueError, "^up is on meta and a is on cpu"),
        (1.0, TypeError, "^up must be a torch.Tensor, not float"),
    ],
    ids=["dtype", "shape", "transposed", "device", "number"],
)
def test_a_products_matrix_that_does_not_fit_is_refused(up, error, message):
    with pytest.raises(error, match=message):
        checked_gated(up=up)


@pytest.mark.parametrize("major", ["row", "col"])
def test_a_call_without_data_has_a_product_of_bs_major(major):
    call = call_at(gated.graph, Problem(64, 128, 256), "bf16", "row", major)
    assert call.arguments.inputs["up"].stride() == call.arguments.b.stride()
    found = signature_of(call, H100)
    assert found.inputs[1] == found.b
    assert found.spec(co.Sm90Config(co.ThreadblockShape(64, 64, 64))).inputs[1] == found.b


def test_no_output_may_lie_in_a_products_matrix():
    # As an (M, N) input could be overwritten, this one cannot: every tile of D reads all of its rows.
    square = torch.zeros(8, 8, dtype=BF16)
    values = {"bias": torch.zeros(8), "up": square}
    with pytest.raises(ValueError, match=r"^out shares memory with up: pass a separate tensor$"):
        check_call(gated.graph, torch.zeros(8, 8, dtype=BF16), torch.zeros(8, 8, dtype=BF16), values, square, None)
