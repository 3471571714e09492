"""What a program meets besides serving: CUDA graphs, torch.compile and training from an empty store, and no compiler.

bench_cold.py says what is measured. Each function here is a part of a scenario, in a process of its own, and `judge_`
functions make a row of the parts.
"""

from __future__ import annotations

import copy
import logging
import random
import re
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from cold_serving import WINDOW_S, Clock, Layer, Source, background_is_done, bias_relu, in_windows
from torch import Tensor, nn
from trained_layers import DTYPE, PLAIN, module_of, operands

import cutlass_ops as co

ROUNDS = 30
GRAPH_RATIO, STEPS_RATIO = 1.02, 1.10
# The sizes of a capture: one, and those that vLLM captures, the largest first.
GRAPH_SIZES = {"graph": (4096,), "graph-sizes": (*range(216, 0, -8), 4, 2, 1)}
GRAPH_WEIGHT = (8192, 8192)
COMPILE_SIZES = (1024, 4096, 14336)  # M, and the widths of the module and between its layers
ITERATIONS = 20
# What trained_layers calls the layer, and its M, N and K.
TRAINED = {
    "train-mlp": ("mlp", (4096, 14336, 4096)),
    "train-gated": ("swiglu", (4096, 14336, 4096)),
    "train-decoder": ("decoder", (4096, 14336, 4096)),
}
README = Path(__file__).parents[1] / "README.md"


def wall_ms(run: Callable[[], object], device: str = "cuda") -> float:
    """Return the milliseconds until a call is done, on the GPU too."""
    _synchronise(device)
    began = time.perf_counter()
    run()
    _synchronise(device)
    return (time.perf_counter() - began) * 1e3


