"""Serving from an empty store: forms of calls, drawn requests, the times of every call, and what they show.

bench_cold.py says what is measured. This module needs a GPU only where it makes a :class:`Clock`, and imports nothing
that a program's first call would import.
"""

from __future__ import annotations

import itertools
import math
import random
import statistics
import time
from array import array
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

import cutlass_ops as co

SIDES = ("ours", "pytorch")
MOST_ROWS, WEIGHTS = 4096, 4
WINDOW_S = 5.0
# Windows and calls of each by which it is decided when all calls have their best kernels.
STEP_S, SAMPLES = 2.5, 150
# What must hold: a window's GPU time, a call's GPU time and host time over PyTorch's, and a call's over its best.
WINDOW_RATIO, CALL_RATIO, CALL_SLACK_US, HOST_SLACK_US, BEST_RATIO = 1.10, 1.5, 100.0, 5_000.0, 1.03
SERVED_AT_END = 0.99
# The share of calls whose GPU time need not be known.
MOST_DRY = 0.01
# Seconds after which all calls have their best kernels, by the number of processors.
SETTLED_S = {16: 30.0, 4: 90.0}
EPS, EXPERTS = 1e-5, 8
BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn

Size = tuple[int, int]
# N and K of the weights of a layer of Llama 8B and 70B.
LLAMA: dict[str, Size] = {
    "8B.qkv": (6144, 4096), "8B.o": (4096, 4096), "8B.gate_up": (28672, 4096), "8B.down": (4096, 14336),
    "70B.qkv": (10240, 8192), "70B.o": (8192, 8192), "70B.gate_up": (57344, 8192), "70B.down": (8192, 28672),
}  # fmt: skip
# Those that follow a norm.
AFTER_NORM = {name: size for name, size in LLAMA.items() if name.endswith(("qkv", "gate_up"))}
# Gates of whole layers, and those of one GPU where two or more share a layer.
GATES: dict[str, Size] = {
    "8B.gate": (14336, 4096), "8B.gate/2": (7168, 4096), "70B.gate": (28672, 8192),
    "70B.gate/2": (14336, 8192), "70B.gate/4": (7168, 8192), "70B.gate/8": (3584, 8192),
}  # fmt: skip
# Each of eight experts has a weight of this size.
MLP = {name: size for name, size in LLAMA.items() if name.endswith(("gate_up", "down"))}


class Layer(NamedTuple):
    """A weight, and how ours and PyTorch compute with it.

    Attributes
    ----------
    op : callable
        Our function, as ``co.warm_up`` takes it.
    on : callable
        Gives a function the call's arguments: ``on(op, *fresh)`` is the call.
    draw : callable
        Takes M and the first row in the pool of rows; returns the arguments that each call has anew.
    peers : dict
        What PyTorch's users write, by name: functions of the arguments that `draw` returns.
    """

    op: Callable[..., Any]
    on: Callable[..., Any]
    draw: Callable[[int, int], tuple[Tensor, ...]]
    peers: dict[str, Callable[..., Tensor]]


class Source:
    """Draws weights, and keeps one pool of rows for each K. Rows begin at multiples of 16, as memory of their own."""

    def __init__(self, device: str = "cuda", most_rows: int = MOST_ROWS) -> None:
        self.device, self.most_rows = device, most_rows
        self._pools: dict[int, Tensor] = {}

    def randn(self, *shape: int) -> Tensor:
        """Draw normally distributed values in BF16."""
        return torch.randn(*shape, device=self.device, dtype=BF16)

    def weight(self, *shape: int) -> Tensor:
        """Draw a weight (..., N, K) whose products with drawn rows have a variance of 1."""
        return self.randn(*shape).mul_(shape[-1] ** -0.5)

    def pool(self, k: int) -> Tensor:
        """Return many rows of K values."""
        if k not in self._pools:
            self._pools[k] = self.randn(_POOL * self.most_rows, k)
        return self._pools[k]

    def rows(self, k: int) -> Callable[[int, int], tuple[Tensor, ...]]:
        """Return a function that takes rows from the pool."""
        pool = self.pool(k)
        return lambda m, at: (pool[at : at + m],)


_POOL = 3


def gemm(source: Source, n: int, k: int) -> Layer:  # noqa: D103
    w = source.weight(n, k)
    return Layer(co.gemm, lambda f, x: f(x, w.t()), source.rows(k), {"linear": lambda x: F.linear(x, w)})


