"""The report of a profile: a table, a diagnosis of each kernel, JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from cutlass_ops.base import terminal
from cutlass_ops.declare import gpus
from cutlass_ops.declare.chips import CHIPS, Chip
from cutlass_ops.tools.contract.tensor_cores import ARCHITECTURES
from cutlass_ops.tools.profile.counters import Kernel
from cutlass_ops.tools.profile.diagnosis import Diagnosis, diagnose

# Kernels in the table, and those whose diagnosis is printed in full.
_ROWS, _EXPLAINED = 20, 8
_NAME = 56  # characters of a kernel's name


@dataclass(frozen=True)
class Point:
    """A kernel on the roofline."""

    label: str  # the kernel's name
    intensity: float  # operations for each byte of device memory
    tflops: float  # TFLOP/s, from the busiest pipe's share of its peak


@dataclass(frozen=True)
class Report:
    """Kernels and the source of their numbers."""

    kernels: tuple[Kernel, ...]  # longest first
    source: str  # ``"ncu"`` or ``"torch.profiler"``
    # microseconds by torch.profiler, by a kernel's name: ncu runs kernels one by one, with cold caches
    traced: dict[str, float]
    chip: Chip | None = None  # None if its peaks are unknown

    @property
    def diagnoses(self) -> list[Diagnosis]:
        """A diagnosis of each kernel."""
        return [diagnose(kernel) for kernel in self.kernels]

    def points(self) -> list[Point]:
        """Return the kernels that have a place on the roofline."""
        return [p for kernel in self.kernels if self.chip and (p := point(kernel, self.chip)) is not None]

    def to_json(self) -> dict[str, Any]:
        """Return the report as plain values."""
        return {
            "source": self.source,
            "chip": self.chip and self.chip.name,
            "kernels": [
                {**asdict(kernel), "traced_microseconds": self.traced.get(kernel.name), "diagnosis": asdict(said)}
                for kernel, said in zip(self.kernels, self.diagnoses, strict=True)
            ],
        }

    def lines(self, styled: bool | None = None) -> list[str]:
        """Return a table of the longest kernels, and what to do about them."""
        total = sum(kernel.microseconds for kernel in self.kernels) or 1.0
        columns = [
            *("kernel", "calls", "us", *(("us traced",) if self.traced else ()), "time"),
            *("Tensor", "FMA", "DRAM", "L2", "occupancy", "waits for", "diagnosis"),
        ]
        rows = []
        for kernel, said in list(zip(self.kernels, self.diagnoses, strict=True))[:_ROWS]:
            traced = (_us(self.traced.get(kernel.name)),) if self.traced else ()
            rows.append(
                (
                    _cut(kernel.name), str(kernel.calls), _us(kernel.microseconds), *traced,
                    f"{100 * kernel.microseconds / total:.0f}%",
                    *(_percent(x) for x in (kernel.tensor, kernel.fma, kernel.dram, kernel.l2, kernel.occupancy)),
                    _stall(kernel), said.name,
                )
            )  # fmt: skip
        more = len(self.kernels) - _ROWS
        lines = terminal.table(columns, rows, styled=styled)
        lines += [f"and {more} more: see --json"] if more > 0 else []
        for kernel, said in list(zip(self.kernels, self.diagnoses, strict=True))[:_EXPLAINED]:
            lines += ["", f"{_cut(kernel.name)}: {said.name}", f"  {said.says}", f"  -> {said.advice}"]
        return lines


def chip_of(kernels: Sequence[Kernel], name: str | None) -> Chip | None:
    """Return the chip by its name, else the usual one of the kernels' compute capability."""
    if name is not None:
        return CHIPS.get(name) or CHIPS[gpus.gpu_named(name).name]
    capability = next((kernel.capability for kernel in kernels if kernel.capability != (0, 0)), None)
    return next((CHIPS[gpu.name] for gpu in gpus.BY_TARGET.values() if gpu.capability == capability), None)


def point(kernel: Kernel, chip: Chip) -> Point | None:
    """Return a kernel's place on the roofline; None without counters of pipes and of device memory.

    Operations are those of the busiest pipe: its share of its peak, which is that of 16-bit operands for the Tensor
    Cores. So kernels of FP8 are drawn at half their height.
    """
    peaks = {"tensor": chip.tflops, "fma": cuda_core_tflops(chip)}
    tflops = max((getattr(kernel, name) or 0.0) / 100 * peak for name, peak in peaks.items())
    if not kernel.bytes or not tflops:
        return None
    flops = tflops * 1e6 * kernel.microseconds / max(kernel.calls, 1)
    return Point(_cut(kernel.name), flops / kernel.bytes, tflops)


def cuda_core_tflops(chip: Chip) -> float:
    """Return the FP32 peak of the CUDA cores: the Tensor Cores' by the number of multiply-adds in a clock."""
    found = ARCHITECTURES["sm_{}{}".format(*chip.capability)]
    return chip.tflops * found.fp32_lanes / found.tensor_fmas


def _cut(name: str) -> str:
    return name if len(name) <= _NAME else f"{name[: _NAME - 1]}…"


def _us(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.0f}%"


def _stall(kernel: Kernel) -> str:
    reason = max(kernel.stalls, key=lambda name: kernel.stalls[name], default="")
    return reason.replace("_", " ")
