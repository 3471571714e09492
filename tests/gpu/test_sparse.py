"""2:4 sparse weights on a GPU: each kernel to the last bit and against float64, calls of any rows, and pruning itself.

python -m pytest -m gpu tests/gpu/test_sparse.py
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import cutlass_ops as co
from cutlass_ops.base import dtypes
from cutlass_ops.declare.compressing import CompressSpec
from cutlass_ops.declare.spec import KernelSpec
from cutlass_ops.epilogue import Epilogue
from cutlass_ops.kinds.legality import is_legal
from cutlass_ops.operand import sparsity
from cutlass_ops.run import sparse as of_sparse
from cutlass_ops.run.registry import Registry

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("hopper")]


DTYPES = (torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2, torch.int8)


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


@co.epilogue
def scaled(acc, scale_x: co.Col, scale_w: co.Row):
    return acc * scale_x * scale_w


def _sm90(m: int, n: int, k: int, schedule: Any, cluster: tuple[int, int] = (1, 1), **others: Any) -> Any:
    shape = co.ThreadblockShape(m, n, k)
    return co.Sm90Config(shape, co.ClusterShape(*cluster), schedule=schedule, swap_ab=True, **others)


def _spec(config: Any, a: str = "bf16", epilogue: Any = None, d: str = "f32", b: str | None = None) -> KernelSpec:
    graph = of_sparse._SPARSE.graph
    graph = graph if epilogue is None else graph.then(epilogue.graph)
    return KernelSpec(
        a=f"{a}.row",
        b=f"{b or a}s.col.blocks64x64",
        d=f"{d}.row",
        epilogue=Epilogue("sparse", "A sparse weight's product.", graph),
        config=config,
        target="sm_90a",
    )


@co.epilogue
def activated(acc, bias: co.Row):
    return co.e.silu(acc + bias)


KERNELS = {
    "coop-128x128": _spec(_sm90(128, 128, 128, "cooperative")),
    "coop-128x256x64": _spec(_sm90(128, 256, 64, "cooperative", (2, 1))),
    "coop-256x192x64": _spec(_sm90(256, 192, 64, "cooperative", (2, 1))),
    "coop-256x184x64": _spec(_sm90(256, 184, 64, "cooperative", (2, 1))),
    "coop-256x128-beside": _spec(_sm90(256, 128, 64, "cooperative", (1, 2))),
    "coop-192x64-side": _spec(_sm90(192, 64, 128, "cooperative")),
    "pp-64x256": _spec(_sm90(64, 256, 128, "pingpong")),
    "pp-128x192x64": _spec(_sm90(128, 192, 64, "pingpong", (2, 1))),
    "pp-192x128x64": _spec(_sm90(192, 128, 64, "pingpong", (1, 4))),
    "pp-64x64x256": _spec(_sm90(64, 64, 256, "pingpong", (2, 2))),
    "ws-64x8-two": _spec(_sm90(64, 8, 256, "warp_specialized", resident=2)),
    "ws-128x16": _spec(_sm90(128, 16, 256, "warp_specialized")),
    "split-128x32": _spec(_sm90(128, 32, 256, "cooperative", split_k=2)),
    "split-64x32": _spec(_sm90(64, 32, 128, "warp_specialized", split_k=4)),
    "stream-128x128": _spec(_sm90(128, 128, 128, "cooperative", scheduler="stream_k")),
    "coop-fp16": _spec(_sm90(128, 128, 128, "cooperative"), "f16"),
    "pp-fp16": _spec(_sm90(128, 128, 64, "pingpong", (2, 1)), "f16"),
    "e4m3-coop": _spec(_sm90(128, 256, 128, "cooperative", (2, 1)), "e4m3"),
    "e4m3-pp": _spec(_sm90(128, 160, 256, "pingpong"), "e4m3"),
    "e4m3-256x184": _spec(_sm90(256, 184, 128, "cooperative", (2, 1)), "e4m3"),
    "e4m3-ws": _spec(_sm90(64, 16, 256, "warp_specialized", resident=2), "e4m3"),
    "e4m3-split": _spec(_sm90(128, 16, 256, "warp_specialized", split_k=2), "e4m3"),
    "e5m2-coop": _spec(_sm90(128, 128, 128, "cooperative"), "e5m2"),
    "e4m3-e5m2": _spec(_sm90(64, 128, 128, "pingpong"), "e4m3", b="e5m2"),
    "i8-coop": _spec(_sm90(128, 128, 128, "cooperative"), "i8", d="i32"),
    "i8-pp": _spec(_sm90(128, 160, 256, "pingpong", (2, 1)), "i8", d="i32"),
    "i8-ws": _spec(_sm90(64, 16, 256, "warp_specialized", resident=2), "i8", d="i32"),
}
FINISHED = {
    "coop": _spec(_sm90(128, 128, 128, "cooperative"), epilogue=finished, d="bf16"),
    "pp": _spec(_sm90(64, 64, 128, "pingpong"), epilogue=finished, d="bf16"),
    "split": _spec(_sm90(128, 32, 256, "cooperative", split_k=2), epilogue=finished, d="bf16"),
    "few": _spec(_sm90(64, 8, 256, "warp_specialized", resident=2), epilogue=finished, d="bf16"),
}
UPDATES = [CompressSpec(each, prune, "sm_90") for each in dtypes.STORED_OF.values() for prune in (False, True)]
# Rows, columns and K, with ends of tiles in every direction, of a stage and of blocks of metadata.
SHAPES = [(1, 64, 128), (7, 144, 416), (130, 528, 1024), (257, 1040, 512), (33, 272, 448), (64, 72, 32)]


@pytest.fixture(scope="module", autouse=True)
def _built() -> None:
    if not torch.cuda.is_available():
        return
    Registry.current().kernels([*KERNELS.values(), *FINISHED.values()])  # in parallel
    if torch.zeros(1, device="cuda").is_cuda:  # a made-up GPU has no such kernels
        Registry.current().kernels(UPDATES)


def _whole(*shape: int, dtype: torch.dtype, most: int = 3) -> Tensor:
    return torch.randint(-most, most + 1, shape, device="cuda").to(dtype)


def _types(spec: KernelSpec) -> tuple[torch.dtype, torch.dtype]:
    return getattr(torch, spec.a.dtype.torch_name), getattr(torch, spec.b.dtype.torch_name)


def _weight(n: int, k: int, dtype: torch.dtype) -> co.Sparse:
    """Draw a weight whose groups keep any two elements: also one, or none."""
    w = _whole(k, n, dtype=dtype)
    places = torch.rand(n, k // 4, 4, device="cuda").argsort(-1)[..., :2]
    mask = torch.zeros(n, k // 4, 4, dtype=torch.bool, device="cuda").scatter_(2, places, True).flatten(1).t()
    return co.sparsify(w, mask)


def _normal(n: int, k: int, dtype: torch.dtype = torch.bfloat16) -> co.Sparse:
    return co.sparsify((torch.randn(k, n, device="cuda") * k**-0.5).to(dtype))


def _poisoned(m: int, n: int, dtype: torch.dtype) -> Tensor:
    filler = float("nan") if dtype.is_floating_point else torch.iinfo(dtype).min
    return torch.full((m, n), filler, dtype=dtype, device="cuda")


def test_declarations_are_legal() -> None:
    assert [name for name, spec in (KERNELS | FINISHED).items() if not is_legal(spec)] == []


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", KERNELS)
def test_sums_that_are_exact_have_every_bit(name: str, shape: tuple[int, int, int]) -> None:
    """Small whole numbers: any wrong element, place or metadata changes a result. Of INT8, all numbers."""
    spec, (m, n, k) = KERNELS[name], shape
    dtype, of_weight = _types(spec)
    weight = _weight(n, k, of_weight)
    x = _whole(m, k, dtype=dtype)
    if dtype is torch.int8:
        weight, x = co.sparsify(_whole(k, n, dtype=dtype, most=127)), _whole(m, k, dtype=dtype, most=127)
    d = _poisoned(m, n, getattr(torch, spec.d.dtype.torch_name))
    co.build(spec)(x, weight.values, weight.meta, out=d)
    wanted = x.double() @ weight.to_dense().double()
    assert torch.equal(d.double(), wanted), (d.double() - wanted).abs().max()


@pytest.mark.parametrize("name", KERNELS)
def test_one_element_at_a_time(name: str) -> None:
    """A is one-hot: each row of D is a row of the weight."""
    spec, n, k = KERNELS[name], 136, 160
    dtype, of_weight = _types(spec)
    weight = _weight(n, k, of_weight)
    x = torch.eye(k, device="cuda").to(dtype)
    d = _poisoned(k, n, getattr(torch, spec.d.dtype.torch_name))
    co.build(spec)(x, weight.values, weight.meta, out=d)
    assert torch.equal(d.double(), weight.to_dense().double())


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", [name for name, spec in KERNELS.items() if spec.a.dtype.bits == 16])
def test_errors_are_those_of_sums_in_fp32(name: str, shape: tuple[int, int, int]) -> None:
    spec, (m, n, k) = KERNELS[name], shape
    weight = _normal(n, k, _types(spec)[1])
    x = torch.randn(m, k, device="cuda").to(_types(spec)[0])
    d = _poisoned(m, n, torch.float32)
    co.build(spec)(x, weight.values, weight.meta, out=d)
    wanted = x.double() @ weight.to_dense().double()
    magnitude = x.double().abs() @ weight.to_dense().double().abs()
    assert ((d.double() - wanted).abs() <= 2.0**-18 * magnitude + 1e-12).all()


@pytest.mark.parametrize("m", [1, 3, 8, 9, 16, 33, 129])
@pytest.mark.parametrize("name", FINISHED)
def test_any_epilogue_follows(name: str, m: int) -> None:
    spec, n, k = FINISHED[name], 528, 512
    weight = _normal(n, k)
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
    co.build(spec)(x, weight.values, weight.meta, *given.values(), out=d)
    z = x.double() @ weight.to_dense().double()
    row, column, tile, alpha = given.values()
    wanted = torch.nn.functional.silu((z + row.double()) * column.double()[:, None]) * alpha + tile.double()
    torch.testing.assert_close(d.double(), wanted, rtol=2e-2, atol=2e-2 * z.std().item())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int8], ids=str)
@pytest.mark.parametrize("m", [1, 5, 16, 17, 64, 100, 300])
def test_calls_choose_a_kernel(dtype: torch.dtype, m: int) -> None:
    weight, x = _weight(272, 512, dtype), _whole(m, 512, dtype=dtype)
    bias = torch.randint(-3, 4, (272,), device="cuda").bfloat16()
    found = co.gemm(x, weight, epilogue=turned, bias=bias, out_dtype=torch.float32)
    acc = x.double() @ weight.to_dense().double()
    assert torch.equal(found.double(), acc.unflatten(1, (-1, 2)).flip(2).flatten(1) + bias.double())


@pytest.mark.parametrize("m", [4, 100])
def test_reductions(m: int) -> None:
    weight = _normal(272, 512)
    x, bias = torch.randn(m, 512, device="cuda").bfloat16(), torch.randn(272, device="cuda").bfloat16()
    d, row_sum, row_max = co.gemm(x, weight, epilogue=with_sums, bias=bias)
    z = x.double() @ weight.to_dense().double() + bias.double()
    scale = z.std().item()
    torch.testing.assert_close(d.double(), z.relu(), rtol=2e-2, atol=2e-2 * scale)
    torch.testing.assert_close(row_sum.double(), z.sum(1), rtol=2e-2, atol=0.5 * scale)
    torch.testing.assert_close(row_max.double(), z.amax(1), rtol=2e-2, atol=2e-2 * scale)


def test_scales_of_fp8() -> None:
    x, w = torch.randn(100, 512, device="cuda"), torch.randn(512, 272, device="cuda")
    of_x, of_w = x.abs().amax(1) / 448, w.abs().amax(0) / 448
    weight = co.sparsify((w / of_w).to(torch.float8_e4m3fn))
    a = (x / of_x[:, None]).to(torch.float8_e4m3fn)
    found = co.gemm(a, weight, epilogue=scaled, scale_x=of_x, scale_w=of_w)
    wanted = a.double() @ weight.to_dense().double() * of_x.double()[:, None] * of_w.double()
    torch.testing.assert_close(found.double(), wanted, rtol=2e-2, atol=1e-2 * wanted.std().item())


@pytest.mark.parametrize("m", [1, 16, 100, 1000])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8], ids=str)
def test_scales_as_those_of_dense_operands(m: int, dtype: torch.dtype) -> None:
    x, weight = _whole(m, 512, dtype=dtype), _weight(272, 512, dtype)
    of_x, of_w = (2.0 ** torch.randint(-3, 3, (n,), device="cuda") for n in (m, 272))
    found = co.gemm(co.Scaled(x, of_x), co.Scaled(weight, of_w), out_dtype=torch.float32)
    assert torch.equal(found.double(), x.double() @ weight.to_dense().double() * of_x.double()[:, None] * of_w.double())


@pytest.mark.parametrize("m", [5, 300])
def test_gradients_with_a_kernel(m: int) -> None:
    """Those of the dense weight, where the mask is: of x, of stored elements and of a bias."""
    weight = _normal(272, 512)
    for _ in range(3):
        x = torch.randn(m, 512, device="cuda").bfloat16().requires_grad_()
        bias = torch.randn(272, device="cuda").bfloat16().requires_grad_()
        values = weight.values.detach().requires_grad_()
        d = co.gemm(x, co.Sparse(values, weight.meta), epilogue=activated, bias=bias)
        of_d = torch.randn_like(d)
        d.backward(of_d)
        exact = [each.detach().double().requires_grad_() for each in (x, bias, weight.to_dense())]
        torch.nn.functional.silu(exact[0] @ exact[2] + exact[1]).backward(of_d.double())
        assert values.grad is not None
        of_w = co.Sparse(values.grad.t().contiguous().t(), weight.meta).to_dense()
        mask = co.Sparse(torch.ones_like(weight.values), weight.meta).to_dense()
        for ours, theirs in ((x.grad, exact[0].grad), (bias.grad, exact[1].grad), (of_w, exact[2].grad * mask)):
            assert ours is not None
            assert (ours.double() - theirs).norm() <= 0.01 * theirs.norm()


@pytest.mark.parametrize("prune", [False, True])
@pytest.mark.parametrize("dtype", list(DTYPES), ids=str)
def test_updates_have_the_bits_of_the_cpu(dtype: torch.dtype, prune: bool) -> None:
    for n, k in ((130, 224), (64, 128), (1, 32), (1040, 4096)):
        before, after = ((torch.randn(n, k) * 9).to(dtype) for _ in range(2))
        after[:, ::5] = 0
        wanted, found = co.sparsify(before.t()), co.sparsify(before.cuda().t())
        wanted.update_(after.t(), prune=prune)
        found.update_(after.cuda().t(), prune=prune)
        for ours, theirs in ((found.values.t(), wanted.values.t()), (found.meta, wanted.meta)):
            assert torch.equal(ours.cpu().view(torch.uint8), theirs.contiguous().view(torch.uint8))


def test_an_update_is_captured() -> None:
    """An optimiser's step, the update and a product with the weight, in one graph."""
    w = _whole(1024, 1024, dtype=torch.bfloat16)
    weight, x = co.sparsify(w.t()), _whole(4, 1024, dtype=torch.bfloat16)
    out = _poisoned(4, 1024, torch.float32)
    co.gemm(x, weight, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        w.add_(1)
        weight.update_(w.t(), prune=True)
        co.gemm(x, weight, out=out)
    for _ in range(3):
        graph.replay()
        assert torch.equal(out.double(), x.double() @ co.sparsify(w.t()).to_dense().double())


def test_infinities_beside_what_is_pruned_do_not_reach_sums() -> None:
    w = torch.ones(128, 64, device="cuda").bfloat16()
    mask = (torch.arange(128, device="cuda") % 4 < 2)[:, None].expand(128, 64)
    x = torch.ones(16, 128, device="cuda").bfloat16()
    x[:, 2::4], x[:, 3::4] = float("inf"), float("nan")
    weight, d = co.sparsify(w, mask), _poisoned(16, 64, torch.float32)
    co.build(KERNELS["coop-128x128"])(x, weight.values, weight.meta, out=d)
    assert torch.equal(d, torch.full((16, 64), 64.0, device="cuda"))


def test_a_graph_replays_with_other_values() -> None:
    weight = _weight(1024, 1024, torch.bfloat16)
    x = _whole(4, 1024, dtype=torch.bfloat16)
    out = _poisoned(4, 1024, torch.float32)
    co.gemm(x, weight, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        co.gemm(x, weight, out=out)
    x.copy_(_whole(4, 1024, dtype=torch.bfloat16))
    out.fill_(float("nan"))
    graph.replay()
    assert torch.equal(out.double(), x.double() @ weight.to_dense().double())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.int8], ids=str)
