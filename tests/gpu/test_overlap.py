"""A launch that overlaps the end of the kernel before it still sees all of its results, and spoils none of its reads.

Every chain is run with a synchronisation after each operation, then as fast as the stream takes it, then from a graph,
where even the shortest kernels follow each other without a gap. The results must agree to the bit.
"""

import pytest
import torch

import cutlass_ops as co
from tests.gpu import kernels, tensors

pytestmark = pytest.mark.gpu

STEPS = 60


def run(step, state, *, wait):
    """Run a chain of operations; return what is left in its tensors."""
    state = {name: value.clone() for name, value in state.items()}

    def after():
        if wait:
            torch.cuda.synchronize()

    for number in range(STEPS):
        step(state, number, after)
    torch.cuda.synchronize()
    return state


def replays(step, state, times):
    """Run a chain from a graph, `times` times from the start; yield what is left in its tensors."""
    state = {name: value.clone() for name, value in state.items()}
    began = {name: value.clone() for name, value in state.items()}
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for number in range(STEPS):
            step(state, number, lambda: None)
    for _ in range(times):
        for name, value in began.items():
            state[name].copy_(value)
        graph.replay()
        torch.cuda.synchronize()
        yield state


def same(step, state):
    exact = run(step, state, wait=True)
    found = [("stream", run(step, state, wait=False)) for _ in range(3)]
    for how, left in [*found, *(("graph", left) for left in replays(step, state, 3))]:
        for name, value in exact.items():
            torch.testing.assert_close(
                left[name], value, rtol=0, atol=0, equal_nan=True, msg=lambda m, n=name, h=how: f"{h}, {n}: {m}"
            )


def square(size):
    return {
        "x": tensors.matrix(size, size, "bf16"),
        "y": torch.zeros(size, size, device="cuda", dtype=torch.bfloat16),
        "w": torch.randn(size, size, device="cuda", dtype=torch.bfloat16) * (2 / size) ** 0.5,
        "bias": torch.randn(size, device="cuda", dtype=torch.bfloat16),
    }


@pytest.mark.parametrize("size", [128, 1024, 2048])
def test_layers_that_feed_each_other(size):
    def step(s, number, after):
        co.gemm_bias_relu(s["x"], s["w"].t(), s["bias"], out=s["y"])
        after()
        co.gemm_bias_relu(s["y"], s["w"].t(), s["bias"], out=s["x"])
        after()

    same(step, square(size))


@pytest.mark.parametrize("name", kernels.overlapping())
@pytest.mark.parametrize("size", [64, 2048])
def test_every_schedule(name, size):
    kernel = co.build(kernels.overlapping()[name])

    def step(s, number, after):
        # Nothing between the two, so that each begins while the other ends.
        kernel(s["x"], s["w"].t(), s["bias"], out=s["y"])
        after()
        kernel(s["y"], s["w"].t(), s["bias"], out=s["x"])
        after()
        if number % 8 == 7:
            s["w"].copy_(s["w"].roll(1, 0))
            after()

    same(step, square(size))


@pytest.mark.parametrize("size", [128, 1024])
def test_every_input_is_written_just_before(size):
    def step(s, number, after):
        for name in ("x", "w", "bias"):
            s[name].mul_(-0.99)
            after()
        co.gemm_bias_relu(s["x"], s["w"].t(), s["bias"], out=s["y"])
        after()
        s["bias"].add_(s["y"][0], alpha=0.01)
        after()
        s["x"].copy_(s["y"])
        after()

    same(step, square(size))


def test_a_tile_and_an_output_in_place():
    op = co.gemm_bias_relu_residual

    def step(s, number, after):
        op(s["x"], s["w"].t(), s["bias"], s["y"], out=s["y"])
        after()
        s["x"].copy_(s["y"].clamp(-2, 2))
        after()

    same(step, square(1024))


def test_an_output_that_the_kernel_before_still_reads():
    state = square(1024) | {"sums": torch.zeros(STEPS, 1024, device="cuda")}

    def step(s, number, after):
        co.gemm_bias_relu(s["x"], s["w"].t(), s["bias"], out=s["y"])
        after()
        torch.sum(s["y"].float(), dim=0, out=s["sums"][number])
        after()
        s["x"].copy_(s["y"])
        after()

    same(step, state)


def test_a_scalar_written_just_before():
    state = square(1024) | {"alpha": torch.tensor(1.0, device="cuda")}

    def step(s, number, after):
        s["alpha"].add_(0.25).fmod_(1.7)
        after()
        co.gemm(s["x"], s["w"].t(), epilogue=kernels.scaled, alpha=s["alpha"], out=s["y"])
        after()
        s["x"].copy_(s["y"])
        after()

    same(step, state)


def test_memsets_and_other_streams():
    same(_with_a_branch, square(1024))


def _with_a_branch(s, number, after):
    s["y"].zero_()
    after()
    co.gemm_bias_relu(s["x"], s["w"].t(), s["bias"], out=s["y"])
    after()
    main, other = torch.cuda.current_stream(), torch.cuda.Stream()
    other.wait_stream(main)
    with torch.cuda.stream(other):
        s["bias"].mul_(0.999)
    after()
    main.wait_stream(other)
    co.gemm_bias_relu(s["y"], s["w"].t(), s["bias"], out=s["x"])
    after()
