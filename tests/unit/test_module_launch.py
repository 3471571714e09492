"""Prepared launches of modules: the bits of a call, and an error if the module would compute something else."""

import copy
import pickle

import pytest
import torch
from test_launch import Counting
from torch import nn
from torch.nn.utils import parametrizations

import cutlass_ops as co
from tests.sampling import in_turn

BF16 = torch.bfloat16
ROWS, WIDTH = 24, 64
DRAW = {"dtype": BF16}


@co.epilogue
def mixed(acc, factor: co.Scalar, other: co.Tile):
    return co.e.tanh(acc) * factor + other


def draw(*shape):
    return torch.randn(*shape).to(BF16)


# A module, what it takes besides x, and how many kernels it is.
MODULES = {
    "Linear": (lambda: co.nn.Linear(WIDTH, 40, activation="gelu", **DRAW), {}, 1),
    "residual": (lambda: co.nn.Linear(WIDTH, 40, **DRAW), {"residual": (ROWS, 40)}, 1),
    "epilogue": (lambda: co.nn.Linear(WIDTH, 40, epilogue=mixed, **DRAW), {"factor": 0.5, "other": (ROWS, 40)}, 1),
    "MLP": (lambda: co.nn.MLP(WIDTH, 96, **DRAW), {"residual": (ROWS, WIDTH)}, 2),
    "GatedMLP": (lambda: co.nn.GatedMLP(WIDTH, 96, **DRAW), {}, 2),
    "biased gate": (lambda: co.nn.GatedMLP(WIDTH, 96, bias=True, **DRAW), {"residual": (ROWS, WIDTH)}, 2),
    "RMSNormLinear": (lambda: co.nn.RMSNormLinear(WIDTH, 40, activation="silu", **DRAW), {}, 1),
    "folded": (lambda: co.nn.RMSNormLinear(WIDTH, 40, bias=True, **DRAW).fold(), {}, 1),
    "LayerNormLinear": (lambda: co.nn.LayerNormLinear(WIDTH, 40, **DRAW).fold(), {}, 1),
    "patched": (lambda: co.patch(nn.Linear(WIDTH, 40, **DRAW), verbose=False), {}, 1),
}


def made(name):
    torch.manual_seed(0)
    make, others, _ = MODULES[name]
    named = {n: draw(*of) if isinstance(of, tuple) else of for n, of in others.items()}
    return make().requires_grad_(False), draw(ROWS, WIDTH), named


@torch.no_grad()
def called(module, x, named=None):
    return module(x, **(named or {})).clone()


@pytest.mark.parametrize("name", MODULES)
def test_the_bits_are_those_of_a_call_and_other_tensors_serve_one(name, device):
    module, x, named = made(name)
    wanted = called(module, x, named)
    launch = module.prepare(x, **named)
    launch.results.fill_(7)
    device.launches.clear()
    assert launch() is launch.results
    assert torch.equal(launch.results, wanted)
    assert [each.spec for each in device.launches] == [each.spec for each in launch.launches]
    assert len(device.launches) == MODULES[name][2]
    x.copy_(draw(*x.shape))
    assert torch.equal(launch(), called(module, x, named))

    before = launch().clone()
    others = {n: draw(*t.shape) for n, t in named.items() if isinstance(t, torch.Tensor)}
    other = draw(*x.shape)
    assert torch.equal(launch(other, **others), called(module, other, named | others))
    assert torch.equal(launch(other), called(module, other, named))
    assert torch.equal(launch(**others), called(module, x, named | others))
    assert torch.equal(launch(), before)


def test_a_layernorm_is_folded_for_a_launch(device):
    module, x = co.nn.LayerNormLinear(WIDTH, 40, **DRAW).requires_grad_(False), draw(ROWS, WIDTH)
    launch = module.prepare(x)
    assert len(launch.launches) == 1
    assert torch.equal(launch(), called(copy.deepcopy(module).fold(), x))
    with torch.no_grad():
        module.norm.weight.mul_(2)
    with pytest.raises(ValueError, match="was written after the launch was prepared"):
        launch()


def test_on_the_cpu_pytorch_computes():
    for name in MODULES:
        module, x, named = made(name)
        launch = module.prepare(x, **named)
        assert torch.equal(launch(x * 2), called(module, x * 2, named))
        assert launch.launches[0].spec is None


