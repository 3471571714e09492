"""Calls in programs whose extents depend on data, such as the rows that a mask selects."""

import pytest
import torch

import cutlass_ops as co

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
T, M, N, K, EXPERTS = 8, 4, 32, 16, 3

X, W, BIAS, GAMMA = (torch.randn(s).to(BF16) for s in ((T, K), (K, N), (N,), (K,)))
ADDED, COL = torch.randn(T, N).to(BF16), torch.rand(T)
XS, WS, ADDEDS = (torch.randn(T, *s).to(BF16) for s in ((M, K), (K, N), (M, N)))
EXPERT_W, XE = torch.randn(EXPERTS, K, N).to(BF16), torch.randn(EXPERTS, T, K).to(BF16)
ONES, OFFSETS = torch.ones(EXPERTS, dtype=torch.int32), torch.tensor([1, 2, T], dtype=torch.int32)
X8, W8 = torch.randn(T, 256).to(E4M3), torch.randn(N, 256).to(E4M3).t()
BLOCKS = torch.rand(T, 2), torch.rand(1, 2)


@co.epilogue
def scaled(acc, scale: co.Col, bias: co.Row, residual: co.Tile):
    d = acc * scale + bias + residual
    return {"d": d, "squares": co.sum(d * d, dim=1), "largest": co.amax(d, dim=0)}


@co.epilogue
def weighted(acc, weight: co.Col, residual: co.Tile):
    return acc * weight + residual


def written(i, j):
    d = torch.zeros(j.shape[0], N, dtype=BF16)
    co.gemm_bias(X[i], W, BIAS, out=d)
    return d


# Each takes the rows that are selected. A second element says whether gradients are asked for.
CALLS = {
    "rows": lambda i: co.gemm(X[i], W),
    "bias": lambda i: co.gemm_bias_gelu(X[i], W, BIAS),
    "of all kinds": lambda i: co.gemm(X[i], W, epilogue=scaled, scale=COL[i], bias=BIAS, residual=ADDED[i]),
    "leading dimensions": lambda i: co.gemm_bias_residual(XS[i], W, BIAS, ADDEDS[i]),
    "batches": lambda i: co.gemm_residual(XS[i], WS[i], ADDEDS[i]),
    "batches of weights": lambda i: co.gemm_bias(XS[:1], WS[i], BIAS),
    "rmsnorm": lambda i: co.rmsnorm_gemm(X[i], W, GAMMA, eps=1e-6),
    "rmsnorm, leading dimensions": lambda i: co.rmsnorm_gemm(X[i][None], W, GAMMA, eps=1e-6),
    "K": lambda i: co.gemm(X[i].t().contiguous(), ADDED[i]),
    "layernorm": lambda i: co.layernorm_gemm(X[i], W, GAMMA, GAMMA, eps=1e-6),
    "swiglu": lambda i: co.gemm_swiglu(X[i], W, W),
    "residual rms": lambda i: co.gemm_residual_rms(X[i], W, ADDED[i], eps=1e-6)[0],
    "experts": lambda i: co.gemm(X[i], EXPERT_W, groups=co.Groups(OFFSETS.clamp(max=i.shape[0]))),
    "experts, a tile": lambda i: co.gemm(
        X[i],
        EXPERT_W,
        groups=co.Groups(OFFSETS.clamp(max=i.shape[0])),
        epilogue=weighted,
        weight=COL[i],
        residual=ADDED[i],
    ),
    "masked": lambda i: co.gemm(XE[:, i], EXPERT_W, groups=co.Groups(counts=i.shape[0] * ONES)),
    "MLP": lambda i: MODULES["MLP"](X[i]),
    "GatedMLP": lambda i: MODULES["GatedMLP"](X[i]),
    "RMSNormLinear": lambda i: MODULES["RMSNormLinear"](X[i]),
}
WITHOUT = {
    "FP8": lambda i: co.gemm(co.Scaled(X8[i], COL[i]), co.Scaled(W8, BIAS.float()), out_dtype=BF16),
    "FP8 blocks": lambda i: co.gemm(co.Scaled(X8[i], BLOCKS[0][i]), co.Scaled(W8, BLOCKS[1]), out_dtype=BF16),
    "quantize": lambda i: co.Scaled.quantize(X[i], "e4m3", block=128)[0],
}
MODULES = {
    "MLP": co.nn.MLP(K, N, dtype=BF16),
    "GatedMLP": co.nn.GatedMLP(K, N, dtype=BF16),
    "RMSNormLinear": co.nn.RMSNormLinear(K, N, dtype=BF16),
}


def program_of(call):
    torch._dynamo.reset()
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        function = torch.compile(lambda mask: call(mask.nonzero().squeeze(1)), backend="aot_eager", fullgraph=True)
        function(torch.tensor([1, 0, 1, 1, 0, 1, 1, 0], dtype=torch.bool))  # traced
    return function


def chosen():
    return [torch.arange(T) % 3 > 0, torch.arange(T) == 2, torch.zeros(T, dtype=torch.bool)]


