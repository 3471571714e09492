"""What no kernel of any device serves: the CPU refuses it as a GPU does, in the words of the rule that it breaks."""

import itertools

import pytest
import torch
from signatures import A100, H100

import cutlass_ops as co
from cutlass_ops.base.errors import UnsupportedError
from cutlass_ops.choose import dispatch
from cutlass_ops.declare.form import DENSE, GROUPED, why_one_gemm
from cutlass_ops.declare.problem import Problem
from cutlass_ops.epilogue import builtin, composed
from cutlass_ops.kinds import legality
from cutlass_ops.operand.call import call_at, check_call, signature_of
from cutlass_ops.run import requests

E4M3, BF16 = torch.float8_e4m3fn, torch.bfloat16
M, N, K, ENDS = 32, 48, 64, torch.tensor([5, 32], dtype=torch.int32)

pytestmark = pytest.mark.usefixtures("session")


@co.epilogue
def with_raw(acc):
    return {"d": co.e.quantize(acc, "e4m3"), "raw": acc}


@co.epilogue
def of_two_tiles(acc, x: co.Tile, y: co.Tile):
    return co.e.quantize(acc + x * y, "e4m3")


@co.epilogue
def of_a_tile(acc, x: co.Tile):
    return co.e.quantize(acc + x, "e4m3")


@co.epilogue
def quantised_gate(acc, up: co.Product):
    d = co.e.silu(acc) * up
    return {"d": co.e.quantize(d, "e4m3"), "amax": co.e.amax(d, dim=1)}


@co.epilogue
def gate_with_sums(acc, up: co.Product):
    d = co.e.silu(acc) * up
    return {"d": d, "sums": co.e.sum(d, dim=1)}


@co.epilogue
def gate_and_tile(acc, up: co.Product, left: co.Tile):
    return co.e.silu(acc) * up + left


@co.epilogue
def with_logsumexp(acc):
    return {"d": acc, "lse": co.e.logsumexp(acc, dim=1)}


@co.epilogue
def with_argmax(acc):
    return {"d": acc, "index": co.e.argmax(acc, dim=1), "twice": acc * 2}


@co.epilogue
def swapped(acc, left: co.Tile, right: co.Tile):
    return co.e.swap_pairs(acc) * left + right


def operands(n=N, dtype=BF16, lead=()):
    return torch.randn(M, K).to(dtype), torch.randn(*lead, n, K).to(dtype).mT


def tile(n=N):
    return torch.randn(M, n).to(BF16)


D_ALONE = "it may then read no tile, and return only D, with lines at multiples of 16 bytes; use two GEMMs"
QUANTISED = "use a row-major d with lines at multiples of 16 bytes, read at most one .M, N. tile, with such lines"
NEIGHBOURS = "the epilogue swaps pairs .* give d 16 bytes of alignment, read at most one tile, and store none besides d"
TWO_NUMBERS = "keeps two numbers, .* give d 16 bytes of alignment, read at most one tile, and store none besides d"
UNSERVED = {
    "quantised D and a tile": (with_raw, operands(), {}, QUANTISED),
    "quantised D of two tiles": (of_two_tiles, operands(), {"x": tile(), "y": tile()}, QUANTISED),
    "quantised D of a misaligned tile": (of_a_tile, operands(), {"x": tile(N + 1)[:, 1:]}, QUANTISED),
    "quantised gate with amax": (quantised_gate, operands(), {"up": operands()[1]}, D_ALONE),
    "gate with sums": (gate_with_sums, operands(), {"up": operands()[1]}, D_ALONE),
    "gate and tile": (gate_and_tile, operands(), {"up": operands()[1], "left": tile()}, D_ALONE),
    "gate of other lines": (composed.swiglu, operands(12), {"up": operands(12)[1]}, D_ALONE),
    "gate of rows": (
        composed.swiglu, (operands()[0], torch.randn(K, N).to(BF16)), {"up": torch.randn(K, N).to(BF16)},
        "b is bf16.row: use bf16.col, a transposed weight",
    ),
    "logsumexp in FP8": (with_logsumexp, operands(42, E4M3), {}, TWO_NUMBERS),
    "argmax in FP8": (with_argmax, operands(dtype=E4M3), {}, TWO_NUMBERS),
    "pairs in FP8": (swapped, operands(dtype=E4M3), {"left": tile(), "right": tile()}, NEIGHBOURS),
}  # fmt: skip
OF_GROUPS = {
    "gate of other lines": (composed.swiglu, operands(12, lead=(2,)), {"up": operands(12, lead=(2,))[1]}, D_ALONE),
    "gate and tile": (gate_and_tile, operands(lead=(2,)), {"up": operands(lead=(2,))[1], "left": tile()}, D_ALONE),
    "pairs of other lines": (swapped, operands(12, lead=(2,)), {"left": tile(12), "right": tile(12)}, NEIGHBOURS),
}