def test_x_may_be_the_residual_and_have_more_dimensions(device):
    module, x = co.nn.MLP(WIDTH, 96, **DRAW).requires_grad_(False), draw(2, 12, WIDTH)
    launch, other = module.prepare(x, residual=x), draw(2, 12, WIDTH)
    assert torch.equal(launch(), called(module, x, {"residual": x}))
    assert torch.equal(launch(other), called(module, other, {"residual": x}))
    assert torch.equal(launch(other, residual=other), called(module, other, {"residual": other}))
    column = draw(WIDTH, 12).t()
    launch = module.prepare(column)
    assert torch.equal(launch(draw(WIDTH, 12).t()), launch.results)


# ---- What has changed ------------------------------------------------------------------------------------------------


def replace_parameter(m):
    m.linear.weight = nn.Parameter(m.linear.weight.clone(), requires_grad=False)


def replace_layer(m):
    m.linear = copy.deepcopy(m.linear)


def move(m):
    m.float()


def cut(m):
    m.linear.weight.data = m.linear.weight.data[:8]


def write(m):
    m.norm.weight.mul_(2)


def hook(m):
    m.linear.register_forward_hook(lambda *_: None)


def other_forward(m):
    m.forward = lambda x: x


def parametrise(m):
    parametrizations.weight_norm(m.linear)


CHANGES = {
    replace_parameter: "linear.weight of RMSNormLinear is another one than when the launch was prepared",
    replace_layer: "linear of RMSNormLinear is another one",
    move: "linear.weight of RMSNormLinear (has other memory|was written)|norm.weight of RMSNormLinear",
    cut: "linear.weight of RMSNormLinear has other memory, or another shape",
    write: "norm.weight of RMSNormLinear was written after the launch was prepared, which has a copy of it",
    hook: "RMSNormLinear has a hook now",
    other_forward: "the forward of RMSNormLinear is another one",
    parametrise: "is another one than when",
}


@pytest.mark.parametrize(("change", "folds"), in_turn(CHANGES, (False, True)))
def test_a_change_of_the_module_is_an_error(change, folds, device):
    module = co.nn.RMSNormLinear(WIDTH, 40, **DRAW).requires_grad_(False)
    x, launch = draw(ROWS, WIDTH), (module.fold() if folds else module).prepare(draw(ROWS, WIDTH))
    launch()
    change(module)
    device.launches.clear()
    for call in (launch, lambda: launch(x)):
        with pytest.raises(ValueError, match=CHANGES[change]) as raised:
            call()
        assert str(raised.value).endswith("prepare another launch, or call the module")
    assert device.launches == []


def test_hooks_of_all_modules_are_an_error(device):
    module, x, _ = made("Linear")
    launch = module.prepare(x)
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        with pytest.raises(ValueError, match="Linear has a hook now"):
            launch()
        with pytest.raises(ValueError, match="all modules have a hook"):
            module.prepare(x)
    finally:
        handle.remove()
    launch()


def test_a_dropout_that_may_not_be_left_out(device):
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_embd=WIDTH, resid_pdrop=0.1)
    module = transformers.models.gpt2.modeling_gpt2.GPT2MLP(4 * WIDTH, config).to(BF16).requires_grad_(False)
    module, x = co.patch(module, verbose=False), draw(ROWS, WIDTH)
    with pytest.raises(NotImplementedError, match="GPT2MLP calls PyTorch's"):
        module.train().prepare(x)
    launch = module.eval().prepare(x)
    assert torch.equal(launch(), called(module, x))
    module.train()
    with pytest.raises(ValueError, match="the mode of dropout of GPT2MLP is another one"):
        launch()


def test_x_that_has_moved_is_followed(device):
    module, x, _ = made("MLP")
    launch = module.prepare(x)
    x.data = draw(*x.shape)
    assert torch.equal(launch(), called(module, x))
    x.data = x.data[:8]
    with pytest.raises(ValueError, match=r"x has shape torch.Size\(\[8, 64\]\), and the launch was prepared for"):
        launch()


WRONG = {
    "shape": (lambda x: x[:8], ValueError, "x has shape"),
    "stride": (lambda x: x.t().contiguous().t(), ValueError, "x has stride"),
    "dtype": (lambda x: x.half(), TypeError, "x has dtype torch.float16, and the launch was prepared for"),
    "device": (lambda x: x.to("meta"), ValueError, "x has device meta"),
    "gradient": (lambda x: x.clone().requires_grad_(), ValueError, "x requires grad"),
    "negation": (torch._neg_view, ValueError, "x is a lazy negation"),
    "no tensor": (lambda x: 1.0, TypeError, "x must be a torch.Tensor, not float"),
}


