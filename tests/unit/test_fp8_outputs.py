"""Results in FP8: what is rounded to what, what is served, and what is refused."""

import math

import pytest
import torch
from signatures import A100, H100

import cutlass_ops as co
from cutlass_ops.choose import dispatch
from cutlass_ops.declare.problem import Problem
from cutlass_ops.epilogue import builtin
from cutlass_ops.epilogue.graph import Graph
from cutlass_ops.epilogue.nodes import Node
from cutlass_ops.kinds import legality
from cutlass_ops.operand import reference
from cutlass_ops.operand.call import call_at, signature_of
from cutlass_ops.tools.explaining import explain_call

E4M3, E5M2, BF16 = torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16
INF, NAN = math.inf, math.nan

pytestmark = pytest.mark.usefixtures("session")

# An FP32 value, and the byte that it is stored as. Ties go to even.
SPECIAL = {
    E4M3: [
        (0.0, 0x00),
        (-0.0, 0x80),
        (1.0, 0x38),
        (17.0, 0x58),  # between 16 and 18
        (19.0, 0x5A),  # between 18 and 20
        (448.0, 0x7E),
        (-448.0, 0xFE),
        (449.0, 0x7E),
        (464.0, 0x7E),  # half of a step above the largest: PyTorch 2.10 gives NaN beyond
        (464.5, 0x7E),
        (-1e30, 0xFE),
        (INF, 0x7E),
        (-INF, 0xFE),
        (2.0**-6, 0x08),  # the least normal value
        (2.0**-9, 0x01),  # the least of all
        (1.5 * 2.0**-9, 0x02),
        (2.0**-10, 0x00),  # half of it
        (1.0001 * 2.0**-10, 0x01),
        (-(2.0**-11), 0x80),
        (2.0**-140, 0x00),
    ],
    E5M2: [
        (0.0, 0x00),
        (-0.0, 0x80),
        (1.0, 0x3C),
        (9.0, 0x48),  # between 8 and 10
        (11.0, 0x4A),  # between 10 and 12
        (57344.0, 0x7B),
        (-57344.0, 0xFB),
        (61439.0, 0x7B),
        (61440.0, 0x7B),  # half of a step above the largest: PyTorch gives infinity from here on
        (65536.0, 0x7B),
        (-1e30, 0xFB),
        (INF, 0x7B),
        (-INF, 0xFB),
        (2.0**-14, 0x04),
        (2.0**-16, 0x01),
        (1.5 * 2.0**-16, 0x02),
        (2.0**-17, 0x00),
        (1.0001 * 2.0**-17, 0x01),
        (-(2.0**-18), 0x80),
        (2.0**-140, 0x00),
    ],
}


@co.epilogue
def kept(acc, x: co.Tile):
    """x itself, -0.0 as well, where the accumulator is 0."""
    return x - acc


@co.epilogue
def plain(acc):
    return acc


@co.epilogue
def saved(acc):
    return {"d": co.e.relu(acc), "pre": acc}


@co.epilogue
def quantised(acc, scale: co.Scalar):
    return {"d": acc * co.e.reciprocal(scale), "amax": co.e.amax(acc, dim=1)}


@co.epilogue
def quantised_rows(acc, scale: co.Col):
    return {"d": acc * co.e.reciprocal(scale), "most": co.e.amax(acc, dim=0)}


def stored(values, dtype):
    """D of a call of whose sums each is 0."""
    x = torch.tensor([values], dtype=torch.float32)
    zeros = torch.zeros(1, 16).to(BF16), torch.zeros(16, x.shape[1]).to(BF16)
    return co.gemm(*zeros, epilogue=kept, x=x, out_dtype=dtype)[0]


def spec(d="e4m3.row", epilogue=plain, outputs=None, a="bf16", tile=(128, 128, 64), **config):
    made = co.Sm90Config(co.ThreadblockShape(*tile), **config)
    return co.KernelSpec(a=f"{a}.row", b=f"{a}.col", d=d, epilogue=epilogue, outputs=outputs or {}, config=made)


# ---- Rounding --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", SPECIAL)
def test_special_values_are_stored_as_the_table_says(dtype):
    values, bytes_ = zip(*SPECIAL[dtype], strict=True)
    assert stored(values, dtype).view(torch.uint8).tolist() == list(bytes_)
    assert reference.rounded(torch.tensor(values), dtype).view(torch.uint8).tolist() == list(bytes_)


@pytest.mark.parametrize("dtype", SPECIAL)
def test_every_value_of_the_type_but_infinity_is_stored_as_it_is(dtype):
    every = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    found = stored(every.tolist(), dtype).float()
    finite = every.isfinite()
    assert torch.equal(found[finite], every[finite])
    assert torch.equal(found.isnan(), every.isnan())
    assert (found[every.isinf()].abs() == torch.finfo(dtype).max).all()


@pytest.mark.parametrize(("name", "dtype"), [("e4m3", E4M3), ("e5m2", E5M2)])
def test_a_cast_inside_an_epilogue_rounds_as_a_store_does(name, dtype):
    @co.epilogue
    def through(acc, x: co.Tile):
        return co.e.cast(x - acc, name) + 0.5

    x = torch.randn(4, 16, generator=torch.Generator().manual_seed(1)) * torch.tensor([1e-3, 1.0, 300.0, 1e6])[:, None]
    x[:, 0] = torch.tensor([INF, -INF, 0.0, -5.0])
    zeros = torch.zeros(4, 16).to(BF16), torch.zeros(16, 16).to(BF16)
    found = co.gemm(*zeros, epilogue=through, x=x, out_dtype=torch.float32)
    assert torch.equal(found, co.gemm(*zeros, epilogue=kept, x=x, out_dtype=dtype).float() + 0.5)
    assert Node("cast", (2,), name) in through.graph.nodes
    assert Graph.from_json(through.graph.to_json()) == through.graph


