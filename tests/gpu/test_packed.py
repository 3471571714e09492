"""Packed weights on a GPU: each kernel to the last bit and against float64, calls of any rows, and packing itself.

python -m pytest -m gpu tests/gpu/test_packed.py
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import cutlass_ops as co
from cutlass_ops.base import dtypes
from cutlass_ops.compilation.builder import build_many
from cutlass_ops.declare.spec import KernelSpec
from cutlass_ops.epilogue import Epilogue
from cutlass_ops.kinds.legality import is_legal
from cutlass_ops.operand import packing
from cutlass_ops.run import packed as of_packed
from tests.unit import test_quantized_models

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("hopper")]

_NAMES = {"int4": "i4", "uint4": "u4", "e2m1": "e2m1"}
_WHOLE = 1 << 16


@co.epilogue
def finished(acc, bias: co.Row, scale: co.Col, residual: co.Tile, alpha: co.Scalar):
    """Something of every kind."""
    return co.e.silu((acc + bias) * scale) * alpha + residual


@co.epilogue
def turned(acc, bias: co.Row):
    return co.swap_pairs(acc) + bias


@co.epilogue
def with_sums(acc, bias: co.Row):
    z = acc + bias
    return {"d": co.e.relu(z), "row_sum": co.e.sum(z, dim=1), "row_max": co.e.max(z, dim=1)}


def _sm90(m: int, n: int, k: int, schedule: Any, cluster: int = 1, **others: Any) -> Any:
    shape = co.ThreadblockShape(m, n, k)
    return co.Sm90Config(shape, co.ClusterShape(cluster, 1), schedule=schedule, swap_ab=True, **others)


def _spec(
    config: Any, numbers: str = "int4", group: int = 128, a: str = "bf16", epilogue: Any = None, d: str = "f32"
) -> KernelSpec:
    scaled = of_packed._SCALED[numbers]
    graph = scaled.graph if epilogue is None else scaled.graph.then(epilogue.graph)
    return KernelSpec(
        a=f"{a}.row",
        b=f"{_NAMES[numbers]}.col.blocks{group}x1",
        d=f"{d}.row",
        epilogue=Epilogue("packed", "A packed weight's product.", graph),
        inputs={"scale_b": f"{a}.row.align1"},
        config=config,
        target="sm_90" if isinstance(config, co.types.PackedRowsConfig) else "sm_90a",
    )


_ROWS = co.types.PackedRowsConfig
KERNELS = {
    "coop-128x128": _spec(_sm90(128, 128, 128, "cooperative")),
    "coop-128x256": _spec(_sm90(128, 256, 128, "cooperative")),
    "coop-256x128-cluster": _spec(_sm90(256, 128, 128, "cooperative", 2)),
    "coop-192x64-side": _spec(_sm90(192, 64, 128, "cooperative")),
    "pp-64x256": _spec(_sm90(64, 256, 128, "pingpong")),
    "pp-128x128-cluster": _spec(_sm90(128, 128, 128, "pingpong", 2)),
    "ws-64x8-two": _spec(_sm90(64, 8, 256, "warp_specialized", resident=2)),
    "ws-64x16-two": _spec(_sm90(64, 16, 256, "warp_specialized", resident=2)),
    "split-128x32": _spec(_sm90(128, 32, 256, "cooperative", split_k=2)),
    "split-64x32": _spec(_sm90(64, 32, 128, "warp_specialized", split_k=4)),
    "stream-128x128": _spec(_sm90(128, 128, 128, "cooperative", scheduler="stream_k")),
    "coop-fp16": _spec(_sm90(128, 128, 128, "cooperative"), a="f16"),
    "uint4-32": _spec(_sm90(128, 128, 128, "pingpong"), "uint4", 32),
    "uint4-16-fp16": _spec(_sm90(128, 64, 128, "cooperative"), "uint4", 16, "f16"),
    "uint4-128": _spec(_sm90(64, 64, 256, "pingpong"), "uint4", 128),
    "uint4-whole": _spec(_sm90(64, 64, 128, "pingpong"), "uint4", _WHOLE),
    "e2m1-32": _spec(_sm90(64, 128, 128, "pingpong"), "e2m1", 32),
    "e2m1-16-fp16": _spec(_sm90(128, 64, 128, "cooperative"), "e2m1", 16, "f16"),
    "int4-64": _spec(_sm90(128, 64, 256, "cooperative"), "int4", 64),
    "int4-whole": _spec(_sm90(128, 192, 128, "cooperative"), "int4", _WHOLE),
    "rows-8x4": _spec(_ROWS(8, 8, 2, 4)),
    "rows-8x1": _spec(_ROWS(8, 8, 4, 1)),
    "rows-16x2": _spec(_ROWS(16, 8, 2, 2)),
    "rows-16x1-fp16": _spec(_ROWS(16, 8, 2, 1), a="f16"),
    "rows-uint4-16": _spec(_ROWS(8, 8, 2, 2), "uint4", 16),
    "rows-uint4-fp16": _spec(_ROWS(8, 16, 2, 2), "uint4", 64, "f16"),
    "rows-e2m1-32": _spec(_ROWS(8, 8, 2, 2), "e2m1", 32),
    "rows-whole": _spec(_ROWS(8, 4, 1, 4), "int4", _WHOLE),
}
FINISHED = {
    "coop": _spec(_sm90(128, 128, 128, "cooperative"), epilogue=finished, d="bf16"),
    "pp": _spec(_sm90(64, 64, 128, "pingpong"), epilogue=finished, d="bf16"),
    "split": _spec(_sm90(128, 32, 256, "cooperative", split_k=2), epilogue=finished, d="bf16"),
    "rows": _spec(_ROWS(8, 8, 2, 4), epilogue=finished, d="bf16"),
    "rows-16": _spec(_ROWS(16, 8, 2, 2), epilogue=finished, d="bf16"),
}
# Rows, columns and K, with ends of tiles in every direction, and of a stage.
SHAPES = [(1, 64, 128), (7, 144, 384), (130, 528, 1024), (257, 1040, 512), (33, 272, 448)]


@pytest.fixture(scope="module", autouse=True)
def _built() -> None:
    if torch.cuda.is_available():
        build_many([*KERNELS.values(), *FINISHED.values()])


def _weight(spec: KernelSpec, n: int, k: int, exact: bool) -> co.Packed:
    """Draw a packed weight. If `exact`, scales are powers of two, so that nothing of it is rounded."""
    of_b, of_a = spec.b, getattr(torch, spec.a.dtype.torch_name)
    numbers: Any = next(name for name, short in _NAMES.items() if short == of_b.dtype.name)
    group = k if of_b.scaling is None or of_b.scaling[0] == _WHOLE else of_b.scaling[0]
    codes = torch.randint(0, 16, (n, k), device="cuda", dtype=torch.uint8)
    exponents = torch.randint(-2, 3, (n, k // group), device="cuda").float()
    scale = torch.exp2(exponents) if exact else torch.rand(n, k // group, device="cuda") + 0.1
    zero = torch.randint(0, 17, (n, k // group), device="cuda") if numbers == "uint4" else None
    return co.Packed(packing.packed(codes).t(), packing.packed_scales(scale.to(of_a), zero), group, numbers)


def _fits(spec: KernelSpec, k: int) -> bool:
    group = (spec.b.scaling or (_WHOLE, 1))[0]
    return group == _WHOLE or k % group == 0


def _poisoned(m: int, n: int, dtype: torch.dtype) -> Tensor:
    return torch.full((m, n), float("nan"), dtype=dtype, device="cuda")


def test_declarations_are_legal() -> None:
    assert [name for name, spec in (KERNELS | FINISHED).items() if not is_legal(spec)] == []


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", KERNELS)
def test_sums_that_are_exact_have_every_bit(name: str, shape: tuple[int, int, int]) -> None:
    """Small whole numbers and powers of two: any wrong number, place, scale or zero point changes a result."""
    spec, (m, n, k) = KERNELS[name], shape
    if not _fits(spec, k):
        pytest.skip("K has no whole groups")
    weight = _weight(spec, n, k, exact=True)
    x = torch.randint(-3, 4, (m, k), device="cuda").to(weight.dtype)
    d = _poisoned(m, n, torch.float32)
    co.build(spec)(x, weight.values, weight.scale, out=d)
    wanted = x.double() @ weight.dequantize(torch.float64)
    assert torch.equal(d.double(), wanted), (d.double() - wanted).abs().max()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", KERNELS)
def test_errors_are_those_of_a_gemm_in_16_bits(name: str, shape: tuple[int, int, int]) -> None:
    spec, (m, n, k) = KERNELS[name], shape
    if not _fits(spec, k):
        pytest.skip("K has no whole groups")
    weight = _weight(spec, n, k, exact=False)
    x = torch.randn(m, k, device="cuda").to(weight.dtype)
    d = _poisoned(m, n, torch.float32)
    co.build(spec)(x, weight.values, weight.scale, out=d)
    wanted = x.double() @ weight.dequantize(torch.float64)
    usual = (x.double() @ weight.dequantize().double() - wanted).abs().max()
    bound = float(1.5 * usual + 1e-5 * wanted.abs().max())
    torch.testing.assert_close(d.double(), wanted, rtol=0, atol=bound)


@pytest.mark.parametrize("m", [1, 3, 8, 9, 16, 33, 129])
@pytest.mark.parametrize("name", FINISHED)
def test_any_epilogue_follows(name: str, m: int) -> None:
    spec, n, k = FINISHED[name], 528, 512
    weight = _weight(spec, n, k, exact=False)
    x = torch.randn(m, k, device="cuda").bfloat16()
    bias, scale = torch.randn(n, device="cuda"), torch.rand(m, device="cuda")
    residual = torch.randn(m, n, device="cuda").bfloat16()
    inputs = {i.name: t for i, t in zip(spec.epilogue.inputs[1:], (bias, scale, residual, 0.5), strict=True)}
    types = {i.name: operand for i, operand in spec.typed_inputs}
    given = {
        name: value.to(getattr(torch, types[name].dtype.torch_name)) if isinstance(value, Tensor) else value
        for name, value in inputs.items()
    }
    d = _poisoned(m, n, torch.bfloat16)
    co.build(spec)(x, weight.values, weight.scale, *given.values(), out=d)
    z = x.double() @ weight.dequantize(torch.float64)
    row, column, tile, alpha = given.values()
    wanted = torch.nn.functional.silu((z + row.double()) * column.double()[:, None]) * alpha + tile.double()
    torch.testing.assert_close(d.double(), wanted, rtol=2e-2, atol=2e-2 * z.std().item())


@pytest.mark.parametrize("numbers", ["int4", "uint4", "e2m1"])
@pytest.mark.parametrize("m", [1, 5, 16, 17, 64, 100, 300])
def test_calls_choose_a_kernel(numbers: str, m: int) -> None:
    spec = _spec(_ROWS(), numbers)
    weight = _weight(spec, 272, 512, exact=False)
    x, bias = torch.randn(m, 512, device="cuda").bfloat16(), torch.randn(272, device="cuda").bfloat16()
    found = co.gemm(x, weight, epilogue=turned, bias=bias)
    acc = x.double() @ weight.dequantize(torch.float64)
    wanted = acc.unflatten(1, (-1, 2)).flip(2).flatten(1) + bias.double()
    torch.testing.assert_close(found.double(), wanted, rtol=2e-2, atol=2e-2 * acc.std().item())


@pytest.mark.parametrize("m", [4, 100])
def test_reductions(m: int) -> None:
    weight = _weight(_spec(_ROWS()), 272, 512, exact=False)
    x, bias = torch.randn(m, 512, device="cuda").bfloat16(), torch.randn(272, device="cuda").bfloat16()
    d, row_sum, row_max = co.gemm(x, weight, epilogue=with_sums, bias=bias)
    z = x.double() @ weight.dequantize(torch.float64) + bias.double()
    scale = z.std().item()
    torch.testing.assert_close(d.double(), z.relu(), rtol=2e-2, atol=2e-2 * scale)
    torch.testing.assert_close(row_sum.double(), z.sum(1), rtol=2e-2, atol=0.5 * scale)
    torch.testing.assert_close(row_max.double(), z.amax(1), rtol=2e-2, atol=2e-2 * scale)


def test_a_graph_replays_with_other_values() -> None:
    weight = _weight(_spec(_ROWS()), 1024, 1024, exact=True)
    x = torch.randint(-3, 4, (4, 1024), device="cuda").bfloat16()
    out = _poisoned(4, 1024, torch.float32)
    co.gemm(x, weight, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        co.gemm(x, weight, out=out)
    x.copy_(torch.randint(-3, 4, x.shape, device="cuda"))
    out.fill_(float("nan"))
    graph.replay()
    assert torch.equal(out.double(), x.double() @ weight.dequantize(torch.float64))


@pytest.mark.parametrize("numbers", ["int4", "uint4", "e2m1"])
@pytest.mark.parametrize("m", [4, 100])
def test_gradients_pass_through_a(numbers: str, m: int) -> None:
    """Three steps, of which the last runs without the Python of the first ones; and dequantising on the GPU."""
    weight = _weight(_spec(_ROWS(), numbers), 272, 512, exact=False)
    host = co.Packed(weight.values.cpu().t().contiguous().t(), weight.scale.cpu(), weight.group, weight.numbers)
    for dtype in (torch.bfloat16, torch.float64):
        assert torch.equal(weight.dequantize(dtype).cpu(), host.dequantize(dtype))
    w = weight.dequantize(torch.float64)
    g = torch.randn(m, 272, device="cuda").bfloat16()
    for _ in range(3):
        x = torch.randn(m, 512, device="cuda").bfloat16().requires_grad_()
        bias = torch.randn(272, device="cuda").bfloat16().requires_grad_()
        co.gemm(x, weight, epilogue=turned, bias=bias).backward(g)
        assert x.grad is not None
        assert bias.grad is not None
        wanted = g.double().unflatten(1, (-1, 2)).flip(2).flatten(1) @ w.t()
        assert (x.grad.double() - wanted).norm() <= 0.01 * wanted.norm()
        assert (bias.grad.double() - g.double().sum(0)).norm() <= 0.01 * g.double().sum(0).norm()


@pytest.mark.parametrize("m", [4, 100])
def test_swiglu_of_packed_weights(m: int) -> None:
    gate, up = (_weight(_spec(_ROWS(), numbers), 272, 512, exact=False) for numbers in ("int4", "uint4"))
    x = (torch.randn(m, 512, device="cuda") / 32).bfloat16()
    found = co.gemm_swiglu(x, gate, up)
    of_gate, of_up = (x.double() @ each.dequantize(torch.float64) for each in (gate, up))
    wanted = torch.nn.functional.silu(of_gate) * of_up
    assert (found.double() - wanted).norm() <= 0.01 * wanted.norm()


@pytest.mark.parametrize("form", test_quantized_models.LAYERS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_quantised_llama_gives_its_logits(form: str, dtype: torch.dtype) -> None:
    model, tokens = test_quantized_models._llama(form, dtype), test_quantized_models.TOKENS.cuda()
    wanted = test_quantized_models._exact(model).cuda()(input_ids=tokens).logits
    model = co.patch(model.cuda(), verbose=False)
    for _ in range(2):
        for layer in test_quantized_models._quantised(model):
            layer.called = False
        logits = model(input_ids=tokens).logits
        assert not any(layer.called for layer in test_quantized_models._quantised(model))
        assert (logits.double() - wanted).norm() <= 0.02 * wanted.norm()


def test_a_step_is_captured() -> None:
    """A forward and its backward, in one CUDA graph."""
    weight = _weight(_spec(_ROWS()), 272, 512, exact=False)
    x = torch.randn(100, 512, device="cuda").bfloat16().requires_grad_()
    g, graph = torch.randn(100, 272, device="cuda").bfloat16(), torch.cuda.CUDAGraph()

    def step() -> Tensor:
        return torch.autograd.grad(co.gemm(x, weight), x, g)[0]

    for _ in range(3):
        wanted = step()
    with torch.cuda.graph(graph):
        found = step()
    found.fill_(float("nan"))
    graph.replay()
    assert torch.equal(found, wanted)


def test_packing_is_the_same_on_both_devices() -> None:
    w = torch.randn(512, 64).bfloat16()
    for symmetric in (True, False):
        here = co.Packed.from_dense(w, group=32, symmetric=symmetric)
        there = co.Packed.from_dense(w.cuda(), group=32, symmetric=symmetric).to("cpu")
        assert torch.equal(here.values, there.values)
        assert torch.equal(here.scale, there.scale)


def test_kernels_refuse_what_is_not_packed() -> None:
    spec = KERNELS["coop-128x128"]
    weight = _weight(spec, 128, 256, exact=True)
    x = torch.zeros(4, 256, device="cuda").bfloat16()
    with pytest.raises((TypeError, ValueError)):
        co.build(spec)(x, weight.values.contiguous(), weight.scale)
    with pytest.raises((TypeError, ValueError)):
        co.build(spec)(x, weight.values, weight.scale.float())


def test_every_type_of_numbers_has_kernels() -> None:
    assert {spec.b.dtype for spec in KERNELS.values()} == set(dtypes.PACKED)