@pytest.mark.slow
@pytest.mark.parametrize(("epilogue", "given", "inputs", "message"), UNSERVED.values(), ids=UNSERVED)
def test_the_cpu_refuses_what_a_gpu_does(epilogue, given, inputs, message):
    op = requests.called(epilogue)
    with pytest.raises(UnsupportedError, match=rf"^no kernel of any device supports .*{message}"):
        op(*given, **inputs)
    with pytest.raises(UnsupportedError, match=message):
        co.explain(op, *given, **inputs)
    call = check_call(epilogue.graph, *given, inputs, None, None)
    signature = signature_of(call, H100)
    assert dispatch.decide(signature, H100, call.problem) is None
    said = dispatch.unserved("it", signature, H100)
    assert "wgmma, which" not in said
    with pytest.raises(UnsupportedError, match=message):
        raise UnsupportedError(said)


@pytest.mark.slow
@pytest.mark.parametrize(("epilogue", "given", "inputs", "message"), OF_GROUPS.values(), ids=OF_GROUPS)
def test_the_cpu_refuses_such_groups_as_well(epilogue, given, inputs, message):
    with pytest.raises(UnsupportedError, match=message):
        co.gemm(*given, groups=co.Groups(ENDS), epilogue=epilogue, **inputs)
    signature = signature_of(check_call(epilogue.graph, *given, inputs, None, None, offsets=ENDS, form=GROUPED), H100)
    assert "wgmma, which" not in dispatch.unserved("it", signature, H100)
    assert "groups of rows need wgmma, which" in dispatch.unserved("it", signature, A100)


@pytest.mark.slow
def test_batches_that_would_have_to_be_copied():
    a, b = torch.randn(4, 31, 15).to(BF16), torch.randn(4, 15, 25).to(BF16)
    assert co.gemm(a, b).shape == (4, 31, 25)
    with pytest.raises(UnsupportedError, match=r"form is batched .*: pad the leading dimensions of a and b"):
        co.gemm(a, b, out_dtype=E4M3)


def test_several_ops_serve_where_no_kernel_does():
    x, w = torch.randn(M, K).to(BF16), torch.randn(K, 13).to(BF16)
    assert co.gemm_swiglu(x, w, w).shape == (M, 13)
    x, w = operands()
    assert co.gemm_swiglu(x, w, w, scale_out=0.5, amax=True, out_dtype=E4M3).d.dtype is E4M3


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bf16", "e4m3"])
@pytest.mark.parametrize(
    "epilogue",
    [builtin.bias_residual, with_logsumexp, with_argmax, swapped, of_a_tile, composed.swiglu, gate_with_sums],
)
def test_the_question_has_the_answer_of_a_choice(epilogue, dtype):
    for n, form in itertools.product((256, 250), (DENSE, GROUPED)):
        problem = Problem(64, n, 256, 1 if form == DENSE else 2)
        if form == GROUPED and why_one_gemm(epilogue.graph, form):
            continue
        if n % 16 and epilogue.graph.quantized:
            continue
        call = call_at(epilogue.graph, problem, dtype, "row", "col", form=form)
        signature = signature_of(call, H100)
        assert legality.is_served(signature) is (dispatch.decide(signature, H100, call.chosen_for) is not None)


def test_what_is_served_runs():
    (a, b), (a8, b8) = operands(), operands(dtype=E4M3)
    for x, w in ((a, b), (a8, b8)):
        requests.called(builtin.bias_residual)(x, w, torch.randn(N), tile(N + 1)[:, 1:])
        requests.called(with_logsumexp)(x, w)
        requests.called(composed.swiglu)(x, w, w)
    requests.called(with_argmax)(a, b)  # in 16 bits, kernels of Sm80 do
    requests.called(of_a_tile)(a, b, tile())
