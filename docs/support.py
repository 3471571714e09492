"""Writes docs/support.md: which op takes which operands on which GPU, as the library itself answers such calls.

    python docs/support.py            # writes it, without a GPU
    python docs/support.py --check    # writes nothing, and fails if it is not up to date

Each cell is a call of tensors without data, checked and decided as any call. "Runs" means that results of such a GPU
are in benchmarks/results.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

import cutlass_ops as co
from cutlass_ops.base.arch import TARGETS
from cutlass_ops.declare.chips import CHIPS, Chip
from cutlass_ops.run.requests import requested
from cutlass_ops.tools.explaining import explain_call

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
OUT = ROOT / "docs" / "support.md"

M, N, K, EXPERTS = 512, 4096, 4096, 8

INTRODUCTION = """\
# Support matrix

<!-- Written by docs/support.py, which asks the library. Do not edit: run it again. -->

| Cell | Meaning |
| --- | --- |
| runs | one kernel serves the call, and results of GPUs of this compute capability are published |
| compiles | one kernel serves the call; no GPU of this compute capability has been tried |
| *2 GEMMs* | several kernels serve the call |
| – | refused, with an error that says why; `co.explain` says it too |

If its line does not say otherwise, a call has aligned operands with the layouts of a linear layer. FP8 is
`torch.float8_e4m3fn`. GPUs of other compute capabilities, such as V100, T4 and B200, refuse every call. On the CPU,
PyTorch computes what any GPU supports.
"""


class Operand(NamedTuple):
    """A type of A and B: its title, dtype, and the arithmetic and result that a call names."""

    title: str
    dtype: torch.dtype
    options: dict[str, Any]


OPERANDS = (
    Operand("BF16", torch.bfloat16, {}),
    Operand("FP16", torch.float16, {}),
    Operand("TF32", torch.float32, {"math": "tf32"}),
    Operand("3xTF32", torch.float32, {"math": "3xtf32"}),
    Operand("FP64", torch.float64, {}),
    Operand("INT8", torch.int8, {"out_dtype": torch.bfloat16}),
    Operand("FP8", torch.float8_e4m3fn, {"out_dtype": torch.bfloat16}),
)


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return a tensor without data."""
    return torch.empty(shape, dtype=dtype, device="meta")


def _x(of: Operand, *shape: int) -> torch.Tensor:
    return empty(*(shape or (M, K)), dtype=of.dtype)


def _w(of: Operand, *batch: int) -> torch.Tensor:
    return empty(*batch, N, K, dtype=of.dtype).mT


def _input(of: Operand, *shape: int) -> torch.Tensor:
    """Return an input of an epilogue: its type is that of D."""
    return empty(*shape, dtype=of.options.get("out_dtype", of.dtype))


def _scales(of: Operand, *shape: int) -> torch.Tensor:
    """Return scales, or a statistic of rows."""
    return empty(*shape, dtype=torch.float64 if of.dtype == torch.float64 else torch.float32)


@co.epilogue
def row_sums(acc: Any, bias: co.Row) -> Any:
    """Reduce over rows beside D."""
    y = co.e.relu(acc + bias)
    return {"d": y, "sums": co.e.sum(y, dim=1)}


@co.epilogue
def quantised(acc: Any, bias: co.Row) -> Any:
    """Quantise D with a scale for each block."""
    return co.e.quantize(acc + bias, "e4m3")


Call = tuple[Any, tuple[Any, ...], dict[str, Any]]
_OFFSETS = empty(EXPERTS, dtype=torch.int32)

