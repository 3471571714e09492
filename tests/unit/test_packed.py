"""Packed weights: their order in memory, the formats that they are made of, calls on the CPU, and what is refused.

The formats of other libraries are written here, number by number, and dequantised here: nothing of the library packs or
unpacks what a test compares with.
"""

from __future__ import annotations

import io
import json
import re
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import cutlass_ops as co
from cutlass_ops.base import dtypes
from cutlass_ops.choose import policies
from cutlass_ops.declare.problem import Problem
from cutlass_ops.epilogue import builtin, composed
from cutlass_ops.operand import packing, reference
from cutlass_ops.operand.call import call_at, signature_of
from cutlass_ops.run import packed as of_packed
from cutlass_ops.tuner import trial
from tests.scripts import BENCHMARKS
from tests.unit.signatures import H200

_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@co.epilogue
def bias_silu(acc: co.types.Value, bias: co.Row) -> co.types.Value:
    """silu(acc + bias)."""
    return co.e.silu(acc + bias)


def _codes(n: int, k: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 16, (n, k), generator=torch.Generator().manual_seed(seed), dtype=torch.int32)


def _scales(n: int, groups: int, dtype: torch.dtype = torch.float16) -> Tensor:
    return (torch.rand(n, groups, generator=torch.Generator().manual_seed(1)) + 0.5).to(dtype)


