"""The memory that a step takes on a device that is made up, as a GPU's allocator would count it."""

from __future__ import annotations

from collections.abc import Callable

from fake_device import KERNEL
from torch.profiler import ProfilerActivity, profile

# These only allocate: what they return is there from then on.
_ALLOCATING = ("aten::empty", "aten::new_empty")


def peak_bytes(run: Callable[[], object]) -> int:
    """Return the largest sum of memory that is there at once, besides what was there before, and is not let go.

    What kernels and PyTorch's operators take while they run is left out: on the CPU, they compute in FP32.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        run()
    events = profiled.profiler.kineto_results.events()
    names = [(e, e.name()) for e in events]
    inside = sorted(
        (e.start_ns(), e.start_ns() + e.duration_ns())
        for e, name in names
        if name == KERNEL or (name.startswith("aten::") and not name.startswith(_ALLOCATING))
    )
    running: list[tuple[int, int]] = []  # outermost ones
    for begin, end in inside:
        if running and begin <= running[-1][1]:
            running[-1] = (running[-1][0], max(end, running[-1][1]))
        else:
            running.append((begin, end))
    # Memory counts between what runs. Where one ends, what it has allocated and let go is known.
    counted = [(end, 1, 0) for _, end in running]
    for e, name in names:
        if name == "[memory]":
            counted.append((e.start_ns(), 0, e.nbytes()))
    counted.sort()
    at, largest, total = iter(running), 0, 0
    current = next(at, None)
    for time, _, size in counted:
        total += size
        while current is not None and current[1] < time:
            current = next(at, None)
        if current is None or not current[0] <= time < current[1]:
            largest = max(largest, total)
    return largest
