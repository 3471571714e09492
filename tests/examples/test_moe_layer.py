"""The mixture of experts of examples/moe_layer.py on the CPU, against transformers' blocks in FP64 and in BF16."""

import copy
import dataclasses

import pytest
import torch

from tests.scripts import EXAMPLES, script

pytest.importorskip("transformers")

moe = script("moe_layer", EXAMPLES)
NAMES = list(moe.MODELS)
BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)
    with torch.no_grad():
        yield


def random_block(name, **sizes):
    model = moe.MODELS[name]
    return moe.random_block(model, model.small | sizes, "cpu")


def states(*shape):
    return torch.randn(*shape, 128, dtype=BF16)


@pytest.mark.parametrize("shape", [(1, 1), (3, 1), (1, 37), (2, 7)], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_a_layer_is_as_near_float64_as_transformers(name, shape):
    block, x = random_block(name), states(*shape)
    exact, found = moe.exact_output(block, x), moe.MoeLayer.of(block)(x)
    assert (found.dtype, found.shape) == (BF16, x.shape)
    assert torch.equal(moe.MoeLayer.of(block)(x.flatten(0, 1)), found.flatten(0, 1))
    ours, theirs = moe.error(found, exact), moe.error(block(x), exact)
    # FP64 differs from BF16, and so the reference is no BF16 result.
    assert 2.0**-10 < ours <= min(1.25 * theirs, 2.0**-7)


@pytest.mark.parametrize("name", NAMES)
def test_the_reference_is_transformers_in_float64(name):
    block, x = random_block(name).double(), states(4, 9).double()
    block.experts.config._experts_implementation = "eager"
    # Transformers' softmax is in FP32, whatever the weights have.
    assert moe.error(block(x), moe.exact_output(block, x)) < 1e-6


@pytest.mark.parametrize("normalizes", [True, False])
def test_shares_add_up_to_one_only_where_the_configuration_says_so(normalizes):
    block, x = random_block("qwen3", norm_topk_prob=normalizes), states(3, 7)
    layer = moe.MoeLayer.of(block)
    shares, experts = layer.route(x.flatten(0, 1))
    _, wanted, chosen = block.gate(x)
    assert torch.equal(experts, chosen)
    torch.testing.assert_close(shares, wanted.float(), rtol=2.0**-8, atol=0)
    assert bool(((shares.sum(1) - 1).abs() < 1e-5).all()) == normalizes
    exact = moe.exact_output(block, x)
    assert moe.error(layer(x), exact) <= 1.25 * moe.error(block(x), exact)
    other = dataclasses.replace(layer, normalizes=not normalizes)
    assert moe.error(other(x), exact) > 0.1  # it matters


@pytest.mark.parametrize("name", NAMES)
def test_one_group_of_experts_has_all_tokens(name):
    block, x = random_block(name), states(1, 13).abs()
    # Only these experts have positive logits.
    chosen = torch.arange(len(block.gate.weight) - block.gate.top_k, len(block.gate.weight))
    block.gate.weight.abs_().neg_()
    block.gate.weight[chosen] *= -1
    layer = moe.MoeLayer.of(block)
    _, experts = layer.route(x[0])
    assert torch.equal(experts.sort(1).values, chosen.expand(13, -1))
    exact = moe.exact_output(block, x)
    assert moe.error(layer(x), exact) <= 1.25 * moe.error(block(x), exact)


@pytest.mark.parametrize("name", NAMES)
def test_weights_are_views(name):
    block, x = random_block(name), states(5)
    layer = moe.MoeLayer.of(block)
    before = layer(x)
    for mine, theirs in (
        (layer.router, block.gate.weight),
        (layer.gate, block.experts.gate_up_proj),
        (layer.up, block.experts.gate_up_proj),
        (layer.down, block.experts.down_proj),
    ):
        assert mine.untyped_storage().data_ptr() == theirs.untyped_storage().data_ptr()
    block.experts.down_proj *= 2
    assert torch.equal(layer(x), 2 * before)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_no_graph_breaks(name):
    block, x = random_block(name), states(2, 11)
    layer = moe.MoeLayer.of(block)
    torch._dynamo.reset()
    compiled = torch.compile(layer, backend="aot_eager", dynamic=False, fullgraph=True)
    assert torch.equal(compiled(x), layer(x))


def test_no_tokens():
    assert moe.MoeLayer.of(random_block("mixtral"))(states(0)).shape == (0, 128)


def test_other_blocks_are_refused():
    with pytest.raises(TypeError, match="Linear is neither a Qwen3MoeSparseMoeBlock nor"):
        moe.MoeLayer.of(torch.nn.Linear(8, 8))
    block = random_block("qwen3", hidden_act="gelu")
    with pytest.raises(ValueError, match="activation is gelu, and the epilogue has SiLU"):
        moe.MoeLayer.of(block)


def test_parameters_that_require_grad_serve_inference():
    block, x = random_block("mixtral"), states(5)
    trained = copy.deepcopy(block).requires_grad_(True)
    assert torch.equal(moe.MoeLayer.of(trained)(x), moe.MoeLayer.of(block)(x))
