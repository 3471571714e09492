"""The kernels to which a choice is limited: those of bundles.

What the user asked for, by ``load_bundle`` or ``CUTLASS_OPS_BUNDLES``, is all that serves its signatures. What pip
installed is all that serves them only if nothing else can be had. Otherwise the choice is free: an installed kernel
serves if it is the best one, or until the best one is compiled.
"""

from __future__ import annotations

import os
from typing import NamedTuple

from cutlass_ops.artifacts.bundles import Bundles, State
from cutlass_ops.base import env
from cutlass_ops.base.session import cached
from cutlass_ops.declare.config import Config, Ordered
from cutlass_ops.declare.problem import Problem
from cutlass_ops.declare.signature import OpSignature

# These decide whether other kernels can be had: a process looks once for each setting of them.
_SETTINGS = (
    "PATH",
    *(v.name for v in (env.JIT, env.NVCC, env.CUDA_HOME, env.CUDA_PATH, env.NVCC_CCBIN, env.CUTLASS_DIR)),
    *(v.name for v in (env.REMOTE_STORE, env.CACHE_DIR, env.XDG_CACHE_HOME)),
)


class Limit(NamedTuple):
    """To what a choice is limited."""

    configs: tuple[Config, ...]  # the kernels that may be chosen; none if the choice is free
    installed: bool  # whether they are what is installed, and not what the user asked for
    generation: int  # the bundles' generation


def limit(signature: OpSignature, capability: tuple[int, int]) -> Limit:
    """Return to which kernels of bundles the choice for a signature is limited."""
    state = Bundles.current().state()
    # Without a distribution no answer depends on what can be compiled.
    settings = tuple(os.environ.get(name) for name in _SETTINGS) if state.distributions else ()
    return _limit(signature, capability, state, settings)


@cached(maxsize=4096)
def _limit(
    signature: OpSignature, capability: tuple[int, int], state: State, settings: tuple[str | None, ...]
) -> Limit:
    bundles = Bundles.current()
    asked = bundles.of_one_kind(signature, capability)
    if asked:
        return Limit(asked, False, state.generation)
    installed = bundles.of_one_kind(signature, capability, installed=True)
    if not installed or _others_can_be_had():
        return Limit((), False, state.generation)
    return Limit(installed, True, state.generation)


class Chosen(NamedTuple):
    """What bundles say about a problem."""

    ordered: Ordered  # the kernel that serves it, with the order of its tiles
    kept: tuple[Config, ...]  # the kernels that its weight may need at any number of rows


def chosen(limited: Limit, signature: OpSignature, capability: tuple[int, int], problem: Problem) -> Chosen | None:
    """Return what bundles say about a problem, or the only kernel that may be chosen; None if they say nothing."""
    configs, installed, _ = limited
    if len(configs) == 1:
        return Chosen(Ordered(configs[0], configs[0].usual_order(problem)), configs)
    choice = Bundles.current().choice(signature, capability, problem, installed=installed) if configs else None
    if choice is None:
        return None
    return Chosen(choice.at(problem.m), tuple(dict.fromkeys(ordered.config for _, ordered in choice.rows)))


def _others_can_be_had() -> bool:
    """Whether there can be kernels besides those of bundles: compiled here, or in a store."""
    # Imported late: a call that a bundle serves needs nothing of this room.
    from cutlass_ops.compilation import finding

    if env.jit_enabled():
        return finding.can_compile()
    return finding.can_render() and (env.REMOTE_STORE.text is not None or _has_store())


def _has_store() -> bool:
    from cutlass_ops.artifacts.store import KernelStore
    from cutlass_ops.base.errors import StoreError

    try:
        return not KernelStore.default().is_empty()
    except StoreError:
        return False
