"""Modules on a GPU: their kernels forward and backward, against PyTorch's results and gradients."""

import copy
import subprocess

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

import cutlass_ops as co
from cutlass_ops.epilogue import Row, Tile, builtin, epilogue, functions
from cutlass_ops.run import backward, warm
from cutlass_ops.run.chained import chain
from tests.modules import BF16, CASES, HIDDEN, MODELS, MODULES, K, N, drawn, made, model_of, model_step, packaged, step
from tests.scripts import script

pytestmark = [
    pytest.mark.gpu,
    # PyTorch's compiler warns of its own past, and its thread of gradients of a context that it makes at once.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS:UserWarning"),
]


def require_as_exact(found, eager, exact, dtype):
    """Require at most twice the error of PyTorch's own, or of one rounding."""
    for x, y, z in zip(found, eager, exact, strict=True):
        assert x.shape == z.shape
        allowed = 2 * (y - z).norm() + torch.finfo(dtype).eps * z.norm()
        assert (x - z).norm() <= allowed


@pytest.mark.parametrize("backend", [None, "inductor"])
@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_a_module_is_as_exact_as_pytorch(name, dtype, backend):
    torch._dynamo.reset()
    module, plain = made(name, dtype, "cuda"), MODULES[name][1]
    wide = copy.deepcopy(module).double()
    x = drawn(dtype, "cuda")
    function = module if backend is None else torch.compile(module, backend=backend, fullgraph=True)
    found, eager = step(function, module, x), step(lambda x: plain(module, x), module, x)
    exact = step(lambda x: plain(wide, x), wide, x.detach().double().requires_grad_())
    require_as_exact(found, eager, exact, dtype)
    with torch.no_grad():
        require_as_exact([function(x)], eager[:1], exact[:1], dtype)


@pytest.mark.parametrize("name", MODULES)
def test_recomputing_gives_the_same(name):
    module = made(name, BF16, "cuda")
    x = drawn(BF16, "cuda")
    stored = step(module, module, x)
    with co.recompute():
        again = step(module, module, x)
    for a, b in zip(again, stored, strict=True):
        assert (a - b).norm() <= 0.01 * b.norm()


@pytest.mark.parametrize("name", ["linear_gelu", "mlp", "swiglu", "rmsnorm"])
def test_the_elementwise_part_is_one_kernel_of_ours(name, monkeypatch):
    module = made(name, BF16, "cuda")
    x = drawn(BF16, "cuda")
    warm._forget()  # a recorded step asks nothing
    by_kernel = step(module, module, x)
    asked = []
    monkeypatch.setattr(backward, "has_kernels", lambda a: asked.append(a) or False)
    by_pytorch = step(module, module, x)
    # That of the others, which add nothing up, is the epilogue of a GEMM.
    assert bool(asked) == (name in ("linear_gelu", "rmsnorm", "mlp"))
    for a, b in zip(by_kernel, by_pytorch, strict=True):
        assert (a - b).norm() <= 0.01 * b.norm()


@pytest.mark.parametrize("name", MODULES)
def test_pytorch_records_small_layers_and_kernels_serve_graphs(name, monkeypatch):
    monkeypatch.setenv("CUTLASS_OPS_STAND_IN", "1")
    module, x = made(name, BF16, "cuda"), drawn(BF16, "cuda")
    recorded = []

    def noted(x):
        d = module(x)
        recorded.append(records_of(d))
        return d

    found = step(noted, module, x)
    plain = step(lambda x: MODULES[name][1](module, x), module, x)
    require_equal(found, plain, "eager")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(noted, module, x)
    graph.replay()
    # Who serves is asked of autograd: kernels without an activation may give PyTorch's very bits.
    assert [bool(each) for each in recorded] == [False, True], recorded
    for at, (a, b) in enumerate(zip(captured, plain, strict=True)):
        assert (a - b).norm() <= 0.02 * b.norm(), (at, (a - b).norm() / b.norm())


