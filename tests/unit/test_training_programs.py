"""Programs that are trained: compiled, exported and traced, with gradients or without."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import cutlass_ops as co

BF16 = torch.bfloat16


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [True])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # its own
def test_inductor_compiles_forward_and_backward(dynamic):
    torch._dynamo.reset()
    torch.manual_seed(0)

    def loss(a, weight, bias):
        return co.gemm_bias_relu(a * 2, weight.t(), bias).float().square().sum()

    compiled = torch.compile(loss, fullgraph=True, dynamic=dynamic)
    for m in (7, 9):
        given = [torch.randn(s).to(BF16).requires_grad_() for s in ((m, 16), (8, 16), (8,))]
        found, wanted = (torch.autograd.grad(f(*given), given) for f in (compiled, loss))
        for x, y in zip(found, wanted, strict=True):
            torch.testing.assert_close(x, y)


def test_a_compiler_sees_the_operators_of_forward_and_backward_only():
    def step(a, weight, bias):
        d = co.gemm_bias_relu(a, weight.t(), bias)
        return torch.autograd.grad(d, [a, weight, bias], torch.ones_like(d))

    given = [torch.randn(s).to(BF16).requires_grad_() for s in ((7, 16), (8, 16), (8,))]
    graph = make_fx(step)(*given)
    called = [n.target for n in graph.graph.nodes if "cutlass_ops" in str(n.target)]
    # Forward, dA, dW: the elementwise part between them is PyTorch's, which its compiler fuses.
    assert called == [torch.ops.cutlass_ops.fused_gemm.default] * 3
    assert all(map(torch.equal, graph(*(x.detach() for x in given)), step(*given)))


@pytest.mark.sample(4)
@pytest.mark.filterwarnings("ignore::FutureWarning")  # PyTorch's own
@pytest.mark.parametrize("decomposed", [False, True])
@pytest.mark.parametrize("recorded", [False, True])
def test_exported_programs_have_gradients(recorded, decomposed):
    """Whether autograd records is a question of the call, not of the export."""

    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(16, 16, dtype=BF16)
            self.mlp = co.nn.MLP(16, 32, dtype=BF16)

        def forward(self, x):
            return self.mlp(co.gemm_bias_gelu(x, self.linear.weight.t(), self.linear.bias))

    layer, x = Layer(), torch.randn(4, 16).to(BF16)
    with torch.set_grad_enabled(recorded):
        program = torch.export.export(layer, (x,))
        program = program.run_decompositions() if decomposed else program
    called = [n.target.name() for n in program.graph.nodes if "cutlass_ops" in str(n.target)]
    chain = ["fused_gemm"] * 2 if decomposed else ["fused_chain_grad"]
    assert called == [f"cutlass_ops::{name}" for name in ("fused_gemm", *chain)]
    module = program.module()
    with torch.no_grad():
        assert torch.equal(module(x), layer(x))
    module(x).float().square().sum().backward()
    layer(x).float().square().sum().backward()
    for found, wanted in zip(module.parameters(), layer.parameters(), strict=True):
        assert torch.equal(found.grad, wanted.grad)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # PyTorch's own
@pytest.mark.parametrize("compiled", [False, True])
def test_autograd_may_be_compiled_where_the_forward_is_not(compiled):
    torch._dynamo.reset()
    module, x = co.nn.GatedMLP(16, 32, dtype=BF16), torch.randn(4, 16).to(BF16)
    parameters = list(module.parameters())
    wanted = torch.autograd.grad(module(x).float().sum(), parameters)
    forward = torch.compile(module, backend="aot_eager") if compiled else module
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager")):
        forward(x).float().sum().backward()
    assert all(torch.equal(p.grad, g) for p, g in zip(parameters, wanted, strict=True))


@pytest.mark.slow
def test_a_compiled_function_notices_whether_it_may_store():
    graphs = []

    def noted(graph, _):
        graphs.append(["fused_gemm_grad" in str(n.target) for n in graph.graph.nodes if "fused" in str(n.target)])
        return graph

    function = torch.compile(lambda a, w, bias: co.gemm_bias_gelu(a, w.t(), bias), backend=noted, fullgraph=True)
    given = [torch.randn(s).to(BF16).requires_grad_() for s in ((7, 16), (8, 16), (8,))]
    for _ in range(2):
        function(*given)
        with co.recompute():
            function(*given)
    assert graphs == [[False], [True]]

    def inside(a, w, bias):
        with co.recompute():
            d = co.gemm_bias_gelu(a, w.t(), bias)
        return co.gemm_bias_gelu(d, w, a[:1, :].detach())

    graphs.clear()
    torch.compile(inside, backend=noted, fullgraph=True)(*given)
    assert graphs == [[True, False]]
