"""The rules of kernels that are written well: those of CUTLASS and of this library, and what WMMA allows.

Conditions have the names of the legality rules that say the same, and ask the same predicates.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from cutlass_ops.base import arch
from cutlass_ops.tools.contract.given import Asked, Given
from cutlass_ops.tools.contract.result import Condition, Ruling
from cutlass_ops.tools.contract.tensor_cores import ARCHITECTURES, MMA_SYNC, Architecture, Instruction, instructions

# Below this part of the multiplied elements that are the problem's own, edges are worth a word.
EDGES = 0.8
# Types with WMMA fragments, and the M, N and K of the square fragment.
_FRAGMENTS = {
    **dict.fromkeys(("f16", "bf16", "i8"), (16, 16, 16)),
    "tf32": (16, 16, 8),
    "f64": (8, 8, 4),
}


def reachable(types: tuple[str, str], architecture: Architecture) -> tuple[str, str]:
    """Return the types, or those to convert to if no Tensor Core instruction of the architecture multiplies them."""
    others = (("tf32", "tf32"),) if types == ("f32", "f32") else ()
    for a, b in (types, *others, ("bf16", "bf16"), ("f16", "f16")):
        if instructions(a, b, architecture):
            return a, b
    raise AssertionError(f"{architecture.name} has no Tensor Cores")


def operand_dtypes(asked: Asked, found: Mapping[str, Instruction], architecture: Architecture) -> Condition:
    """Return whether the Tensor Cores multiply the types, by any of the instructions that were found."""
    a, b = asked.types
    if found:
        return Condition("operand_dtypes", True, f"{a} and {b} are multiplied by {next(iter(found.values()))}")
    says = f"a is {a} and b is {b}, which no Tensor Core instruction multiplies in this program on {architecture.name}"
    newer = [name for name, each in ARCHITECTURES.items() if instructions(a, b, each) and name != architecture.name]
    where = f", or run on {', '.join(newer)}" if newer else ""
    to, _ = reachable((a, b) if (a, b) == ("f32", "f32") else ("", ""), architecture)
    if to == "tf32":
        remedy = "allow TF32: torch.set_float32_matmul_precision('high'), or input_precision='tf32' in tl.dot"
        return Condition("operand_dtypes", False, says, remedy, {"precision": to})
    change = {"a": f"{to}.{asked.a.major}", "b": f"{to}.{asked.b.major}"}
    return Condition("operand_dtypes", False, says, f"convert both to {to}{where}", change)


def operand_majors(asked: Asked, instruction: Instruction) -> Condition:
    """Return whether the instruction reads operands of these layouts."""
    majors = (asked.a.major, asked.b.major)
    met = not instruction.k_major_only or majors == ("row", "col")
    says = f"a is {majors[0]}-major and b is {majors[1]}-major"
    if met:
        return Condition("operand_majors", True, says)
    wrong = [name for name, major, fine in (("a", majors[0], "row"), ("b", majors[1], "col")) if major != fine]
    return Condition(
        "operand_majors", False, f"{says}; {instruction} reads these types along K only",
        "store " + " and ".join(f"{name} transposed, with K contiguous" for name in wrong),
        {"a": f"{asked.a.dtype}.row", "b": f"{asked.b.dtype}.col"},
    )  # fmt: skip


def alignment(asked: Asked, name: str, needed: int, why: str) -> Condition:
    """Return whether both operands' lines begin at multiples of a number of bytes."""
    short = [(x, g) for x, g in (("a", asked.a), ("b", asked.b)) if g.line_bytes < needed]
    if not short:
        return Condition(name, True, f"lines of a and b begin at multiples of {needed} bytes")
    says = " and ".join(f"{x}'s lines begin at multiples of {g.line_bytes} bytes" for x, g in short)
    remedy, change = _padded(asked, short, needed)
    return Condition(name, False, f"{says}; {why}", remedy, change)


