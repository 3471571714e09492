"""Modules on the CPU: results, gradients and state_dicts against PyTorch's, and what else is done with modules."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from processes import run_with_pytorch
from signatures import A100, H100
from torch import nn

import cutlass_ops as co
from cutlass_ops.nn import epilogues
from cutlass_ops.run.gated import gated_op
from tests import modules
from tests.sampling import in_turn

BF16 = torch.bfloat16
K, N, HIDDEN = 16, 24, 32
FUNCTIONS = {
    "none": lambda x: x,
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "hardswish": F.hardswish,
    "mish": F.mish,
    "softplus": F.softplus,
}


def gated(m, x):
    return m.down_proj(m.gate_proj(x) * m.up_proj(x))  # the gate's layer has the activation


def as_pytorch(module):
    """The same module in FP64, with PyTorch's forwards."""
    other = copy.deepcopy(module).double()
    for each in other.modules():
        if isinstance(each, co.nn.Linear):
            each.forward = lambda x, residual=None, m=each: (
                FUNCTIONS[m.activation or "none"](F.linear(x, m.weight, m.bias)) + (0 if residual is None else residual)
            )
    for each in other.modules():
        if isinstance(each, co.nn.MLP):
            each.forward = lambda x, residual=None, m=each: m.fc2(m.fc1(x)) + (0 if residual is None else residual)
        elif isinstance(each, co.nn.GatedMLP):
            each.forward = lambda x, residual=None, m=each: gated(m, x) + (0 if residual is None else residual)
        elif isinstance(each, co.nn.RMSNormLinear | co.nn.LayerNormLinear):
            each.forward = lambda x, m=each: m.linear(m.norm(x))
    return other


# What makes a module, whether it takes a residual, and of what shape.
MODULES = {
    "linear": (lambda **k: co.nn.Linear(K, N, **k), N),
    "linear_gelu": (lambda **k: co.nn.Linear(K, N, activation="gelu", **k), N),
    "linear_silu_plain": (lambda **k: co.nn.Linear(K, N, bias=False, activation="silu", **k), N),
    "mlp": (lambda **k: co.nn.MLP(K, HIDDEN, N, **k), N),
    "mlp_relu_plain": (lambda **k: co.nn.MLP(K, HIDDEN, activation="relu", bias=False, **k), K),
    "swiglu": (lambda **k: co.nn.GatedMLP(K, HIDDEN, **k), K),
    "geglu": (lambda **k: co.nn.GatedMLP(K, HIDDEN, "gelu_tanh", bias=True, **k), K),
    "rmsnorm": (lambda **k: co.nn.RMSNormLinear(K, N, activation="silu", **k), None),
    "rmsnorm_bias": (lambda **k: co.nn.RMSNormLinear(K, N, bias=True, **k), None),
    "layernorm": (lambda **k: co.nn.LayerNormLinear(K, N, **k), None),
    "layernorm_plain": (lambda **k: co.nn.LayerNormLinear(K, N, bias=False, activation="gelu", **k), None),
    "block": (lambda **k: co.nn.DecoderBlock(32, 64, num_heads=4, num_kv_heads=2, **k), None),
}


def made(name, dtype=BF16, rows=(2, 8)):
    torch.manual_seed(0)
    make, residual = MODULES[name]
    module = make(dtype=dtype)
    with torch.no_grad():
        for x in module.parameters():
            x.add_(torch.randn_like(x) * 0.2)
    k = 32 if name == "block" else K
    x = torch.randn(*rows, k).to(dtype).requires_grad_()
    others = [] if residual is None else [torch.randn(*rows, residual).to(dtype).requires_grad_()]
    return module, [x, *others]


def call(module, given):
    """Call a module with x, and a residual if one is given."""
    x, *residual = given
    return module(x, residual=residual[0]) if residual else module(x)


def step(module, given):
    """A result, and the gradients of what is given and of the parameters."""
    d = call(module, given)
    grad = torch.linspace(-1, 1, d.numel(), dtype=torch.float64).reshape(d.shape).to(BF16)
    return d, torch.autograd.grad(d, [*given, *module.parameters()], grad.to(d.dtype))


def close(found, exact, allowed=0.015):
    assert found.shape == exact.shape
    assert (found.double() - exact).norm() <= allowed * exact.norm()


