"""What rules, shared memory and search space ask of a main loop that reads weights in a form of its own.

Its source is a :class:`cutlass_ops.kinds.sm90.loop.Loop`. Another such main loop is a row of `OWN`, and an import in
``lowering.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from cutlass_ops.base.dtypes import PACKED, SPARSE, DType
from cutlass_ops.declare.signature import OpSignature
from cutlass_ops.declare.spec import KernelSpec
from cutlass_ops.kinds.kind import Broken
from cutlass_ops.kinds.layout import Block
from cutlass_ops.kinds.sm90 import packed, sparse
from cutlass_ops.kinds.sm90.config import Sm90Config


@dataclass(frozen=True)
class OwnLoop:
    """A main loop for weights in a form of its own.

    Attributes
    ----------
    name : str
        Of its rule.
    reads : tuple of DType
        Types of B.
    rule : function
        Yields what a kernel breaks of what it supports.
    memory : function
        From a spec, its configuration, the bytes of a stage's tiles along the kernel's M and N, and stages: the blocks
        of shared memory, in their order.
    untuned : function
        Tiles for signatures that have no tables.
    fitted : function
        From a configuration of tables of other signatures: the nearest one that it supports.
    """

    name: str
    reads: tuple[DType, ...]
    rule: Callable[[KernelSpec, Sm90Config], Iterator[str | Broken]]
    memory: Callable[[KernelSpec, Sm90Config, int, int, int], tuple[Block, ...]]
    untuned: Callable[[OpSignature], tuple[Sm90Config, ...]]
    fitted: Callable[[Sm90Config, OpSignature], Sm90Config]


OWN = (
    OwnLoop("packed", PACKED, packed.rule, packed.memory, packed.untuned, packed.fitted),
    OwnLoop("sparse", SPARSE, sparse.rule, sparse.memory, sparse.untuned, sparse.fitted),
)
_BY_TYPE = {dtype: own for own in OWN for dtype in own.reads}


def own_loop(of_b: DType) -> OwnLoop | None:
    """Return the main loop for a type of B, or None if that is the library's usual one."""
    return _BY_TYPE.get(of_b)