def _in_eights(x: Tensor, order: tuple[int, ...] = (0, 1, 2, 3, 4, 5, 6, 7)) -> Tensor:
    """Pack each eight numbers of the last dimension into 32 bits, those of `order` from the lowest bits on."""
    rows, columns = x.shape
    found = torch.zeros(rows, columns // 8, dtype=torch.int64)
    for place, column in enumerate(order):
        found |= x.long()[:, column::8] << 4 * place
    return torch.where(found >= 1 << 31, found - (1 << 32), found).to(torch.int32)


def _by_group(x: Tensor, k: int) -> Tensor:
    return x.double().repeat_interleave(k // x.shape[1], 1)


# ---- The order in memory ---------------------------------------------------------------------------------------------


def test_numbers_are_where_threads_read_them() -> None:
    codes = _codes(32, 128)
    words = packing.packed(codes.to(torch.uint8)).view(torch.uint8).reshape(2, 2, 32, 4, 4)  # line, piece, thread, word
    for line, piece, thread, step, p in [(0, 0, 0, 0, 0), (1, 1, 31, 3, 3), (0, 1, 5, 2, 1), (1, 0, 18, 1, 2)]:
        word = int.from_bytes(bytes(words[line, piece, thread, step].tolist()), "little")
        row = line * 16 + thread // 4 + 8 * (p % 2)
        first = piece * 64 + step * 16 + 2 * (thread % 4) + 8 * (p // 2)
        assert word >> 4 * p & 15 == codes[row, first]
        assert word >> 16 + 4 * p & 15 == codes[row, first + 1]


@pytest.mark.parametrize(("n", "k"), [(16, 64), (48, 192), (128, 256)])
def test_packing_is_undone(n: int, k: int) -> None:
    codes, ones = _codes(n, k).to(torch.uint8), packing.packed_scales(torch.ones(n, 1, dtype=torch.half))
    assert torch.equal(packing.dequantized(packing.packed(codes), ones, dtypes.i4) + 8, codes.half())
    scale, zero = _scales(n, k // 64), _codes(n, k // 64)
    for given in (None, zero):
        found = packing.unpacked_scales(packing.packed_scales(scale, given), 1 if given is None else 2)
        assert torch.equal(found[0], scale)
        assert given is None or (found[1] is not None and torch.equal(found[1].int(), zero))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_zero_points_are_exact(dtype: torch.dtype) -> None:
    zero = torch.arange(17).repeat_interleave(16)[:, None]
    scale = torch.ones(17 * 16, 1, dtype=dtype)
    found = packing.unpacked_scales(packing.packed_scales(scale, zero), 2)[1]
    assert found is not None
    assert torch.equal(found.int(), zero.int())


HEADER = Path(__file__).parents[2] / "templates" / "include" / "cutlass_ops" / "packed.h"


def _constants(element: str) -> dict[str, int]:
    """Return the constants of a type of A in the header, the lower half of pairs."""
    (body,) = re.findall(rf"struct PairOf<cutlass::{element}_t> \{{(.*?)\}};", HEADER.read_text(), re.DOTALL)
    return {name: int(value, 0) & 0xFFFF for name, value in re.findall(r"(k\w+) = (0x[0-9a-f]+|\d+)", body)}


@pytest.mark.parametrize(("element", "dtype"), [("bfloat16", torch.bfloat16), ("half", torch.float16)])
def test_the_bits_that_kernels_make_are_the_numbers(element: str, dtype: torch.dtype) -> None:
    """The same operations on bits as in the header, with its constants, for each of the sixteen codes."""
    of = _constants(element)

    def number(bits: Tensor | int) -> Tensor:
        return (
            torch.as_tensor(bits).to(torch.int32).sub((torch.as_tensor(bits) >> 15) << 16).to(torch.int16).view(dtype)
        )

    codes = torch.arange(16)
    counted = number(codes | of["kCounts"])
    assert torch.equal(counted * number(of["kOnes"]) + number(of["kMinusBias"]), (codes - 8).to(dtype))
    minus = packing.packed_scales(torch.ones(16, 1, dtype=dtype), torch.full((16, 1), 5))[-1, -1]
    assert torch.equal(counted + minus, (codes - 5).to(dtype))
    small = number((codes << 12 & 0x7000) >> of["kFP4Shift"] | (codes & 8) << 12)
    assert (small * number(of["kFP4"])).tolist() == [*_FP4, *(-x for x in _FP4)]


# ---- Formats ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("group", [16, 32, 64, 128, 256])
@pytest.mark.parametrize("version", [1, 2])
def test_gptq(group: int, version: int) -> None:
    n, k = 48, 256
    codes, scale = _codes(n, k), _scales(n, k // group)
    zero = _codes(n, k // group, 2).clamp(min=1) if version == 1 else _codes(n, k // group, 2)
    stored = zero - 1 if version == 1 else zero
    packed = co.Packed.from_gptq(
        _in_eights(codes).t(), scale.t(), _in_eights(stored.t()), torch.arange(k) // group, version=version
    )
    assert (packed.numbers, packed.group, packed.shape) == ("uint4", group, (k, n))
    wanted = (codes - _by_group(zero, k)) * _by_group(scale, k)
    assert torch.equal(packed.dequantize(torch.float64), wanted.t())


def test_symmetric_gptq_has_no_zero_points() -> None:
    codes, scale = _codes(16, 128), _scales(16, 1)
    packed = co.Packed.from_gptq(_in_eights(codes).t(), scale.t(), _in_eights(torch.full((1, 16), 7)))
    assert packed.numbers == "int4"
    assert torch.equal(packed.dequantize(torch.float64), ((codes - 8) * _by_group(scale, 128)).t())


def test_awq() -> None:
    n, k, group = 64, 128, 32
    codes, scale, zero = _codes(n, k), _scales(n, k // group), _codes(n, k // group, 3)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    packed = co.Packed.from_awq(_in_eights(codes.t(), order), scale.t(), _in_eights(zero.t(), order))
    wanted = (codes - _by_group(zero, k)) * _by_group(scale, k)
    assert torch.equal(packed.dequantize(torch.float64), wanted.t())


@pytest.mark.parametrize("zeros", ["none", "packed", "int8"])
def test_compressed_tensors(zeros: str) -> None:
    n, k, group = 32, 256, 128
    signed, scale = _codes(n, k) - 8, _scales(n, k // group, torch.bfloat16)
    zero = torch.zeros(n, k // group, dtype=torch.int32) if zeros == "none" else _codes(n, k // group, 4) - 8
    given = {"none": None, "packed": _in_eights((zero + 8).t()).t(), "int8": zero.to(torch.int8)}[zeros]
    packed = co.Packed.from_compressed_tensors(_in_eights(signed + 8), scale, given)
    assert packed.numbers == ("int4" if zeros == "none" else "uint4")
    wanted = (signed - _by_group(zero, k)) * _by_group(scale, k)
    assert torch.equal(packed.dequantize(torch.float64), wanted.t())


@pytest.mark.parametrize("flat", [False, True])
def test_mxfp4(flat: bool) -> None:
    n, k = 32, 192
    codes = _codes(n, k)
    exponents = torch.randint(100, 140, (n, k // 32), dtype=torch.int32)
    blocks = (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8)
    packed = co.Packed.from_mxfp4(blocks if flat else blocks.view(n, k // 32, 16), exponents.to(torch.uint8))
    numbers = torch.tensor([*_FP4, *(-x for x in _FP4)], dtype=torch.float64)[codes]
    wanted = numbers * _by_group(2.0 ** (exponents.double() - 127), k)
    assert torch.equal(packed.dequantize(torch.float64), wanted.t())
    assert torch.equal(packed.dequantize().double(), wanted.t())  # BF16 rounds nothing


def test_mxfp4_has_nan() -> None:
    exponents = torch.full((16, 2), 255, dtype=torch.uint8)
    packed = co.Packed.from_mxfp4(torch.zeros(16, 32, dtype=torch.uint8), exponents)
    assert packed.dequantize().isnan().all()


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("of_tensor", [0.0371, torch.tensor([0.0371])])
def test_nvfp4(flat: bool, dtype: torch.dtype, of_tensor: Any) -> None:
    n, k = 32, 192
    codes = _codes(n, k)
    scales = (_scales(n, k // 16) * 100).to(torch.float8_e4m3fn)
    blocks = (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8)
    packed = co.Packed.from_nvfp4(blocks if flat else blocks.view(n, k // 16, 8), scales, of_tensor, dtype=dtype)
    assert (packed.group, packed.numbers) == (16, "e2m1")
    numbers = torch.tensor([*_FP4, *(-x for x in _FP4)], dtype=torch.float64)[codes]
    wanted = (numbers * _by_group(scales.double() * 0.0371, k)).t()
    off = (packed.dequantize(torch.float64) - wanted).abs()
    assert (off <= (2.0**-8 if dtype is torch.bfloat16 else 2.0**-11) * 1.001 * wanted.abs()).all()


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group", [16, 32, 64, 128, None])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_dense(symmetric: bool, group: int | None, dtype: torch.dtype) -> None:
    w = torch.randn(256, 32, generator=torch.Generator().manual_seed(0)).to(dtype)
    packed = co.Packed.from_dense(w, bits=4, group=group, symmetric=symmetric)
    each = group or 256
    of = w.t().double().reshape(32, -1, each)
    largest = of.abs().amax(-1, keepdim=True) / 7
    if not symmetric:
        largest = (of.amax(-1, keepdim=True).clamp(min=0) - of.amin(-1, keepdim=True).clamp(max=0)) / 15
    wrong = (packed.dequantize(torch.float64).t().reshape(of.shape) - of).abs()
    # Half a step, and what rounding the scale adds: of a zero point too.
    assert (wrong <= (0.5 + 16 * 2.0**-8) * largest * (1 if symmetric else 2)).all()


def test_zeros_stay_zero() -> None:
    w = torch.zeros(64, 16).bfloat16()
    for symmetric in (True, False):
        assert not co.Packed.from_dense(w, group=64, symmetric=symmetric).dequantize().any()


# ---- Calls on the CPU ------------------------------------------------------------------------------------------------


def _packed(numbers: str, group: int, dtype: torch.dtype, n: int = 48, k: int = 256) -> co.Packed:
    codes, scale = _codes(n, k), _scales(n, k // group, dtype)
    if numbers == "uint4":
        zero = _codes(n, k // group, 5)
        return co.Packed(packing.packed(codes.to(torch.uint8)).t(), packing.packed_scales(scale, zero), group, "uint4")
    found: Any = numbers
    return co.Packed(packing.packed(codes.to(torch.uint8)).t(), packing.packed_scales(scale), group, found)


@pytest.mark.parametrize("numbers", ["int4", "uint4", "e2m1"])
@pytest.mark.parametrize("group", [16, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_call_computes_what_the_weight_represents(numbers: str, group: int, dtype: torch.dtype) -> None:
    packed = _packed(numbers, group, dtype)
    x, bias = torch.randn(3, 5, 256).to(dtype), torch.randn(48).to(dtype)
    wanted = torch.nn.functional.silu(x.double() @ packed.dequantize(torch.float64) + bias.double())
    d = co.gemm(x, packed, epilogue=bias_silu, bias=bias, out_dtype=torch.float32)
    assert d.shape == (3, 5, 48)
    assert (d - wanted).abs().max() <= 1e-4 * wanted.abs().max()


def test_out_and_further_outputs() -> None:
    packed = _packed("int4", 64, torch.bfloat16)
    x = torch.randn(4, 256).bfloat16()

    @co.epilogue
    def with_sums(acc: co.types.Value) -> dict[str, Any]:
        return {"d": acc, "row_sum": co.e.sum(acc, dim=1)}

    out = torch.full((4, 48), float("nan")).bfloat16()
    found = co.gemm(x, packed, epilogue=with_sums, out={"d": out})
    wanted = x.double() @ packed.dequantize(torch.float64)
    torch.testing.assert_close(found.row_sum.double(), wanted.sum(1), rtol=1e-2, atol=1e-1)
    torch.testing.assert_close(out.double(), wanted, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("other", ["packed", "dense"])
def test_swiglu_of_packed_weights(other: str) -> None:
    """Two GEMMs, with gradients and an output that is given."""
    gate, up = (_packed(numbers, 64, torch.bfloat16) for numbers in ("int4", "e2m1"))
    x = (torch.randn(3, 5, 256) / 16).bfloat16().requires_grad_()
    d = co.gemm_swiglu(x, gate, up if other == "packed" else up.dequantize())
    exact = x.detach().double().requires_grad_()
    wanted = torch.nn.functional.silu(exact @ gate.dequantize(torch.float64)) * (exact @ up.dequantize(torch.float64))
    assert (d.double() - wanted).norm() <= 0.01 * wanted.norm()
    d.backward(torch.ones_like(d))
    wanted.sum().backward()  # type: ignore[no-untyped-call]
    assert x.grad is not None
    assert exact.grad is not None
    assert (x.grad.double() - exact.grad).norm() <= 0.02 * exact.grad.norm()
    out = torch.empty(3, 5, 48)
    with torch.no_grad():
        assert co.gemm_swiglu(x.detach(), gate, up, out=out) is out
    assert (out - wanted).norm() <= 0.01 * wanted.norm()


def test_compiled_and_exported() -> None:
    packed, x = _packed("int4", 128, torch.bfloat16), torch.randn(4, 256).bfloat16()

    class Layer(torch.nn.Module):
        def forward(self, x: Tensor, weight: co.Packed) -> Tensor:
            return co.gemm(x, weight)

    wanted = co.gemm(x, packed)
    assert torch.equal(torch.compile(Layer(), backend="eager", fullgraph=True)(x, packed), wanted)
    program = torch.export.export(Layer(), (x, packed))
    assert torch.equal(program.module()(x, packed), wanted)


def test_saved_and_loaded() -> None:
    packed = _packed("uint4", 64, torch.float16)
    file = io.BytesIO()
    torch.save(packed.tensors("layer."), file)
    file.seek(0)
    loaded = co.Packed.from_tensors(torch.load(file, weights_only=True), "layer.")
    assert (loaded.group, loaded.numbers, loaded.shape) == (64, "uint4", packed.shape)
    assert torch.equal(loaded.dequantize(), packed.dequantize())


@co.epilogue
def gated(acc: co.types.Value, bias: co.Row, residual: co.Tile) -> dict[str, co.types.Value]:
    """Two outputs, of which the first needs the accumulator again in its backward."""
    z = acc + bias
    return {"d": co.e.silu(z) + residual, "row_sum": co.e.sum(z, dim=1)}


def _gradients(packed: co.Packed, *, exact: bool, through: Any = None) -> list[Tensor]:
    """Return the gradients of x, bias and residual, by the library or in float64 from the dequantised weight."""
    generator = torch.Generator().manual_seed(3)
    x, bias, residual, g = (
        torch.randn(*shape, generator=generator).to(packed.dtype)
        for shape in ((3, 5, 256), (48,), (3, 5, 48), (3, 5, 48))
    )
    leaves = [each.double() if exact else each for each in (x, bias, residual)]
    leaves = [each.requires_grad_() for each in leaves]
    if exact:
        z = leaves[0] @ packed.dequantize(torch.float64) + leaves[1]
        d, row_sum = torch.nn.functional.silu(z) + leaves[2], z.sum(-1)
    else:
        call = co.gemm if through is None else through
        d, row_sum = call(leaves[0], packed, epilogue=gated, bias=leaves[1], residual=leaves[2])
    (row_sum.sum() + (d * g.to(d.dtype)).sum()).backward()  # type: ignore[no-untyped-call]
    return [each.grad for each in leaves if each.grad is not None]


@pytest.mark.parametrize("numbers", ["int4", "uint4", "e2m1"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("way", ["saved", "recomputed", "checkpointed", "compiled"])
def test_gradients_pass_through_a(numbers: str, dtype: torch.dtype, way: str) -> None:
    """As of a dense GEMM with the dequantised weight. The third step runs without the Python of the first ones."""
    packed = _packed(numbers, 64, dtype)
    through = {
        "checkpointed": lambda *args, **kwargs: checkpoint(co.gemm, *args, use_reentrant=False, **kwargs),
        "compiled": torch.compile(co.gemm, backend="aot_eager", fullgraph=True),
    }.get(way)
    wanted = _gradients(packed, exact=True)
    for _ in range(3):
        with co.recompute() if way == "recomputed" else nullcontext():
            found = _gradients(packed, exact=False, through=through)
        assert len(found) == 3
        for mine, other in zip(found, wanted, strict=True):
            assert mine.dtype == dtype
            assert (mine.double() - other).norm() <= 0.02 * other.norm()


def test_gradients_of_gradients() -> None:
    packed = _packed("int4", 64, torch.bfloat16)
    x = torch.randn(4, 256).bfloat16().requires_grad_()

    def penalty(x: Tensor, product: Any) -> Tensor:
        (first,) = torch.autograd.grad(torch.nn.functional.silu(product(x)).sum(), x, create_graph=True)
        return first.square().sum()

    (found,) = torch.autograd.grad(penalty(x, lambda x: co.gemm(x, packed, out_dtype=torch.float32)), x)
    exact = x.detach().double().requires_grad_()
    (wanted,) = torch.autograd.grad(penalty(exact, lambda x: x @ packed.dequantize(torch.float64)), exact)
    assert (found.double() - wanted).norm() <= 0.02 * wanted.norm()


def test_a_bias_alone_needs_no_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    packed, bias = _packed("int4", 64, torch.bfloat16), torch.zeros(48).bfloat16().requires_grad_()
    d = co.gemm(torch.randn(4, 256).bfloat16(), packed, epilogue=builtin.bias, bias=bias)
    monkeypatch.setattr(packing, "dequantized", None)
    d.sum().backward()
    assert bias.grad is not None
    assert bias.grad.tolist() == [4.0] * 48


def test_the_weight_is_frozen() -> None:
    packed, x = _packed("int4", 64, torch.bfloat16), torch.randn(4, 256).bfloat16()
    packed.scale.requires_grad_()
    with pytest.raises(ValueError, match=r"scale_b requires grad, .*frozen"):
        co.gemm(x, packed)


@pytest.mark.parametrize("numbers", ["int4", "uint4", "e2m1"])
def test_the_tuner_draws_packed_weights(numbers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(L2_cache_size=1 << 20))
    graph = of_packed._SCALED[numbers].graph.then(bias_silu.graph)
    call = call_at(graph, Problem(64, 256, 512), "bf16", "row", "col")
    found = trial.Trial(signature_of(call, H200), call.problem, torch.device("cpu"))
    x = found._sets[0]
    (wanted,) = found._exact(x)
    assert 0.1 < wanted.std() < 2
    named = dict(zip((i.name for i in graph.inputs), x.inputs, strict=True))
    d = reference.gemm_reference(x.a, x.b, graph, named, d_dtype=torch.bfloat16)["d"]
    x.outputs[0].copy_(d)
    assert found._wrong([wanted]) is None
    x.outputs[0].mul_(1.1)
    assert found._wrong([wanted]) is not None


def test_the_model_chooses_near_the_best_of_a_sweep() -> None:
    """Of an H200, at 1 to 4096 rows: by the model alone, within 3%."""
    call = call_at(of_packed._SCALED["int4"].graph, Problem(64, 8192, 8192), "bf16", "row", "col")
    policy = policies.policy(signature_of(call, H200), H200)
    rows = json.loads((BENCHMARKS / "results" / "sweep_packed_h200.json").read_text())["rows"]
    assert len(rows) == 5
    for row in rows:
        times: dict[str, float] = {}
        for slug, microseconds, _ in row["kernels"]:
            times[slug] = min(microseconds, times.get(slug, microseconds))
        chosen = policy.choose(Problem(row["m"], row["n"], row["k"])).config.slug
        assert times[chosen] <= 1.03 * min(times.values()), (row["m"], chosen)


# ---- What is refused -------------------------------------------------------------------------------------------------


def _refused(match: str, error: type[Exception], function: Any, *args: Any, **kwargs: Any) -> None:
    with pytest.raises(error, match=match):
        function(*args, **kwargs)


def test_bad_fields_are_named() -> None:
    good = _packed("int4", 64, torch.bfloat16)
    values, scale = good.values, good.scale
    _refused("version is 2", ValueError, co.Packed, values, scale, 64, "int4", 2)
    _refused("numbers is 'int8'", ValueError, co.Packed, values, scale, 64, "int8")
    _refused("group is 48", ValueError, co.Packed, values, scale, 48)
    _refused("scale has shape", ValueError, co.Packed, values, scale, 128)
    _refused("scale has shape", ValueError, co.Packed, values, scale, 64, "uint4")
    _refused("scale is torch.float32", TypeError, co.Packed, values, scale.float(), 64)
    _refused("values is torch.int8", TypeError, co.Packed, values.to(torch.int8), scale, 64)
    _refused("values has strides", ValueError, co.Packed, values.contiguous(), scale, 64)
    _refused("N is 40", ValueError, co.Packed, values[:, :40], scale[:40], 64)
    _refused("K is 224", ValueError, co.Packed, values[:112], scale, 64)


def test_bad_calls_are_named() -> None:
    good = _packed("int4", 64, torch.bfloat16)
    x = torch.randn(4, 256)
    _refused("a is torch.float32", TypeError, co.gemm, x, good)
    _refused("packed for torch.bfloat16", TypeError, co.gemm, x.half(), good)
    _refused("a has a scale", TypeError, co.gemm, co.Scaled(x.bfloat16(), 1.0), good)
    _refused("K", ValueError, co.gemm, x.bfloat16()[:, :128], good)
    _refused("math", TypeError, co.gemm, x.bfloat16(), good, math="tf32")
    ends = torch.tensor([2, 4], dtype=torch.int32)
    _refused("b is packed, and groups of rows", TypeError, co.gemm, x.bfloat16(), good, groups=co.Groups(ends))
    gate = composed.swiglu
    _refused(
        "product up, and b is packed.* gemm_swiglu", ValueError, co.gemm, x.bfloat16(), good, epilogue=gate, up=good
    )
    _refused("eps is given, and a weight is a Packed", TypeError, co.gemm_swiglu, x.bfloat16(), good, good, eps=1e-5)


def test_bad_weights_are_named() -> None:
    w = torch.randn(128, 32).bfloat16()
    make = co.Packed
    _refused("bits is 8", ValueError, make.from_dense, w, bits=8)
    _refused("w is torch.float32", TypeError, make.from_dense, w.float())
    _refused("group is 96", ValueError, make.from_dense, w, group=96)
    _refused("N is 24", ValueError, make.from_dense, w[:, :24])
    _refused("K is 96", ValueError, make.from_dense, w[:96], group=32)
    qweight, scales = _in_eights(_codes(32, 128)).t(), _scales(32, 1).t()
    qzeros = _in_eights(torch.full((1, 32), 7))
    _refused("qzeros is torch.float16", TypeError, make.from_gptq, qweight, scales, scales)
    _refused("qzeros has shape", ValueError, make.from_gptq, qweight, scales, qzeros[:, :2])
    _refused("scales has shape", ValueError, make.from_gptq, qweight, scales[:, :16], qzeros)
    _refused("activation order", ValueError, make.from_gptq, qweight, scales, qzeros, torch.arange(128) % 2)
    _refused("version is 3", ValueError, make.from_gptq, qweight, scales, qzeros, version=3)
    _refused("scales are torch.float32", TypeError, make.from_gptq, qweight, scales.float(), qzeros)
    small = torch.full((16, 2), 20, dtype=torch.uint8)
    _refused(
        "FP16 cannot hold", ValueError, make.from_mxfp4, torch.zeros(16, 32, dtype=torch.uint8), small, dtype=torch.half
    )
    fp4, of_e4m3 = torch.zeros(16, 32, dtype=torch.uint8), torch.full((16, 4), 448.0).to(torch.float8_e4m3fn)
    _refused("scales is torch.float32", TypeError, make.from_nvfp4, fp4, of_e4m3.float(), 1.0)
    _refused("scales has shape", ValueError, make.from_nvfp4, fp4, of_e4m3[:, :2], 1.0)
    _refused("one scale of the tensor", ValueError, make.from_nvfp4, fp4, of_e4m3, torch.ones(16))
    _refused("above 65504", ValueError, make.from_nvfp4, fp4, of_e4m3, 1e3, dtype=torch.half)
    _refused("16, 8", TypeError, make.from_nvfp4, fp4.int(), of_e4m3, 1.0)
    _refused("has no", ValueError, make.from_tensors, {})
    newer = {**make.from_dense(w).tensors(), "form": torch.tensor([2, 0, 128])}
    _refused("has version 2", ValueError, make.from_tensors, newer)


# ---- The layer -------------------------------------------------------------------------------------------------------


def test_a_layer_adds_its_bias_and_a_residual() -> None:
    packed, bias = _packed("uint4", 64, torch.bfloat16), torch.randn(48).bfloat16()
    layer = co.nn.PackedLinear(packed, bias, activation="silu")
    x, residual = torch.randn(2, 4, 256).bfloat16(), torch.randn(2, 4, 48).bfloat16()
    wanted = torch.nn.functional.silu(x.double() @ packed.dequantize(torch.float64) + bias.double()) + residual.double()
    torch.testing.assert_close(layer(x, residual=residual).double(), wanted, rtol=2e-2, atol=1e-1)
    assert "uint4, group=64" in repr(layer)


def test_a_layer_is_saved_and_loaded() -> None:
    first, second = (co.nn.PackedLinear(_packed("int4", group, torch.bfloat16)) for group in (64, 64))
    second.values.zero_()
    second.load_state_dict(first.state_dict())
    x = torch.randn(4, 256).bfloat16()
    assert torch.equal(first(x), second(x))
    other = co.nn.PackedLinear(_packed("int4", 128, torch.bfloat16))
    with pytest.raises(RuntimeError, match="form is"):
        other.load_state_dict(first.state_dict())


def test_an_adapter_beside_a_layer_is_trained() -> None:
    """As QLoRA does: the packed weight passes gradients on, and has none."""
    packed = _packed("uint4", 64, torch.bfloat16, n=64, k=64)
    first, second = co.nn.PackedLinear(packed, activation="silu"), co.nn.PackedLinear(packed)
    adapter = torch.nn.Linear(64, 64, bias=False).bfloat16()
    x, g = (torch.randn(4, 64).bfloat16() for _ in range(2))
    second(first(x + adapter(x))).backward(g)
    assert not list(first.parameters())
    exact, w = adapter.weight.detach().double().requires_grad_(), packed.dequantize(torch.float64)
    (torch.nn.functional.silu((x.double() + x.double() @ exact.t()) @ w) @ w).backward(g.double())
    assert adapter.weight.grad is not None
    assert exact.grad is not None
    assert (adapter.weight.grad.double() - exact.grad).norm() <= 0.03 * exact.grad.norm()


def test_a_layer_is_not_converted() -> None:
    layer = co.nn.PackedLinear(_packed("int4", 64, torch.bfloat16))
    assert layer.to("cpu") is layer
    with pytest.raises(TypeError, match=r"packed for torch\.bfloat16"):
        layer.half()


def test_a_layer_has_an_epilogue() -> None:
    @co.epilogue
    def times(acc: co.types.Value, by: co.Scalar) -> co.types.Value:
        return acc * by

    layer = co.nn.PackedLinear(_packed("int4", 64, torch.bfloat16), epilogue=times)
    x = torch.randn(4, 256).bfloat16()
    torch.testing.assert_close(layer(x, by=2.0), 2 * layer(x, by=1.0))
    with pytest.raises(TypeError, match="by is missing"):
        layer(x)
