"""Autograd of ops on the CPU: in FP64 against differences, in BF16 against PyTorch, eager and compiled."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from signatures import A100, H100
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

import cutlass_ops as co
from cutlass_ops.epilogue import Col, Integer, Product, Row, Scalar, Tile, builtin, composed, epilogue, functions
from cutlass_ops.epilogue.graph import Graph, canonical
from cutlass_ops.epilogue.nodes import Kind
from cutlass_ops.operand.reference import gemm_reference
from cutlass_ops.run import backward, portable, traced
from tests.layers import LAYERS, tuple_of
from tests.sampling import sampled
from tests.strategies import at_most, programs

F64, BF16 = torch.float64, torch.bfloat16
M, N, K = 5, 4, 3


class InFp64(portable.Portable):
    """An op that computes in FP64 by the reference: PyTorch's operators find it by its string, as any other."""

    def __init__(self, graph):
        self.graph = graph
        self.about = portable.register("in_fp64", graph, self, "in_fp64", graph.to_json())

    def __call__(self, a, b, *inputs, out_dtype=None):
        return traced.Traced(self.about)(a, b, *inputs, out_dtype=out_dtype)

    def run_plain(self, a, b, inputs, out, out_dtype):
        names = [i.name for i in self.graph.inputs]
        whole = {i.name for i in self.graph.inputs if i.kind is Kind.INTEGER}
        values = zip(names, inputs, strict=True)
        given = {n: int(x) if n in whole else x for n, x in values}
        others = {o.name: torch.int32 if o.reduce in ("argmax", "argmin") else F64 for o in self.graph.outputs[1:]}
        return list(
            gemm_reference(a, b, self.graph, given, d_dtype=F64, output_dtypes=others, compute_dtype=F64).values()
        )

    def results_of(self, a, b, inputs, out_dtype=None):
        raise NotImplementedError

    def of(self, graph):
        return InFp64(graph)


def _again(name, plain):
    return InFp64(Graph.from_json(plain))


portable.MAKERS["in_fp64"] = (__name__, "_again")


@epilogue
def wide(acc, bias: Row, scale: Col, residual: Tile, alpha: Scalar):
    y = functions.maximum(acc + bias, -residual) * scale
    return {
        "d": functions.silu(y) * alpha + residual,
        "sums": functions.sum(y, dim=1),
        "squares": functions.sum_square(y, dim=0),
        "logs": functions.logsumexp(y, dim=1),
    }


@epilogue
def stored(acc, bias: Row):
    pre = acc + bias
    return {"d": functions.gelu(pre), "pre": pre}


@epilogue
def dropped(acc, bias: Row, seed: Integer):
    return functions.where(functions.dropout_mask(0.5, seed), functions.tanh(acc + bias), 0.0) / 0.5


@epilogue
def gated(acc, up: Product, bias: Row):
    return functions.silu(acc + bias) * up


@epilogue
def centred(acc, up: Product, eps: Scalar):
    r = functions.rsqrt(functions.mean_square_of_a() + eps)
    return {"d": functions.sigmoid(acc * r) * (up - functions.mean_of_a()), "sums": functions.sum(acc * r, dim=0)}


@epilogue
def only_means(acc, up: Product):
    return functions.floor(acc) + functions.tanh(functions.mean_of_a()) * functions.mean_square_of_a() + up


@epilogue
def means_alone(acc, bias: Row):
    return functions.floor(acc) + bias * functions.mean_of_a() - functions.mean_square_of_a()


@epilogue
def only_a_product(acc, up: Product):
    return acc + functions.square(up)


@epilogue
def many_outputs(acc, r1: Row, r2: Row, r3: Row, r4: Row, r5: Row, r6: Row, r7: Row, r8: Row):
    return functions.tanh(acc) * (r1 + r2 * r3 + r4 * r5 + r6 * r7 * r8)