@pytest.mark.parametrize(("change", "kind", "message"), WRONG.values(), ids=WRONG)
def test_another_x_must_lie_alike(change, kind, message, device):
    module, x, _ = made("GatedMLP")
    launch = module.prepare(x)
    device.launches.clear()
    with pytest.raises(kind, match=message):
        launch(change(x))
    with pytest.raises(TypeError, match="mask is unknown to the launch of GatedMLP, which takes x"):
        launch(mask=x)
    assert device.launches == []


# ---- Gradients, autocast, modes --------------------------------------------------------------------------------------


def test_gradients_are_refused_where_they_would_be_recorded(device):
    module, x, _ = made("MLP")
    module.train().requires_grad_()
    with pytest.raises(ValueError, match=r"fc1.weight of MLP requires grad, and this has no backward"):
        module.prepare(x)
    with torch.no_grad():
        launch = module.prepare(x)
    assert all(len(each.spec.outputs) == 0 for each in launch.launches)  # nothing is stored for a backward
    with pytest.raises(ValueError, match=r"fc1.weight of MLP requires grad"):
        launch()
    with torch.inference_mode():
        assert torch.equal(launch(), called(module, x))
    module.requires_grad_(False)
    launch()
    x.requires_grad_()
    with pytest.raises(ValueError, match="x requires grad"):
        launch()


def test_autocast_matters_for_the_preparation(device):
    module, x = co.nn.MLP(WIDTH, 96).requires_grad_(False), draw(ROWS, WIDTH)
    with torch.autocast("cpu", BF16):
        wanted = called(module, x)
        launch = module.prepare(x)
        with pytest.raises(NotImplementedError, match=r"MLP calls PyTorch's _to_copy .*in the weights' dtype"):
            module.prepare(x.float())
    assert torch.equal(launch(), wanted)
    module.fc2.weight.mul_(2)  # FP32: the launch has a copy in BF16
    with pytest.raises(ValueError, match=r"fc2.weight of MLP was written"):
        launch()


def test_modes_are_refused(device):
    module, x, _ = made("Linear")
    launch = module.prepare(x)
    for call in (launch, lambda: launch(x), lambda: module.prepare(x)):
        with Counting(), pytest.raises(NotImplementedError, match="a mode is active"):
            call()


def test_a_launch_is_captured_and_none_is_prepared_in_a_capture(device, monkeypatch):
    module, x, _ = made("MLP")
    launch = module.prepare(x)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    device.launches.clear()
    launch()
    assert len(device.launches) == 2
    with pytest.raises(NotImplementedError, match="the stream is being captured into a CUDA graph"):
        module.prepare(x)


# ---- What is no launch -----------------------------------------------------------------------------------------------


class Two(co.nn.Linear):
    def forward(self, x):
        return super().forward(x), x


REFUSED = {
    "FP32": (lambda: co.nn.Linear(WIDTH, 40), lambda: torch.randn(ROWS, WIDTH), "calls PyTorch's addmm for this input"),
    "attention": (
        lambda: co.nn.DecoderBlock(WIDTH, 96, num_heads=4, **DRAW),
        lambda: draw(1, ROWS, WIDTH),
        "DecoderBlock calls PyTorch's .* prepare a module inside this one",
    ),
    "a copy of x": (
        lambda: co.nn.Linear(WIDTH, 40, **DRAW),
        lambda: draw(4, 2, WIDTH).transpose(0, 1),
        "calls PyTorch's clone for this input.*pass contiguous tensors",
    ),
    "two results": (lambda: Two(WIDTH, 40, **DRAW), lambda: draw(ROWS, WIDTH), "does not return one tensor"),
}


@pytest.mark.parametrize(("make", "x", "message"), REFUSED.values(), ids=REFUSED)
def test_what_pytorch_computes_is_refused(make, x, message, device):
    with pytest.raises(NotImplementedError, match=message):
        make().requires_grad_(False).prepare(x())


def test_hooks_and_parameters_that_are_no_memory_are_refused(device):
    module, x, _ = made("MLP")
    module.fc2.register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match="fc2 of MLP has a hook or another forward"):
        module.prepare(x)
    with torch.inference_mode():
        module = co.nn.RMSNormLinear(WIDTH, 40, **DRAW)
    with torch.no_grad(), pytest.raises(ValueError, match=r"norm.weight of RMSNormLinear was created inside"):
        module.prepare(x)


def test_the_object(device):
    module, x, _ = made("Linear")
    launch = module.prepare(x)
    assert repr(launch) == f"<launch of Linear: {launch.launches[0]!r}>"
    for make in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="cannot be copied or pickled"):
            make(launch)
    with pytest.raises(AttributeError):
        launch.results = None
