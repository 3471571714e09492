"""Which kernel serves a call now: the best one, or another until the best one is there.

A call must not wait for a compiler where any kernel of its signature can serve it. Nor must it wait until a kernel is
found in the store and loaded, which takes some milliseconds, where one that is loaded is almost as fast and gives the
same bits. Such a stand-in serves until the best kernel has arrived from the background.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from cutlass_ops.artifacts.bundles import Bundles
from cutlass_ops.base import env
from cutlass_ops.base.errors import CompileError, LoadError, MissingKernelError, ToolchainError
from cutlass_ops.choose.dispatch import Decision
from cutlass_ops.compilation.background import Background
from cutlass_ops.declare.config import Config, Ordered
from cutlass_ops.declare.spec import KernelSpec
from cutlass_ops.run.registry import Registry

if TYPE_CHECKING:
    from cutlass_ops.artifacts.entry import Artifact

_log = logging.getLogger("cutlass_ops")


@dataclass(frozen=True)
class Supply:
    """What serves a call now.

    Attributes
    ----------
    spec : KernelSpec
        The kernel.
    serves : Ordered
        Its configuration, with the order of its tiles.
    awaited : KernelSpec or None
        The best kernel, if this one stands in for it until it is there.
    """

    spec: KernelSpec
    serves: Ordered
    awaited: KernelSpec | None = None

    def until_it_is_there(self, device: torch.device, forget: Callable[[], object]) -> None:
        """Have a function called once the best kernel is there, so that the stand-in serves no further call.

        Parameters
        ----------
        device : torch.device
            Where calls run.
        forget : callable
            The function.
        """
        awaited, registry = self.awaited, Registry.current()
        if awaited is None:
            return

        def arrived(found: Artifact) -> None:
            registry.take(awaited, found, device)  # here, so that no call has to load it
            forget()

        Background.current().when_built(awaited, arrived)


def supply(decision: Decision) -> Supply:
    """Return what serves a decided call now. Wait for a compiler only if no kernel of the signature is there.

    Raises
    ------
    MissingKernelError
        If the stream is being captured into a CUDA graph, and no kernel of the signature is there.
    CompileError, ToolchainError, StoreError
        If no kernel of the signature can be had.
    """
    registry, background = Registry.current(), Background.current()
    best = Supply(decision.spec, Ordered(decision.config, decision.order))
    if decision.bundled or not env.stand_in() or registry.has(best.spec):
        return best
    alike = None if background.failure(best.spec) else _alike(decision)
    if alike is not None:
        background.add([best.spec], first=True)
        _say("%s serves until %s is there", alike.spec, best.spec)
        return Supply(alike.spec, alike.serves, best.spec)
    if not env.jit_enabled():
        return _without_compiling(decision, best)
    captured = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
    loaded = _loaded(decision)
    looks = not captured and (loaded is None or _store_is_quick())
    waits = captured or background.pending(best.spec)
    if not waits and _is_at_hand(best.spec, quickly=not looks):
        return best
    found = loaded or (_at_hand(decision) if looks else None)
    if found is None and captured and registry.at_hand(best.spec) is None:
        raise MissingKernelError(
            f"no kernel for this call is compiled, and the stream is being captured into a CUDA graph: call "
            f"cutlass_ops.warm_up before, with such arguments. The best kernel is {best.spec.slug}"
        )
    if found is None and not captured:
        # To fetch the best kernel takes less time than to compile any.
        if registry.fetched(best.spec) is not None:
            return best
        _say("a call waits for the compiler: no kernel that may serve in place of %s is compiled", best.spec)
        found = _quickest(decision)
    if found is None:
        return best
    why_not = background.failure(best.spec)
    if why_not is not None:
        _log.warning(
            "%s serves, since the best kernel %s cannot be compiled: %s", found.spec.slug, best.spec.slug, why_not
        )
        return found
    background.add([best.spec], first=True)
    _say("%s serves until %s is compiled", found.spec, best.spec)
    return Supply(found.spec, found.serves, best.spec)


def supply_others(decision: Decision, device: torch.device) -> None:
    """Have what other numbers of rows may need decided, built and loaded meanwhile: no later call waits for it.

    Parameters
    ----------
    decision : Decision
        What was decided for a call.
    device : torch.device
        Where it runs.
    """
    registry, bundles = Registry.current(), Bundles.current()
    missing = [spec for spec in decision.specs if not registry.has(spec)]
    if decision.bundled or not env.jit_enabled():
        missing = [spec for spec in missing if bundles.find(spec) is not None]
    if missing:
        Background.current().add(missing, then=functools.partial(registry.take, device=device))
    if not decision.is_finished:
        Background.current().later(decision.finish)


def stand_in(decision: Decision) -> Supply | None:
    """Return what would serve a decided call in place of its best kernel, if that is not there; load nothing."""
    if decision.bundled or not env.stand_in() or Registry.current().has(decision.spec):
        return None
    alike = _alike(decision)
    if alike is not None:
        return Supply(alike.spec, alike.serves, decision.spec)
    if _is_there(decision.spec):
        return None
    if not env.jit_enabled():
        found = _installed(decision)
        return None if found is None else Supply(found.spec, found.serves, decision.spec)
    with _one_situation():
        stored = (each for each in _others(decision) if _may_be_there(each, decision) and _is_there(each.spec))
        found = _loaded(decision) or next(stored, None)
    return None if found is None else Supply(found.spec, found.serves, decision.spec)


def _say(message: str, *kernels: KernelSpec) -> None:
    if _log.isEnabledFor(logging.INFO):  # a slug takes longer than the choice
        _log.info(message, *(spec.slug for spec in kernels))


def _store_is_quick() -> bool:
    """Whether a look into the store need not examine the compilers first."""
    from cutlass_ops.compilation import toolchain

    return toolchain.is_known()


def _is_at_hand(spec: KernelSpec, *, quickly: bool) -> bool:
    """Whether a kernel is loaded, or can be now.

    A quick look is for a call that another kernel can serve. It leaves a kernel that cannot be loaded to the
    background, which says why.
    """
    try:
        return Registry.current().at_hand(spec, quickly=quickly) is not None
    except LoadError:
        if not quickly:
            raise
        return False


def _is_there(spec: KernelSpec) -> bool:
    return Registry.current().has(spec) or Registry.current().found(spec) is not None


def _others(decision: Decision) -> Iterator[Supply]:
    """Yield the signature's other kernels that can be launched, the fastest first."""
    for candidate in decision.alternatives():
        yield Supply(decision.device.spec(decision.signature, candidate.config), candidate.ordered)