def bias_relu(source: Source, n: int, k: int) -> Layer:  # noqa: D103
    w, bias = source.weight(n, k), source.randn(n)
    peers = {
        "linear_relu": lambda x: F.relu(F.linear(x, w, bias)),
        "addmm_activation": lambda x: torch._addmm_activation(bias, x, w.t(), use_gelu=False),
    }
    return Layer(co.gemm_bias_relu, lambda f, x: f(x, w.t(), bias), source.rows(k), peers)


def swiglu(source: Source, n: int, k: int) -> Layer:  # noqa: D103
    both = source.weight(2 * n, k)
    gate, up = both.chunk(2)

    def one_linear(x: Tensor) -> Tensor:
        of_gate, of_up = F.linear(x, both).chunk(2, dim=-1)
        return F.silu(of_gate) * of_up

    peers = {"two_linears": lambda x: F.silu(F.linear(x, gate)) * F.linear(x, up), "one_linear": one_linear}
    return Layer(co.gemm_swiglu, lambda f, x: f(x, gate.t(), up.t()), source.rows(k), peers)


def rmsnorm(source: Source, n: int, k: int) -> Layer:  # noqa: D103
    w, gamma = source.weight(n, k), source.randn(k).mul_(0.2).add_(1)
    prepared = co.prepare(w.t(), gamma)
    peers = {"rms_norm_linear": lambda x: F.linear(F.rms_norm(x, (k,), gamma, EPS), w)}
    return Layer(co.rmsnorm_gemm, lambda f, x: f(x, prepared, eps=EPS), source.rows(k), peers)


def fp8_rows(source: Source, n: int, k: int) -> Layer:  # noqa: D103
    (w, of_w), (pool, of_pool) = (_by_rows(x) for x in (source.weight(n, k), source.pool(k)))

    def scaled_mm(x: Tensor, of_x: Tensor) -> Tensor:
        return torch._scaled_mm(x, w.t(), of_x[:, None], of_w[None], out_dtype=BF16)

    return Layer(
        co.gemm,
        lambda f, x, of_x: f(co.Scaled(x, of_x), co.Scaled(w.t(), of_w)),
        lambda m, at: (pool[at : at + m], of_pool[at : at + m]),
        {"scaled_mm": scaled_mm},
    )


def _by_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return a matrix in FP8 and the scale of each row."""
    scale = x.abs().amax(1).float().clamp(min=1e-30) / torch.finfo(E4M3).max
    return (x / scale[:, None]).to(E4M3), scale


def grouped(source: Source, n: int, k: int) -> Layer:  # noqa: D103
    w, rows = source.weight(EXPERTS, n, k), source.rows(k)
    # Where the rows of each expert end, as shares of all rows: the GPU multiplies, so that no call waits for a copy.
    shares = torch.rand(_POOL * source.most_rows // 16, EXPERTS, device=source.device).sort(1).values
    shares[:, -1] = 1

    def draw(m: int, at: int) -> tuple[Tensor, ...]:
        return *rows(m, at), (shares[at // 16] * m).ceil_().int()

    return Layer(
        co.gemm,
        lambda f, x, offsets: f(x, w.mT, groups=co.Groups(offsets)),
        draw,
        {"grouped_mm": lambda x, offsets: torch._grouped_mm(x, w.mT, offs=offsets)},
    )


class Form(NamedTuple):
    """What makes a form's layers, and the sizes that four are drawn from."""

    make: Callable[[Source, int, int], Layer]
    sizes: dict[str, Size]


FORMS = {
    "gemm": Form(gemm, LLAMA),
    "bias_relu": Form(bias_relu, LLAMA),
    "swiglu": Form(swiglu, GATES),
    "rmsnorm": Form(rmsnorm, AFTER_NORM),
    "fp8_rows": Form(fp8_rows, LLAMA),
    "grouped": Form(grouped, MLP),
}


# ---- What is asked for ----------------------------------------------------------------------------------------------


class Request(NamedTuple):
    """One call: which weight, M, the first of its rows in the pool, and who computes it first."""

    weight: int
    m: int
    at: int
    ours_first: bool


def drawn_weights(form: str, seed: int) -> list[str]:
    """Draw the names of a scenario's weights."""
    return random.Random(f"{form} {seed}").sample(list(FORMS[form].sizes), WEIGHTS)