def records_of(d):
    """Return the names of the nodes behind a result that are this library's."""
    left, found = [d.grad_fn], []
    for node in left:
        found += [node.name()] if "_Recorded" in node.name() else []
        left += [following for following, _ in node.next_functions if following is not None]
    return found


def require_equal(found, wanted, when):
    """Require the same bits. No kernel of a step adds up in an order that changes."""
    for at, (x, y) in enumerate(zip(found, wanted, strict=True)):
        if not torch.equal(x, y):
            differing = (x != y) & ~(x.isnan() & y.isnan())
            pytest.fail(
                f"{when}: result {at} {tuple(x.shape)} differs in {int(differing.sum())} elements, first at "
                f"{differing.nonzero()[:1].tolist()}, by at most {float((x - y).abs().max())}; "
                f"{int(x.isnan().sum())} and {int(y.isnan().sum())} are NaN"
            )


@pytest.mark.parametrize("name", ["linear_gelu", "mlp", "swiglu"])
def test_a_captured_step_and_further_steps(name, monkeypatch):
    at_rest = script("harness").memory_at_rest
    module = made(name, BF16, "cuda")
    x = drawn(BF16, "cuda")
    wanted = step(module, module, x)
    monkeypatch.setenv("CUTLASS_OPS_JIT", "0")
    before = at_rest()
    for number in range(3):
        require_equal(step(module, module, x), wanted, f"step {number + 2} after the first")
    left = at_rest() - before
    sizes = [x.numel() * x.element_size() for x in wanted]
    assert left == 0, f"three steps left {left} bytes; the result and the gradients have {sizes}"
    grad = torch.linspace(-1, 1, wanted[0].numel(), device="cuda").reshape(wanted[0].shape).to(BF16)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        aside = step(module, module, x, grad)
    torch.cuda.current_stream().wait_stream(stream)
    require_equal(aside, wanted, "a step on another stream")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        found = step(module, module, x, grad)
    for number in range(2):
        for each in found:
            each.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        require_equal(found, wanted, f"replay {number + 1} of the captured step")


@pytest.mark.parametrize("layer", ["linear_gelu", "mlp", "swiglu"])
def test_a_step_takes_no_more_memory_than_torch_compile_s(layer):
    torch._dynamo.reset()
    bench = script("bench_training")
    m, n, k = 8192, 1024, 512  # as a layer's, tiles are larger than weights
    found = bench.variants(layer, n, k, [], device="cuda", dtype=BF16)
    compiled = torch.compile(lambda x: found.plain(found.module, x), dynamic=False, fullgraph=True)
    parameters, given = list(found.module.parameters()), bench.operands(layer, m, n, k, "cuda")
    # By kernels, as in a graph: outside of tests, PyTorch serves a layer as small as this one, and keeps more.
    ours, theirs = (bench.peak_mib(each, parameters, *given) for each in (found.module, compiled))
    tiles = {name: 2 * a * b / 2**20 for name, a, b in (("behind the first", m, n), ("x", m, k), ("a weight", n, k))}
    assert ours <= theirs + 0.1, f"{ours} for {theirs} MiB; tiles have {tiles} MiB"  # each is rounded


@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=["fp32", "bf16"])
def test_gradients_are_added_to_main_grads(dtype):
    module = made("mlp", BF16, "cuda")
    x = drawn(BF16, "cuda")
    wanted = step(module, module, x)
    weights = [module.fc1.weight, module.fc2.weight]
    for w in weights:
        w.main_grad = torch.ones(w.shape, device="cuda", dtype=dtype)
    d = module(x)
    d.backward(torch.linspace(-1, 1, d.numel(), device="cuda").reshape(d.shape).to(BF16))
    assert torch.equal(x.grad, wanted[1])
    named = dict(zip([n for n, _ in module.named_parameters()], wanted[2:], strict=True))
    for name, w in zip(("fc1.weight", "fc2.weight"), weights, strict=True):
        assert w.grad is None
        exact = named[name].float() + 1.0
        assert (w.main_grad.float() - exact).norm() <= 0.01 * exact.norm()


@epilogue
def gates_gradients(acc, gate: Tile, up: Tile):
    s = functions.sigmoid(gate)
    return {"d": acc * up * s, "of_up": acc * gate * s, "sums": functions.sum(acc * up, dim=0)}


# Few tiles, many tiles, and lines that are not aligned.
@pytest.mark.parametrize("shape", [(192, 320, 128), (2048, 1536, 512), (37, 70, 100)])
@pytest.mark.parametrize("swapped", [False, True])
def test_results_that_overwrite_tiles_have_the_same_bits(shape, swapped):
    m, n, k = shape
    a, b, gate, up = (torch.randn(s, device="cuda").to(BF16) for s in ((m, k), (k, n), (m, n), (m, n)))
    wanted = co.gemm(a, b, epilogue=gates_gradients, gate=gate, up=up)
    for _ in range(3):
        tiles = gate.clone(), up.clone()
        out = dict(zip(("d", "of_up"), tiles[::-1] if swapped else tiles, strict=True))
        found = co.gemm(a, b, epilogue=gates_gradients, gate=tiles[0], up=tiles[1], out=out)
        assert all(found[at].data_ptr() == out[name].data_ptr() for at, name in enumerate(out))
        require_equal(found, wanted, "in place")


def test_gradients_of_extrema():
    @epilogue
    def extrema(acc, bias: Row):
        z = functions.tanh(acc + bias)
        return {"d": z, "top": functions.max(z, dim=1), "low": functions.min(acc, dim=0)}

    torch.manual_seed(0)
    # Whole numbers: a kernel and PyTorch find the same maxima.
    x, w = (torch.randint(-3, 4, s, device="cuda").to(BF16).requires_grad_() for s in ((96, K), (N, K)))
    bias = torch.randn(N, device="cuda").mul_(0.01).requires_grad_()
    d, top, low = co.gemm(x, w.t(), epilogue=extrema, bias=bias)
    grads = [torch.randn_like(v) for v in (d, top, low)]
    found = torch.autograd.grad((d, top, low), [x, w, bias], grads)
    given = [v.detach().double().requires_grad_() for v in (x, w, bias)]
    acc = given[0] @ given[1].t()
    z = torch.tanh(acc + given[2])
    # The places are the kernel's: where tanh is 1, the elements of a row are equal.
    at = co.gemm(x.detach(), w.detach().t(), epilogue=_places, bias=bias.detach()).at.long()
    tops = z.gather(1, at[:, None])[:, 0]
    exact = torch.autograd.grad((z, tops, acc.min(0).values), given, [g.double() for g in grads])
    for a, b in zip(found, exact, strict=True):
        assert (a - b).norm() <= 0.02 * b.norm()


@epilogue
def _places(acc, bias: Row):
    z = functions.tanh(acc + bias)
    return {"d": z, "at": functions.argmax(z, dim=1)}


def test_chains_of_odd_extents():
    """Lines that are not aligned take other kernels."""
    torch.manual_seed(0)
    shapes = (37, 100), (70, 100), (70,), (50, 70), (50,)
    given = [(torch.randn(s, device="cuda") / 4).to(BF16).requires_grad_() for s in shapes]

    def mine(x, w1, b1, w2, b2):
        return chain(co.gemm_bias_gelu, co.gemm_bias, x, w1.t(), w2.t(), [b1], [b2])

    def theirs(x, w1, b1, w2, b2):
        return F.linear(F.gelu(F.linear(x, w1, b1)), w2, b2)

    def gradients(function, values):
        d = function(*values)
        grad = torch.linspace(-1, 1, d.numel(), device="cuda", dtype=torch.float64).reshape(d.shape)
        return d.detach(), *torch.autograd.grad(d, values, grad.to(BF16).to(d.dtype))

    exact = gradients(theirs, [x.detach().double().requires_grad_() for x in given])
    require_as_exact(gradients(mine, given), gradients(theirs, given), exact, BF16)