OPS: dict[str, Callable[[Operand], Call]] = {
    "`gemm`": lambda t: (co.gemm, (_x(t), _w(t)), {}),
    "`gemm`, A column-major, B row-major": lambda t: (
        co.gemm, (empty(K, M, dtype=t.dtype).t(), empty(K, N, dtype=t.dtype)), {},
    ),
    "`gemm`, odd M, N and K": lambda t: (co.gemm, (_x(t, 511, 4097), empty(4093, 4097, dtype=t.dtype).t()), {}),
    "`gemm`, batches": lambda t: (co.gemm, (_x(t, 8, M, K), _w(t, 8)), {}),
    "elementwise epilogue (`gemm_bias_gelu`)": lambda t: (co.gemm_bias_gelu, (_x(t), _w(t), _input(t, N)), {}),
    "residual (`gemm_bias_residual`)": lambda t: (
        co.gemm_bias_residual, (_x(t), _w(t), _input(t, N), _input(t, M, N)), {},
    ),
    "epilogue with a reduction": lambda t: (row_sums, (_x(t), _w(t), _input(t, N)), {}),
    "scales of rows and columns": lambda t: (
        co.gemm, (co.Scaled(_x(t), _scales(t, M, 1)), co.Scaled(_w(t), _scales(t, 1, N))), {},
    ),
    "scales of blocks": lambda t: (
        co.gemm,
        (co.Scaled(_x(t), _scales(t, M, K // 128)), co.Scaled(_w(t), _scales(t, K // 128, N // 128))), {},
    ),
    "D in FP8": lambda t: (co.gemm, (_x(t), _w(t)), {"out_dtype": torch.float8_e4m3fn}),
    "D quantised in blocks": lambda t: (quantised, (_x(t), _w(t), _input(t, N)), {"out_dtype": None}),
    "`rmsnorm_gemm`": lambda t: (co.rmsnorm_gemm, (_x(t), _w(t)), {"eps": 1e-5}),
    "`rmsnorm_gemm`, given `rstd`": lambda t: (co.rmsnorm_gemm, (_x(t), _w(t)), {"rstd": _scales(t, M, 1)}),
    "`layernorm_gemm`": lambda t: (co.layernorm_gemm, (_x(t), _w(t)), {"eps": 1e-5}),
    "`layernorm_gemm`, given `mean` and `rstd`": lambda t: (
        co.layernorm_gemm, (_x(t), _w(t)), {"mean": _scales(t, M, 1), "rstd": _scales(t, M, 1)},
    ),
    "`gemm_residual_rms`": lambda t: (
        co.gemm_residual_rms, (_x(t), _w(t), _input(t, M, N)), {"eps": 1e-5, "out_dtype": None},
    ),
    "`gemm_swiglu`": lambda t: (co.gemm_swiglu, (_x(t), _w(t), _w(t)), {}),
    "groups of rows": lambda t: (co.gemm, (_x(t), _w(t, EXPERTS)), {"groups": co.Groups(_OFFSETS)}),
    "groups of rows, scales": lambda t: (
        co.gemm,
        (co.Scaled(_x(t), _scales(t, M, 1)), co.Scaled(_w(t, EXPERTS), _scales(t, EXPERTS, 1, N))),
        {"groups": co.Groups(_OFFSETS)},
    ),
    "groups with counts": lambda t: (
        co.gemm, (_x(t, EXPERTS, M, K), _w(t, EXPERTS)), {"groups": co.Groups(counts=_OFFSETS)},
    ),
    "sums over groups (gradient of weights)": lambda t: (
        co.gemm, (_x(t).mT, _x(t, M, N)), {"groups": co.Groups(_OFFSETS)},
    ),
}  # fmt: skip


def served(call: Call, of: Operand, chip: Chip) -> tuple[str, str]:
    """Return "one", the number of GEMMs, or "" for a call that is refused, and the reason."""
    op, arguments, named = call
    named = {key: value for key, value in {**of.options, **named}.items() if value is not None}
    try:
        request = requested(op, *arguments, **named).as_autocast()
        given = dict(request.named)
        out, out_dtype = given.pop("out", None), given.pop("out_dtype", None)
        a, b, *inputs = request.arguments
        checked = request.op.checked(a, b, tuple(inputs), given, out, out_dtype)
        found = explain_call(request.op.name, checked, chip.device, request.op)
    except (TypeError, ValueError, co.CutlassOpsError) as exc:
        return "", f"{type(exc).__name__}: {exc}"
    return (f"*{len(found.parts)} GEMMs*" if found.parts else "one") if found.is_served else "", found.why


def measured() -> set[tuple[int, int]]:
    """Return the compute capabilities of the GPUs of which results are committed."""
    chips = {json.loads(path.read_text()).get("chip") for path in RESULTS.glob("*.json")}
    return {CHIPS[name].capability for name in chips if name in CHIPS}


def cell(found: str, ran: bool) -> str:
    """Return what a cell says."""
    return {"": "–", "one": "runs" if ran else "compiles"}.get(found, found)


def matrix(chip: Chip, ran: bool) -> list[tuple[str, ...]]:
    """Return the lines of a chip's table."""
    return [(name, *(cell(served(call(of), of, chip)[0], ran) for of in OPERANDS)) for name, call in OPS.items()]


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table."""
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [header, ["---"] * len(header), *rows])


def document() -> str:
    """Return docs/support.md: a table for each set of GPUs with the same answers."""
    ran = measured()
    of: dict[tuple[tuple[str, ...], ...], list[Chip]] = {}
    for capability in sorted({target.capability for target in TARGETS.values()}, reverse=True):
        chips = [chip for chip in CHIPS.values() if chip.capability == capability]
        of.setdefault(tuple(matrix(chips[0], capability in ran)), []).extend(chips)
    unserved = [name for number, name in enumerate(OPS) if all(set(lines[number][1:]) == {"–"} for lines in of)]
    if unserved:
        raise SystemExit(f"no GPU serves {', '.join(unserved)}: the calls above must be wrong")
    parts = [INTRODUCTION.strip()]
    for lines, chips in of.items():
        names = [chip.name.removeprefix("NVIDIA ") for chip in chips]
        capabilities = ", ".join(dict.fromkeys(".".join(map(str, chip.capability)) for chip in chips))
        parts += [f"## Compute capability {capabilities}", f"{', '.join(names)}, and others of this capability."]
        parts.append(table(("call", *(each.title for each in OPERANDS)), lines))
    return "\n\n".join(parts) + "\n"


def main() -> None:
    """Write the page, or check it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    text = document()
    if parser.parse_args().check:
        sys.exit(None if OUT.is_file() and OUT.read_text() == text else f"{OUT} is not up to date: run {__file__}")
    OUT.write_text(text)


if __name__ == "__main__":
    main()
