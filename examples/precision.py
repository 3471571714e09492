"""What a GEMM's arithmetic costs in accuracy, and what it gains in time.

    python -m examples.precision                                      # errors over K; with a GPU, times as well
    python -m examples.precision --ks 64 4096 --out precision.json --plot precision.svg
    python -m examples.precision --write                              # docs/precision.md, from benchmarks/results

D = A B^T of FP32 operands, A (M, K) and B (N, K), is computed in several arithmetics and compared with float64. An
error is relative to the size of the results: |d - exact|, over the root of the mean square of all exact elements. It
has three sources: operands that are rounded, sums that are rounded, and a result that is rounded.

On a GPU the instructions themselves compute. Without one, PyTorch's CPU emulates them: operands are rounded as there,
and products are added up in FP32. Sums in FP16 are rounded after every 16 products, which is the K of an instruction.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import random
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from examples.documents import insert

ROOT = Path(__file__).resolve().parents[1]
RESULTS = {"cpu": "precision_cpu.json", "h200": "precision_h200.json"}
DOCUMENT = ROOT / "docs" / "precision.md"
PLOTS = ROOT / "docs" / "precision"
BY = "examples/precision.py"

KS = tuple(2**power for power in range(6, 18))  # 64 to 131072
SIDE = {"cpu": 64, "cuda": 512}  # M and N
SEEDS = 2
# FP16 sums are called broken from here on: the mean element is off by a hundredth of the results' size.
BROKEN = 0.01
_INSTRUCTION_K = 16
_BATCH = 256 * _INSTRUCTION_K  # of K, emulated at a time
_E4M3_MAX = torch.finfo(torch.float8_e4m3fn).max


# Distributions of the operands.


def normal(size: tuple[int, int], generator: torch.Generator) -> Tensor:
    """Return values of both signs, whose products cancel: results grow with the root of K."""
    return torch.randn(size, generator=generator, device=generator.device)


def positive(size: tuple[int, int], generator: torch.Generator) -> Tensor:
    """Return values between 0 and 1: nothing cancels, and results grow with K."""
    return torch.rand(size, generator=generator, device=generator.device)


def lognormal(size: tuple[int, int], generator: torch.Generator) -> Tensor:
    """Return positive values over several orders of magnitude: a few products are most of a sum."""
    return normal(size, generator).exp()


def outliers(size: tuple[int, int], generator: torch.Generator) -> Tensor:
    """Return normal values of which one in 256 is 64 times as large, as activations of language models have them."""
    large = torch.rand(size, generator=generator, device=generator.device) < 1 / 256
    return normal(size, generator) * torch.where(large, 64.0, 1.0)


DISTRIBUTIONS = {each.__name__: each for each in (normal, positive, lognormal, outliers)}


# Arithmetics. Each takes A (M, K) and B (N, K) in FP32 and returns D (M, N).


def round_to_tf32(x: Tensor) -> Tensor:
    """Round FP32 to TF32's ten bits of mantissa, to nearest even. Infinities and NaN stay as they are."""
    bits = x.view(torch.int32)
    rounded = (bits + 0xFFF + ((bits >> 13) & 1)) & ~0x1FFF
    return torch.where(x.isfinite(), rounded.view(torch.float32), x)


