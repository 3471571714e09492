"""What serves a call now: its best kernel if that is loaded, else PyTorch until it is.

A call waits for a compiler only if its answer would stay: a captured graph would keep PyTorch's kernels for ever. It
also waits if results must have the same bits at every call, or if the user says so.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as Late
from typing import Any

import torch

from cutlass_ops.artifacts.bundles import Bundles
from cutlass_ops.base import env
from cutlass_ops.base.errors import MissingKernelError
from cutlass_ops.base.session import warn_once
from cutlass_ops.choose.dispatch import Decision
from cutlass_ops.compilation.background import Background, Wanted
from cutlass_ops.declare.quantizing import Declaration
from cutlass_ops.run.gathering import REGIONS, is_gathering
from cutlass_ops.run.registry import Registry

_log = logging.getLogger("cutlass_ops")

# Seconds that a call waits for a decision, and for a kernel that need not be compiled: to load one takes about that.
_A_LOAD = 0.002
# Seconds after which a captured call gives up, and between two lines of its log.
_LONGEST, _A_LINE = 300.0, 10.0


def may_stand_in() -> bool:
    """Whether PyTorch may serve calls until their kernels are there."""
    return is_gathering() or env.stand_in()


def serves_again() -> bool:
    """Whether PyTorch serves a call as it served one before. If not, the call requests its kernel, or waits."""
    return not REGIONS and not is_captured() and env.stand_in()


def is_captured() -> bool:
    """Whether a CUDA graph captures what runs now."""
    is_in_use: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return is_in_use and torch.cuda.is_current_stream_capturing()


def waits(decision: Decision) -> bool:
    """Whether a call waits for its best kernel, as long as needed, and raises the error if it cannot be had."""
    return decision.bundled or not may_stand_in() or (decision.is_deterministic and not is_gathering())


def supply(decision: Decision, device: torch.device) -> Wanted | None:
    """Return None if the best kernel serves a decided call; else what is done once the kernel is there.

    PyTorch serves until then. Raises MissingKernelError, CompileError, ToolchainError, StoreError or LoadError if the
    call waits for a kernel that cannot be had.
    """
    signature = decision.signature
    what = f"{signature.epilogue.title or 'gemm'} of a {signature.a}, b {signature.b} and d {signature.d}"
    return supply_kernel(decision.spec, device, what, waits=waits(decision))


def supply_kernel(spec: Declaration, device: torch.device, what: str, *, waits: bool) -> Wanted | None:
    """Do as :func:`supply` does, for a kernel. `what` is for a warning; `waits` is whether the call waits for it."""
    registry, captured = Registry.current(), is_captured()
    if registry.has(spec) or (waits and not captured):
        return None
    wanted = need(spec, device)
    if captured:
        _wait(wanted, spec.slug)
    if not wanted.looked.is_set():
        wanted.looked.wait(_A_LOAD)  # it may be loaded in a moment
    if registry.has(spec):
        return None
    error = wanted.exception() if wanted.done() else None
    if isinstance(error, CancelledError):  # the background has ended, and nothing is wrong with the kernel
        error = None
    if waits:
        raise error or MissingKernelError(f"{spec.slug} is not compiled: call cutlass_ops.warm_up before the capture")
    if error is not None:
        warn_once(
            f"PyTorch serves {what}, since the kernel cannot be had: {type(error).__name__}: {error}. Install or "
            f"compile kernels (docs/deployment.md); {env.STAND_IN.name}=0 makes this an error"
        )
    elif _log.isEnabledFor(logging.INFO):  # making a slug takes longer than the choice
        _log.info("PyTorch serves until %s is there", spec.slug)
    return wanted


def is_soon_done(future: Future[Any]) -> bool:
    """Whether something is done, or will be in a moment: the call waits that long."""
    with contextlib.suppress(Late):
        future.exception(_A_LOAD)
    return future.done()


def need(spec: Declaration, device: torch.device) -> Wanted:
    """Find or compile the kernel of a call, and load it on its device."""
    background = Background.current()
    wanted = background.needed(spec)
    if wanted is None:
        wanted = background.need(spec, functools.partial(Registry.current().take, spec, device=device))
    for found in REGIONS:
        found.append(wanted)
    return wanted


def supply_others(decision: Decision, device: torch.device) -> None:
    """Decide, build and load in the background what other numbers of rows than the decided call's may need."""
    registry, bundles, background = Registry.current(), Bundles.current(), Background.current()
    missing = [spec for spec in decision.specs if not registry.has(spec)]
    if decision.bundled or not env.jit_enabled():
        missing = [spec for spec in missing if bundles.find(spec) is not None]
    if missing:
        background.guess(missing, functools.partial(registry.take, device=device))


def _wait(wanted: Wanted, slug: str) -> None:
    """Wait for a kernel on a thread that captures a graph. Another thread loads it."""
    began = time.monotonic()
    while not wanted.done():
        waited = time.monotonic() - began
        if waited > _LONGEST:
            _log.warning("a CUDA graph is captured without %s, which is not there after %.0f s", slug, waited)
            return
        try:
            wanted.exception(_A_LINE)
        except Late:
            _log.warning("a CUDA graph is being captured, and waits for %s to be compiled (%.0f s)", slug, waited)