def test_pruning_is_the_same_on_both_devices(dtype: torch.dtype) -> None:
    w = (torch.randn(512, 72) * 9).to(dtype)
    here, there = co.sparsify(w), co.sparsify(w.cuda()).to("cpu")
    assert torch.equal(here.values.t().view(torch.uint8), there.values.t().view(torch.uint8))
    assert torch.equal(here.meta, there.meta)


@pytest.mark.filterwarnings("ignore:The PyTorch API of SparseSemiStructuredTensor")
def test_pytorchs_tensors() -> None:
    w = co.sparsify(torch.randn(256, 128, device="cuda").half()).to_dense().t().contiguous()
    found = co.Sparse.from_semi_structured(torch.sparse.to_sparse_semi_structured(w))
    assert torch.equal(found.to_dense(), w.t())


def test_kernels_refuse_what_is_not_sparse() -> None:
    spec = KERNELS["coop-128x128"]
    weight = _weight(128, 256, torch.bfloat16)
    x = torch.zeros(4, 256, device="cuda").bfloat16()
    with pytest.raises((TypeError, ValueError)):
        co.build(spec)(x, weight.values.contiguous(), weight.meta)
    with pytest.raises((TypeError, ValueError)):
        co.build(spec)(x, weight.values, weight.meta[:, :1024].contiguous())


def test_every_type_has_kernels() -> None:
    assert {spec.b.dtype for spec in KERNELS.values()} == set(dtypes.SPARSE)
    assert sparsity.VERSION == 1
