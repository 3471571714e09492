"""2:4 sparse weights: pruning, their form in memory, calls on the CPU, and what is refused.

What is wanted is computed here, element by element, from what the form's first lines say.
"""

from __future__ import annotations

import io
import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.sparse import SparseSemiStructuredTensorCUTLASS
from torch.sparse._semi_structured_conversions import sparse_semi_structured_from_dense_cutlass

import cutlass_ops as co
from cutlass_ops.base import dtypes
from cutlass_ops.base.errors import ConfigError, UnsupportedError
from cutlass_ops.choose import dispatch, policies
from cutlass_ops.declare.compressing import CompressSpec
from cutlass_ops.declare.problem import Problem
from cutlass_ops.declare.quantizing import declaration_from_json
from cutlass_ops.kinds.legality import is_legal
from cutlass_ops.kinds.render import render
from cutlass_ops.kinds.sm90 import sparse as sm90_sparse
from cutlass_ops.kinds.sm90.timer import Sm90Timer
from cutlass_ops.kinds.traits import Traits
from cutlass_ops.operand import reference, sparsity
from cutlass_ops.operand.call import call_at, signature_of
from cutlass_ops.run import sparse as of_sparse
from cutlass_ops.tuner import trial
from tests.scripts import BENCHMARKS
from tests.unit.signatures import A100, H200

DTYPES = [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2, torch.int8]


@co.epilogue
def bias_silu(acc: co.types.Value, bias: co.Row) -> co.types.Value:
    """silu(acc + bias)."""
    return co.e.silu(acc + bias)


def _weight(n: int, k: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    """Draw a weight (K, N) of whole numbers, some of them 0."""
    return torch.randint(-9, 10, (k, n), generator=torch.Generator().manual_seed(seed)).to(dtype)


def _pruned(w: Tensor) -> Tensor:
    """Prune a weight (K, N) by magnitude, in float64, group by group."""
    found = w.double().clone()
    for column in found.unbind(1):
        for group in column.view(-1, 4):
            least = sorted(range(4), key=lambda i: (abs(group[i].item()), -i))[:2]
            group[least] = 0
    return found


# ---- Pruning and the form --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_two_of_largest_magnitude_are_kept(dtype: torch.dtype) -> None:
    w = _weight(9, 64, dtype)
    found = co.sparsify(w).to_dense()
    assert found.dtype == dtype
    assert torch.equal(found.double(), _pruned(w))


def test_nan_and_infinities_are_kept() -> None:
    w = torch.tensor([1.0, float("nan"), 3.0, -float("inf")] * 8)[:, None].repeat(1, 2).bfloat16()
    found = co.sparsify(w).to_dense()[:4, 0]
    assert found[1].isnan()
    assert found[3] == -float("inf")
    assert found[[0, 2]].tolist() == [0, 0]


def test_a_mask_decides() -> None:
    w, generator = _weight(16, 64), torch.Generator().manual_seed(1)
    places = torch.rand(16, 16, 4, generator=generator).argsort(-1)[..., :2]
    mask = torch.zeros(16, 16, 4, dtype=torch.bool).scatter_(2, places, True).flatten(1).t()
    assert torch.equal(co.sparsify(w, mask).to_dense(), w * mask)


@pytest.mark.parametrize("dtype", DTYPES[:4], ids=str)
def test_a_negative_zero_is_no_value(dtype: torch.dtype) -> None:
    w = torch.tensor([-0.0, 1.0, -0.0, 2.0] * 8)[:, None].repeat(1, 3).to(dtype)
    sparse = co.Sparse.from_dense(w)
    assert torch.equal(sparse.values.double()[:2, 0], torch.tensor([1.0, 2.0]).double())
    one = co.Sparse.from_dense(torch.tensor([-0.0, -0.0, -0.0, 2.0] * 8)[:, None].to(dtype))
    assert not one.to_dense().float().signbit().any()
    assert one.to_dense()[:4, 0].tolist() == [0, 0, 0, 2]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8], ids=str)
