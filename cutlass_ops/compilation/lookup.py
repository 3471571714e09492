"""Look for a kernel in the user's store, first by a key that is remembered: a process's first calls wait for this."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from cutlass_ops.artifacts.entry import Artifact
from cutlass_ops.artifacts.store import KernelStore
from cutlass_ops.base.errors import StoreError
from cutlass_ops.compilation import memo
from cutlass_ops.declare.quantizing import Declaration

T = TypeVar("T")


def recalled(spec: Declaration) -> Artifact | None:
    """Return the kernel for a declaration if the user's store has it and its key is remembered."""
    key = memo.recall(memo.place_of_key(spec, KernelStore.default()))
    try:
        return None if key is None else with_key(spec, key)
    except StoreError:  # a look without the key says why the store cannot be used
        return None


def with_key(spec: Declaration, key: str) -> Artifact | None:
    """Return the kernel with a key from the user's store, if it is there and was built for this declaration."""
    found = KernelStore.default().lookup(key)
    if found is None or found.manifest["identity"]["spec"] != spec.to_json():
        return None

    def built_again(use: Callable[[Artifact], T]) -> T:
        from cutlass_ops.compilation import builder

        return builder.built_again(spec, use)

    return replace(found, again=built_again)


def stored(spec: Declaration) -> Artifact | None:
    """Return the kernel for a declaration if the user's store has it; compile and fetch nothing."""
    found = recalled(spec)
    if found is not None:
        return found
    # What compiles is half of this package.
    from cutlass_ops.compilation import builder

    return builder.stored(spec)
