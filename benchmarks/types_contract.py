"""Writes the contract by type of docs/types.md: what each type takes, and which instruction multiplies it.

    python benchmarks/types_contract.py            # prints it
    python benchmarks/types_contract.py --write    # writes it

Both are asked of the library: its table of instructions, and the choice of a kernel for a large problem in each layout.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import torch
from over_k import ROOT, insert, table

from cutlass_ops.base.arch import MMA_SYNC
from cutlass_ops.base.dtypes import DType, f64, i8, tf32, tf32x3
from cutlass_ops.base.mma import MmaSpec, mma_of
from cutlass_ops.choose import dispatch
from cutlass_ops.declare.chips import CHIPS, Chip
from cutlass_ops.declare.problem import Problem
from cutlass_ops.declare.spec import Major
from cutlass_ops.epilogue import builtin
from cutlass_ops.tuner.tuning import signature_at

SCRIPT, DOCUMENT, PART = "benchmarks/types_contract.py", ROOT / "docs" / "types.md", "contract by type"
HOPPER, AMPERE = CHIPS["NVIDIA H200"], CHIPS["NVIDIA A100-SXM4-80GB"]
LAYOUTS: tuple[tuple[Major, Major], ...] = (("row", "col"), ("row", "row"), ("col", "col"), ("col", "row"))
# Problems whose lines begin at multiples of 16 bytes, and do not.
WHOLE, ODD = Problem(4096, 4096, 4096), Problem(4095, 4093, 4097)


@dataclass(frozen=True)
class Type:
    """A type of A and B, and what the results call it.

    Attributes
    ----------
    title : str
        Its name in the document.
    dtype : DType
        The type.
    cases : str
        How its cases begin in results of `bench_types.py`.
    """

    title: str
    dtype: DType
    cases: str

    @property
    def mma(self) -> MmaSpec:
        """Its row in the table of instructions."""
        found = mma_of(self.dtype, self.dtype)
        assert found is not None
        return found


TYPES = (
    Type("INT8", i8, "i8"),
    Type("TF32", tf32, "tf32"),
    Type("3xTF32", tf32x3, "3xtf32"),
    Type("FP64", f64, "f64"),
)


def serves(of: Type, chip: Chip, majors: tuple[Major, Major], problem: Problem) -> str:
    """Return what multiplies operands of a layout, without an epilogue."""
    out = getattr(torch, of.mma.result.torch_name)
    signature = signature_at(builtin.identity.graph, problem, of.dtype.name, *majors, out, chip.device)
    decision = dispatch.decide(signature, chip.device, problem)
    if decision is None:
        return "refused"
    config = decision.config
    unit = "`wgmma`" if config.family.tma else "`mma.sync`"
    return f"{unit} of copies" if config.copies else unit


def layouts(chip: Chip) -> str:
    """Return the table of what multiplies each layout on a chip."""
    header = ["", *(f"{a}, {b}" for a, b in LAYOUTS), "row, col; odd lines", "row, row; odd lines"]
    asked = [(majors, WHOLE) for majors in LAYOUTS] + [(LAYOUTS[0], ODD), (LAYOUTS[1], ODD)]
    rows = [[of.title, *(serves(of, chip, *each) for each in asked)] for of in TYPES]
    return table(header, rows)


def instructions(mma: MmaSpec, chip: Chip) -> str:
    """Return the instructions of a pair of types on a chip, as PTX names them."""
    warp = mma.by(MMA_SYNC)
    shapes = [f"m{m}n{n}k{k}" for m, n, k in warp.shapes_on(chip.capability)] if warp else []
    found = [f"`mma.sync` {', '.join(shapes)}"] if shapes else []
    if mma.by_tma and chip.device.has_tma:
        found.insert(0, f"`wgmma` m64nN{mma.wgmma_types.partition('.')[0]}")
    return "; ".join(found)


def contract() -> str:
    """Return the table of what each type takes."""
    lines = [
        (
            of.title,
            instructions(of.mma, HOPPER),
            instructions(of.mma, AMPERE),
            f"{of.mma.rate * HOPPER.tflops:.0f} {'TOP/s' if of.dtype is i8 else 'TFLOP/s'}",
        )
        for of in TYPES
    ]
    return table(("", "Hopper", "Ampere, Ada", "Peak of an H200"), lines)


def text() -> str:
    """Return the part of the document."""
    return f"""{contract()}

*Peak* is BF16's peak times the relative rate of the instruction; NVIDIA gives 67 TFLOP/s for FP64.

M, N and K may have any size, including 0. A and B are row- or column-major. The table shows the instruction on Hopper
at M = N = K = 4096. Lines begin at multiples of 16 bytes; in the last two columns (odd lines), at multiples of one
element:

{layouts(HOPPER)}

On Ampere and Ada:

{layouts(AMPERE)}"""


def written() -> str:
    """Return the document as it should be."""
    return insert(DOCUMENT.read_text(), PART, text(), SCRIPT)


def main() -> None:
    """Print the part, or write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write docs/types.md")
    if parser.parse_args().write:
        DOCUMENT.write_text(written())
    else:
        print(text())


if __name__ == "__main__":
    main()
