"""What modules make of their operands: strides of any kind, and gradients that are added to main_grad."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from test_module_changes import close
from torch import nn
from torch.nn.utils import parametrize

import cutlass_ops as co
from tests.sampling import in_turn

BF16 = torch.bfloat16
K, HIDDEN = 16, 32


def drawn(*shape):
    return torch.randn(shape).to(BF16)


# Tensors (..., K) that no view folds into rows.
STRIDES = {
    "transposed": lambda: drawn(4, 3, K).transpose(0, 1),
    "sliced": lambda: drawn(3, 5, K)[:, 1:],
    "last_tokens": lambda: drawn(2, 12, K)[:, -3:, :],
    "image": lambda: drawn(2, K, 3, 4).flatten(2).transpose(1, 2),
    "permuted": lambda: drawn(2, 3, 4, K).permute(1, 2, 0, 3),
    "expanded": lambda: drawn(1, 4, K).expand(3, 4, K),
    "expanded_rows": lambda: drawn(1, K).expand(6, K),
    "every_second": lambda: drawn(3, 4, 2 * K)[..., ::2],
    "columns": lambda: drawn(K, 6).t(),
    "columns_of_one": lambda: drawn(1, K, 6).mT,
    "part_of_a_row": lambda: drawn(6, 2 * K)[:, K:],
    "vector": lambda: drawn(K),
}
MODULES = {
    "linear": lambda: co.nn.Linear(K, K, activation="gelu", dtype=BF16),
    "mlp": lambda: co.nn.MLP(K, HIDDEN, dtype=BF16),
    "gated": lambda: co.nn.GatedMLP(K, HIDDEN, dtype=BF16),
    "rmsnorm": lambda: co.nn.RMSNormLinear(K, K, dtype=BF16),
    "layernorm": lambda: co.nn.LayerNormLinear(K, K, dtype=BF16),
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("strides", [s for s in STRIDES if s != "vector"])
@pytest.mark.parametrize("name", MODULES)
def test_operands_of_any_strides(name, strides):
    torch.manual_seed(0)
    module, x = MODULES[name](), STRIDES[strides]().requires_grad_()
    named = {} if "norm" in name else {"residual": STRIDES[strides]().requires_grad_()}
    found, wanted = module(x, **named), module(x.contiguous(), **{n: v.contiguous() for n, v in named.items()})
    close(found, wanted, 1e-6)
    given, grad = [x, *named.values(), *module.parameters()], torch.randn_like(found)
    for p, q in zip(torch.autograd.grad(found, given, grad), torch.autograd.grad(wanted, given, grad), strict=True):
        close(p, q, 0.01)
    with torch.no_grad():
        close(module(x, **named), wanted, 0.01)


class Strided(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.how = how

    def forward(self, weight):
        if self.how == "expanded":
            return weight[:1].expand(weight.shape)
        return torch.stack((weight, weight), -1)[..., 0]


@pytest.mark.parametrize("how", ["expanded", "strided"])
@pytest.mark.parametrize("of", ["weight", "bias"])
def test_a_parametrization_may_return_any_strides(how, of):
    torch.manual_seed(0)
    x = drawn(6, K)
    for layer in (co.nn.Linear(K, HIDDEN, dtype=BF16), nn.Linear(K, HIDDEN, dtype=BF16)):
        model = nn.Sequential(layer)
        co.patch(model)
        parametrize.register_parametrization(layer, of, Strided(how))
        assert not getattr(layer, of).is_contiguous()
        close(model(x), F.linear(x, layer.weight, layer.bias))


# ---- main_grad -------------------------------------------------------------------------------------------------------


def patched():
    model = nn.Sequential(nn.Linear(K, K, dtype=BF16))
    co.patch(model)
    return model


MAIN = {**MODULES, "patched": patched}


def added(module, x, run, *, dtype=torch.float32):
    """The main_grads of matrices after a step, each 1 before it; no matrix has a grad."""
    matrices = [p for p in module.parameters() if p.ndim == 2]
    for p in matrices:
        p.main_grad = torch.ones_like(p, dtype=dtype)
    run(x).float().square().sum().backward()
    assert all(p.grad is None for p in matrices)
    assert all(p.grad is not None for p in module.parameters() if p.ndim == 1)
    found = [p.main_grad - 1 for p in matrices]
    for p in module.parameters():
        p.grad = None
        if p.ndim == 2:
            del p.main_grad
    return found


def wanted(module, x):
    matrices = [p for p in module.parameters() if p.ndim == 2]
    return torch.autograd.grad(module(x).float().square().sum(), matrices)


@pytest.mark.parametrize("turned", ["gate_proj", "up_proj"])
def test_gradients_of_a_gate_whose_weights_lie_in_different_ways_are_added(turned):
    torch.manual_seed(0)
    module, x = MODULES["gated"](), drawn(6, K)
    layer = module.get_submodule(turned)
    layer.weight = nn.Parameter(layer.weight.detach().t().contiguous().t())
    grads = wanted(module, x)
    for p in module.parameters():
        p.main_grad = torch.ones(p.shape)
    d = module(x)
    d.float().square().sum().backward()
    for p, grad in zip(module.parameters(), grads, strict=True):
        assert p.grad is None
        close(p.main_grad - 1, grad)
    close(module.requires_grad_(False)(x), d)  # nothing is recorded, so that one kernel reads copies


@pytest.mark.sample(5)
@pytest.mark.parametrize("name", MAIN)
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # PyTorch's own, where its graph ends
def test_gradients_of_modules_are_added_to_main_grad(name, compiled):
    torch.manual_seed(0)
    module, x = MAIN[name](), drawn(8, K)
    exact = wanted(module, x)
    torch._dynamo.reset()
    run = torch.compile(module, backend="aot_eager") if compiled else module
    for found, y in zip(added(module, x, run), exact, strict=True):
        close(found, y)


@pytest.mark.parametrize(("name", "dtype"), in_turn(MODULES, (torch.float32, BF16)))
def test_gradients_of_fp32_parameters_are_added_to_main_grad_under_autocast(name, dtype):
    torch.manual_seed(0)
    module, x = MODULES[name]().float(), torch.randn(8, K)
    with torch.autocast("cpu", BF16):
        exact = wanted(module, x)
        for found, y in zip(added(module, x, module, dtype=dtype), exact, strict=True):
            close(found, y)


def test_a_whole_graph_has_no_main_grad():
    torch._dynamo.reset()
    module, x = MODULES["linear"](), drawn(8, K)
    module.weight.main_grad = torch.zeros(K, K)
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        close(compiled(x), module(x))
    with pytest.raises(Exception, match="add_to_main_grad"):
        compiled(x)


@pytest.mark.parametrize("name", ["linear", "mlp", "gated"])
@pytest.mark.parametrize("residual", [1.0, [0.0] * K], ids=["a number", "a list"])
def test_a_residual_that_is_no_tensor_is_named(name, residual):
    with pytest.raises(TypeError, match=r"^residual must be a torch\.Tensor, not"):
        MODULES[name]()(drawn(3, K), residual=residual)
