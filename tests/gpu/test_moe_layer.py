"""The mixture of experts of examples/moe_layer.py on the device: its error, CUDA graphs and torch.compile."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tests.gpu import tensors
from tests.scripts import EXAMPLES, script

pytestmark = [
    pytest.mark.gpu,
    # Threads that build kernels are the first to use the device.
    pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS:UserWarning"),
]

HIDDEN = 512
SIZES = {
    "qwen3": {"hidden_size": HIDDEN, "moe_intermediate_size": 192, "num_experts": 128},
    "mixtral": {"hidden_size": HIDDEN, "intermediate_size": 1024},
}
TOKENS = [(1, 1), (16, 1), (3, 67)]


@pytest.fixture(scope="module")
def moe():
    pytest.importorskip("transformers")
    return script("moe_layer", EXAMPLES)


@pytest.fixture(params=list(SIZES))
def block(moe, request):
    torch.manual_seed(0)
    model = moe.MODELS[request.param]
    with torch.no_grad():
        found = moe.random_block(model, model.small | SIZES[request.param], "cuda")
        layer = moe.MoeLayer.of(found)
        with ThreadPoolExecutor(len(TOKENS)) as pool:
            list(pool.map(layer, map(states, TOKENS)))
        yield found


def states(shape):
    return torch.randn(*shape, HIDDEN, device="cuda", dtype=torch.bfloat16)


@pytest.mark.parametrize("shape", TOKENS, ids=str)
def test_a_layer_is_as_near_float64_as_transformers(moe, block, shape):
    layer, x = moe.MoeLayer.of(block), states(shape)
    exact, found = moe.exact_output(block, x), layer(x)
    assert moe.error(found, exact) <= min(1.25 * moe.error(block(x), exact), 2.0**-7)
    torch._dynamo.reset()
    compiled = torch.compile(layer, dynamic=False, fullgraph=True)(x)
    far = (compiled.double() - exact).norm(dim=-1) > 2.0**-6 * exact.norm(dim=-1)
    # Compiled routers round otherwise: where two experts are about as likely, another may be chosen.
    assert not compiled.isnan().any()
    assert far.sum() <= 0.05 * far.numel()


@pytest.mark.parametrize("shape", TOKENS, ids=str)
def test_one_graph_serves_any_tokens(moe, block, shape):
    layer, x = moe.MoeLayer.of(block), states(shape)
    layer(x)
    with tensors.without_synchronisation():
        layer(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = layer(x)
    for other in (states(shape), states(shape)[:1].expand(*shape, -1)):  # the second has few experts
        x.copy_(other)
        graph.replay()
        first = found.clone()
        assert torch.equal(first, layer(x))
        graph.replay()
        assert torch.equal(first, found)