def _alike(decision: Decision) -> Supply | None:
    """Return a loaded kernel that gives the best one's bits, in not much more time; None if there is none."""
    if not _sums_in_order(decision, decision.config):
        return None
    registry = Registry.current()
    for spec, each in decision.near():
        if each.config != decision.config and _sums_in_order(decision, each.config) and registry.has(spec):
            return Supply(spec, each)
    return None


def _sums_in_order(decision: Decision, config: Config) -> bool:
    """Whether a kernel's bits are those of all others of which this holds.

    By wgmma, each element of D is summed along K in one order, whatever the tile. Reductions depend on the tile.
    """
    graph = decision.signature.epilogue
    reduces = bool(graph.gathered) or any(output.reduce is not None for output in graph.outputs)
    return config.wgmma and config.whole_k and not reduces


def _loaded(decision: Decision) -> Supply | None:
    """Return another kernel that is loaded, the fastest by the model."""
    found = decision.beside(Registry.current().those)
    return None if found is None else Supply(*found)


def _at_hand(decision: Decision) -> Supply | None:
    """Return the fastest other kernel that could be loaded without a compiler.

    A look into the store takes milliseconds, so only kernels of the call's weight are looked for there.
    """
    registry = Registry.current()
    others = (each for each in _others(decision) if _may_be_there(each, decision))
    with _one_situation():
        return next((each for each in others if registry.at_hand(each.spec) is not None), None)


def _one_situation() -> contextlib.AbstractContextManager[None]:
    from cutlass_ops.compilation import keys

    return keys.one_situation()


def _may_be_there(each: Supply, decision: Decision) -> bool:
    return each.serves.config in decision.kept or Bundles.current().find_installed(each.spec) is not None


def _without_compiling(decision: Decision, best: Supply) -> Supply:
    """Return the best kernel if a bundle, the store or the remote store has it, else an installed one."""
    found = _installed(decision)
    if found is None:
        return best
    try:
        Registry.current().kernel(best.spec)
    except (MissingKernelError, ToolchainError) as exc:
        _log.warning("%s serves, since the best kernel is not there: %s", found.spec.slug, exc)
        return found
    return best


def _installed(decision: Decision) -> Supply | None:
    """Return the fastest kernel for a decided call that an installed distribution has."""
    bundles = Bundles.current()
    if not bundles.configs(decision.signature, decision.device.capability, installed=True):
        return None
    return next((each for each in _others(decision) if bundles.find_installed(each.spec) is not None), None)


def _quickest(decision: Decision) -> Supply | None:
    """Compile the kernel that compiles fastest; None if that is the best one, or it cannot be compiled."""
    others = [each for each in _others(decision) if _compiles(each.serves.config) < _compiles(decision.config)]
    if not others:
        return None
    quickest = min(others, key=lambda each: _compiles(each.serves.config))  # of those of one kind, the fastest
    Background.current().add([decision.spec], first=True)
    try:
        Registry.current().kernel(quickest.spec)
    except CompileError as exc:
        _log.warning("%s cannot be compiled: %s", quickest.spec.slug, exc)
        return None
    return quickest


def _compiles(config: Config) -> float:
    # Kinds have their models with them, which a call that a bundle serves does not need.
    from cutlass_ops.kinds.table import kind_of

    return kind_of(config).compile_seconds