EPILOGUES = {
    **{f"gemm_{each.name}": each for each in builtin.BY_OP.values()},
    "layer_norm": composed.layer_norm,
    **{
        each.name: each
        for each in (wide, stored, dropped, gated, centred, only_means, means_alone, only_a_product, many_outputs)
    },
}
SHAPES = {Kind.ROW: (N,), Kind.COL: (M,), Kind.TILE: (M, N), Kind.SCALAR: (), Kind.PRODUCT: (K, N)}


def arguments(graph):
    torch.manual_seed(0)
    shapes = [(M, K), (K, N), *(SHAPES.get(i.kind) for i in graph.inputs)]
    drawn = [torch.tensor(7) if s is None else torch.randn(s, dtype=F64).requires_grad_() for s in shapes]
    for each, i in zip(drawn[2:], graph.inputs, strict=True):
        if i.name == "eps":
            each.data.abs_()
    return drawn


@pytest.mark.sample(6)
@pytest.mark.parametrize("name", EPILOGUES)
def test_gradients_are_those_that_differences_show(name):
    op = InFp64(EPILOGUES[name].graph)
    assert torch.autograd.gradcheck(lambda *x: tuple(op.as_list(*x)), arguments(op.graph), atol=1e-4)


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", sampled(3, EPILOGUES))
def test_gradients_can_be_differentiated_again(name):
    op = InFp64(EPILOGUES[name].graph)
    # Along random directions: a difference for each number takes ten times as long.
    given = arguments(op.graph)
    assert torch.autograd.gradgradcheck(lambda *x: tuple(op.as_list(*x)), given, atol=1e-4, fast_mode=True)


@pytest.mark.slow
@at_most(40)
@given(programs(tame=True, max_outputs=3), st.integers(0, 2**30))
def test_drawn_epilogues(program, seed):
    traced_one = program.epilogue()
    outputs = [o for o in traced_one.outputs if o.reduce not in ("max", "min")]
    try:
        graph = canonical(traced_one.inputs, traced_one.graph.nodes, outputs)
    except co.errors.ConfigError:  # an input of such an output alone
        return
    generator = torch.Generator().manual_seed(seed)
    shapes = [(M, K), (K, N), *(SHAPES[i.kind] for i in graph.inputs)]
    values = [torch.randn(s, generator=generator, dtype=F64).requires_grad_() for s in shapes]
    op = InFp64(graph)
    assert torch.autograd.gradcheck(lambda *x: tuple(op.as_list(*x)), values, atol=1e-4, fast_mode=True)


@pytest.mark.sample(4)
@pytest.mark.parametrize("wanted", [w for w in itertools.product((False, True), repeat=4) if any(w)])
def test_only_wanted_gradients_are_computed(wanted):
    op = InFp64(gated.graph)
    values = [x.detach().requires_grad_(w) for x, w in zip(arguments(op.graph), wanted, strict=True)]
    assert torch.autograd.gradcheck(lambda *x: op(*x), values)


@pytest.mark.parametrize("major", ["row", "col"])
@pytest.mark.parametrize("batch", [(), (2, 3)])
def test_a_gradient_has_the_layout_of_its_matrix(major, batch):
    torch.manual_seed(0)
    w = torch.randn(16, 8, dtype=BF16) if major == "row" else torch.randn(8, 16, dtype=BF16).t()
    a, up = torch.randn(*batch, 7, 16, dtype=BF16).requires_grad_(), (w * 0.5).requires_grad_()
    w.requires_grad_()
    found = torch.autograd.grad(co.gemm(a, w, epilogue=composed.swiglu, up=up).sum(), [a, w, up])
    assert [x.stride() for x in found] == [x.stride() for x in (a, w, up)]
    assert [x.dtype for x in found] == [BF16] * 3


def test_a_transposed_a_has_a_gradient_in_its_layout():
    a, b = torch.randn(16, 7, dtype=BF16).t().requires_grad_(), torch.randn(16, 8, dtype=BF16)
    (found,) = torch.autograd.grad(co.gemm(a, b).sum(), a)
    assert found.stride() == a.stride()
    torch.testing.assert_close(found, b.float().sum(1).expand(7, 16).to(BF16), rtol=2**-7, atol=0)