# ---- Calls on the CPU ------------------------------------------------------------------------------------------------


@pytest.fixture
def operands():
    generator = torch.Generator().manual_seed(2)
    return torch.randn(24, 64, generator=generator).to(BF16), torch.randn(64, 32, generator=generator).to(BF16)


@pytest.mark.parametrize("dtype", SPECIAL)
def test_a_static_scale_of_the_tensor_and_of_rows(operands, dtype):
    a, b = operands
    exact = a.double() @ b.double()
    scale = float(exact.abs().max()) / torch.finfo(dtype).max
    d, amax = co.gemm(a, b, epilogue=quantised, scale=scale, out_dtype=dtype)
    assert (d.dtype, amax.dtype) == (dtype, torch.float32)
    step = torch.finfo(dtype).eps / 2
    assert (d.double() * scale - exact).abs().max() <= 1.01 * step * exact.abs().max()
    torch.testing.assert_close(amax.double(), exact.abs().amax(1), rtol=1e-5, atol=0)
    scales = exact.abs().amax(1).float() / torch.finfo(dtype).max
    d, most = co.gemm(a, b, epilogue=quantised_rows, scale=scales, out_dtype=dtype)
    assert ((d.double() * scales[:, None] - exact).abs().amax(1) <= 1.01 * step * exact.abs().amax(1)).all()
    torch.testing.assert_close(most.double(), exact.abs().amax(0), rtol=1e-5, atol=0)
    # Half of the scale: more than half of the largest is cut off.
    d, _ = co.gemm(a, b, epilogue=quantised, scale=scale / 2, out_dtype=dtype)
    assert d.float().abs().max() == torch.finfo(dtype).max
    assert not d.isnan().any()


def test_a_further_tile_in_fp8_beside_d(operands):
    a, b = operands
    out = {"pre": torch.empty(24, 32, dtype=E5M2)}
    d, pre = co.gemm(a, b, epilogue=saved, out=out)
    assert d.dtype is BF16
    assert pre is out["pre"]
    assert torch.equal(pre, reference.rounded(co.gemm(a, b, out_dtype=torch.float32), E5M2))
    both = co.gemm(a, b, epilogue=saved, out_dtype=E4M3)
    assert [x.dtype for x in both] == [E4M3, E4M3]


def test_refusals(operands):
    a, b = operands
    with pytest.raises(TypeError, match=r"^out_dtype is torch.int8: use .*torch.float8_e5m2$"):
        co.gemm(a, b, out_dtype=torch.int8)
    with pytest.raises(TypeError, match=r"^out\['amax'\] is torch.float8_e4m3fn: use"):
        co.gemm(a, b, epilogue=quantised, scale=1.0, out={"amax": torch.empty(24, dtype=E4M3)})
    with pytest.raises(TypeError, match=r"^x is torch.float8_e4m3fn: use"):
        co.gemm(a, b, epilogue=kept, x=torch.zeros(24, 32).to(E4M3))
    a.requires_grad_()
    with pytest.raises(ValueError, match=r"^out_dtype is torch.float8_e4m3fn, and no gradient .* torch.no_grad\(\)"):
        co.gemm(a, b, out_dtype=E4M3)
    with torch.no_grad():
        assert co.gemm(a, b, out_dtype=E4M3).dtype is E4M3


# ---- The greatest absolute value ------------------------------------------------------------------------------------


def test_amax_is_the_maximum_of_absolute_values(operands):
    @co.epilogue
    def written_out(acc, scale: co.Scalar):
        return {"d": acc * co.e.reciprocal(scale), "amax": co.e.max(co.e.abs(acc), dim=1)}

    assert quantised.graph == written_out.graph
    a, b = operands
    a[0, 0], a[1] = NAN, 0
    _, amax = co.gemm(a, b, epilogue=quantised, scale=1.0)
    assert amax[0].isnan()
    assert amax[1] == 0


# ---- Kernels ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("a", "d", "read"),
    [
        ("bf16", "e4m3.row", "bf16.row"),
        ("f16", "e5m2.col.align8", "f16.col"),
        ("e4m3", "e4m3.row.align2", "bf16.row.align2"),
    ],
)
def test_inputs_are_not_in_fp8_where_nothing_is_said(a, d, read):
    declared = spec(d=d, epilogue=kept, a=a, tile=(128, 128, 128 if a == "e4m3" else 64))
    assert str(declared.inputs[0]) == read
    assert co.check(declared) == ()


# ---- The choice of a kernel ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["bf16", "e4m3"])
@pytest.mark.parametrize("n", [4096, 4104, 4097])
@pytest.mark.parametrize("m", [1, 64, 4096])
def test_every_call_is_served_by_legal_kernels(dtype, n, m):
    problem = Problem(m, n, 4096)
    signature = signature_of(call_at(builtin.bias.graph, problem, dtype, "row", "col", E4M3), H100)
    assert signature.d.alignment == {4096: 16, 4104: 8, 4097: 1}[n]
    decision = dispatch.decide(signature, H100, problem)
    assert decision.kept
    for config in decision.kept:
        assert legality.check(H100.spec(signature, config)) == ()


def test_other_devices_say_what_to_do():
    problem = Problem(512, 4096, 4096)
    call = call_at(builtin.bias.graph, problem, "bf16", "row", "col", E4M3)
    assert dispatch.decide(signature_of(call, A100), A100, problem) is None
    found = explain_call("gemm", call, A100)
    assert not found.is_served
    assert "results in FP8 are stored on sm_90 alone: take them in BF16" in found.why
