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


def _relu(s, x, out):
    co.gemm_bias_relu(s[x], s["w"].t(), s["bias"], out=s[out])


def _feeding_each_other(s, number):
    yield _relu(s, "x", "y")
    yield _relu(s, "y", "x")


def _inputs_written_just_before(s, number):
    for name in ("x", "w", "bias"):
        yield s[name].mul_(-0.99)
    yield _relu(s, "x", "y")
    yield s["bias"].add_(s["y"][0], alpha=0.01)
    yield s["x"].copy_(s["y"])


def _a_tile_and_an_output_in_place(s, number):
    yield co.gemm_bias_relu_residual(s["x"], s["w"].t(), s["bias"], s["y"], out=s["y"])
    yield s["x"].copy_(s["y"].clamp(-2, 2))


def _an_output_that_the_kernel_before_still_reads(s, number):
    yield _relu(s, "x", "y")
    yield torch.sum(s["y"].float(), dim=0, out=s["sums"][number])
    yield s["x"].copy_(s["y"])


def _a_scalar_written_just_before(s, number):
    yield s["alpha"].add_(0.25).fmod_(1.7)
    yield co.gemm(s["x"], s["w"].t(), epilogue=kernels.scaled, alpha=s["alpha"], out=s["y"])
    yield s["x"].copy_(s["y"])


def _memsets_and_other_streams(s, number):
    yield s["y"].zero_()
    yield _relu(s, "x", "y")
    main, other = torch.cuda.current_stream(), torch.cuda.Stream()
    other.wait_stream(main)
    with torch.cuda.stream(other):
        s["bias"].mul_(0.999)
    yield
    main.wait_stream(other)
    yield _relu(s, "y", "x")


CHAINS = [
    *((_feeding_each_other, size) for size in (128, 1024, 2048)),
    *((_inputs_written_just_before, size) for size in (128, 1024)),
    (_a_tile_and_an_output_in_place, 1024),
    (_an_output_that_the_kernel_before_still_reads, 1024),
    (_a_scalar_written_just_before, 1024),
    (_memsets_and_other_streams, 1024),
]


@pytest.mark.parametrize(("chain", "size"), CHAINS, ids=lambda x: getattr(x, "__name__", x))
def test_a_chain(chain, size):
    """A chain yields after each operation, where it may wait for the device."""

    def step(s, number, after):
        for _ in chain(s, number):
            after()

    further = {"sums": torch.zeros(STEPS, size, device="cuda"), "alpha": torch.tensor(1.0, device="cuda")}
    same(step, square(size) | further)
