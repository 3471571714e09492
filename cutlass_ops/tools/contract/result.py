"""The answer: the instruction, what it can reach, and the conditions with their remedies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from cutlass_ops.declare.roofline import Roofline
from cutlass_ops.tools.contract.tensor_cores import Instruction

# What runs if no Tensor Core instruction does, and if nothing does.
CUDA_CORES = "none"
NOTHING = "nothing"


@dataclass(frozen=True)
class Condition:
    """One condition of the fastest instruction.

    Attributes
    ----------
    name : str
        The condition. Where a legality rule says the same, its name (docs/legality.md).
    met : bool
        Whether the call meets it.
    says : str
        The value that was found, and what is needed.
    remedy : str
        The smallest change that meets it; empty if it is met.
    change : mapping
        The same for programs: new values by the name of an argument of ``contract``; empty if no argument does it.
    """

    name: str
    met: bool
    says: str
    remedy: str = ""
    change: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Ruling:
    """What a program's rules say."""

    instruction: Instruction | None  # None if the CUDA cores multiply, or nothing runs
    conditions: tuple[Condition, ...]
    useful: float = 1.0  # the part of the products that are the problem's own
    nothing: str = ""  # why nothing runs, if nothing does


@dataclass(frozen=True, repr=False)
class Contract:
    """The instruction that a GEMM will run, and why.

    Attributes
    ----------
    program : str
        The kind of program: ``"library"``, ``"triton"`` or ``"wmma"``.
    architecture : str
        For example ``"sm_90"``.
    a, b : str
        Element type and major, and the alignment if it is below 16 bytes.
    problem : tuple of int
        M, N and K.
    family : str
        ``"tcgen05"``, ``"wgmma"``, ``"mma.sync"``, ``"none"`` for CUDA cores, or ``"nothing"`` if the program does not
        compile or launch.
    instruction : str
        Family and shape of the instruction, such as ``"wgmma m64nNk16"``, or what happens instead.
    opcode : str
        The instruction's name in machine code: what ``cuobjdump -sass`` shows. Empty if there is none.
    best : str
        The fastest instruction that this architecture has for these types, or for the types they convert to.
    peak_fraction : float or None
        An upper bound of the part of the Tensor Cores' peak for these types that the kernel can reach: the
        instruction's share, times the share of products that are not padding. None if the instruction was not measured.
    conditions : tuple of Condition
        All conditions, met or not.
    roofline : Roofline or None
        Lower bounds of the time in microseconds on a chip of the architecture; None if its peaks are unknown.
    chip : str
        The name of that chip.

    Examples
    --------
    >>> found = co.contract("bf16.row", "bf16.col", m=4096, n=4096, k=4100, arch="sm_90")
    >>> found.instruction, found.violated[0].remedy
    ('mma.sync m16n8k16', 'pad K to 4104')
    """

    program: str
    architecture: str
    a: str
    b: str
    problem: tuple[int, int, int]
    family: str
    instruction: str
    opcode: str
    best: str
    peak_fraction: float | None
    conditions: tuple[Condition, ...]
    roofline: Roofline | None = None
    chip: str = ""

    @property
    def violated(self) -> tuple[Condition, ...]:
        """The conditions that are not met."""
        return tuple(each for each in self.conditions if not each.met)

    @property
    def kept(self) -> bool:
        """Whether every condition is met."""
        return not self.violated

    @property
    def tensor_cores(self) -> bool:
        """Whether the Tensor Cores multiply."""
        return self.family not in (CUDA_CORES, NOTHING)

    def to_json(self) -> dict[str, Any]:
        """Return the contract as plain values."""
        return {
            "program": self.program,
            "architecture": self.architecture,
            "a": self.a,
            "b": self.b,
            "problem": list(self.problem),
            "family": self.family,
            "instruction": self.instruction,
            "opcode": self.opcode,
            "best": self.best,
            "peak_fraction": None if self.peak_fraction is None else round(self.peak_fraction, 4),
            "kept": self.kept,
            "conditions": [
                {"name": c.name, "met": c.met, "says": c.says, "remedy": c.remedy, "change": dict(c.change)}
                for c in self.conditions
            ],
            "bound": None if self.roofline is None else self.roofline.bound,
            "chip": self.chip or None,
        }

    def __repr__(self) -> str:
        m, n, k = self.problem
        broken = ", ".join(c.name for c in self.violated) or "kept"
        return f"<contract of {self.a} by {self.b}, {m}x{n}x{k} on {self.architecture}: {self.instruction}; {broken}>"

    def __str__(self) -> str:
        """Return the instruction, the conditions and the limit, a line each."""
        m, n, k = self.problem
        lines = [f"{self.a} by {self.b}, M={m} N={n} K={k}, on {self.architecture}, by the rules of {self.program}"]
        lines.append(f"  runs      {self._runs()}")
        if self.best not in ("", self.instruction):
            lines.append(f"  could     {self.best}")
        for each in self.violated:
            lines += [f"  broken    {each.name}: {each.says}", f"            -> {each.remedy}"]
        if met := ", ".join(c.name for c in self.conditions if c.met):
            lines.append(f"  met       {met}")
        if self.roofline is not None:
            lines.append(f"  limit     {self._limit(self.roofline)}")
        return "\n".join(lines)

    def _runs(self) -> str:
        opcode = f" ({self.opcode} in machine code)" if self.opcode else ""
        if self.family == NOTHING:
            return self.instruction
        if self.peak_fraction is None:
            return f"{self.instruction}{opcode}; what it reaches here is not known"
        return f"{self.instruction}{opcode}, at most {100 * self.peak_fraction:.0f}% of the Tensor Cores' peak"

    def _limit(self, roof: Roofline) -> str:
        says = f"bound by {roof.bound} on {self.chip}: {roof.compute:.1f} us of compute, {roof.memory:.1f} us of memory"
        if roof.bound == "memory":
            most = 100 * roof.compute / roof.memory
            says += f"; the Tensor Cores can be busy for {most:.0f}% of the time at most: compare bandwidth instead"
        return says