@pytest.mark.parametrize(
    ("name", "residual"), [(n, r) for n, (_, taken) in MODULES.items() for r in (False, True) if taken or not r]
)
def test_results_and_gradients_are_pytorch_s(name, residual):
    module, given = made(name)
    given = given if residual else given[:1]
    d, found = step(module, given)
    exact_d, exact = step(as_pytorch(module), [x.detach().double().requires_grad_() for x in given])
    close(d, exact_d)
    for x, y in zip(found, exact, strict=True):
        close(x, y)
    with torch.no_grad():
        close(call(module, given), exact_d)


@pytest.mark.parametrize("activation", epilogues.ACTIVATIONS)
@pytest.mark.parametrize("biased", [False, True])
def test_every_activation(activation, biased):
    torch.manual_seed(0)
    x = torch.randn(8, K).to(BF16)
    for module in (
        co.nn.Linear(K, N, bias=biased, activation=activation, dtype=BF16),
        co.nn.GatedMLP(K, HIDDEN, activation, bias=biased, dtype=BF16),
    ):
        with torch.no_grad():
            close(module(x), as_pytorch(module)(x.double()))


# The quick tests compile each forward once: a bias and another activation are the same to a compiler.
FORWARDS = ("linear", "mlp", "swiglu", "rmsnorm", "layernorm", "block")


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", [n if n in FORWARDS else pytest.param(n, marks=pytest.mark.slow) for n in MODULES])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # PyTorch's own
def test_modules_compile_as_one_graph_forward_and_backward(name, backend):
    torch._dynamo.reset()
    module, given = made(name)
    d, wanted = step(module, given)
    compiled = torch.compile(module, backend=backend, fullgraph=True)
    found_d, found = step(compiled, given)
    close(found_d, d.double(), 0.01)
    for x, y in zip(found, wanted, strict=True):
        close(x, y.double(), 0.01)
    with torch.no_grad():
        close(call(torch.compile(module, backend=backend, fullgraph=True), given), d.double(), 0.01)


@pytest.mark.parametrize(("name", "strict"), in_turn(MODULES, (False, True)))
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore:The given buffer is not writable")  # PyTorch's own
def test_modules_are_exported(name, strict, tmp_path):
    module, given = made(name)
    given = tuple(x.detach() for x in given)
    with torch.no_grad():
        wanted = call(module, given)
        named = dict(zip(("residual",), given[1:], strict=False))
        program = torch.export.export(module, given[:1], named, strict=strict)
        torch.export.save(program, tmp_path / "program.pt2")
        loaded = torch.export.load(tmp_path / "program.pt2").module()
        close(loaded(given[0], **named), wanted.double(), 1e-6)
    # It may be trained as well.
    for each in (lambda: loaded(given[0], **named), lambda: call(module, given)):
        each().float().square().sum().backward()
    parameters = dict(loaded.named_parameters())
    for name_of, parameter in module.named_parameters():
        close(parameters[name_of].grad, parameter.grad.double(), 0.03)


@pytest.mark.parametrize("name", MODULES)
def test_copies_and_pickles_are_the_same_module(name):
    module, given = made(name)
    with torch.no_grad():
        wanted = call(module, given)
        for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
            assert torch.equal(call(other, given), wanted)
            assert all(x is not y for x, y in zip(other.parameters(), module.parameters(), strict=True))


@pytest.mark.parametrize("name", MODULES)
def test_a_module_begins_on_meta_and_moves(name):
    module, given = made(name)
    other = MODULES[name][0](device="meta")
    assert all(p.is_meta for p in other.parameters())
    other = other.to_empty(device="cpu").to(BF16)
    other.load_state_dict(module.state_dict())
    with torch.no_grad():
        assert torch.equal(call(other, given), call(module, given))
        half = copy.deepcopy(module).half()
        assert call(half, [x.half() for x in given]).dtype is torch.float16


def test_state_dicts_are_pytorch_s():
    pairs = [
        (co.nn.Linear(K, N, activation="gelu"), nn.Linear(K, N)),
        (co.nn.RMSNormLinear(K, N), nn.ModuleDict({"norm": nn.RMSNorm(K), "linear": nn.Linear(K, N, bias=False)})),
        (co.nn.LayerNormLinear(K, N), nn.ModuleDict({"norm": nn.LayerNorm(K), "linear": nn.Linear(K, N)})),
        (co.nn.MLP(K, HIDDEN), nn.ModuleDict({"fc1": nn.Linear(K, HIDDEN), "fc2": nn.Linear(HIDDEN, K)})),
    ]
    for mine, theirs in pairs:
        mine.load_state_dict(theirs.state_dict())
        assert all(map(torch.equal, mine.state_dict().values(), theirs.state_dict().values()))


def test_initial_weights_are_pytorch_s():
    torch.manual_seed(0)
    mine = co.nn.Linear(K, N, activation="relu")
    torch.manual_seed(0)
    assert torch.equal(mine.weight, nn.Linear(K, N).weight)
    assert "in_features=16, out_features=24, bias=True, activation='relu'" in repr(mine)


def test_tied_weights_add_up():
    torch.manual_seed(0)
    embedding, head = nn.Embedding(N, K, dtype=BF16), co.nn.Linear(K, N, bias=False, dtype=BF16)
    head.weight = embedding.weight
    tokens = torch.tensor([1, 2, 3])

    def loss(dtype):
        x = F.embedding(tokens, embedding.weight.to(dtype))
        return (head(x) if dtype is BF16 else x @ head.weight.to(dtype).t()).float().square().sum()

    found, exact = (torch.autograd.grad(loss(t), embedding.weight)[0] for t in (BF16, torch.float64))
    close(found, exact.double())


def test_hooks_of_inner_layers_run():
    module, given = made("swiglu")
    seen = []
    module.up_proj.register_forward_hook(lambda m, x, d: seen.append(d.shape))
    d, found = step(module, given)
    assert seen == [(2, 8, HIDDEN)]
    exact_d, exact = step(as_pytorch(module), [x.detach().double().requires_grad_() for x in given])
    close(d, exact_d)
    for x, y in zip(found, exact, strict=True):
        close(x, y, 0.02)


@pytest.mark.parametrize("name", ["rmsnorm", "layernorm"])
def test_a_folded_norm_follows_its_parameters(name):
    module, (x,) = made(name)
    assert module.fold() is module
    with torch.no_grad():
        for change in (
            lambda: None,
            lambda: module.norm.weight.mul_(2.0),
            lambda: module.linear.weight.mul_(0.5),
            lambda: module.load_state_dict({n: v * 1.5 for n, v in module.state_dict().items()}),
        ):
            change()
            folded = module._folded.value
            close(module(x), as_pytorch(module)(x.double()))
        assert module._folded.value is not folded
    assert not copy.deepcopy(module).folds
    assert not pickle.loads(pickle.dumps(module)).folds
    # Gradients are those of the parameters, and not of the copy.
    torch.autograd.grad(module(x).sum(), list(module.parameters()))
    assert module._folded.value is None
    with torch.no_grad():
        module(x)
    assert module._folded.value is not None
    assert module.half()._folded.value is None
    assert module.folds


def test_a_norm_without_a_weight_is_folded_as_one_of_ones():
    module, (x,) = made("rmsnorm")
    module.norm = torch.nn.RMSNorm(module.norm.normalized_shape, eps=1e-5, elementwise_affine=False)
    with torch.no_grad():
        before = module(x)
        assert torch.equal(module.fold()(x), before)


def test_autocast_casts_what_f_linear_casts():
    torch.manual_seed(0)
    module = nn.Sequential(co.nn.Linear(K, N, activation="gelu"), co.nn.MLP(N, HIDDEN), co.nn.RMSNormLinear(N, N))
    module.append(co.nn.GatedMLP(N, HIDDEN)).append(co.nn.LayerNormLinear(N, N))
    x = torch.randn(8, K)
    with pytest.raises(TypeError, match=r"^a is torch\.float32, .* convert a and b to torch\.bfloat16"):
        module(x)
    for dtype in (BF16, torch.float16):
        with torch.autocast("cpu", dtype):
            d = module(x)
            assert d.dtype is F.linear(x, module[0].weight).dtype is dtype
        exact = as_pytorch(module)
        close(d, exact(x.double()), 0.03)
        found = torch.autograd.grad(d.float().square().sum(), list(module.parameters()))
        wanted = torch.autograd.grad(exact(x.double()).square().sum(), list(exact.parameters()))
        for g, y, p in zip(found, wanted, module.parameters(), strict=True):
            assert g.dtype is p.dtype is torch.float32
            close(g, y, 0.06)
    with torch.autocast("cpu", BF16, enabled=False), pytest.raises(TypeError, match=r"^a is torch\.float32"):
        module(x)


@pytest.mark.parametrize(
    ("name", "backend"), in_turn([n for n, (_, taken) in MODULES.items() if taken], ("aot_eager", None))
)
def test_an_fp32_residual_stays_one(name, backend):
    torch._dynamo.reset()
    module, (x, residual) = made(name)
    given = x, residual.detach().float().requires_grad_()
    d, found = step(module if backend is None else torch.compile(module, backend=backend, fullgraph=True), given)
    assert (d.dtype, found[1].dtype) == (torch.float32, torch.float32)
    exact_d, exact = step(as_pytorch(module), [v.detach().double().requires_grad_() for v in given])
    close(d, exact_d)
    for g, y in zip(found, exact, strict=True):
        close(g, y)
    with torch.no_grad(), torch.autocast("cpu", BF16):
        assert module(x.float(), residual=given[1]).dtype is torch.float32
        assert module(x, residual=residual).dtype is BF16


def test_a_step_with_a_scaler_and_checkpoints():
    torch.manual_seed(0)
    module = nn.Sequential(co.nn.MLP(K, HIDDEN), co.nn.GatedMLP(K, HIDDEN))
    optimizer, scaler = torch.optim.SGD(module.parameters(), 0.01), torch.amp.GradScaler("cpu", init_scale=1024.0)
    x, before = torch.randn(8, K), copy.deepcopy(module)

    def loss(m, checkpointed):
        run = torch.utils.checkpoint.checkpoint if checkpointed else lambda f, x, **_: f(x)
        with torch.autocast("cpu", torch.float16):
            return run(m, x, use_reentrant=False).float().square().mean()

    scaler.scale(loss(module, True)).backward()
    grads = [p.grad.clone() / 1024.0 for p in module.parameters()]
    wanted = torch.autograd.grad(loss(before, False), list(before.parameters()))
    for g, y in zip(grads, wanted, strict=True):
        close(g, y.double(), 0.02)
    scaler.step(optimizer)
    scaler.update()
    assert not any(map(torch.equal, module.parameters(), before.parameters()))


def test_what_is_refused():
    with pytest.raises(ValueError, match="activation is 'swish': use one of none, relu, gelu"):
        co.nn.Linear(K, N, activation="swish")
    with pytest.raises(ValueError, match="num_heads is 4, num_kv_heads 3 and head_dim 8"):
        co.nn.DecoderBlock(32, 64, num_heads=4, num_kv_heads=3)
    with pytest.raises(ValueError, match=r"a \(8, 15\) and b \(16, 24\)"):
        co.nn.Linear(K, N, dtype=BF16)(torch.zeros(8, 15, dtype=BF16))


@pytest.mark.parametrize(("name", "gpu"), in_turn(MODULES, (H100, A100)))
def test_kernels_serve_a_module_s_step(name, gpu, device):
    device.device = gpu
    module, given = made(name, rows=(8, 8))
    first = step(module, given)
    launched = len(device.launches)
    device.closed = True
    again = step(module, given)
    assert len(device.launches) == 2 * launched > 0
    assert torch.equal(first[0], again[0])
    with torch.no_grad():
        device.closed = False
        close(call(module, given), first[0].double(), 0.01)


@pytest.mark.parametrize("biased", [False, True])
def test_a_gate_s_op_is_one_kernel_on_hopper_and_two_before(biased, device):
    op = gated_op("gelu", biased=biased)
    assert gated_op("silu") is not op
    x, w, up = (torch.randn(s).to(BF16) for s in ((64, 64), (128, 64), (128, 64)))
    biases = [torch.randn(128).to(BF16) for _ in range(2 * biased)]
    first = op(x, w.t(), up.t(), *biases)
    assert len(device.launches) == 1
    device.device = A100
    other = pickle.loads(pickle.dumps(op))
    op._plans.clear()
    close(other(x, w.t(), up.t(), *biases), first.double(), 0.01)
    assert len(device.launches) == 3


def test_importing_the_library_does_not_import_its_modules():
    found = run_with_pytorch(
        "import sys, cutlass_ops as co\n"
        "assert not [name for name in sys.modules if name.startswith('cutlass_ops.nn')]\n"
        "assert co.nn.Linear(8, 8).weight.shape == (8, 8)\n"
        "assert 'transformers' not in sys.modules\n"
    )
    assert (found.returncode, found.stderr) == (0, "")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_package_of_aotinductors_needs_only_this_library(tmp_path):
    module = nn.Sequential(modules.made("swiglu", BF16, "cpu"), modules.made("rmsnorm", BF16, "cpu"))
    found, x = modules.packaged(module, "cpu", tmp_path)
    assert (found - module(x)).norm() <= 0.01 * found.norm()
