"""Which epilogue a kernel uses, and questions that several kinds of kernels ask."""

from __future__ import annotations

from collections.abc import Iterator

from cutlass_ops.base.arch import MMA_SYNC, WGMMA
from cutlass_ops.base.dtypes import FP8, f64
from cutlass_ops.base.mma import MmaSpec, unit_of
from cutlass_ops.declare.form import DENSE, Form
from cutlass_ops.declare.spec import KernelSpec, Operand
from cutlass_ops.epilogue.graph import Graph
from cutlass_ops.epilogue.nodes import Input, Kind, Output
from cutlass_ops.epilogue.operations import REDUCTIONS


def source(spec: KernelSpec) -> tuple[Input, Operand] | None:
    """Return the tile input that TMA loads as the collective epilogue's C, or None: see :func:`source_name`."""
    return next(((i, operand) for i, operand in spec.typed_inputs if i.kind is Kind.TILE and operand.aligned), None)


def source_name(spec: KernelSpec) -> str | None:
    """Return the name of the tile input that TMA loads as the collective epilogue's C, or None."""
    found = source(spec)
    return found and found[0].name


def plain_epilogue(spec: KernelSpec) -> bool:
    """Return whether ``epilogue.h`` stores D: TMA can store D, and it reads no other tensor of D's size than C."""
    read = [i.name for i in spec.epilogue.inputs if i.kind is Kind.TILE]
    written = [o for o in spec.epilogue.outputs[1:] if o.reduce is None]
    by_itself = not written or stored_by_threads(spec)
    return spec.d.aligned and by_itself and all(name == source_name(spec) for name in read)


def stored_by_threads(spec: KernelSpec) -> bool:
    """Return whether further (M, N) outputs are of the kind that ``tile_output.h`` stores: FP8 beside reductions.

    CUTLASS's reductions clear their results in launches of their own, and join parts one after the other. That took
    longer than all else at few rows. Without reductions, CUTLASS's epilogue stores such outputs by TMA.
    """
    written = [operand for output, operand in spec.typed_outputs if output.reduce is None]
    reduces = any(output.reduction is not None for output in spec.epilogue.outputs)
    fp8 = all(operand.aligned and operand.dtype in FP8 for operand in written)
    return bool(written) and reduces and fp8 and spec.epilogue.quantized is None


def d_alone(spec: KernelSpec) -> bool:
    """Return whether the epilogue gives nothing but D, and the scales of its blocks if it has some."""
    return all(o.kind is Kind.BLOCKS_D for o in spec.epilogue.outputs[1:])


def in_16_bits(mma: MmaSpec) -> bool:
    """Return whether this library's own kernels of ``mma.sync`` multiply a pair of types: these load 16 bits."""
    return mma.by(MMA_SYNC) is not None and mma.bits == 16 and not mma.own


def by_several_fours(mma: MmaSpec, instruction_k: int) -> bool:
    """Return whether an instruction has operands of several that CUTLASS's iterators bring (``sm80_doubles.h``)."""
    return mma.accumulator is f64 and instruction_k > 4


def takes_means(mma: MmaSpec) -> bool:
    """Return whether kernels can take means of A's rows (``row_sums.h``)."""
    return mma.bits == 16


def quantizes_apart(epilogue: Graph, form: Form) -> bool:
    """Return whether D is quantised and each warp can store its own rows (``QuantizedByWarps`` in ``quantized.h``)."""
    return (
        epilogue.quantized is not None
        and form == DENSE
        and not epilogue.gathered
        and not any(i.kind is Kind.TILE for i in epilogue.inputs)
        and all(output.reduction is None for output in epilogue.outputs)
    )


def whole_lines(spec: KernelSpec) -> bool:
    """Return whether A and B, with all their lines, begin at multiples of 16 bytes."""
    return spec.a.aligned and spec.b.aligned


def beside_each_other(spec: KernelSpec) -> bool:
    """Return whether B and a second weight can lie beside each other in a tile: along K.

    Of types that are copied along K, they are not copied: no other kernel has two weights, so that even a few rows
    would take copies of both. Two GEMMs choose for themselves.
    """
    unit = unit_of(spec.a.dtype, spec.b.dtype, WGMMA)
    return spec.b.major == "col" and (spec.b.aligned or unit is None or not unit.k_major_only)


def paired(spec: KernelSpec) -> Iterator[str]:
    """Yield the names of the outputs that are reductions that keep two numbers, which CUTLASS's own do not."""
    return (o.name for o in spec.epilogue.outputs if o.reduction is not None and REDUCTIONS[o.reduction].paired)


def reduced_together(spec: KernelSpec) -> tuple[tuple[Output, ...], ...]:
    """Return a kernel's reductions, those of the same values in the same direction together, each in D's order."""
    groups: dict[object, list[Output]] = {}
    for output, _ in spec.typed_outputs:
        if output.reduction is not None:
            key = (output.node, output.kind) if plain_epilogue(spec) else output.name
            groups.setdefault(key, []).append(output)
    return tuple(map(tuple, groups.values()))