@pytest.mark.sample(4)
@pytest.mark.parametrize(("name", "backend"), sampled(3, LAYERS, [None, "aot_eager"]))
def test_a_layer_has_pytorch_s_gradients(name, backend):
    torch._dynamo.reset()
    torch.manual_seed(0)
    mine, theirs, shapes = LAYERS[name]
    given = [torch.randn(s).to(BF16).requires_grad_() for s in shapes]
    exact = [x.detach().double().requires_grad_() for x in given]
    function = mine if backend is None else torch.compile(mine, backend=backend, fullgraph=True)
    found, wanted = tuple_of(function(*given)), tuple_of(theirs(*exact))
    grads = [torch.randn(x.shape) for x in wanted]
    found = torch.autograd.grad(found, given, [g.to(x.dtype) for g, x in zip(grads, found, strict=True)])
    wanted = torch.autograd.grad(wanted, exact, [g.to(BF16).double() for g in grads])
    for x, y, like in zip(found, wanted, given, strict=True):
        assert (x.shape, x.dtype, x.stride()) == (like.shape, like.dtype, like.stride())
        # A scalar's is one number, in which larger ones cancel.
        assert (x - y).norm() <= (0.01 if like.ndim else 0.05) * y.norm()


class Calls(torch.utils._python_dispatch.TorchDispatchMode):
    """Notes the ops that are called, by their names."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "cutlass_ops":
            self.names.append(args[0].partition(" ")[0])
        return function(*args, **(kwargs or {}))


def calls_of(layer, *given):
    with Calls() as calls:
        d = layer(*given)
        d = d if isinstance(d, torch.Tensor) else d[0]
        torch.autograd.grad(d, [x for x in given if x.requires_grad], torch.ones_like(d))
    return calls.names


def test_the_accumulator_is_computed_again_or_was_stored():
    a, w, bias = (torch.randn(s).to(BF16).requires_grad_() for s in ((7, 16), (8, 16), (8,)))

    def again(a, w, bias):
        with co.recompute():
            return co.gemm_bias_gelu(a, w.t(), bias)

    assert calls_of(again, a, w, bias) == ["gemm_bias_gelu", "bias_ndtr_exp_grad_d_grad_bias", "gemm", "gemm"]
    # The pre-activation is stored by the kernel that computes it.
    assert calls_of(lambda a, w, bias: co.gemm_bias_gelu(a, w.t(), bias), a, w, bias) == [
        *("bias_gelu_saved_0", "gemm", "gemm")
    ]
    # A kernel of two products gives D alone, so that they are two GEMMs here. Then dA has two products, and each
    # weight's gradient one.
    swiglu = calls_of(lambda a, w, up: co.gemm_swiglu(a, w.t(), up.t()), a, w, (w * 2).detach().requires_grad_())
    assert swiglu == ["gemm", "silu_up_saved_0", "gemm", "residual", "gemm", "gemm"]
    # Of ReLU, D is enough: nothing is stored.
    assert calls_of(lambda a, w, bias: co.gemm_bias_relu(a, w.t(), bias), a, w, bias)[0] == "gemm_bias_relu"
    # The tile beside D has what the gradient needs: no GEMM computes it again.
    assert len(calls_of(lambda a, w, bias: co.gemm(a, w.t(), epilogue=stored, bias=bias), a, w, bias)) == 3
    # Nor does a bias need any.
    assert len(calls_of(lambda a, w, bias: co.gemm_bias(a, w.t(), bias), a, w, bias)) == 3
    # Without a gradient of A and B there is only the first.
    assert len(calls_of(lambda a, w, bias: co.gemm_bias(a, w.t(), bias), a.detach(), w.detach(), bias)) == 1


def test_a_product_s_range_is_not_fp16_s_before_a_norm_scales_it():
    x, w = torch.full((8, 64), 100.0), torch.full((8, 64), 100.0)
    for dtype in (torch.float16, BF16):
        given = [v.to(dtype).requires_grad_() for v in (x, w)]  # 64 * 100 * 100 is no FP16 number
        found = calls_of(lambda x, w: co.rmsnorm_gemm(x, w.t(), eps=1e-5), *given)
        assert (found[0] == "rmsnorm_gemm") == (dtype is torch.float16)
        d = co.rmsnorm_gemm(given[0], given[1].t(), eps=1e-5)
        assert all(g.isfinite().all() for g in torch.autograd.grad(d.sum(), given))


@epilogue
def extrema(acc, bias: Row, scale: Col):
    z = functions.tanh(acc + bias) * scale
    return {"d": z, "top": functions.max(z, dim=1), "low": functions.min(acc + bias, dim=0)}


@pytest.mark.slow
@pytest.mark.parametrize("recompute", [False, True])
def test_gradients_of_extrema_are_pytorch_s(recompute):
    torch.manual_seed(0)
    op = InFp64(extrema.graph)
    given = arguments(op.graph)
    with torch.enable_grad():
        z = (given[0] @ given[1] + given[2]).tanh() * given[3][:, None]
        wanted = z, z.max(1).values, (given[0] @ given[1] + given[2]).min(0).values
    grads = [torch.randn_like(x) for x in wanted]
    if recompute:
        with co.recompute():
            found = op.as_list(*given)
    else:
        found = op.as_list(*given)
    for x, y in zip(*(torch.autograd.grad(v, given, grads) for v in (found, wanted)), strict=True):
        torch.testing.assert_close(x, y)
    assert torch.autograd.gradgradcheck(lambda *x: tuple(op.as_list(*x)), given, atol=1e-4)


def test_of_equal_extrema_the_first_has_the_gradient():
    a, w = torch.ones(2, 8, dtype=BF16), torch.ones(8, 8, dtype=BF16)
    bias = torch.tensor([0.0, 3, 1, 3, 0, 0, 0, 0], dtype=BF16).requires_grad_()

    @epilogue
    def with_top(acc, bias: Row):
        return {"d": acc, "top": functions.max(acc + bias, dim=1)}

    co.gemm(a, w, epilogue=with_top, bias=bias).top.sum().backward()
    theirs = torch.tensor([0.0, 3, 1, 3, 0, 0, 0, 0], requires_grad=True)
    (theirs + torch.zeros(2, 8)).max(1).values.sum().backward()
    assert bias.grad.tolist() == theirs.grad.tolist() == [0, 2, 0, 0, 0, 0, 0, 0]


def test_surroundings_of_training():
    torch.manual_seed(0)
    layer = torch.nn.Linear(16, 8, dtype=BF16)
    x = torch.randn(7, 16).to(BF16).requires_grad_()

    def forward(x):
        return co.gemm_bias_relu(x, layer.weight.t(), layer.bias)

    values = [x, *layer.parameters()]
    wanted = torch.autograd.grad(forward(x).sum(), values)
    found = torch.autograd.grad(checkpoint(forward, x, use_reentrant=False).sum(), values)
    assert all(map(torch.equal, found, wanted))
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = [mode.from_tensor(v) for v in values]
        d = co.gemm_bias_relu(fake[0], fake[1].t(), fake[2])
        grads = torch.autograd.grad(d.sum(), fake)
    assert [(g.shape, g.dtype, g.stride()) for g in grads] == [(g.shape, g.dtype, g.stride()) for g in wanted]
    # Parameters do not stand in the way of a look.
    assert co.warm_up(co.gemm_bias_relu, x, layer.weight.t(), layer.bias) == 0
    # Nothing that is not asked for is recorded.
    with torch.no_grad():
        assert forward(x).grad_fn is None
    with torch.inference_mode():
        assert forward(x.detach()).is_inference()


def test_gradients_enabled_inside_inference_mode():
    """PyTorch records nothing there, so a call is as any other without gradients: with `out`, prepared, compiled."""
    x, w, bias = torch.randn(4, 32).to(BF16), torch.randn(16, 32).to(BF16), torch.randn(16).to(BF16)
    p, b = torch.nn.Parameter(w), torch.nn.Parameter(bias)
    want = co.gemm_bias_relu(x, w.t(), bias)
    with torch.inference_mode(), torch.enable_grad():
        d = co.gemm_bias_relu(x, p.t(), b)
        assert torch.equal(d, want)
        assert d.is_inference()
        assert not d.requires_grad
        out = torch.empty_like(want)
        assert torch.equal(co.gemm_bias_relu(x, p.t(), b, out=out), want)
        assert torch.equal(co.prepare_launch(co.gemm_bias_relu, x, p.t(), b)(), want)
        compiled = torch.compile(lambda x: co.gemm_bias_relu(x, p.t(), b), backend="aot_eager", fullgraph=True)
        assert torch.equal(compiled(x), want)
        assert torch.equal(co.Scaled.quantize(p, "e4m3").values.float(), co.Scaled.quantize(w, "e4m3").values.float())
    assert compiled(x).requires_grad


@pytest.mark.parametrize("extents", [(0, 8, 16), (7, 0, 16), (7, 8, 0), (1, 1, 1)], ids=str)
@pytest.mark.parametrize("batch", [False, True])
def test_extents_of_0_and_1(extents, batch):
    m, n, k = extents
    a, w, up = (torch.randn(s).to(BF16).requires_grad_() for s in ((m, k), (n, k), (n, k)))
    bias = torch.randn(n).to(BF16).requires_grad_()
    given = [a, w, up, bias]

    @epilogue
    def normed(acc, up: Product, bias: Row):
        return functions.silu(acc * functions.rsqrt(functions.mean_square_of_a() + 1.0) + bias) * up

    for call in (
        lambda a: co.gemm(a, w.t(), epilogue=normed, up=up.t(), bias=bias),
        lambda a: co.gemm_bias(a, w.t(), bias),
        lambda a: co.gemm_bias_gelu(a, w.t(), bias),
    ):
        found = torch.autograd.grad(call(a[None] if batch else a).sum(), given, allow_unused=True)
        for x, like in zip(found, given, strict=True):
            assert x is None or (x.shape == like.shape and x.isfinite().all())
        assert found[0] is not None


def test_a_scalar_on_the_cpu_has_a_gradient():
    @epilogue
    def scaled(acc, scale: Scalar):
        return acc * scale

    a, b = torch.ones(2, 3, dtype=BF16), torch.ones(3, 4, dtype=BF16)
    scale = torch.tensor([2.0], dtype=F64, requires_grad=True)
    co.gemm(a, b, epilogue=scaled, scale=scale).sum().backward()
    assert (scale.grad.item(), scale.grad.dtype, scale.grad.shape) == (24.0, F64, (1,))


A, B = torch.zeros(4, 8, dtype=BF16), torch.zeros(8, 6, dtype=BF16)
GRAD = torch.zeros(6, dtype=BF16, requires_grad=True)


def test_what_has_no_gradient_is_refused():
    @epilogue
    def with_top(acc, bias: Row):
        return {"d": acc + bias, "top": functions.max(acc + bias, dim=1), "at": functions.argmax(acc, dim=1)}

    d, top, at = co.gemm(A, B, epilogue=with_top, bias=GRAD)
    assert not at.requires_grad
    torch.autograd.grad(d.sum(), GRAD, retain_graph=True)
    assert torch.autograd.grad(top.sum(), GRAD)[0].sum() == 4

    @epilogue
    def full(acc, bias: Row):
        tops = {f"top{i}": functions.max(acc + bias * float(i), dim=1) for i in range(7)}
        return {"d": acc, **tops}

    # A kernel has 8 outputs, and none is left for the places.
    found = co.gemm(A, B, epilogue=full, bias=GRAD)
    with pytest.raises(NotImplementedError, match=r"output 'top1': the gradient of max goes to the element .* argmax"):
        torch.autograd.grad(found.top1.sum(), GRAD)


def test_a_call_with_out_is_refused():
    with pytest.raises(ValueError, match=r"^bias requires grad, and a call with `out` has no backward: omit `out`"):
        co.gemm_bias(A, B, GRAD, out=torch.zeros(4, 6, dtype=BF16))
    compiled = torch.compile(
        lambda bias: co.gemm_bias(A, B, bias, out=torch.zeros(4, 6, dtype=BF16)), backend="aot_eager", fullgraph=True
    )
    with pytest.raises(Exception, match="bias requires grad, and a call with `out` has no backward"):
        compiled(GRAD)
    with torch.no_grad():
        co.gemm_bias(A, B, GRAD, out=torch.zeros(4, 6, dtype=BF16))


# ---- On a device that is made up -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "gpu"), sampled(5, LAYERS, [H100, A100]))
def test_kernels_serve_the_backward_and_further_steps_are_warm(name, gpu, device, session):
    device.device = gpu
    torch.manual_seed(0)
    layer, _, shapes = LAYERS[name]
    # Lines of 16 bytes: the shapes of a real layer.
    given = [torch.randn([8 * x if x > 1 else x for x in s]).to(BF16).requires_grad_() for s in shapes]

    def step():
        found = tuple_of(layer(*given))
        generator = torch.Generator().manual_seed(1)
        grads = [torch.randn(x.shape, generator=generator).to(x.dtype) for x in found]
        return torch.autograd.grad(found, given, grads)

    first = step()
    launched = len(device.launches)
    device.closed = True  # nothing is compiled any more
    again = step()
    assert len(device.launches) == 2 * launched >= 2 * 3
    assert all(map(torch.equal, first, again))
    assert [co.check(spec) for spec in device.loaded] == [()] * len(device.loaded)


@pytest.mark.parametrize("name", sampled(5, LAYERS))
def test_kernels_compute_the_elementwise_part(name, device, monkeypatch):
    torch.manual_seed(0)
    layer, _, shapes = LAYERS[name]
    given = [torch.randn([8 * x if x > 1 else x for x in s]).to(BF16).requires_grad_() for s in shapes]
    found = tuple_of(layer(*given))
    grads = [torch.randn(x.shape).to(x.dtype) for x in found]
    wanted = torch.autograd.grad(found, given, grads, retain_graph=True)
    before = len(device.launches)
    monkeypatch.setattr(backward, "has_kernels", lambda a: True)
    again = torch.autograd.grad(found, given, grads)
    assert len(device.launches) > before
    for x, y, like in zip(again, wanted, given, strict=True):
        assert (x.shape, x.dtype, x.stride()) == (like.shape, like.dtype, like.stride())
        assert (x.float() - y.float()).norm() <= 0.01 * y.float().norm()


@pytest.mark.parametrize("name", ["gelu", "swiglu", "rmsnorm"])
def test_warm_up_compiles_the_backward_s_kernels(name, device, monkeypatch):
    monkeypatch.setattr(backward, "has_kernels", lambda a: True)
    x, w, other = (torch.randn(s).to(BF16).requires_grad_() for s in ((128, 64), (256, 64), (256, 64)))
    last = other[:, 0].detach().clone().requires_grad_()
    call, arguments = {
        "gelu": (co.gemm_bias_gelu, (x, w.t(), last)),
        "swiglu": (co.gemm_swiglu, (x, w.t(), other.t())),
        "rmsnorm": (co.rmsnorm_gemm, (x, w.t(), torch.ones(64).requires_grad_())),
    }[name]
    named = {"eps": 1e-5} if name == "rmsnorm" else {}
    with torch.no_grad():
        inference = co.warm_up(call, *arguments, **named)
    assert co.warm_up(call, *arguments, **named) > inference
    assert w.grad is None
    device.closed = True
    for rows in (128, 64):
        call(x[:rows], *arguments[1:], **named).sum().backward()
    assert w.grad is not None
