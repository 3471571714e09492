"""The roofline as a picture. Only this module imports matplotlib, which the extra ``plot`` installs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cutlass_ops.base.errors import CutlassOpsError
from cutlass_ops.declare.chips import Chip
from cutlass_ops.tools.profile.report import Point, cuda_core_tflops

FORMATS = (".svg", ".png")
_LEGEND = 12  # points with a name


def require_name(path: Path) -> None:
    """Require a file's name that ends in .svg or .png; raise ValueError otherwise."""
    if path.suffix.lower() not in FORMATS:
        raise ValueError(f"the plot's name must end in {' or '.join(FORMATS)}, not {path}")


def require(path: Path) -> None:
    """Raise ValueError if the file is neither .svg nor .png, and CutlassOpsError if matplotlib is not installed."""
    require_name(path)
    _pyplot()


def roofline(points: Sequence[Point], chip: Chip, path: Path) -> None:
    """Draw points below a chip's roofs, to .svg or .png: Tensor Cores (16 bits), CUDA cores (FP32), device memory."""
    matplotlib = _pyplot()
    figure, axes = matplotlib.subplots(figsize=(8, 5))
    ridge = chip.tflops * 1e3 / chip.gb_per_s
    low = min([1.0, *(p.intensity for p in points)]) / 2
    high = max([ridge * 8, *(p.intensity for p in points)]) * 2
    for name, peak, style in (
        ("Tensor Cores, 16 bits", chip.tflops, "-"),
        ("CUDA cores, FP32", cuda_core_tflops(chip), "--"),
    ):
        knee = peak * 1e3 / chip.gb_per_s
        roof = [low * chip.gb_per_s / 1e3, peak, peak]
        axes.plot([low, knee, high], roof, style, color="0.3", label=f"{name}: {peak:.0f} TFLOP/s")
    for number, each in enumerate(points, 1):
        label = f"{number} {each.label}" if number <= _LEGEND else None
        axes.plot(each.intensity, each.tflops, "o", label=label)
        axes.annotate(str(number), (each.intensity, each.tflops), xytext=(4, 4), textcoords="offset points")
    axes.set(
        xscale="log", yscale="log", xlabel=f"FLOP for each byte of device memory ({chip.gb_per_s:.0f} GB/s)",
        ylabel="TFLOP/s", title=chip.name,
    )  # fmt: skip
    axes.legend(fontsize="x-small", loc="lower right")
    axes.grid(which="both", alpha=0.2)
    figure.savefig(path, bbox_inches="tight", dpi=150, metadata={"Date": None} if path.suffix.lower() == ".svg" else {})
    matplotlib.close(figure)


def _pyplot() -> Any:
    try:
        import matplotlib
    except ImportError:
        raise CutlassOpsError("plots need matplotlib: pip install 'cutlass_ops[plot]'") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot
