"""Modules on the CPU: results, gradients and state_dicts against PyTorch's, and what else is done with modules."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
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
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "hardswish": F.hardswish,
    "leaky_relu": F.leaky_relu,
    "mish": F.mish,
    "relu2": lambda x: F.relu(x).square(),
    "relu6": F.relu6,
    "softplus": F.softplus,
}


def plus(d, residual):
    return d if residual is None else d + residual


def as_pytorch(module):
    """The same module in FP64, with PyTorch's forwards."""
    other = copy.deepcopy(module).double()
    for each in other.modules():
        activation = FUNCTIONS[getattr(each, "activation", None) or "none"]
        if isinstance(each, co.nn.Linear):
            each.forward = lambda x, residual=None, m=each, f=activation: plus(
                f(F.linear(x, m.weight, m.bias)), residual
            )
        elif isinstance(each, co.nn.MLP):
            each.forward = lambda x, residual=None, m=each, f=activation: plus(m.fc2(f(m.fc1(x))), residual)
        elif isinstance(each, co.nn.GatedMLP):
            each.forward = lambda x, residual=None, m=each, f=activation: plus(
                m.down_proj(f(m.gate_proj(x)) * m.up_proj(x)), residual
            )
        elif isinstance(each, co.nn.RMSNormLinear | co.nn.LayerNormLinear):
            each.forward = lambda x, m=each, f=activation: f(m.linear(m.norm(x)))
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
    # PyTorch rounds the gradient of a LayerNorm's result, from which those of gamma and beta are, and adds up in BF16.
    allowed = 0.1 if name == "layernorm" else 0.015
    for x, y in zip(found, exact, strict=True):
        close(x, y, allowed)
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


@pytest.mark.slow
@pytest.mark.parametrize(("name", "backend"), [*((n, "aot_eager") for n in MODULES), ("swiglu", "inductor")])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # PyTorch's own
def test_modules_compile_as_one_graph_forward_and_backward(name, backend):
    torch._dynamo.reset()
    module, given = made(name)
    d, wanted = step(module, given)
    compiled = torch.compile(module, backend=backend, fullgraph=True)
    found_d, found = step(compiled, given)
    for x, y in zip([found_d, *found], [d, *wanted], strict=True):
        close(x, y.double(), 0.01)
    with torch.no_grad():
        other, inference = call(module, given), call(torch.compile(module, backend=backend, fullgraph=True), given)
    close(inference, other.double(), 0.01)
    # The same ops run. By itself, an activation reads what a GEMM has rounded, and gives other bits.
    assert backend == "inductor" or (torch.equal(found_d, d) and torch.equal(inference, other))


@pytest.mark.slow
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
def test_a_module_is_copied_pickled_begun_on_meta_and_moved(name):
    module, given = made(name)
    begun = MODULES[name][0](device="meta")
    assert all(p.is_meta for p in begun.parameters())
    begun = begun.to_empty(device="cpu").to(BF16)
    begun.load_state_dict(module.state_dict())
    with torch.no_grad():
        wanted = call(module, given)
        for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module)), begun):
            assert torch.equal(call(other, given), wanted)
            assert all(x is not y for x, y in zip(other.parameters(), module.parameters(), strict=True))
        half = copy.deepcopy(module).half()
        assert call(half, [x.half() for x in given]).dtype is torch.float16


@pytest.mark.parametrize("name", MODULES)
def test_a_module_begun_on_meta_is_reset_as_pytorch_s_are(name):
    """As FSDP and torchtitan do: each module with a ``reset_parameters`` is reset once it has memory."""
    begun = MODULES[name][0](device="meta").to_empty(device="cpu")
    for p in begun.parameters():
        p.data.fill_(float("nan"))
    for each in begun.modules():
        if hasattr(each, "reset_parameters"):
            each.reset_parameters()
    assert all(p.isfinite().all() for p in begun.parameters())


@pytest.mark.parametrize("name", MODULES)
def test_a_module_takes_the_tensors_of_another_dtype(name):
    module, given = made(name)
    wide = copy.deepcopy(module).float()
    module.load_state_dict(copy.deepcopy(wide).state_dict(), assign=True)
    assert all(p.dtype is torch.float32 for p in module.parameters())
    with torch.no_grad():
        assert torch.equal(call(module, [x.float() for x in given]), call(wide, [x.float() for x in given]))


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
    torch.manual_seed(0)
    mine = co.nn.Linear(K, N, activation="relu")
    torch.manual_seed(0)
    assert torch.equal(mine.weight, nn.Linear(K, N).weight)
    assert "in_features=16, out_features=24, bias=True, activation='relu'" in repr(mine)


def test_autocast_casts_what_f_linear_casts():
    torch.manual_seed(0)
    module = nn.Sequential(co.nn.Linear(K, N, activation="gelu"), co.nn.MLP(N, HIDDEN), co.nn.RMSNormLinear(N, N))
    module.append(co.nn.GatedMLP(N, HIDDEN)).append(co.nn.LayerNormLinear(N, N))
    x = torch.randn(8, K)
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
    with torch.autocast("cpu", BF16, enabled=False):
        assert module(x).dtype is torch.float32


@pytest.mark.sample(5)
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


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_other_dtypes_are_pytorch_s(name, dtype):
    """By F.linear and PyTorch's activations, forward and backward."""
    module, given = made(name, dtype)
    d, found = step(module, given)
    exact_d, exact = step(as_pytorch(module), [x.detach().double().requires_grad_() for x in given])
    assert d.dtype is dtype
    for x, y in zip((d, *found), (exact_d, *exact), strict=True):
        close(x, y, 1e-5 if dtype is torch.float32 else 1e-12)


# ---- Activations and epilogues ---------------------------------------------------------------------------------------


def test_names_mean_what_they_do_in_hugging_face():
    activations = pytest.importorskip("transformers.activations").ACT2FN
    x = torch.linspace(-9, 9, 500)
    named = {*epilogues.ALIASES, *epilogues.ACTIVATIONS} & set(activations)
    assert {"gelu_new", "gelu_pytorch_tanh", "quick_gelu", "silu", "swish", "relu2", "linear"} <= named
    for name in named:
        function = epilogues.ACTIVATIONS[epilogues.known(name)].function
        torch.testing.assert_close(function(x), activations[name](x), rtol=1e-5, atol=1e-5)


@co.epilogue
def scaled(acc, gain: co.Row, offset: co.Tile, factor: co.Scalar):
    return co.e.tanh(acc * gain) * factor + offset


@pytest.mark.parametrize("dtype", [BF16, torch.float32, torch.float64])
@pytest.mark.parametrize("bias", [False, True])
def test_a_layer_has_an_epilogue(dtype, bias):
    torch.manual_seed(0)
    layer = co.nn.Linear(K, N, bias, dtype=dtype, epilogue=scaled)
    x, gain, offset, residual = (torch.randn(s).to(dtype) for s in ((2, 4, K), (N,), (2, 4, N), (2, 4, N)))
    given = [v.requires_grad_() for v in (x, gain, offset, residual, *layer.parameters())]
    d = layer(x, gain=gain, offset=offset, factor=0.5, residual=residual)
    wide = [v.detach().double().requires_grad_() for v in given]
    exact = torch.tanh(F.linear(wide[0], wide[4], wide[5] if bias else None) * wide[1]) * 0.5 + wide[2] + wide[3]
    close(d, exact)
    grad = torch.randn(d.shape, dtype=torch.float64)
    for found, wanted in zip(
        torch.autograd.grad(d, given, grad.to(dtype)), torch.autograd.grad(exact, wide, grad), strict=True
    ):
        close(found, wanted, 0.02)
    assert repr(layer).endswith("epilogue=scaled)")
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(other(x, gain=gain, offset=offset, factor=0.5, residual=residual), d)


def test_an_epilogue_that_does_not_fit_says_what_to_do():
    @co.epilogue
    def biased(acc, bias: co.Row):
        return acc + bias

    @co.epilogue
    def noted(acc):
        return {"d": acc, "most": co.e.amax(acc, dim=1)}

    layer, x = co.nn.Linear(K, N, dtype=BF16, epilogue=scaled), torch.randn(4, K).to(BF16)
    for call, kind, said in (
        (
            lambda: co.nn.Linear(K, N, epilogue=torch.relu),
            TypeError,
            r"^epilogue must be a function with @co\.epilogue",
        ),
        (lambda: co.nn.Linear(K, N, epilogue=scaled, activation="relu"), TypeError, "^activation is 'relu', and there"),
        (lambda: co.nn.Linear(K, N, epilogue=biased), ValueError, "^epilogue has an input bias, which the layer adds"),
        (lambda: co.nn.Linear(K, N, epilogue=noted), ValueError, r"^epilogue has the outputs d, most, .*call co\.gemm"),
        (lambda: layer(x), TypeError, "^factor is missing: besides x and residual=, this layer takes gain, offset"),
        (lambda: layer(x, other=1), TypeError, "^factor is missing"),
        (lambda: co.nn.Linear(K, N, dtype=BF16)(x, scale=2), TypeError, "^scale is no input: .* takes nothing by name"),
    ):
        with pytest.raises(kind, match=said):
            call()


def test_what_is_refused():
    for wrong in ("swiss", F.gelu):
        with pytest.raises(ValueError, match=r"^activation is .*: use one of none, relu, gelu.*swish.*epilogue="):
            co.nn.MLP(K, N, activation=wrong)
    for arguments, said in (
        ((32, 64, 4, 3), "num_heads is 4, num_kv_heads 3 and head_dim 8"),
        ((32, 64, 4, 0), "num_kv_heads 0"),
        ((32, 64, 3), "num_heads is 3, num_kv_heads 3 and head_dim 10.6667"),
        ((32, 64, 4, 4, 0), "head_dim 0"),
        ((32, 64, 0), "num_heads is 0"),
    ):
        with pytest.raises(ValueError, match=said):
            co.nn.DecoderBlock(*arguments)
    with pytest.raises(AttributeError):
        co.nn.Linear(K, N, activation="relu").activation = "silu"
    with pytest.raises(ValueError, match=r"a \(8, 15\) and b \(16, 24\)"):
        co.nn.Linear(K, N, dtype=BF16)(torch.zeros(8, 15, dtype=BF16))


@pytest.mark.sample(7)
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


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_package_of_aotinductors_needs_only_this_library(tmp_path):
    module = nn.Sequential(modules.made("swiglu", BF16, "cpu"), modules.made("rmsnorm", BF16, "cpu"))
    found, x = modules.packaged(module, "cpu", tmp_path)
    assert (found - module(x)).norm() <= 0.01 * found.norm()
