"""How C++ lays objects out in shared memory."""

from __future__ import annotations

from dataclasses import dataclass

# One stage of a pipeline is filled while one is used; no tile is so small that it needs more than the most.
MIN_STAGES, MAX_STAGES = 2, 64

# CUTLASS's default alignment of an array in shared memory (cutlass/array.h, cute/container/array_aligned.hpp).
ARRAY_ALIGNMENT = 16


@dataclass(frozen=True)
class Block:
    """Size and alignment of a C++ object in bytes."""

    size: int
    alignment: int = ARRAY_ALIGNMENT


def round_up(value: int, multiple: int) -> int:
    """Return the next multiple."""
    return -(-value // multiple) * multiple


def struct(*members: Block, alignment: int = 1) -> Block:
    """Lay members out one after the other as C++ does; ``alignment`` is the least that the struct itself has."""
    offset = 0
    for member in members:
        offset = round_up(offset, member.alignment) + member.size
        alignment = max(alignment, member.alignment)
    return Block(round_up(offset, alignment), alignment)


def union(*members: Block) -> Block:
    """Lay members out in the same place."""
    alignment = max(m.alignment for m in members)
    return Block(round_up(max(m.size for m in members), alignment), alignment)