@contextlib.contextmanager
def settings(*, tf32: bool = False, fp16_sums: bool = False) -> Iterator[None]:
    """Set what PyTorch lets cuBLAS do. Parts of K are never added up in less than FP32, unless all of it is.

    PyTorch older than 2.7 has no sums in FP16: to ask for them is an AttributeError there.
    """
    matmul = torch.backends.cuda.matmul
    wanted = {
        "allow_tf32": tf32,
        "allow_fp16_reduced_precision_reduction": False,
        "allow_bf16_reduced_precision_reduction": False,
    }
    if fp16_sums:
        wanted["allow_fp16_accumulation"] = True
    before = {name: getattr(matmul, name) for name in wanted}
    try:
        for name, value in wanted.items():
            setattr(matmul, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(matmul, name, value)


def fp32(a: Tensor, b: Tensor) -> Tensor:
    """FP32, on the CUDA cores."""
    with settings():
        return a @ b.t()


def tf32(a: Tensor, b: Tensor) -> Tensor:
    """TF32: operands of ten bits of mantissa, FP32's exponent, FP32 sums."""
    if not a.is_cuda:
        return round_to_tf32(a) @ round_to_tf32(b).t()
    with settings(tf32=True):
        return a @ b.t()


def three_tf32(a: Tensor, b: Tensor) -> Tensor:
    """Three products in TF32: each operand is a large and a small part, and that of the small parts is left out."""
    large_a, large_b = round_to_tf32(a), round_to_tf32(b)
    small_a, small_b = round_to_tf32(a - large_a), round_to_tf32(b - large_b)
    with settings(tf32=True):
        return (small_a @ large_b.t()).addmm_(large_a, small_b.t()).addmm_(large_a, large_b.t())


def _narrow(dtype: torch.dtype, a: Tensor, b: Tensor) -> Tensor:
    a, b = a.to(dtype), b.to(dtype)
    if not a.is_cuda:
        return a.float() @ b.float().t()
    with settings():
        return torch.mm(a, b.t(), out_dtype=torch.float32)


def fp16(a: Tensor, b: Tensor) -> Tensor:
    """FP16 operands, FP32 sums and result."""
    return _narrow(torch.float16, a, b)


def bf16(a: Tensor, b: Tensor) -> Tensor:
    """BF16 operands, FP32 sums and result."""
    return _narrow(torch.bfloat16, a, b)


def fp16_sums(a: Tensor, b: Tensor) -> Tensor:
    """FP16 operands, sums and result."""
    a, b = a.half(), b.half()
    if a.is_cuda:
        with settings(fp16_sums=True):
            return a @ b.t()
    sums = torch.zeros(len(a), len(b), dtype=torch.float16)
    for several_a, several_b in zip(a.float().split(_BATCH, 1), b.float().split(_BATCH, 1), strict=True):
        # (instructions, M, 16) by (instructions, 16, N): what each instruction adds.
        parts_a, parts_b = (each.unflatten(1, (-1, _INSTRUCTION_K)) for each in (several_a, several_b))
        for added in parts_a.transpose(0, 1) @ parts_b.permute(1, 2, 0):
            sums = added.add_(sums).half()
    return sums


def _e4m3(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = x.abs().max() / _E4M3_MAX
    return (x / scale).clamp(-_E4M3_MAX, _E4M3_MAX).to(torch.float8_e4m3fn), scale


def fp8(a: Tensor, b: Tensor, *, fast: bool = False) -> Tensor:
    """FP8 (e4m3) with a scale for each operand, FP32 result. On a GPU, sums are promoted to FP32 on the way."""
    (a, scale_a), (b, scale_b) = _e4m3(a), _e4m3(b)
    if not a.is_cuda:
        return (a.float() @ b.float().t()) * (scale_a * scale_b)
    return torch._scaled_mm(a, b.t(), scale_a, scale_b, out_dtype=torch.float32, use_fast_accum=fast)


def fp8_fast(a: Tensor, b: Tensor) -> Tensor:
    """FP8 (e4m3), with sums as the Tensor Cores keep them, which is in fewer bits than FP32."""
    return fp8(a, b, fast=True)


@dataclass(frozen=True)
class Arithmetic:
    """One way to compute a product.

    Attributes
    ----------
    name : str
        As tables have it.
    product : callable
        Takes A (M, K) and B (N, K) in FP32, and returns D (M, N).
    emulated : bool
        Whether it can be computed without a GPU.
    """

    name: str
    product: Callable[[Tensor, Tensor], Tensor]
    emulated: bool = True


FP16_SUMS = "FP16, FP16 sums"
FP16_FP32_SUMS = "FP16, FP32 sums"
ARITHMETICS = (
    Arithmetic("FP32", fp32),
    Arithmetic("3xTF32", three_tf32),
    Arithmetic("TF32", tf32),
    Arithmetic(FP16_FP32_SUMS, fp16),
    Arithmetic(FP16_SUMS, fp16_sums),
    Arithmetic("BF16", bf16),
    Arithmetic("FP8", fp8),
    Arithmetic("FP8, fast sums", fp8_fast, emulated=False),
)


# Errors.


def errors(found: Tensor, exact: Tensor) -> tuple[float, float]:
    """Return the largest and the mean error, relative to the size of the results; infinite if an element is not finite.

    Parameters
    ----------
    found : Tensor
        D in any type.
    exact : Tensor
        D in FP64.

    Returns
    -------
    tuple of float
        Largest and mean.
    """
    if not bool(found.isfinite().all()):
        return math.inf, math.inf
    off = (found.double() - exact).abs() / exact.square().mean().sqrt()
    return off.max().item(), off.mean().item()


def measure(ks: Sequence[int], device: str) -> list[dict[str, Any]]:
    """Return a row for each distribution, arithmetic and K: errors over all seeds, None where a result overflows."""
    rows = []
    side = SIDE[device]
    for distribution, draw in DISTRIBUTIONS.items():
        for k in ks:
            found: dict[str, list[tuple[float, float]]] = {}
            for seed in range(SEEDS):
                generator = torch.Generator(device).manual_seed(seed)
                a, b = (draw((side, k), generator) for _ in range(2))
                exact = a.double() @ b.double().t()
                for arithmetic in ARITHMETICS:
                    if arithmetic.emulated or device == "cuda":
                        found.setdefault(arithmetic.name, []).append(errors(arithmetic.product(a, b), exact))
            for name, each in found.items():
                largest, mean = max(e[0] for e in each), statistics.mean(e[1] for e in each)
                rows.append({"distribution": distribution, "arithmetic": name, "k": k} | _plain(largest, mean))
    return rows


def _plain(largest: float, mean: float) -> dict[str, float | None]:
    # JSON has no infinity.
    return {"largest": _rounded(largest), "mean": _rounded(mean)}


def _rounded(value: float) -> float | None:
    return float(f"{value:.3g}") if math.isfinite(value) else None


def breaks_at(rows: Sequence[Mapping[str, Any]], distribution: str) -> int | None:
    """Return the first K at which FP16 sums are off by 1% or more in the mean, or overflow; None if there is none."""
    found = _means(rows, distribution, FP16_SUMS)
    return min((k for k, mean in found.items() if mean is None or mean >= BROKEN), default=None)


def loses_a_digit_at(rows: Sequence[Mapping[str, Any]], distribution: str) -> int | None:
    """Return the first K at which FP16 sums have ten times the mean error of FP32 sums; None if there is none."""
    good, found = (_means(rows, distribution, name) for name in (FP16_FP32_SUMS, FP16_SUMS))
    return min((k for k, mean in found.items() if mean is None or mean >= 10 * (good[k] or 0)), default=None)


def _means(rows: Sequence[Mapping[str, Any]], distribution: str, arithmetic: str) -> dict[int, float | None]:
    meant = distribution, arithmetic
    return {row["k"]: row["mean"] for row in rows if (row["distribution"], row["arithmetic"]) == meant}


# The pipeline FP32 -> FP16 -> GEMM -> FP32, timed.

PIPELINE_SHAPES = (
    (16, 4096, 4096),
    (256, 4096, 4096),
    (512, 512, 512),
    (1024, 1024, 1024),
    (2048, 2048, 2048),
    (4096, 4096, 4096),
    (8192, 8192, 8192),
)
ROUNDS = 25


def _convert(dtype: torch.dtype, *tensors: Tensor) -> list[Tensor]:
    return [each.to(dtype) for each in tensors]


def _weight_kept(a: Tensor, b16: Tensor) -> Tensor:
    return torch.mm(a.half(), b16.t(), out_dtype=torch.float32)


def _gemm_alone(a16: Tensor, b16: Tensor) -> Tensor:
    return torch.mm(a16, b16.t())


def _three_kernels(a: Tensor, b16: Tensor) -> Tensor:
    return torch.mm(a.half(), b16.t()).float()


# Each variant and which of A and B it takes in FP16.
PIPELINES: dict[str, tuple[Callable[..., Any], bool, bool]] = {
    "FP32": (fp32, False, False),
    "3xTF32": (three_tf32, False, False),
    "TF32": (tf32, False, False),
    "FP16, A and B converted": (fp16, False, False),
    "FP16, A converted": (_weight_kept, False, True),
    "FP16, A and D converted": (_three_kernels, False, True),
    "FP16, nothing converted": (_gemm_alone, True, True),
    "converting A": (lambda a, _: _convert(torch.float16, a), False, False),
    "converting A and B": (lambda a, b: _convert(torch.float16, a, b), False, False),
}
MIXED = ("FP16, A and B converted", "FP16, A converted", "FP16, A and D converted")


def time_pipelines(shape: tuple[int, int, int]) -> dict[str, float]:
    """Return the microseconds of each variant: medians over rounds in random order, in graphs over rotated operands."""
    from cutlass_ops.tuner.timing import Stopwatch, rotation

    m, n, k = shape
    sets = []
    for seed in range(rotation(4 * (m * k + n * k + m * n))):
        generator = torch.Generator("cuda").manual_seed(seed)
        a, b = normal((m, k), generator), normal((n, k), generator)
        sets.append((a, b, a.half(), b.half()))

    def run(function: Callable[..., Any], narrow_a: bool, narrow_b: bool, index: int) -> object:
        a, b, a16, b16 = sets[index % len(sets)]
        return function(a16 if narrow_a else a, b16 if narrow_b else b)

    watch = Stopwatch(2 * m * n * k / 4e8 + 10)  # about as long as TF32 takes
    for name, (function, narrow_a, narrow_b) in PIPELINES.items():
        with settings():
            watch.add(name, partial(run, function, narrow_a, narrow_b))
    names, rounds = list(PIPELINES), []
    for number in range(ROUNDS):
        random.Random(number).shuffle(names)
        rounds.append(dict(zip(names, watch.round(names), strict=True)))
    return {name: round(statistics.median(each[name] for each in rounds), 2) for name in PIPELINES}


def pays(us: Mapping[str, float], over: str) -> dict[str, float]:
    """Return how many times faster each mixed pipeline is than FP32 or TF32: above 1, it pays."""
    return {name: round(us[over] / us[name], 3) for name in MIXED}


# The report.


def error_table(rows: Sequence[Mapping[str, Any]], distribution: str) -> list[str]:
    """Return a distribution's errors as a Markdown table: mean, and in brackets the largest, at every fourth K."""
    mine = [row for row in rows if row["distribution"] == distribution]
    ks = sorted({row["k"] for row in mine})
    shown = [k for k in ks if math.log2(k / ks[0]) % 2 == 0 or k == ks[-1]]
    lines = [f"| Arithmetic | {' | '.join(f'K = {k}' for k in shown)} |", "| --- |" + " --- |" * len(shown)]
    for name in dict.fromkeys(row["arithmetic"] for row in mine):
        at = {row["k"]: row for row in mine if row["arithmetic"] == name}
        lines.append(f"| {name} | {' | '.join(_error(at[k]) for k in shown)} |")
    return lines


def _error(row: Mapping[str, Any]) -> str:
    return "overflows" if row["mean"] is None else f"{row['mean']:.1e} ({row['largest']:.1e})"


def break_table(results: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return from which K on FP16 sums lose a digit, and break, for each distribution and each result."""
    titles = [f"{title}: {what}" for title in results for what in ("ten times the error of FP32 sums", "off by 1%")]
    lines = [f"| Distribution | {' | '.join(titles)} |", "| --- |" + " ---: |" * len(titles)]
    for distribution in DISTRIBUTIONS:
        found = []
        for result in results.values():
            last = max(row["k"] for row in result["rows"])
            for first in (loses_a_digit_at, breaks_at):
                k = first(result["rows"], distribution)
                found.append(f"not up to {last}" if k is None else str(k))
        lines.append(f"| {distribution} | {' | '.join(found)} |")
    return lines


def pipeline_table(pipelines: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return microseconds of each variant at each shape, and how much a mixed pipeline gains."""
    names = list(PIPELINES)
    lines = [f"| M×N×K | {' | '.join(names)} |", "| --- |" + " ---: |" * len(names)]
    for row in pipelines:
        shape = "×".join(map(str, row["shape"]))
        us = [f"{row['us'][name]:.1f}" for name in names]
        lines.append(f"| {shape} | {' | '.join(us)} |")
    lines += ["", "| M×N×K | over | " + " | ".join(MIXED) + " |", "| --- | --- |" + " ---: |" * len(MIXED)]
    for row in pipelines:
        shape = "×".join(map(str, row["shape"]))
        for over in ("FP32", "TF32"):
            gains = pays(row["us"], over)
            lines.append(f"| {shape} | {over} | {' | '.join(f'{gains[name]:.2f}' for name in MIXED)} |")
    return lines


def draw(result: Mapping[str, Any], path: Path) -> None:
    """Draw mean errors over K, a panel for each distribution; the largest ones are thin.

    Raises
    ------
    ImportError
        If matplotlib is not installed.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    mpl.rcParams["svg.hashsalt"] = "precision"
    figure, axes = plt.subplots(1, len(DISTRIBUTIONS), figsize=(4 * len(DISTRIBUTIONS), 4.2), sharey=True)
    for axis, distribution in zip(axes, DISTRIBUTIONS, strict=True):
        for color, arithmetic in enumerate(ARITHMETICS):
            points = [
                (row["k"], row["mean"], row["largest"])
                for row in result["rows"]
                if (row["distribution"], row["arithmetic"]) == (distribution, arithmetic.name)
                and row["mean"] is not None
            ]
            if points:
                ks, means, largest = zip(*points, strict=True)
                axis.loglog(ks, means, color=f"C{color}", marker=".", label=arithmetic.name)
                axis.loglog(ks, largest, color=f"C{color}", linewidth=0.6, linestyle=":")
        axis.axhline(BROKEN, color="0.6", linewidth=0.8)
        axis.set_title(distribution)
        axis.set_xlabel("K")
    axes[0].set_ylabel("error over the results' size")
    axes[-1].legend(fontsize=7)
    figure.suptitle(f"Mean (lines) and largest (dotted) errors against float64, {result['where']}", fontsize=11)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    plt.close(figure)


def write(folder: Path = ROOT / "benchmarks" / "results") -> None:
    """Write docs/precision.md's parts and its plots from the results that there are."""
    found = {where: folder / name for where, name in RESULTS.items() if (folder / name).exists()}
    results = {where: json.loads(path.read_text()) for where, path in found.items()}
    text = DOCUMENT.read_text()
    for where, result in results.items():
        lines = [f"{_head(result)}", ""]
        for distribution in DISTRIBUTIONS:
            lines += [f"Operands {distribution}:", "", *error_table(result["rows"], distribution), ""]
        lines.append(f"![Errors over K](precision/{where}.svg)")
        text = insert(text, f"errors, {where}", "\n".join(lines), BY)
        draw(result, PLOTS / f"{where}.svg")
        if result["pipelines"]:
            text = insert(text, "pipeline", "\n".join(pipeline_table(result["pipelines"])), BY)
    if results:
        titles = {result["where"]: result for result in results.values()}
        text = insert(text, "breaks", "\n".join(break_table(titles)), BY)
    DOCUMENT.write_text(text)


def _head(result: Mapping[str, Any]) -> str:
    how = f"M = N = {result['side']}, {result['seeds']} seeds"
    return f"{result['where']}, {result['date']}, PyTorch {result['torch']}; {how}."


def _save(result: Mapping[str, Any], path: Path) -> None:
    from benchmarks.harness import save

    save(path, result)


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.precision", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ks", nargs="+", type=int, default=KS, help="K, multiples of 16; default 64 to 131072")
    parser.add_argument("--out", type=Path, help="write the result as JSON")
    parser.add_argument("--plot", type=Path, help="draw the errors, as SVG or PNG; needs matplotlib")
    parser.add_argument("--write", action="store_true", help="write docs/precision.md from benchmarks/results, and end")
    options = parser.parse_args()
    if options.write:
        write()
        return
    if any(k <= 0 or k % _INSTRUCTION_K for k in options.ks):
        parser.error(f"--ks takes positive multiples of {_INSTRUCTION_K}, which every arithmetic accepts")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    result = _environment(device)
    result["rows"] = measure(sorted(options.ks), device)
    for distribution in DISTRIBUTIONS:
        print(
            f"\nOperands {distribution}: mean error, and the largest",
            *error_table(result["rows"], distribution),
            sep="\n",
        )
    print("\nFrom which K on FP16 sums have:", *break_table({result["where"]: result}), sep="\n")
    if device == "cuda":
        result["pipelines"] = [{"shape": shape, "us": time_pipelines(shape)} for shape in PIPELINE_SHAPES]
        print("\nMicroseconds", *pipeline_table(result["pipelines"]), sep="\n")
    else:
        print("\nThe pipeline with its conversions was not timed: that needs a GPU and PyTorch for CUDA.")
    if options.out is not None:
        _save(result, options.out)
    if options.plot is not None:
        try:
            draw(result, options.plot)
        except ImportError:
            print("there is no plot without matplotlib: pip install matplotlib")


def _environment(device: str) -> dict[str, Any]:
    if device == "cuda":
        from benchmarks.harness import environment

        about = environment()
        where = about["chip"]
    else:
        import datetime

        about = {"date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"), "torch": torch.__version__}
        where = "emulated on a CPU"
    return {**about, "where": where, "side": SIDE[device], "seeds": SEEDS, "pipelines": []}


if __name__ == "__main__":
    main()
