"""What a rung's machine code computes with: its instructions counted, and its inner loop."""

from __future__ import annotations

import itertools
import re
import struct
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from cutlass_ops.base import elf
from cutlass_ops.base.sass import OPCODES

# The lowest nine bits of an instruction. FFMA is no Tensor Core instruction, so the library has no need of it.
_COUNTED = {**OPCODES, 0x023: "FFMA"}

# The best first: a kernel is of the class of the first one it has.
CLASSES = ("HGMMA", "HMMA", "FFMA")


def count(code: bytes) -> dict[str, int]:
    """Count the instructions of machine code for GPUs: of a shared library or of a cubin.

    Raises
    ------
    ValueError
        If it has no machine code that can be read.
    """
    counts: Counter[str] = Counter()
    try:
        for image in elf.gpu_images(code) if next(elf.gpu_images(code), None) else (code,):
            for section in elf.sections(image):
                if section.executable and section.name.startswith(".text."):
                    opcodes = (low & 0x1FF for low, _ in struct.iter_unpack("<QQ", section.data))
                    counts.update(_COUNTED[opcode] for opcode in opcodes if opcode in _COUNTED)
    except struct.error as exc:
        raise ValueError(f"the machine code cannot be read: {exc}") from None
    return dict(sorted(counts.items()))


def class_of(counts: dict[str, int]) -> str:
    """Return what a kernel computes with: the first of :data:`CLASSES` that it has, or ``"none"``."""
    return next((name for name in CLASSES if counts.get(name)), "none")


class Instruction(NamedTuple):
    """One instruction as cuobjdump prints it: its address and text."""

    address: int
    text: str

    @property
    def opcode(self) -> str:
        """The first word after a predicate, without what follows a dot."""
        return self.text.removeprefix(_predicate(self.text)).split()[0].rstrip(";").split(".")[0]

    @property
    def target(self) -> int | None:
        """Where a branch goes."""
        found = re.search(r"\bBRA(?:\.\S+)? .*?0x([0-9a-f]+)", self.text)
        return int(found[1], 16) if found else None


def _predicate(text: str) -> str:
    found = re.match(r"@!?U?P\w+ +", text)
    return found[0] if found else ""


def disassemble(library: Path, cuobjdump: Path) -> list[Instruction]:
    """Return a library's instructions, of all its kernels."""
    command = [str(cuobjdump), "-sass", str(library)]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return list(parse(said))


def parse(listing: str) -> Iterator[Instruction]:
    """Read cuobjdump's listing."""
    for address, text in re.findall(r"^\s+/\*([0-9a-f]{4,})\*/\s+(.*?;)", listing, re.MULTILINE):
        yield Instruction(int(address, 16), re.sub(r"\s+", " ", text.strip()))


def inner_loop(instructions: list[Instruction]) -> list[Instruction]:
    """Return the smallest loop with the most products: Tensor Core instructions if there are any, else FFMA."""
    key = next((name for name in CLASSES if any(i.opcode == name for i in instructions)), "")
    loops = []
    for at, instruction in enumerate(instructions):
        if instruction.target is not None and instruction.target < instruction.address:
            body = [i for i in instructions[: at + 1] if i.address >= instruction.target]
            products = sum(i.opcode == key for i in body)
            # A branch of a hundred loops back is one around the rest of the kernel.
            loops.append((products, -len(body), body))
    return max(loops, key=lambda found: found[:2])[2] if loops else []


# What a loop is shown by: products, reads, copies and waits. Other instructions are counted.
_SHOWN = re.compile(
    r"^(HGMMA|HMMA|FFMA|LDSM|LDS|LDG|LDGSTS|STS|LDGDEPBAR|DEPBAR|UTMALDG|SYNCS|BAR|WARPGROUP|MEMBAR|FENCE|BRA)$"
)


def outline(loop: list[Instruction]) -> list[str]:
    """Return a loop as lines: the instructions that matter, the first of each run of one kind, and what is left out."""
    shown = [i for i in loop if _SHOWN.match(i.opcode)]
    lines = []
    for opcode, found in itertools.groupby(shown, lambda i: i.opcode):
        run = list(found)
        lines.append(run[0].text if len(run) == 1 else f"{run[0].text}    ... {len(run)} {opcode}")
    return [*lines, f"({len(loop) - len(shown)} other instructions)"]