@pytest.mark.sample(17)
@pytest.mark.parametrize("name", [*CALLS, *WITHOUT])
@torch.no_grad()
def test_a_program_serves_any_number_of_rows(name):
    call = (CALLS | WITHOUT)[name]
    function = program_of(call)
    for mask in chosen():
        found, wanted = function(mask), call(mask.nonzero().squeeze(1))
        for x, y in zip(*((d if isinstance(d, (list, tuple)) else [d]) for d in (found, wanted)), strict=True):
            torch.testing.assert_close(x.float(), y.float())


@pytest.mark.sample(14)
@pytest.mark.parametrize("name", [name for name in CALLS if name != "masked"])
def test_gradients_of_any_number_of_rows(name):
    leaves = [X, W, BIAS, GAMMA, ADDED, COL, XS, WS, ADDEDS, EXPERT_W]
    leaves += [p for module in MODULES.values() for p in module.parameters()]
    for leaf in leaves:
        leaf.requires_grad_()
    try:
        function = program_of(CALLS[name])
        for mask in chosen():
            both = []
            for called in (lambda m=mask: function(m), lambda m=mask: CALLS[name](m.nonzero().squeeze(1))):
                d = called()
                d = d[0] if isinstance(d, (list, tuple)) else d
                both.append(torch.autograd.grad(d.float().square().sum(), leaves, allow_unused=True))
            assert any(x is not None for x in both[1])
            for x, y in zip(*both, strict=True):
                assert (x is None) == (y is None)
                if x is not None:
                    torch.testing.assert_close(x.float(), y.float())
    finally:
        for leaf in leaves[:10]:
            leaf.requires_grad_(False)


# Each takes two selections. PyTorch does not know that they have the same number of elements.
OF_TWO = {
    "K": lambda i, j: co.gemm(X.t()[:, i].contiguous(), ADDED[j]),
    "K of batches": lambda i, j: co.gemm(
        X.t()[:, i].expand(2, -1, -1).contiguous(), ADDED[j].expand(2, -1, -1).contiguous()
    ),
    "a column": lambda i, j: co.gemm(X[i], W, epilogue=scaled, scale=COL[j], bias=BIAS, residual=ADDED[i])[0],
    "a tile": lambda i, j: co.gemm_residual(X[i], W, ADDED[j]),
    "inputs of groups": lambda i, j: co.gemm(
        X[i],
        EXPERT_W,
        groups=co.Groups(OFFSETS.clamp(max=i.shape[0])),
        epilogue=weighted,
        weight=COL[j],
        residual=ADDED[j],
    ),
    "K of groups": lambda i, j: co.gemm(X[i].mT, ADDED[j], groups=co.Groups(OFFSETS.clamp(max=i.shape[0]))),
    "out": written,
}


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", OF_TWO)
@torch.no_grad()
def test_extents_that_must_be_the_same(name):
    """A program compares them when it runs, as for PyTorch's own operators."""
    call = OF_TWO[name]
    torch._dynamo.reset()
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        function = torch.compile(
            lambda a, b: call(a.nonzero().squeeze(1), b.nonzero().squeeze(1)), backend="aot_eager", fullgraph=True
        )
        for mask in chosen()[:2]:
            wanted = call(mask.nonzero().squeeze(1), mask.flip(0).nonzero().squeeze(1))
            torch.testing.assert_close(function(mask, mask.flip(0)), wanted)
        with pytest.raises(RuntimeError, match="Eq"):
            function(mask, ~mask)


@pytest.mark.parametrize("masked", [False, True])
@torch.no_grad()
def test_rows_of_experts_by_bincount(masked):
    """As documented: its result has at least as many elements as `minlength` says, so the compiler knows no number."""

    def call(expert):
        counts = torch.bincount(expert, minlength=EXPERTS)
        if masked:
            used = torch.arange(T) < counts[:EXPERTS, None]
            return torch.where(used[..., None], co.gemm(XE, EXPERT_W, groups=co.Groups(counts=counts.int())), 0)
        return co.gemm(X, EXPERT_W, groups=co.Groups(counts.cumsum(0, dtype=torch.int32)))

    torch._dynamo.reset()
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        function = torch.compile(call, backend="aot_eager", fullgraph=True)
        for expert in ([0, 0, 1, 1, 2, 2, 2, 2], [0] * T, [2] * T):
            assert torch.equal(function(torch.tensor(expert)), call(torch.tensor(expert)))
        with pytest.raises((RuntimeError, ValueError)):
            function(torch.full((T,), EXPERTS))


@torch.no_grad()
def test_a_compiled_call_is_not_repeated_over_a_larger_out():
    def call(x, out):
        return co.gemm(x, W, out=out)

    torch._dynamo.reset()
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    for function in (call, compiled):
        with pytest.raises(Exception, match=r"out has shape \(3, "):
            function(X[:1], torch.zeros(3, N, dtype=BF16))