def _synchronise(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


# ---- CUDA graphs ----------------------------------------------------------------------------------------------------


class Captured(NamedTuple):
    """A graph, and the seconds that its capture took."""

    replay: Callable[[], object]
    seconds: float


def captured(run: Callable[[], object], mode: str = "global") -> Captured:
    """Call twice on another stream, as PyTorch's guide does, and capture the third call."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
        run()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    began = time.perf_counter()
    with torch.cuda.graph(graph, capture_error_mode=mode):
        run()
    return Captured(graph.replay, time.perf_counter() - began)


def replays_us(graphs: dict[str, Callable[[], object]], clock: Clock, rounds: int = ROUNDS) -> dict[str, float]:
    """Return the median GPU time of each graph's replay, in rounds of random order."""
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for number in range(rounds):
        names = list(graphs)
        random.Random(number).shuffle(names)
        for name in names:
            clock.call(graphs[name], lambda us, _, of=times[name]: of.append(us))
    clock.drain()
    return {name: statistics.median(each) for name, each in times.items()}


def graphs(
    sizes: Sequence[int],
    mode: str,
    layer: Layer | None = None,
    capture: Callable[..., Captured] = captured,
    clock: Clock | None = None,
) -> dict[str, Any]:
    """Capture calls of all sizes from nothing, then once more when all kernels are there; time the replays."""
    layer = layer or bias_relu(Source(), *GRAPH_WEIGHT)
    inputs = [layer.draw(m, 0) for m in sizes]
    peers = {name: [capture(partial(call, *x), mode) for x in inputs] for name, call in layer.peers.items()}
    ours = [capture(partial(layer.on, layer.op, *x), mode) for x in inputs]
    began = time.perf_counter()
    layer.on(partial(co.warm_up, layer.op), *inputs[0])
    warm_up_s = time.perf_counter() - began
    warm = [capture(partial(layer.on, layer.op, *x), mode) for x in inputs]
    clock = clock or Clock()
    each = []
    for at, m in enumerate(sizes):
        of_peers = {name: graphs[at].replay for name, graphs in peers.items()}
        us = replays_us({"captured": ours[at].replay, "warm": warm[at].replay, **of_peers}, clock)
        pytorch = min(us[name] for name in of_peers)
        each.append(
            {
                "m": m,
                "capture_s": round(ours[at].seconds, 3),
                "us": {name: round(t, 2) for name, t in us.items()},
                "over_warm": round(us["captured"] / us["warm"], 4),
                "over_pytorch": round(us["captured"] / pytorch, 4),
            }
        )
    return {
        "capture_s": round(sum(graph.seconds for graph in ours), 3),
        "pytorch_capture_s": round(min(sum(graph.seconds for graph in of) for of in peers.values()), 3),
        "warm_up_s": round(warm_up_s, 1),
        "sizes": each,
    }


def judge_graph(parts: dict[str, Any]) -> dict[str, Any]:
    """Return the graphs' row."""
    found = parts["only"]
    over = {name: max(each[name] for each in found["sizes"]) for name in ("over_warm", "over_pytorch")}
    slow = over["over_warm"] > GRAPH_RATIO
    return {**over, **found, "failed": False, "misses": [f"a replay takes {over['over_warm']} of a warm call"] * slow}


# ---- torch.compile --------------------------------------------------------------------------------------------------


class Fused(nn.Module):
    """Two linear layers with ReLU between them, by this library."""

    def __init__(self, first: nn.Linear, second: nn.Linear) -> None:
        super().__init__()
        self.first, self.second = first, second

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        inner = co.gemm_bias_relu(x, self.first.weight.t(), self.first.bias)
        found: Tensor = co.gemm_bias(inner, self.second.weight.t(), self.second.bias)
        return found


class Plain(Fused):
    """The same in PyTorch."""

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        return F.linear(F.relu(F.linear(x, self.first.weight, self.first.bias)), self.second.weight, self.second.bias)


def compiled(
    part: str,
    mode: str,
    settle: float,
    *,
    device: str = "cuda",
    sizes: tuple[int, int, int] = COMPILE_SIZES,
    compiler: Callable[..., Callable[..., Any]] = torch.compile,
    iterations: int = ITERATIONS,
) -> dict[str, Any]:
    """Compile the module and call it at once.

    `part` is "ours" or "pytorch", alone in its process, or "together": ours is compiled after PyTorch's is warm, and
    both are called in turn.
    """
    m, width, inner = sizes
    with torch.no_grad():
        layers = [nn.Linear(*of, device=device, dtype=torch.bfloat16) for of in ((width, inner), (inner, width))]
        inputs = [torch.randn(m, width, device=device, dtype=torch.bfloat16) for _ in range(4)]
        F.relu(layers[0](inputs[0]))  # PyTorch's own start
        modules = {"ours": Fused(*layers), "pytorch": Plain(*layers)}
        if part == "together":
            peer, ours = (compiler(modules[side], mode=mode) for side in ("pytorch", "ours"))
            for x in inputs * 3:
                wall_ms(partial(peer, x), device)
            wall_ms(partial(ours, inputs[0]), device)  # the first iteration
            calls = {"ours": ours, "pytorch": peer}
            found: dict[str, Any] = {"at_once": _in_turn(calls, inputs, iterations, device)}
            found["background_done"] = background_is_done(settle)
            found["later"] = _in_turn(calls, inputs, iterations, device)
            return found
        module = compiler(modules[part], mode=mode)
        first = wall_ms(partial(module, inputs[0]), device)
        times = _in_turn({part: module}, inputs, iterations, device)[part]
        return {"first_s": round(first / 1e3, 3), "iterations_ms": times}


def _in_turn(
    calls: dict[str, Callable[..., Any]], inputs: Sequence[Tensor], count: int, device: str
) -> dict[str, list[float]]:
    """Return the milliseconds of each iteration; calls alternate."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for at in range(count):
        for name, call in calls.items():
            # CUDA graph trees may then use the memory of the last result again.
            torch.compiler.cudagraph_mark_step_begin()
            times[name].append(round(wall_ms(partial(call, inputs[at % len(inputs)]), device), 4))
    return times


def judge_compile(parts: dict[str, Any]) -> dict[str, Any]:
    """Return the row of a mode: first calls, and the time from the tenth iteration on."""
    # The first call is the first iteration, and no part of the lists.
    tenth = {side: statistics.median(times[8:]) for side, times in parts["together"]["at_once"].items()}
    later = {side: statistics.median(times[8:]) for side, times in parts["together"]["later"].items()}
    ratio = tenth["pytorch"] / tenth["ours"]
    return {
        "first_s": {side: parts[side]["first_s"] for side in ("ours", "pytorch")},
        "tenth_ms": tenth,
        "ratio": round(ratio, 4),
        "later_ratio": round(later["pytorch"] / later["ours"], 4),
        "parts": parts,
        "failed": False,
        "misses": [f"the tenth iteration has {ratio:.4f} of PyTorch's speed"] * (ratio < 1),
    }


# ---- Training -------------------------------------------------------------------------------------------------------


class Trainer:
    """Trains a layer: forward, backward and a step of AdamW."""

    def __init__(self, layer: Callable[[Tensor], Tensor], module: nn.Module) -> None:
        self._layer = layer
        self._optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4, fused=True)

    def step(self, x: Tensor, grad: Tensor) -> None:
        """Make one step."""
        self._layer(x).backward(grad)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        x.grad = None


def trained(
    part: str,
    scenario: str,
    seconds: float,
    *,
    device: str = "cuda",
    sizes: tuple[int, int, int] | None = None,
    compiler: Callable[..., Callable[..., Any]] = torch.compile,
) -> dict[str, Any]:
    """Train a layer from nothing.

    `part` is "ours", whose steps alternate with those of eager PyTorch, or "compile": PyTorch's layer with
    torch.compile, and the same alternation.
    """
    layer, known = TRAINED[scenario]
    m, n, k = sizes or known
    module, plain = module_of(layer, n, k, device=device, dtype=DTYPE), PLAIN[layer]
    other = copy.deepcopy(module)
    # Draws are not timed: each step has another input than the one before.
    inputs = [operands(layer, m, n, k, device) for _ in range(4)]
    eager = Trainer(partial(plain, other), other)
    first = Trainer(module if part == "ours" else compiler(lambda x: plain(module, x)), module)
    # PyTorch's own start: the library of GEMMs and the thread that computes gradients.
    x = torch.randn(16, 16, device=device, dtype=DTYPE, requires_grad=True)
    (x @ x).sum().backward()
    steps: list[tuple[float, float, float]] = []
    began = time.perf_counter()
    while not steps or time.perf_counter() - began < seconds:
        at = time.perf_counter() - began
        found = (wall_ms(partial(each.step, *inputs[len(steps) % 4]), device) for each in (first, eager))
        steps.append((at, *found))
    return {"first_s": round(steps[0][1] / 1e3, 3), "steps": len(steps), "windows": step_windows(steps)}


def step_windows(steps: Sequence[tuple[float, float, float]], length: float = WINDOW_S) -> list[dict[str, Any]]:
    """Return the medians of a window's steps, of the variant and of eager PyTorch, and the sums' ratio.

    A window's time is that of its steps' beginnings. The first step is apart, and the first of eager PyTorch's too.
    """
    found, others = [], steps[1:]
    for begin, indices in in_windows([at for at, _, _ in others], length):
        ours, eager = ([others[index][side] for index in indices] for side in (1, 2))
        found.append(
            {
                "from_s": begin,
                "steps": len(indices),
                "ms": round(statistics.median(ours), 3),
                "eager_ms": round(statistics.median(eager), 3),
                "longest_ms": round(max(ours), 3),
                "over_eager": round(sum(ours) / sum(eager), 4),
            }
        )
    return found


def judge_training(parts: dict[str, Any]) -> dict[str, Any]:
    """Return the row of a trained layer."""
    first = {part: parts[part]["first_s"] for part in ("ours", "compile")}
    misses = []
    if first["ours"] > first["compile"]:
        misses.append(f"the first step takes {first['ours']} s, torch.compile's {first['compile']} s")
    misses += [
        f"steps from {each['from_s']:.0f} s on: {each['over_eager']} of eager PyTorch's"
        for each in parts["ours"]["windows"]
        if each["over_eager"] > STEPS_RATIO
    ]
    return {"first_s": first, "parts": parts, "failed": False, "misses": misses}


# ---- No compiler ----------------------------------------------------------------------------------------------------


def ten_lines(readme: Path = README) -> str:
    """Return the program of README's "Ten lines"."""
    section = readme.read_text().split("\n## Ten lines\n")[1]
    found = re.search(r"```python\n(.*?)```", section, re.DOTALL)
    assert found is not None, f"{readme} has no program under Ten lines"
    return found[1]


class _Warnings(logging.Handler):
    """Keeps what is logged as a warning."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.found.append(record.getMessage())


def warned(program: str, times: int) -> tuple[dict[str, Any], list[list[str]]]:
    """Run a program some times; return its names, and what each run warned of, by Python's warnings and our log."""
    names: dict[str, Any] = {}
    handler, log, runs = _Warnings(), logging.getLogger("cutlass_ops"), []
    log.addHandler(handler)
    try:
        for _ in range(times):
            with warnings.catch_warnings(record=True) as found:
                warnings.simplefilter("always")
                exec(compile(program, "README.md", "exec"), names)
                background_is_done(5.0)  # it may have to say something too
            runs.append([*(str(warning.message) for warning in found), *handler.found])
            handler.found.clear()
    finally:
        log.removeHandler(handler)
    return names, runs


def without_compiler() -> dict[str, Any]:
    """Run README's ten lines, as a program that goes on does, and compare the last result with PyTorch's."""
    names, runs = warned(ten_lines(), _RUNS)
    x, weight, bias, residual = (names[name].double() for name in ("x", "weight", "bias", "residual"))
    wanted = F.silu(x @ weight.t() + bias) * 0.5 + residual
    error = float((names["d"].double() - wanted).norm() / wanted.norm())
    return {"device": names["device"], "error": round(error, 6), "warnings": sum(map(len, runs)), "runs": runs}


# What is missing may be known only after the first calls, since they do not wait.
_RUNS = 3


def judge_compiler(parts: dict[str, Any]) -> dict[str, Any]:
    """Return the row: a program of two signatures may warn of each once."""
    found, misses = parts["only"], []
    if not 1 <= found["warnings"] <= 2:
        misses.append(f"{found['warnings']} warnings")
    if found["error"] > 0.01:
        misses.append(f"the relative error is {found['error']}")
    return {**found, "failed": False, "misses": misses}