def _padded(asked: Asked, short: list[tuple[str, Given]], needed: int) -> tuple[str, dict[str, object]]:
    """Say which extents to pad: those whose lines are no multiple; else the addresses are at fault."""
    longer: dict[str, int] = {}
    moved = {}
    for x, given in short:
        extent = asked.extent_along(x)
        value, step = getattr(asked, extent), given.element.count_in(needed)
        if value % step:
            longer[extent] = max(-(-value // step) * step, longer.get(extent, 0))
        else:
            moved[x] = f"{given.dtype}.{given.major}"
    says = [f"pad {extent.upper()} to {value}" for extent, value in longer.items()]
    says += [f"store {x} at an address and with a leading dimension of a multiple of {needed} bytes" for x in moved]
    return ", ".join(says), {**longer, **moved}


def edges(asked: Asked, tile: tuple[int, int, int], remedy: str) -> tuple[float, Condition]:
    """Return the part of the multiplied elements that are the problem's own, and whether it is most of them."""
    padded = [-(-extent // side) * side for extent, side in zip((asked.m, asked.n, asked.k), tile, strict=True)]
    useful = asked.m * asked.n * asked.k / (padded[0] * padded[1] * padded[2])
    says = f"{100 * useful:.0f}% of the products are the problem's own: tiles cover {padded[0]}x{padded[1]}x{padded[2]}"
    fine = useful >= EDGES
    return useful, Condition("edges", fine, says, "" if fine else remedy)


def ruling(asked: Asked, architecture: Architecture) -> Ruling:
    """Return the instruction of a well-written kernel and its conditions."""
    found = instructions(*asked.types, architecture)
    if asked.products > 1:  # what sums three products of TF32 has mma.sync alone, here and in CUTLASS
        found = {family: each for family, each in found.items() if family == MMA_SYNC}
    types = operand_dtypes(asked, found, architecture)
    if not found:
        return Ruling(None, (types,))
    best = next(iter(found.values()))
    every = [types, *_of(best, asked)]
    # mma.sync also works with narrow loads. wgmma and tcgen05 cannot be fed by narrow loads.
    slower = best if best.family == MMA_SYNC or all(each.met for each in every) else found.get(MMA_SYNC)
    if slower is None:
        return Ruling(None, tuple(every))
    useful, edge = _edges(asked, slower)
    return Ruling(slower, (*every, edge), useful)


def _edges(asked: Asked, instruction: Instruction) -> tuple[float, Condition]:
    """Count the products that no kernel of an instruction can leave out, with A and B swapped if these are fewer."""
    rows, columns = (16, 8) if instruction.family == MMA_SYNC else (arch.WGMMA.m, arch.WGMMA.n_step)
    remedy = f"give it more rows or columns: one {instruction} has {rows} by {columns}"
    return max((edges(asked, tile, remedy) for tile in ((rows, columns, 1), (columns, rows, 1))), key=lambda e: e[0])


def _of(best: Instruction, asked: Asked) -> Iterator[Condition]:
    if best.family != MMA_SYNC:
        yield operand_majors(asked, best)
        yield alignment(asked, "tma_alignment", arch.TMA_ALIGNMENT_BYTES, f"TMA needs {arch.TMA_ALIGNMENT_BYTES}")
    else:
        yield whole_loads(asked)


def whole_loads(asked: Asked) -> Condition:
    """Return whether both operands can be loaded by the widest accesses."""
    widest = max(arch.CP_ASYNC_BYTES)
    return alignment(asked, "whole_loads", widest, f"the widest load takes {widest}, and narrower ones are slower")


def wmma_ruling(asked: Asked, architecture: Architecture) -> Ruling:
    """Return the instruction of a kernel with ``nvcuda::wmma``, which is mma.sync on every architecture."""
    types = asked.types
    found = instructions(*types, architecture) if types[0] in _FRAGMENTS else {}
    found = {MMA_SYNC: found[MMA_SYNC]} if MMA_SYNC in found else {}
    every = [operand_dtypes(asked, found, architecture)]
    if not found:
        return Ruling(None, tuple(every))
    every.append(alignment(asked, "fragment_lines", 16, "load_matrix_sync needs leading dimensions of 16 bytes"))
    fragment = _FRAGMENTS[types[0]]
    extents = zip("mnk", (asked.m, asked.n, asked.k), fragment, strict=True)
    change = {x: -(-value // side) * side for x, value, side in extents if value % side}
    says = "M={} N={} K={}; fragments are loaded whole, {}x{}x{}".format(asked.m, asked.n, asked.k, *fragment)
    remedy = ", ".join(f"pad {x.upper()} to {value}" for x, value in change.items())
    every.append(Condition("whole_fragments", not change, says, remedy, change))
    fastest = architecture.families[0]
    if fastest != MMA_SYNC:
        says = f"WMMA compiles to mma.sync, and the peak of {architecture.name} needs {fastest}"
        remedy = f"use a kernel of {fastest}: co.gemm, CUTLASS, cuBLAS or Triton"
        every.append(Condition("family", False, says, remedy, {"program": "library"}))
    useful, edge = edges(asked, fragment, "use the other fragment shapes, 32x8x16 or 8x32x16")
    return Ruling(found[MMA_SYNC], (*every, edge), useful)
