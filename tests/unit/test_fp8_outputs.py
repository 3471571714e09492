"""Results in FP8: what is rounded to what, what is served, and what is refused."""

import itertools
import math

import pytest
import torch
from signatures import A100, H100

import cutlass_ops as co
from cutlass_ops.base import arch
from cutlass_ops.base.dtypes import FP8, READ, REDUCED, STORED
from cutlass_ops.base.errors import ConfigError, EpilogueError
from cutlass_ops.choose import dispatch
from cutlass_ops.declare.problem import Problem
from cutlass_ops.epilogue import builtin
from cutlass_ops.epilogue.graph import Graph
from cutlass_ops.epilogue.nodes import Node
from cutlass_ops.kinds import legality
from cutlass_ops.kinds.sm90.footprint import epilogue_tile
from cutlass_ops.run import reference
from cutlass_ops.run.call import call_at, check_call, signature_of
from cutlass_ops.run.fallbacks import can_fall_back
from cutlass_ops.ship.shipping import Kernels, _calls
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
def test_nan_stays_nan(dtype):
    assert stored([NAN, -NAN], dtype).isnan().all()


def test_what_pytorchs_own_conversion_does():
    """What docs/fp8.md says of it, and why the reference does not leave it to PyTorch."""
    beyond = torch.tensor([1e30, -1e30, INF, -INF])
    assert beyond.to(E5M2).float().tolist() == [INF, -INF, INF, -INF]
    found = beyond.to(E4M3).float()
    assert found.isnan().all() or found.tolist() == [448, -448, 448, -448]


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


def test_fp8_in_and_out(operands):
    a, b = operands[0].to(E4M3), operands[1].t().contiguous().to(E5M2)
    found = co.scaled_gemm(a, b.t(), 0.5, 2.0, out_dtype=E4M3)
    assert torch.equal(found, reference.rounded(co.gemm(a, b.t(), out_dtype=torch.float32), E4M3))
    assert co.scaled_gemm(a, b.t(), 0.5, 2.0).dtype is BF16


def test_a_compiled_function_gives_the_same(operands):
    def layer(a, b):
        return co.gemm(a, b, epilogue=quantised, scale=0.25, out_dtype=E4M3)

    found = torch.compile(layer, backend="eager", fullgraph=True)(*operands)
    for x, wanted in zip(found, layer(*operands), strict=True):
        assert torch.equal(x.float(), wanted.float())


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


def test_pytorch_serves_no_call_whose_d_is_in_fp8(operands):
    """Its peers give FP8 operands' results in BF16, which it would convert by its own rule."""
    a, b = operands[0].to(E4M3), operands[1].t().contiguous().to(E4M3).t()
    calls = [check_call(plain.graph, a, b, {}, None, dtype) for dtype in (E4M3, E5M2, BF16)]
    assert not any(map(can_fall_back, calls))
    assert can_fall_back(check_call(plain.graph, *operands, {}, None, None))


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


def test_amax_names_itself_in_messages():
    with pytest.raises(EpilogueError, match=r"co\.amax reduces over a row with dim=1"):

        @co.epilogue
        def wrong(acc):
            return {"d": acc, "amax": co.e.amax(acc, dim=2)}


# ---- Kernels ---------------------------------------------------------------------------------------------------------


def test_fp8_is_stored_and_not_read():
    assert set(FP8) <= set(STORED)
    assert not set(FP8) & {*READ, *REDUCED}


SCHEDULES = ("pingpong", "cooperative", "warp_specialized")


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize(
    "of",
    [
        {"d": "e4m3.row"},
        {"d": "e5m2.row.align8"},
        {"d": "bf16.row", "epilogue": saved, "outputs": {"pre": "e4m3.row"}},
        {"d": "e4m3.row", "epilogue": saved, "outputs": {"pre": "bf16.row"}},
        {"d": "e4m3.row", "epilogue": saved, "outputs": {"pre": "e5m2.row.align4"}},
    ],
    ids=str,
)
@pytest.mark.parametrize(("a", "tile"), [("bf16", (128, 48, 64)), ("e4m3", (128, 192, 128))])
def test_sm90_kernels_are_legal_and_rendered(schedule, swap, of, a, tile):
    declared = spec(**of, a=a, tile=tile, schedule=schedule, swap_ab=swap)
    assert co.check(declared) == ()
    text = co.source(declared)
    for operand in (declared.d, *declared.outputs):
        assert f"using Element{'D' if operand is declared.d else '_pre'} = {operand.dtype.cpp};" in text
        assert f"CUTLASS_OPS_TYPE({operand.dtype.cpp}, {operand.dtype.dl_code})" in text


def test_the_part_of_a_tile_that_cutlass_takes_at_a_time():
    """CUTLASS takes twice as many columns of an 8-bit D, where neither warpgroups share a tile nor N is in its way."""
    written = {"d": "e4m3.row", "epilogue": saved, "outputs": {"pre": "bf16.row"}}
    found = {
        (schedule, n): epilogue_tile(spec(**written, tile=(128, n, 64), schedule=schedule))
        for schedule, n in itertools.product(SCHEDULES, (48, 96, 128))
    }
    assert found == {
        (schedule, n): (
            128 if schedule == "cooperative" else 64,
            16 if n == 48 else 64 if n == 128 and schedule != "cooperative" else 32,
        )
        for schedule, n in itertools.product(SCHEDULES, (48, 96, 128))
    }
    assert epilogue_tile(spec()) == (64, 32)


def test_other_kinds():
    sm80 = co.Sm80Config(co.ThreadblockShape(128, 128, 32), co.WarpShape(64, 64, 32))
    rules = {}
    for config, target in itertools.product((sm80, co.GemvConfig()), ("sm_80", "sm_89", "sm_90")):
        declared = co.KernelSpec(a="bf16.row", b="bf16.col", d="e4m3.row", epilogue=plain, config=config, target=target)
        rules[config.arch, target] = [v.rule for v in co.check(declared)]
    refused = ["fp8_outputs"]
    assert rules == {
        ("sm80", "sm_80"): refused,
        ("sm80", "sm_89"): refused,
        ("sm80", "sm_90"): refused,
        ("gemv", "sm_80"): refused,
        ("gemv", "sm_89"): refused,
        ("gemv", "sm_90"): [],
    }
    assert arch.target("sm_90").capability == arch.STORES_FP8


def test_a_message_of_another_kind_says_what_to_do():
    sm80 = co.Sm80Config(co.ThreadblockShape(128, 128, 32), co.WarpShape(64, 64, 32))
    declared = co.KernelSpec(a="bf16.row", b="bf16.col", d="e4m3.row", epilogue=plain, config=sm80)
    with pytest.raises(ConfigError, match=r"d is e4m3\.row, and kernels of this kind store no FP8: use an Sm90Config"):
        legality.require_legal(declared)


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


def test_a_catalogue_names_them():
    kernels = Kernels(ops=("gemm_bias",), archs=("sm_90a",), out_dtypes=("e4m3",), shapes=("64x4096x4096",))
    ((signature, *_),) = _calls(kernels, "gemm_bias")
    assert str(signature.d) == "e4m3.row"
    usual = Kernels(ops=("gemm_bias",), archs=("sm_90a",), dtypes=("e4m3",), shapes=("64x4096x4096",))
    ((signature, *_),) = _calls(usual, "gemm_bias")
    assert str(signature.d) == "bf16.row"
