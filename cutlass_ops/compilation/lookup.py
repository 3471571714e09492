"""Look for a kernel in the user's store, first by its key from a file: a process's first calls wait for this."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from cutlass_ops.artifacts.entry import Artifact
from cutlass_ops.artifacts.store import KernelStore
from cutlass_ops.base.errors import StoreError
from cutlass_ops.compilation import keys
from cutlass_ops.declare.quantizing import Declaration

T = TypeVar("T")


def recalled(spec: Declaration) -> Artifact | None:
    """Return the kernel for a declaration if the user's store has it and its key is known: see :mod:`.keys`.

    If the store cannot be used, nothing is found: a look without the key says why.
    """
    try:
        key = keys.recalled(KernelStore.default(), spec)
        return None if key is None else with_key(spec, key)
    except StoreError:
        return None


def with_key(spec: Declaration, key: str) -> Artifact | None:
    """Return the kernel with a key from the user's store, if it is there and was built for this declaration.

    Raises
    ------
    StoreError
        If the store is not private.
    """
    found = KernelStore.default().lookup(key)
    if found is None or found.manifest["identity"]["spec"] != spec.to_json():
        return None
    return replace(found, again=functools.partial(_built_again, spec))


def stored(spec: Declaration) -> Artifact | None:
    """Return the kernel for a declaration if the user's store has it; compile and fetch nothing.

    The errors are those of :func:`cutlass_ops.compilation.builder.stored`.
    """
    found = recalled(spec)
    if found is not None:
        return found
    # What compiles is half of this package.
    from cutlass_ops.compilation import builder

    return builder.stored(spec)


def _built_again(spec: Declaration, use: Callable[[Artifact], T]) -> T:
    from cutlass_ops.compilation import builder

    return builder.built_again(spec, use)