def test_metadata_are_where_threads_read_them(dtype: torch.dtype) -> None:
    n, k = 130, 224
    sparse = co.sparsify(_weight(n, k, dtype))
    dense, values = sparse.to_dense().double().t(), sparse.values.double().t()
    words = sparse.meta.view(3, 4, 128, 4)
    for row, group in [(0, 0), (7, 3), (8, 5), (63, 15), (64, 16), (129, 55), (77, 40), (100, 31)]:
        r, w, k_in = row % 8, row % 64 // 16, group * 4 % 64
        if dtype is torch.bfloat16:
            thread, bit = 32 * w + 4 * r + k_in // 16, 16 * (row // 8 % 2) + k_in % 16
        else:
            thread, bit = 32 * w + 4 * r + row // 8 % 2 + 2 * (k_in // 32), k_in % 32
        word = int.from_bytes(bytes(words[row // 64, group * 4 // 64, thread].tolist()), "little")
        first, second = word >> bit & 3, word >> bit + 2 & 3
        assert first < second
        found = torch.zeros(4).double()
        found[[first, second]] = values[row, 2 * group : 2 * group + 2]
        assert torch.equal(found, dense[row, 4 * group : 4 * group + 4])


@pytest.mark.parametrize("itemsize", [1, 2])
@pytest.mark.parametrize(("n", "k"), [(64, 128), (1, 32), (130, 224)])
def test_the_order_is_undone(n: int, k: int, itemsize: int) -> None:
    bits = torch.randint(0, 16, (n, k // 4), dtype=torch.uint8)
    found = sparsity.packed(bits, itemsize)
    assert tuple(found.shape) == sparsity.meta_shape(n, k)
    assert torch.equal(sparsity.unpacked(found, n, k, itemsize), bits)


def test_what_is_filled_up_has_two_places() -> None:
    sparse = co.sparsify(_weight(1, 32))
    bits = sparsity.unpacked(sparse.meta, 64, 128, 2)
    assert ((bits & 3) < (bits >> 2)).all()


@pytest.mark.filterwarnings("ignore:The PyTorch API of SparseSemiStructuredTensor")
def test_pytorchs_tensor() -> None:
    w = co.sparsify(_weight(64, 128)).to_dense().t().contiguous()
    values, meta = sparse_semi_structured_from_dense_cutlass(w)  # type: ignore[no-untyped-call]
    theirs = SparseSemiStructuredTensorCUTLASS(w.shape, values, meta, None, None, None)
    assert torch.equal(co.Sparse.from_semi_structured(theirs).to_dense(), w.t())


def test_rows_of_a_block_are_a_weight_of_their_own() -> None:
    sparse = co.sparsify(_weight(192, 64))
    part = co.Sparse(sparse.values[:, 64:128], sparse.meta[1:2])
    assert torch.equal(part.to_dense(), sparse.to_dense()[:, 64:128])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("prune", [False, True])
def test_a_weight_is_updated_in_place(dtype: torch.dtype, prune: bool) -> None:
    before, after = (_weight(130, 224, dtype, seed).t().contiguous().t() for seed in (0, 1))
    sparse = co.sparsify(before)
    at = sparse.values.data_ptr(), sparse.meta.data_ptr(), sparse.values._version
    places = co.Sparse(torch.ones_like(sparse.values), sparse.meta).to_dense().double()
    assert sparse.update_(after, prune=prune) is sparse
    assert (sparse.values.data_ptr(), sparse.meta.data_ptr()) == at[:2]
    assert sparse.values._version > at[2]  # autograd refuses a backward that saved the former ones
    assert torch.equal(sparse.to_dense().double(), _pruned(after) if prune else after.double() * places)
    assert not sparse.to_dense().float().signbit().logical_and(sparse.to_dense().float() == 0).any()


# ---- Calls on the CPU ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_call_multiplies_the_pruned_weight(dtype: torch.dtype) -> None:
    w = _weight(48, 160, dtype)
    sparse, x, bias = co.sparsify(w), _weight(160, 5, dtype, 1), torch.randn(48).bfloat16()
    wanted = x.double() @ _pruned(w)
    d = co.gemm(x, sparse, out_dtype=torch.float32)
    assert torch.equal(d.double(), wanted)
    found = co.gemm(x, sparse, epilogue=bias_silu, bias=bias, out_dtype=torch.float32)
    torch.testing.assert_close(found.double(), torch.nn.functional.silu(wanted + bias.double()), rtol=1e-5, atol=1e-4)


def test_integers_have_every_bit() -> None:
    w = torch.randint(-128, 128, (512, 32), dtype=torch.int8)
    x = torch.randint(-128, 128, (7, 512), dtype=torch.int8)
    found = co.gemm(x, co.sparsify(w), out_dtype=torch.int32)
    assert torch.equal(found, (x.double() @ _pruned(w)).int())


def test_scales_are_inputs_of_an_epilogue() -> None:
    @co.epilogue
    def scaled(acc: co.types.Value, scale_x: co.Col, scale_w: co.Row) -> co.types.Value:
        return acc * scale_x * scale_w

    x, w = _weight(64, 4, torch.float8_e4m3fn), _weight(32, 64, torch.float8_e4m3fn)
    of_x, of_w = torch.rand(4), torch.rand(32)
    found = co.gemm(x, co.sparsify(w), epilogue=scaled, scale_x=of_x, scale_w=of_w, out_dtype=torch.float32)
    wanted = x.double() @ _pruned(w) * of_x[:, None] * of_w
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("scale_b", ["columns", "line", "number", "tensor", "one"])
@pytest.mark.parametrize("scale_a", ["rows", "number", "one"])
def test_scales_as_those_of_dense_operands(scale_a: str, scale_b: str) -> None:
    x, w = _weight(128, 4, torch.float8_e5m2), _weight(32, 128, torch.float8_e4m3fn)
    of_a = {"rows": torch.rand(4), "number": 0.5, "one": torch.tensor([0.5])}[scale_a]
    columns = torch.rand(32)
    of_b: Any = {
        "columns": columns,
        "line": columns[None],
        "number": 2.0,
        "tensor": torch.tensor(2.0),
        "one": torch.tensor([2.0]),
    }[scale_b]
    weight, bias = co.Scaled(co.sparsify(w), of_b), torch.randn(32).bfloat16()
    found = co.gemm(co.Scaled(x, of_a), weight, epilogue=bias_silu, bias=bias, out_dtype=torch.float32)
    scales = torch.as_tensor(of_a).reshape(-1, 1).double() * torch.as_tensor(of_b).double()
    wanted = torch.nn.functional.silu(x.double() @ _pruned(w) * scales + bias.double())
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-4)
    dense = co.gemm(co.Scaled(x, of_a), co.Scaled(_pruned(w).to(w.dtype).t().contiguous().t(), of_b))
    assert torch.equal(co.gemm(co.Scaled(x, of_a), weight), dense)


def test_a_scaled_weight_is_exported() -> None:
    x = co.Scaled(_weight(128, 4, torch.int8), torch.rand(4))
    weight = co.Scaled(co.sparsify(_weight(32, 128, torch.int8)), torch.rand(32))

    class Layer(torch.nn.Module):
        def forward(self, x: co.Scaled, weight: co.Scaled) -> Tensor:
            return co.gemm(x, weight)

    program = torch.export.export(Layer(), (x, weight))
    assert torch.equal(program.module()(x, weight), co.gemm(x, weight))


def test_compiled_and_exported() -> None:
    sparse, x = co.sparsify(_weight(48, 64)), torch.randn(4, 64).bfloat16()

    class Layer(torch.nn.Module):
        def forward(self, x: Tensor, weight: co.Sparse) -> Tensor:
            return co.gemm(x, weight)

    wanted = co.gemm(x, sparse)
    assert torch.equal(torch.compile(Layer(), backend="eager", fullgraph=True)(x, sparse), wanted)
    program = torch.export.export(Layer(), (x, sparse))
    assert torch.equal(program.module()(x, sparse), wanted)


def test_saved_and_loaded() -> None:
    sparse = co.sparsify(_weight(48, 64))
    file = io.BytesIO()
    torch.save(sparse.tensors("layer."), file)
    file.seek(0)
    loaded = co.Sparse.from_tensors(torch.load(file, weights_only=True), "layer.")
    assert torch.equal(loaded.to_dense(), sparse.to_dense())


@co.epilogue
def trained(acc: co.types.Value, bias: co.Row, alpha: co.Scalar, residual: co.Tile) -> co.types.Value:
    """gelu(alpha acc + bias) + residual."""
    return co.e.gelu(acc * alpha + bias) + residual


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_gradients_are_those_of_the_pruned_weight(dtype: torch.dtype) -> None:
    """Those of stored elements are the weight's where the mask is. Later steps run what the first ones recorded."""
    generator = torch.Generator().manual_seed(3)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    sparse = co.sparsify(normal(64, 48))
    weight = sparse.to_dense()
    mask = weight != 0
    for step in range(4):
        x, bias, residual = (each.requires_grad_() for each in (normal(2, 5, 64), normal(48), normal(2, 5, 48)))
        values = sparse.values.detach().requires_grad_(step != 2)
        given = {"bias": bias, "residual": residual, "alpha": 0.5}
        d = co.gemm(x, co.Sparse(values, sparse.meta), epilogue=trained, **given)
        exact = [each.detach().double().requires_grad_() for each in (x, bias, residual, weight)]
        wanted = torch.nn.functional.gelu(exact[0] @ exact[3] * 0.5 + exact[1]) + exact[2]
        of_d = normal(2, 5, 48)
        d.backward(of_d)
        wanted.backward(of_d.double())
        found = [x.grad, bias.grad, residual.grad]
        if step != 2:
            assert values.grad is not None
            # A group's two places name elements that the mask keeps, in this weight without zeros.
            found.append(co.Sparse(values.grad.t().contiguous().t(), sparse.meta).to_dense())
        for ours, theirs in zip(found, exact, strict=False):
            assert ours is not None
            assert theirs.grad is not None
            whole = theirs.grad * mask if theirs is exact[3] else theirs.grad
            assert (ours.double() - whole).norm() <= 0.01 * whole.norm()


def test_training_keeps_the_mask() -> None:
    """An element that is 0 now keeps its place: the next step may change it."""
    w = torch.zeros(32, 8).bfloat16()
    w[0] = 1.0
    mask = (torch.arange(32) % 4 % 3 == 0)[:, None].expand(32, 8)
    sparse = co.sparsify(w, mask)
    values = sparse.values.detach().requires_grad_()
    optimizer = torch.optim.SGD([values], lr=1.0)
    co.gemm(torch.ones(4, 32).bfloat16(), co.Sparse(values, sparse.meta)).sum().backward()
    optimizer.step()
    assert torch.equal(co.Sparse(values.detach(), sparse.meta).to_dense(), w - 4 * mask)


def test_gradients_of_8_bits_are_refused() -> None:
    sparse, x = co.sparsify(_weight(48, 64, torch.int8)), _weight(64, 4, torch.int8)
    with pytest.raises(ValueError, match="no gradient"):
        co.gemm(x, sparse, epilogue=bias_silu, bias=torch.ones(48, requires_grad=True))


@pytest.mark.parametrize("dtype", ["bf16", "e4m3", "i8"])
def test_the_tuner_draws_sparse_weights(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(L2_cache_size=1 << 20))
    graph = of_sparse._SPARSE.graph.then(bias_silu.graph)
    call = call_at(graph, Problem(64, 256, 512), dtype, "row", "col")
    found = trial.Trial(signature_of(call, H200), call.problem, torch.device("cpu"))
    x = found._sets[0]
    (wanted,) = found._exact(x)
    named = dict(zip((i.name for i in graph.inputs), x.inputs, strict=True))
    d = reference.gemm_reference(x.a, x.b, graph, named, d_dtype=torch.bfloat16)["d"]
    x.outputs[0].copy_(d)
    assert found._wrong([wanted]) is None
    x.outputs[0].mul_(1.1)
    assert found._wrong([wanted]) is not None


# ---- Kernels that serve ----------------------------------------------------------------------------------------------


def test_the_model_chooses_near_the_best_of_a_sweep() -> None:
    """Of an H200, by the model alone: dense kernels' times say nothing of these."""
    call = call_at(of_sparse._SPARSE.graph, Problem(64, 8192, 8192), "bf16", "row", "col")
    policy = policies.policy(signature_of(call, H200), H200)
    assert policy.tables == ()
    rows = json.loads((BENCHMARKS / "results" / "sweep_sparse_h200.json").read_text())["rows"]
    assert len(rows) == 2
    for row in rows:
        times: dict[str, float] = {}
        for slug, microseconds, _ in row["kernels"]:
            times[slug] = min(microseconds, times.get(slug, microseconds))
        chosen = policy.choose(Problem(row["m"], row["n"], row["k"]))
        assert times[chosen.config.slug] <= 1.03 * min(times.values())
        assert chosen.microseconds == pytest.approx(times[chosen.config.slug], rel=0.1)


@pytest.mark.parametrize("dtype", ["bf16", "f16", "e4m3", "e5m2", "i8"])
@pytest.mark.parametrize("m", [1, 16, 64, 300, 1024, 8192])
def test_a_kernel_is_chosen_for_any_rows(m: int, dtype: str) -> None:
    signature = signature_of(call_at(of_sparse._SPARSE.graph, Problem(m, 4096, 4096), dtype, "row", "col"), H200)
    found = policies.policy(signature, H200).choose(Problem(m, 4096, 4096)).config
    assert isinstance(found, co.Sm90Config)
    assert found.swap_ab
    assert is_legal(signature.spec(found, "sm_90a"))


def test_ampere_is_refused_with_what_to_do() -> None:
    problem = Problem(64, 256, 512)
    signature = signature_of(call_at(of_sparse._SPARSE.graph, problem, "bf16", "row", "col"), A100)
    _refused(r"sparse weight needs wgmma.*to_dense\(\)", UnsupportedError, dispatch.choose, signature, A100, problem)


@pytest.mark.parametrize("dtype", ["e4m3", "e5m2", "i8", "bf16", "f16"])
def test_instructions_of_chosen_kernels_overlap(dtype: str) -> None:
    """No kernel of any table takes more registers than ptxas can have two steps in flight with."""
    signature = signature_of(call_at(of_sparse._SPARSE.graph, Problem(1, 4096, 4096), dtype, "row", "col"), H200)
    kernels = [c for c in policies.policy(signature, H200).kernels if isinstance(c, co.Sm90Config)]
    assert len(kernels) > 50
    assert max(sum(sm90_sparse._registers(c)) for c in kernels) <= 198


def test_half_of_the_products_and_of_the_bytes_are_expected() -> None:
    """Of the same tile, at many rows and at one."""
    config = co.Sm90Config(co.ThreadblockShape(128, 256, 64), schedule="cooperative", swap_ab=True)
    sparse = Traits(2.0, 2.0, narrow=0.5625, sparse=True)
    many, one = (
        [float(Sm90Timer.of([config], traits).times([problem], H200)[0][0, 0]) for traits in (Traits(2.0, 2.0), sparse)]
        for problem in (Problem(8192, 8192, 8192), Problem(1, 8192, 8192))
    )
    assert 1.3 < many[0] / many[1] < 1.9
    assert 1.4 < one[0] / one[1] < 1.8


# ---- What is refused -------------------------------------------------------------------------------------------------


def _refused(match: str, error: type[Exception], function: Any, *args: Any, **kwargs: Any) -> None:
    with pytest.raises(error, match=match):
        function(*args, **kwargs)


def test_what_is_not_sparse_is_refused_with_its_place() -> None:
    w = torch.zeros(64, 16).bfloat16()
    w[[40, 41, 43], 5] = torch.tensor([1.0, -2.0, 0.5]).bfloat16()
    match = r"w is not 2:4 sparse: of column 5, elements 40 to 43 along K \(1, -2, 0, 0.5\) have 3 to keep"
    _refused(match, ValueError, co.Sparse.from_dense, w)
    _refused("mask is not 2:4 sparse: of column 5, elements 40 to 43", ValueError, co.sparsify, w, w != 0)


def test_bad_fields_are_named() -> None:
    good = co.sparsify(_weight(48, 128))
    values, meta = good.values, good.meta
    _refused("version is 2", ValueError, co.Sparse, values, meta, 2)
    _refused("values is torch.float32", TypeError, co.Sparse, values.float(), meta)
    _refused("meta is torch.int8", TypeError, co.Sparse, values, meta.to(torch.int8))
    _refused("meta has shape", ValueError, co.Sparse, values, meta[:, :512])
    _refused("values has strides", ValueError, co.Sparse, values.contiguous(), meta)
    _refused("values has shape", ValueError, co.Sparse, values[None], meta)
    _refused("multiple of 32", ValueError, co.Sparse, values[:56], meta)


def test_bad_calls_are_named() -> None:
    good, x = co.sparsify(_weight(48, 128)), torch.randn(4, 128)
    _refused("a is torch.float32", TypeError, co.gemm, x, good)
    _refused("sparse in torch.bfloat16", TypeError, co.gemm, x.half(), good)
    one = co.Scaled(x.bfloat16(), 1.0)
    _refused(r"has none: pass cutlass_ops\.Scaled\(b", TypeError, co.gemm, one, good)
    _refused("scale_a is missing", TypeError, co.gemm, x.bfloat16(), co.Scaled(good, 1.0))
    _refused(r"Packed, which has scales", TypeError, co.gemm, one, co.Scaled(co.Packed.from_dense(_weight(48, 128)), 1))
    blocks = co.Scaled.quantize(torch.randn(4, 256))
    eight = co.sparsify(_weight(48, 256, torch.float8_e4m3fn))
    _refused("block=None", ValueError, co.gemm, blocks, co.Scaled(eight, 1.0))
    _refused("block=None", ValueError, co.gemm, co.Scaled(blocks.values, 1.0), co.Scaled(eight, torch.rand(2, 48)))
    _refused("K", ValueError, co.gemm, x.bfloat16()[:, :64], good)
    _refused("math", TypeError, co.gemm, x.bfloat16(), good, math="tf32")
    ends = torch.tensor([2, 4], dtype=torch.int32)
    _refused("sparse|groups", (TypeError, ValueError), co.gemm, x.bfloat16(), good, groups=co.Groups(ends))  # type: ignore[arg-type]


def test_declarations_of_updates() -> None:
    spec = CompressSpec(dtypes.e4m3, True, "sm_90")
    assert declaration_from_json(json.loads(spec.canonical())) == spec
    assert "Compress<cutlass::float_e4m3_t, true>" in render(spec)
    _refused("f32 is not stored 2:4 sparse", ConfigError, CompressSpec, dtypes.f32, True, "sm_90")
    _refused("target is 'sm_1'", ConfigError, CompressSpec, dtypes.i8, True, "sm_1")
    bad: list[Any] = [{"w": "bf16"}, {"w": "e9", "prune": True}, {"w": "bf16", "prune": 1}, None]
    for of in bad:
        _refused("compression", ConfigError, declaration_from_json, {"compress": of, "target": "sm_90"})


def test_a_weight_made_in_inference_mode_is_updated() -> None:
    w = _weight(64, 64).t().contiguous().t()
    with torch.inference_mode():
        sparse = co.sparsify(-w)
    assert torch.equal(sparse.update_(w, prune=True).to_dense().double(), _pruned(w))


def test_bad_updates_are_named() -> None:
    good, w = co.sparsify(_weight(48, 128)), _weight(48, 128)
    _refused("w is torch.float16", TypeError, good.update_, w.half())
    _refused("w has shape", ValueError, good.update_, w[:64])
    _refused("contiguous along K", ValueError, good.update_, w)
    _refused("multiples of 16 bytes", ValueError, good.update_, torch.zeros(48, 129).bfloat16()[:, :128].t())


def test_bad_weights_are_named() -> None:
    w = _weight(32, 128)
    _refused("w is torch.float32", TypeError, co.sparsify, w.float())
    _refused("w must be a tensor", TypeError, co.sparsify, [1.0])
    _refused("w has shape", ValueError, co.sparsify, w[None])
    _refused("multiple of 32", ValueError, co.sparsify, w[:60])
    _refused("mask is torch.int64", TypeError, co.sparsify, w, torch.ones(128, 32, dtype=torch.int64))
    _refused("mask has shape", ValueError, co.sparsify, w, torch.ones(64, 32, dtype=torch.bool))
    _refused("SparseSemiStructuredTensor, not Tensor", TypeError, co.Sparse.from_semi_structured, w)
    _refused("has no", ValueError, co.Sparse.from_tensors, {})
    newer = {**co.sparsify(w).tensors(), "form": torch.tensor([2])}
    _refused("version is 2", ValueError, co.Sparse.from_tensors, newer)


# ---- The layer -------------------------------------------------------------------------------------------------------


def test_a_layer_adds_its_bias_and_a_residual() -> None:
    sparse, bias = co.sparsify(_weight(48, 64)), torch.randn(48).bfloat16()
    layer = co.nn.SparseLinear(sparse, bias, activation="silu")
    x, residual = torch.randn(2, 4, 64).bfloat16(), torch.randn(2, 4, 48).bfloat16()
    wanted = torch.nn.functional.silu(x.double() @ sparse.to_dense().double() + bias.double()) + residual.double()
    torch.testing.assert_close(layer(x, residual=residual).double(), wanted, rtol=2e-2, atol=2e-1)
    assert "in_features=64, out_features=48, bias=True, torch.bfloat16" in repr(layer)


def test_a_layer_in_8_bits_returns_bf16() -> None:
    layer = co.nn.SparseLinear(co.sparsify(_weight(48, 64, torch.int8)))
    assert layer(_weight(64, 4, torch.int8)).dtype == torch.bfloat16


def test_a_layer_is_saved_and_loaded() -> None:
    first, second = (co.nn.SparseLinear(co.sparsify(_weight(48, 64, seed=seed))) for seed in (0, 1))
    second.load_state_dict(first.state_dict())
    x = torch.randn(4, 64).bfloat16()
    assert torch.equal(first(x), second(x))
    other = {**first.state_dict(), "form": torch.tensor([2])}
    with pytest.raises(RuntimeError, match="form is"):
        second.load_state_dict(other)


def test_a_layer_is_trained() -> None:
    """The places stay, and the loss falls. Without `trained`, only x has a gradient."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(64, 48, generator=generator).bfloat16()
    frozen, layer = (
        co.nn.SparseLinear(co.sparsify(weight), torch.zeros(48).bfloat16(), activation="gelu", trained=trained)
        for trained in (False, True)
    )
    assert list(frozen.parameters()) == []
    assert [name for name, _ in layer.named_parameters()] == ["values", "bias"]
    x, wanted = (torch.randn(32, n, generator=generator).bfloat16() for n in (64, 48))
    meta, losses = layer.meta.clone(), []
    optimizer = torch.optim.Adam(layer.parameters(), lr=1e-2)
    for _ in range(20):
        loss = (layer(x) - wanted).float().square().mean()
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses[-1] < 0.7 * losses[0]
    assert torch.equal(layer.meta, meta)
    frozen.load_state_dict(layer.state_dict())
    assert torch.equal(frozen(x), layer(x))
    x.requires_grad_()
    frozen(x).sum().backward()
    assert x.grad is not None
    with pytest.raises(TypeError, match="no gradients"):
        co.nn.SparseLinear(co.sparsify(_weight(48, 64, torch.int8)), trained=True)


def test_a_layer_is_not_converted() -> None:
    layer = co.nn.SparseLinear(co.sparsify(_weight(48, 64)))
    assert layer.to("cpu") is layer
    with pytest.raises(TypeError, match=r"sparse in torch\.bfloat16"):
        layer.half()


def test_a_layer_has_an_epilogue() -> None:
    @co.epilogue
    def times(acc: co.types.Value, by: co.Scalar) -> co.types.Value:
        return acc * by

    layer = co.nn.SparseLinear(co.sparsify(_weight(48, 64)), epilogue=times)
    x = torch.randn(4, 64).bfloat16()
    torch.testing.assert_close(layer(x, by=2.0), 2 * layer(x, by=1.0))
    with pytest.raises(TypeError, match="by is missing"):
        layer(x)