@pytest.mark.parametrize("dtype", [BF16, torch.float16], ids=["bf16", "f16"])
def test_autocast_with_a_scaler(dtype):
    torch.manual_seed(0)
    module = nn.Sequential(co.nn.MLP(K, HIDDEN), co.nn.GatedMLP(K, HIDDEN), co.nn.LayerNormLinear(K, K)).cuda()
    x, scaler = torch.randn(96, K, device="cuda"), torch.amp.GradScaler("cuda", init_scale=256.0)
    optimizer = torch.optim.SGD(module.parameters(), 0.01)
    before = [p.detach().clone() for p in module.parameters()]
    with torch.autocast("cuda", dtype):
        d = module(x)
        assert d.dtype is dtype
        residual = module[0](x, residual=x)
        assert residual.dtype is torch.float32
    scaler.scale(d.float().square().mean()).backward()
    assert all(p.grad.dtype is torch.float32 and p.grad.isfinite().all() for p in module.parameters())
    scaler.step(optimizer)
    scaler.update()
    assert not any(map(torch.equal, before, module.parameters()))


@pytest.mark.parametrize("name", MODELS)
def test_a_patched_model_is_as_exact(name):
    pytest.importorskip("transformers")
    model = model_of(name, "cuda")
    exact, theirs = model_step(copy.deepcopy(model).float(), "cuda"), model_step(model, "cuda")
    assert len(co.patch(co.patch(model), dry_run=True).fused) > 8
    require_as_exact(model_step(model, "cuda"), theirs, [x.double() for x in exact], BF16)


@pytest.mark.parametrize("name", [name for name in MODELS if name != "GPT2"])
def test_folded_norms_are_as_exact(name):
    pytest.importorskip("transformers")
    model = model_of(name, "cuda")
    tokens = torch.arange(128, device="cuda").reshape(2, 64) * 7 % 512

    @torch.no_grad()
    def logits(model):
        return [model(input_ids=tokens, use_cache=False).logits]

    exact, theirs = logits(copy.deepcopy(model).double()), logits(model)
    found = co.patch(co.patch(model, fold_norms=True), dry_run=True)
    assert [n for n in found.fused if n.endswith("self_attn")]
    for _ in range(2):
        require_as_exact(logits(model), theirs, exact, BF16)


def test_double_backward_computes_again():
    x, w, bias = (torch.randn(s, device="cuda").to(BF16).requires_grad_() for s in ((96, K), (N, K), (N,)))

    def twice(function, given):
        (grad,) = torch.autograd.grad(function(*given).sum(), given[0], create_graph=True)
        return torch.autograd.grad(grad.square().sum(), given[1:])

    found = twice(lambda x, w, b: co.gemm(x, w.t(), epilogue=builtin.bias_silu, bias=b), [x, w, bias])
    exact = twice(
        lambda x, w, b: F.silu(F.linear(x, w, b)), [v.detach().double().requires_grad_() for v in (x, w, bias)]
    )
    for a, b in zip(found, exact, strict=True):
        assert (a - b).norm() <= 0.03 * b.norm()


@pytest.mark.filterwarnings("ignore")
def test_a_package_of_aotinductors_needs_only_this_library(tmp_path):
    module = nn.Sequential(made("swiglu", BF16, "cuda"), made("rmsnorm", BF16, "cuda"))
    try:
        found, x = packaged(module, "cuda", tmp_path)
    except subprocess.CalledProcessError:
        with pytest.raises(subprocess.CalledProcessError):
            packaged(nn.Linear(K, N).to("cuda", BF16), "cuda", tmp_path)
        pytest.skip("a process that loads a package of PyTorch's own nn.Linear ends as well")
    with torch.no_grad():
        assert (found - module(x)).norm() <= 0.01 * found.norm()
