"""Sizes of C++ objects in shared memory."""

from __future__ import annotations

from dataclasses import dataclass

# A pipeline needs one stage to fill and one to use. Even the smallest tile does not need more than the maximum.
MIN_STAGES, MAX_STAGES = 2, 64

# CUTLASS's default alignment of an array in shared memory (cutlass/array.h, cute/container/array_aligned.hpp).
ARRAY_ALIGNMENT = 16


@dataclass(frozen=True)
class Block:
    """Size and alignment of a C++ object in bytes."""

    size: int
    alignment: int = ARRAY_ALIGNMENT


def round_up(value: int, multiple: int) -> int:
    """Round a value up to a multiple."""
    return -(-value // multiple) * multiple


def struct(*members: Block, alignment: int = 1) -> Block:
    """Return the layout of a C++ struct. ``alignment`` is the struct's own ``alignas``."""
    offset = 0
    for member in members:
        offset = round_up(offset, member.alignment) + member.size
        alignment = max(alignment, member.alignment)
    return Block(round_up(offset, alignment), alignment)


def union(*members: Block) -> Block:
    """Return the layout of a C++ union."""
    alignment = max(m.alignment for m in members)
    return Block(round_up(max(m.size for m in members), alignment), alignment)