def requests(seed: int, most_rows: int = MOST_ROWS) -> Iterator[Request]:
    """Draw requests without end. M is from 1 to `most_rows`, with equal probability on each scale."""
    rng = random.Random(seed)
    while True:
        yield Request(
            rng.randrange(WEIGHTS),
            round(most_rows ** rng.random()),
            16 * rng.randrange((_POOL - 1) * most_rows // 16),
            rng.random() < 0.5,
        )


def served_by_pytorch(op: Any) -> int:
    """Return how many calls of an op PyTorch has served."""
    found: int = op.served_by_pytorch
    return found


def _background() -> Any:
    from cutlass_ops.compilation.background import Background  # late: a first call imports what it needs

    return Background.current()


class Look(NamedTuple):
    """What there is at a time: how many kernels are loaded, and whether calls need others."""

    at: float
    kernels: int
    pending: bool


# ---- Times ----------------------------------------------------------------------------------------------------------


class Event(Protocol):
    """A CUDA event with a time."""

    def record(self) -> None: ...  # noqa: D102
    def query(self) -> bool: ...  # noqa: D102
    def synchronize(self) -> None: ...  # noqa: D102
    def elapsed_time(self, end: Any) -> float: ...  # noqa: D102


class Clock:
    """Times calls on the GPU by events around them, and on the host.

    The GPU is kept some milliseconds behind the host: between calls it runs a spacer, which also leaves nothing of a
    call in the L2 cache. So what the host takes for a call is no part of its GPU time. If the host took longer than
    that, the GPU came to the call before all of it was launched, and the call is noted as dry.

    Parameters
    ----------
    event, spacer : callable
        Make an event; queue a spacer.
    depth : int
        Calls that are queued before the host waits. Eight launches of each fit into CUDA's queue.
    """

    def __init__(
        self,
        event: Callable[[], Event] | None = None,
        spacer: Callable[[], object] | None = None,
        depth: int = 48,
    ) -> None:
        # An event that blocks leaves the processor to the compilers while the host waits.
        self._event = event or partial(torch.cuda.Event, enable_timing=True, blocking=True)
        self._space, self._depth = spacer or cuda_spacer(), depth
        self._queue: deque[tuple[Event, Event, Callable[[float, bool], object], bool]] = deque()
        self._nothing_us = 0.0
        found: list[float] = []
        for _ in range(2 * depth):
            self.call(_nothing, lambda us, _: found.append(us))
        self.drain()
        self._nothing_us = statistics.median(found[depth:])

    def call(self, run: Callable[[], object], note: Callable[[float, bool], object]) -> float:
        """Make a call; return its microseconds on the host. Those on the GPU are noted later, and whether it is dry."""
        self._space()
        begin, end = self._event(), self._event()
        begin.record()
        began = time.perf_counter()
        run()
        host = time.perf_counter() - began
        end.record()
        self._queue.append((begin, end, note, begin.query()))
        if len(self._queue) > self._depth:
            self._note_oldest()
        return host * 1e6

    def fill(self) -> None:
        """Queue more spacers than in the midst of serving, so that the first call is not dry."""
        for _ in range(2 * self._depth):
            self._space()

    def drain(self) -> None:
        """Note what is left."""
        while self._queue:
            self._note_oldest()

    def _note_oldest(self) -> None:
        begin, end, note, dry = self._queue.popleft()
        end.synchronize()
        note(max(begin.elapsed_time(end) * 1e3 - self._nothing_us, 0.1), dry)


def _nothing() -> None:
    pass


def cuda_spacer() -> Callable[[], object]:
    """Return a function that queues some 150 us of work, which reads and writes twice the size of the L2 cache."""
    l2_bytes = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
    other = torch.zeros(2 * l2_bytes // 4, device="cuda")

    def space() -> None:
        other.add_(1.0)
        torch.cuda._sleep(_SPACER_CYCLES)

    return space


_SPACER_CYCLES = 175_000  # 100 us at 1.75 GHz


class Calls:
    """The times of all calls, in columns: 50,000 objects would be work for Python's garbage collector."""

    def __init__(self) -> None:
        self.at, self.weight, self.m = array("d"), array("i"), array("i")
        self.gpu = {side: array("d") for side in SIDES}
        self.host = {side: array("d") for side in SIDES}
        self.dry = bytearray()
        self.by_pytorch = bytearray()
        self.looks: list[Look] = []

    def __len__(self) -> int:
        return len(self.at)

    def begin(self, at: float, request: Request) -> int:
        """Add a call; return its index."""
        self.at.append(at)
        self.weight.append(request.weight)
        self.m.append(request.m)
        for times in (*self.gpu.values(), *self.host.values()):
            times.append(0.0)
        self.dry.append(False)
        self.by_pytorch.append(False)
        return len(self.at) - 1

    def note(self, side: str, index: int, us: float, dry: bool) -> None:
        """Note a call's time on the GPU."""
        self.gpu[side][index] = us
        self.dry[index] |= dry

    def one(self, index: int, times: dict[str, array[float]]) -> dict[str, Any]:
        """Return what there is to say of a call."""
        return {
            "at_s": round(self.at[index], 2),
            "weight": self.weight[index],
            "m": self.m[index],
            **{f"{side}_us": round(times[side][index], 1) for side in SIDES},
            "by_pytorch": bool(self.by_pytorch[index]),
        }


def bucket(m: int) -> int:
    """Return the power of two that is nearest on a scale of ratios."""
    return round(math.log2(m))


Peers = list[dict[int, str]]


def fastest(layers: Sequence[Layer], clock: Clock, most_rows: int = MOST_ROWS) -> Peers:
    """Return the name of PyTorch's fastest composition, by weight and :func:`bucket` of M.

    All are called several times: PyTorch is warm when serving begins, and only this library is cold.
    """
    found: list[dict[int, dict[str, list[float]]]] = []
    for layer in layers:
        found.append({})
        for at in range(bucket(most_rows) + 1):
            fresh = layer.draw(2**at, 0)
            times = found[-1].setdefault(at, {name: [] for name in layer.peers})
            for _, (name, call) in itertools.product(range(_TRIALS), layer.peers.items()):
                clock.call(partial(call, *fresh), lambda us, _, of=times[name]: of.append(us))
    clock.drain()
    return [
        {at: min(times, key=lambda name: statistics.median(times[name][2:])) for at, times in each.items()}
        for each in found
    ]


_TRIALS = 7  # the first two do not count
_LOOK_S = 0.5


def serve(layers: Sequence[Layer], peers: Peers, wanted: Iterable[Request], seconds: float, clock: Clock) -> Calls:
    """Make calls for some time, each by this library and by PyTorch; return their times."""
    from cutlass_ops.run.requests import requested  # late: no program needs it

    calls, looked = Calls(), _LOOK_S  # a look imports what the first call should
    # Not of one row, whose scales may be scalars, for another op.
    ops = [layer.on(partial(requested, layer.op), *layer.draw(16, 0)).op for layer in layers]
    clock.fill()
    began = time.perf_counter()
    for request in wanted:
        at = time.perf_counter() - began
        if at >= seconds:
            break
        if at >= looked:
            calls.looks.append(Look(at, len(co.registry.entries()), not _background().wait(0, needed=True)))
            looked = at + _LOOK_S
        layer = layers[request.weight]
        fresh = layer.draw(request.m, request.at)
        runs = {
            "ours": partial(layer.on, layer.op, *fresh),
            "pytorch": partial(layer.peers[peers[request.weight][bucket(request.m)]], *fresh),
        }
        index, before = calls.begin(at, request), served_by_pytorch(ops[request.weight])
        for side in SIDES if request.ours_first else reversed(SIDES):
            calls.host[side][index] = clock.call(runs[side], partial(calls.note, side, index))
        calls.by_pytorch[index] = served_by_pytorch(ops[request.weight]) != before
    clock.drain()
    return calls


# ---- What they show -------------------------------------------------------------------------------------------------


def in_windows(at: Sequence[float], length: float) -> list[tuple[float, range]]:
    """Return the beginning and the calls of each window, of times in order. Windows without calls are left out."""
    found: list[tuple[float, range]] = []
    for number, each in itertools.groupby(range(len(at)), lambda index: int(at[index] // length)):
        indices = list(each)
        found.append((number * length, range(indices[0], indices[-1] + 1)))
    return found


def windows(calls: Calls, length: float = WINDOW_S) -> list[dict[str, Any]]:
    """Return each window's GPU time and host time of both, and who served. Dry calls are no part of the GPU time."""
    found = []
    for begin, indices in in_windows(calls.at, length):
        timed = [index for index in indices if not calls.dry[index]]
        gpu = {side: sum(calls.gpu[side][index] for index in timed) / 1e3 for side in SIDES}
        host = {side: sum(calls.host[side][index] for index in indices) / 1e3 for side in SIDES}
        kernels = [look.kernels for look in calls.looks if look.at < begin + length]
        found.append(
            {
                "from_s": begin,
                "calls": len(indices),
                "gpu_ms": {side: round(ms, 3) for side, ms in gpu.items()},
                "gpu_ratio": _ratio(gpu),
                "host_ms": {side: round(ms, 3) for side, ms in host.items()},
                "host_ratio": _ratio(host),
                "by_pytorch": sum(calls.by_pytorch[index] for index in indices),
                "dry": len(indices) - len(timed),
                "kernels": kernels[-1] if kernels else 0,
            }
        )
    return found


def _ratio(times: dict[str, float]) -> float | None:
    return round(times["ours"] / times["pytorch"], 4) if times["pytorch"] else None


def extremes(calls: Calls) -> dict[str, Any]:
    """Return the worst calls, and how many break the rules: ours, and PyTorch's if they were ours, which is noise."""
    timed = [index for index in range(len(calls)) if not calls.dry[index]]
    rules = {
        "gpu": (calls.gpu, timed, CALL_RATIO, CALL_SLACK_US),
        "host": (calls.host, range(len(calls)), 1.0, HOST_SLACK_US),
    }
    found: dict[str, Any] = {}
    for name, (times, indices, factor, slack) in rules.items():
        ours, theirs = times["ours"], times["pytorch"]
        over = {
            "ours": sum(ours[i] > factor * theirs[i] + slack for i in indices),
            "pytorch": sum(theirs[i] > factor * ours[i] + slack for i in indices),
        }
        furthest = max(indices, key=lambda i: ours[i] - factor * theirs[i], default=None)
        highest = max(indices, key=lambda i: ours[i] / theirs[i], default=None)
        found[name] = {
            "over": over,
            "furthest": None if furthest is None else calls.one(furthest, times),
            "highest_ratio": None if highest is None else calls.one(highest, times),
        }
    return found


def sampled(calls: Calls, length: float = STEP_S, most: int = SAMPLES) -> list[int]:
    """Return calls of each window, spread over it, none of which is dry."""
    found: list[int] = []
    for _, indices in in_windows(calls.at, length):
        timed = [index for index in indices if not calls.dry[index]]
        found += timed[:: -(-len(timed) // most) or 1]
    return found


def settled_s(calls: Calls, indices: Sequence[int], again: Calls, length: float = STEP_S) -> float | None:
    """Return the seconds after which all windows have calls within 3% of their best; None if the last has not.

    Both over PyTorch's time beside each, as the chip's clock varies: the sum of the calls, and the geometric mean of
    each call over its best.

    Parameters
    ----------
    calls : Calls
        Those of serving.
    indices : sequence of int
        Those that were made again.
    again : Calls
        These, when all kernels were there.
    """
    kept = [(index, best) for best, index in enumerate(indices) if not (calls.dry[index] or again.dry[best])]
    found = 0.0
    for begin, part in in_windows([calls.at[index] for index, _ in kept], length):
        now = {side: [calls.gpu[side][kept[at][0]] for at in part] for side in SIDES}
        best = {side: [again.gpu[side][kept[at][1]] for at in part] for side in SIDES}
        each = zip(now["ours"], best["pytorch"], now["pytorch"], best["ours"], strict=True)
        mean = math.exp(statistics.fmean(math.log(ours * theirs / (p * o)) for ours, theirs, p, o in each))
        if max(mean, _over_pytorch(now) / _over_pytorch(best)) > BEST_RATIO:
            found = begin + length
    # The end of the last window is later than any call.
    return found if kept and found <= calls.at[kept[-1][0]] else None


def _over_pytorch(times: dict[str, list[float]]) -> float:
    return sum(times["ours"]) / sum(times["pytorch"])


def kernels_s(calls: Calls) -> float | None:
    """Return the seconds after which kernels serve all calls; None if PyTorch serves the last one."""
    last = calls.by_pytorch.rfind(True)
    if last == len(calls) - 1:
        return None
    return round(calls.at[last], 2) if last >= 0 else 0.0


def needed_s(calls: Calls) -> float | None:
    """Return the seconds after which every kernel that a call needed was there; None if one never was."""
    if not calls.looks or calls.looks[-1].pending:
        return None
    pairs = itertools.pairwise(calls.looks)
    return round(max((after.at for look, after in pairs if look.pending), default=0.0), 2)


def verdict(found: dict[str, Any], processors: int) -> dict[str, Any]:
    """Return whether a scenario failed, so that its times say little, and the aims that it missed, in words."""
    last = found["windows"][-1]
    misses = [
        f"GPU time from {each['from_s']:.0f} s on: {each['gpu_ratio']} of PyTorch's"
        for each in found["windows"]
        if each["gpu_ratio"] is not None and each["gpu_ratio"] > WINDOW_RATIO
    ]
    for name, rule in (("gpu", "1.5 of PyTorch's GPU time and 100 us"), ("host", "PyTorch's host time and 5 ms")):
        over = found["extremes"][name]["over"]["ours"]
        if over:
            misses.append(f"{over} calls over {rule}")
    if found["dry"] > MOST_DRY * found["calls"]:
        misses.append(f"the GPU time of {found['dry']} of {found['calls']} calls is not known")
    limit, settled = SETTLED_S.get(processors), found["settled_s"]
    if settled is None or (limit is not None and settled > limit):
        misses.append(f"calls within 3% of their best: {'never' if settled is None else f'after {settled} s'}")
    share = 1 - last["by_pytorch"] / last["calls"]
    return {"served_at_end": round(share, 4), "failed": share < SERVED_AT_END, "misses": misses}


def background_is_done(limit: float) -> bool:
    """Wait until nothing is compiled in the background, or for `limit` seconds; return whether it is done."""
    found: bool = _background().wait(limit)
    return found


def check(layer: Layer, m: int = 100) -> float:
    """Return the relative difference of our result from PyTorch's.

    Raises
    ------
    AssertionError
        If it is more than rounding.
    """
    fresh = layer.draw(m, 0)
    found = layer.on(layer.op, *fresh).double()
    worst = max(float((found - call(*fresh).double()).norm() / found.norm()) for call in layer.peers.values())
    assert worst < 0.02, f"results differ by {worst:.3f}"
    return worst


def run(
    form: str,
    seed: int,
    seconds: float,
    *,
    request_seed: int = 0,
    settle: float = 60.0,
    warm_up: bool = False,
    processors: int,
    source: Source | None = None,
    clock: Clock | None = None,
) -> dict[str, Any]:
    """Serve a form's requests, and make some of them again when all kernels are there; return what that shows.

    Parameters
    ----------
    form : str
        A key of :data:`FORMS`.
    seed, request_seed : int
        Decide the weights; together, the requests.
    seconds : float
        How long to serve.
    settle : float
        Most seconds to wait for the background after that.
    warm_up : bool
        Whether to call ``co.warm_up`` for each weight then, which may take minutes.
    processors : int
        By which the aims are chosen.
    source, clock : Source, Clock
        By default those of a GPU.
    """
    names = drawn_weights(form, seed)
    make, sizes = FORMS[form]
    source, clock = source or Source(), clock or Clock()
    layers = [make(source, *sizes[name]) for name in names]
    peers = fastest(layers, clock, source.most_rows)
    request_seed += 1000 * seed
    calls = serve(layers, peers, requests(request_seed, source.most_rows), seconds, clock)
    is_done = background_is_done(settle)
    if warm_up:
        for layer in layers:
            layer.on(partial(co.warm_up, layer.op), *layer.draw(1, 0))
    indices = sampled(calls)
    made = list(itertools.islice(requests(request_seed, source.most_rows), len(calls)))
    again = serve(layers, peers, [made[index] for index in indices], math.inf, clock)
    found = {
        "weights": {name: sizes[name] for name in names},
        "peers": [Counter(each.values()) for each in peers],  # how many sizes each is the fastest for, by weight
        "calls": len(calls),
        "first": {"gpu": calls.one(0, calls.gpu), "host": calls.one(0, calls.host)},
        "extremes": extremes(calls),
        "dry": sum(calls.dry),
        "long_host": {side: sum(us > HOST_SLACK_US for us in calls.host[side]) for side in SIDES},
        "kernels_s": kernels_s(calls),
        "needed_s": needed_s(calls),
        "settled_s": settled_s(calls, indices, again),
        "best_gpu_ratio": _ratio({side: sum(times) for side, times in again.gpu.items()}),
        "background_done": is_done,
        "kernels": len(co.registry.entries()),
        "difference": round(max(map(check, layers)), 5),
        "windows": windows(calls),
    }
    return found | verdict(found, processors)
