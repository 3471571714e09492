"""What a kernel's counters say about it, and what to do. Pure functions: no GPU, no profiler."""

from __future__ import annotations

import math
from dataclasses import dataclass

from cutlass_ops.tools.profile.counters import Kernel

# Percent of a peak from which a pipe or the memory is what limits a kernel, and below which it is idle.
BUSY, IDLE = 60.0, 2.0
# Percent of the FP32 pipe from which a kernel computes.
COMPUTES = 25.0
# Microseconds below which starting takes a good part of a kernel's time.
SHORT = 5.0
# Part of the last wave's multiprocessors that must work.
EDGES = 0.8

_FIRST_WITH_WGMMA = (9, 0)
_STALLS = {
    "long_scoreboard": "loads from memory: use more stages, or asynchronous copies",
    "short_scoreboard": "shared memory: check for bank conflicts",
    "mio_throttle": "the queue of shared memory: use wider accesses",
    "lg_throttle": "the queue of global memory: use wider accesses",
    "barrier": "other warps at a barrier: use more, smaller blocks, or finer barriers",
    "math_pipe_throttle": "the pipe itself, which is busy",
    "gmma": "wgmma to end: keep one group in flight",
    "wait": "fixed latencies: use more independent instructions",
    "not_selected": "the scheduler: other warps were ready",
}


@dataclass(frozen=True)
class Diagnosis:
    """What limits a kernel."""

    # ``"memory-bound"``, ``"cuda-cores"``, ``"mma.sync"``, ``"edges"``, ``"healthy"``, ``"short"``, ``"waiting"``
    # or ``"time only"``
    name: str
    says: str  # the counters that say so
    advice: str


def diagnose(kernel: Kernel) -> Diagnosis:
    """Return what limits a kernel: the first that applies, most certain first."""
    if not kernel.counted:
        says = f"{kernel.microseconds / max(kernel.calls, 1):.1f} us a launch, and no counters"
        return Diagnosis("time only", says, "run it with ncu to know why")
    rules = (_memory, _healthy, _cuda_cores, _fallback, _short, _edges)
    found = next((said for rule in rules if (said := rule(kernel)) is not None), None)
    return found or _waiting(kernel)


def _of(value: float | None) -> float:
    return 0.0 if value is None else value


def _memory(kernel: Kernel) -> Diagnosis | None:
    dram, tensor = _of(kernel.dram), _of(kernel.tensor)
    if dram < BUSY or dram < tensor:
        return None
    says = f"device memory is {dram:.0f}% busy, the Tensor Cores {tensor:.0f}%: their share is the wrong metric here"
    advice = "move fewer bytes: fuse what follows into the kernel, use smaller types, keep reused data in the L2 cache"
    return Diagnosis("memory-bound", says, advice)


def _healthy(kernel: Kernel) -> Diagnosis | None:
    tensor = _of(kernel.tensor)
    if tensor < BUSY:
        return None
    says = f"the Tensor Cores are {tensor:.0f}% busy"
    if _falls_back(kernel):
        return None
    return Diagnosis("healthy", says, "nothing, unless a smaller type will do")


def _cuda_cores(kernel: Kernel) -> Diagnosis | None:
    fma, tensor = _of(kernel.fma), _of(kernel.tensor)
    if tensor >= IDLE or fma < COMPUTES:
        return None
    says = f"all on the CUDA cores: their FP32 pipe is {fma:.0f}% busy, the Tensor Cores {tensor:.1f}%"
    advice = "if it is a matrix product, ask co.contract: FP32 without TF32, other types, a tile without an instruction"
    return Diagnosis("cuda-cores", says, advice)


def _falls_back(kernel: Kernel) -> bool:
    return kernel.capability == _FIRST_WITH_WGMMA and kernel.wgmma is False and _of(kernel.tensor) >= IDLE


def _fallback(kernel: Kernel) -> Diagnosis | None:
    if not _falls_back(kernel):
        return None
    says = f"the Tensor Cores are {_of(kernel.tensor):.0f}% busy by mma.sync, which reaches 63% of an H100's peak"
    advice = "ask co.contract what wgmma needs: lines at multiples of 16 bytes, K-major FP8, BLOCK_M of 64, 4 warps"
    return Diagnosis("mma.sync", says, advice)


def _short(kernel: Kernel) -> Diagnosis | None:
    each = kernel.microseconds / max(kernel.calls, 1)
    if each >= SHORT:
        return None
    advice = "fuse it with its neighbours, or capture a CUDA graph"
    return Diagnosis("short", f"{each:.1f} us a launch: starting takes a good part of it", advice)


def _edges(kernel: Kernel) -> Diagnosis | None:
    waves = _of(kernel.waves)
    full = waves / math.ceil(waves) if waves else 1.0
    if _of(kernel.tensor) < IDLE or full >= EDGES:
        return None
    says = f"{waves:.2f} waves of blocks: on average {100 * full:.0f}% of the chip works"
    return Diagnosis("edges", says, "use smaller tiles, split K, or stream-K, so that blocks fill the multiprocessors")


def _waiting(kernel: Kernel) -> Diagnosis:
    busy = {"Tensor Cores": kernel.tensor, "FP32 pipe": kernel.fma, "device memory": kernel.dram, "L2 cache": kernel.l2}
    says = "nothing is busy: " + ", ".join(f"{name} {value:.0f}%" for name, value in busy.items() if value is not None)
    reason = max(kernel.stalls, key=lambda name: kernel.stalls[name], default=None)
    if reason is None:
        return Diagnosis("waiting", says, "look at the source page of ncu for stalls")
    share = 100 * kernel.stalls[reason] / sum(kernel.stalls.values())
    known = _STALLS.get(reason, f"{reason.replace('_', ' ')}: see ncu's documentation of stall reasons")
    return Diagnosis("waiting", says, f"warps wait ({share:.0f}% of their time) for {known}")
