"""Measures groups of rows, as experts have them, against torch._grouped_mm, and with SiLU against it and torch.compile.

With `--form wgrad` it measures the product of each group's rows instead, the gradient of the weights. With `--form fp8`
x and the weights are e4m3, with a scale for each row and for each column of each expert, against
torch._scaled_grouped_mm: both add up in the Tensor Cores alone, and with `--form promoted` in FP32. With
`--form blocks` blocks of 1x128 of x and of 128x128 of the weights have scales instead, against the same function with
scales of rows and columns: no function of PyTorch has such blocks. With `--form masked` each expert has room for the
same rows, as many as the largest one has, against torch._grouped_mm of the rows alone.

    python benchmarks/bench_grouped.py --out benchmarks/results/grouped_h100.json
    python benchmarks/bench_grouped.py --experts 8 --tokens 64 1024 --groups zipf --out /tmp/few.json
    python benchmarks/bench_grouped.py --resume /tmp/few.json --out /tmp/all.json    # only missing rows
    python benchmarks/bench_grouped.py --form wgrad --out benchmarks/results/wgrad_h100.json
    python benchmarks/bench_grouped.py --form fp8 --out benchmarks/results/grouped_fp8_h100.json
    python benchmarks/bench_grouped.py --form blocks --out benchmarks/results/grouped_blocks_h100.json
    python benchmarks/bench_grouped.py --form masked --out benchmarks/results/grouped_masked_h100.json

x is (tokens, K), and weights (experts, N, K) are multiplied as their transposes. Tokens are spread over the experts
evenly ("balanced"), by 1 / rank ("zipf"), or are all of one ("one_hot"). Calls rotate through other experts of the same
sizes, so that no weight is still in the L2 cache.

For the gradient, x (tokens, K) and the gradient (tokens, N) give (experts, K, N), and calls rotate through tensors of
the same sizes.

Each row: {"experts", "tokens", "n", "k", "groups", "active", "epilogue", "ours_ms", "peers": {name: ms}, "best_peer",
"ratio_to_best_peer", "ratio_range", "tflops", "gb_per_s", "error", "peers_error", "kernel"}. Errors are relative, of
the whole D, against float64 expert by expert. Bytes are those of x, D and the weights of experts with tokens, once.
Rows of the other forms have {"form": its name} besides. Errors in FP8 are those for each way's own quantised operands.
Bytes of a gradient are those of x, the gradient and D.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, product
from pathlib import Path
from typing import Any

import harness
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

import cutlass_ops as co
from cutlass_ops.base.mma import BLOCK_K as BLOCK
from cutlass_ops.base.mma import Math
from cutlass_ops.choose import dispatch
from cutlass_ops.compilation.builder import build_many
from cutlass_ops.declare.problem import Problem
from cutlass_ops.operand.call import device_of, signature_of
from cutlass_ops.run.gemm import op_for
from cutlass_ops.tuner.timing import expected_us, rotation

# N and K of the weights, by the number of experts.
WEIGHTS = {8: (14336, 4096), 64: (2048, 2048), 128: (1536, 4096), 256: (4096, 7168)}
TOKENS = (64, 1024, 8192, 32768)
GROUPS = ("balanced", "zipf", "one_hot")
EPILOGUES = ("none", "silu")
FORMS = ("rows", "wgrad", "fp8", "promoted", "blocks", "masked")
# How sums are added up by form.
SUMS: dict[str, Math | None] = {"fp8": "fast", "promoted": "promoted", "blocks": None}
# Rooms of all experts take at most so many bytes, of x or of D; other cases of that form are left out.
MOST_ROOM = 8 << 30
DTYPE, E4M3 = torch.bfloat16, torch.float8_e4m3fn


@co.epilogue
def silu(acc):  # noqa: ANN001, ANN201, D103
    return co.e.silu(acc)


EPILOGUE = {"none": None, "silu": silu}


@dataclass(frozen=True)
class Case:
    """One number of experts and tokens, and how the tokens are spread."""

    experts: int
    tokens: int
    groups: str

    @property
    def sizes(self) -> list[int]:
        """How many tokens each expert has."""
        shares = {
            "balanced": [1.0] * self.experts,
            "zipf": [1 / rank for rank in range(1, self.experts + 1)],
            "one_hot": [1.0] + [0.0] * (self.experts - 1),
        }[self.groups]
        # Each takes its tokens up to where its share of the sum ends.
        ends = [round(self.tokens * share / sum(shares)) for share in accumulate(shares)]
        return [end - begin for begin, end in zip([0, *ends], ends, strict=False)]


@dataclass(frozen=True)
class Inputs:
    """One set of a case's tensors; the sets have one weight."""

    x: Tensor
    w: Tensor
    offsets: Tensor
    out: Tensor


def draw(case: Case, n: int, k: int, sets: int, device: str = "cuda") -> list[Inputs]:
    """Draw sets of inputs, such that D's variance is 1: in each, other experts have the tokens."""
    weights = torch.empty(case.experts, n, k, dtype=DTYPE, device=device)
    for each in weights:  # by one, since a random tensor of all takes twice their memory
        each.copy_(torch.randn(n, k, device=device) * k**-0.25)
    found = []
    for at in range(sets):
        step = at * max(1, case.experts // sets) % case.experts
        sizes = case.sizes[-step:] + case.sizes[:-step] if step else case.sizes
        x = (torch.randn(case.tokens, k, device=device) * k**-0.25).to(DTYPE)
        offsets = torch.tensor(list(accumulate(sizes)), dtype=torch.int32, device=device)
        out = torch.empty(case.tokens, n, dtype=DTYPE, device=device)
        found.append(Inputs(x, weights.mT, offsets, out))
    return found


def exact_errors(epilogue: str, x: Inputs, results: dict[str, Tensor]) -> dict[str, float]:
    """Return the relative error of each result in the Frobenius norm, computed expert by expert."""
    begin, wrong, whole = 0, dict.fromkeys(results, 0.0), 0.0
    for expert, end in enumerate(x.offsets.tolist()):
        for first in range(begin, end, 4096):  # parts that float64 has room for
            rows = slice(first, min(end, first + 4096))
            wanted = x.x[rows].double() @ x.w[expert].double()
            wanted = wanted if epilogue == "none" else F.silu(wanted)
            whole += float(wanted.square().sum())
            for name, found in results.items():
                wrong[name] += float((found[rows].double() - wanted).square().sum())
        begin = end
    return {name: (value / whole) ** 0.5 for name, value in wrong.items()}


def ours(epilogue: str, x: Inputs) -> Tensor:
    """Compute D into its memory by this library."""
    found = co.gemm(x.x, x.w, groups=co.Groups(x.offsets), epilogue=EPILOGUE[epilogue], out=x.out)
    assert isinstance(found, Tensor)
    return found


def peers(epilogue: str) -> dict[str, Callable[[Inputs], Tensor]]:
    """Return PyTorch's ways to compute D, by name."""

    def grouped_mm(x: Inputs) -> Tensor:
        return torch._grouped_mm(x.x, x.w, offs=x.offsets)

    def eager(x: Inputs) -> Tensor:
        return F.silu(grouped_mm(x))

    if epilogue == "none":
        return {"grouped_mm": grouped_mm}
    compiled = harness.compiled(lambda x, w, offsets: F.silu(torch._grouped_mm(x, w, offs=offsets)))
    return {"grouped_mm_silu": eager, "compile": lambda x: compiled(x.x, x.w, x.offsets)}


# ---- The gradient of the weights ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Gradient:
    """One set of the tensors of a weight's gradient. All sets have one D, which no cache keeps."""

    x: Tensor
    gradient: Tensor
    offsets: Tensor
    out: Tensor


def draw_gradients(case: Case, n: int, k: int, sets: int, device: str = "cuda") -> list[Gradient]:
    """Draw sets of inputs: in each, other experts have the tokens."""
    out, found = torch.empty(case.experts, k, n, dtype=DTYPE, device=device), []
    for at in range(sets):
        step = at * max(1, case.experts // sets) % case.experts
        sizes = case.sizes[step:] + case.sizes[:step]
        x, gradient = (torch.randn(case.tokens, extent, device=device).to(DTYPE) for extent in (k, n))
        offsets = torch.tensor(list(accumulate(sizes)), dtype=torch.int32, device=device)
        found.append(Gradient(x, gradient, offsets, out))
    return found


def our_gradient(x: Gradient) -> Tensor:
    """Compute D into its memory by this library."""
    found = co.gemm(x.x.mT, x.gradient, groups=co.Groups(x.offsets), out=x.out)
    assert isinstance(found, Tensor)
    return found


def their_gradient(x: Gradient) -> Tensor:
    """Compute D by PyTorch."""
    return torch._grouped_mm(x.x.t(), x.gradient, offs=x.offsets)


def gradient_errors(x: Gradient, results: dict[str, Tensor]) -> dict[str, float]:
    """Return the relative error of each result in the Frobenius norm, of the experts that have tokens."""
    begin, wrong, whole = 0, dict.fromkeys(results, 0.0), 0.0
    for expert, end in enumerate(x.offsets.tolist()):
        if end > begin:
            wanted = x.x[begin:end].double().mT @ x.gradient[begin:end].double()
            whole += float(wanted.square().sum())
            for name, found in results.items():
                wrong[name] += float((found[expert].double() - wanted).square().sum())
        begin = end
    return {name: (value / whole) ** 0.5 for name, value in wrong.items()}


def run_gradient(case: Case) -> dict[str, Any]:
    """Check and time the gradient of the weights in one case.

    Raises
    ------
    AssertionError
        If our result is more than twice as far from float64 as PyTorch's, or is not zero where an expert has no tokens.
    """
    n, k = WEIGHTS[case.experts]
    moved = (case.tokens * (k + n) + case.experts * n * k) * DTYPE.itemsize
    sets = draw_gradients(case, n, k, rotation(moved))
    first = sets[0]
    first.out.fill_(float("nan"))
    results = {"ours": our_gradient(first), "grouped_mm": their_gradient(first)}
    empty = [expert for expert, size in enumerate(case.sizes) if size == 0]
    assert not any(bool(first.out[expert].any()) for expert in empty), "experts without tokens have a gradient"
    errors = gradient_errors(first, results)
    del results
    assert errors["ours"] <= 2 * errors["grouped_mm"], f"errors are {errors}"
    decision = op_for(None, "ragged_k").plan(first.x.mT, first.gradient, first.offsets, out=first.out)
    variants = {
        "ours": lambda index: our_gradient(sets[index % len(sets)]),
        "grouped_mm": lambda index: their_gradient(sets[index % len(sets)]),
    }
    problem = Problem(k, n, max(1, case.tokens // case.experts), case.experts)
    times = harness.time_interleaved(variants, expected_us(problem, DTYPE.itemsize))
    return row_of("wgrad", case, times, errors, moved, decision.spec.config.slug)


def row_of(
    form: str, case: Case, times: Mapping[str, harness.Timing], errors: Mapping[str, float], moved: int, kernel: str
) -> dict[str, Any]:
    """Return the row of a case with one peer."""
    own, peer = times["ours"], times["grouped_mm"]
    n, k = WEIGHTS[case.experts]
    ratio = harness.ratios(own, peer)
    return {
        "form": form,
        "experts": case.experts,
        "tokens": case.tokens,
        "n": n,
        "k": k,
        "groups": case.groups,
        "active": sum(size > 0 for size in case.sizes),
        "epilogue": "none",
        "ours_ms": round(own.median, 5),
        "peers": {"grouped_mm": round(peer.median, 5)},
        "best_peer": "grouped_mm",
        "ratio_to_best_peer": ratio["median"],
        "ratio_range": [ratio["min"], ratio["max"]],
        "tflops": round(2 * case.tokens * n * k / own.median / 1e9, 1),
        "gb_per_s": round(moved / own.median / 1e6, 1),
        "error": round(errors["ours"], 6),
        "peers_error": {"grouped_mm": round(errors["grouped_mm"], 6)},
        "kernel": kernel,
    }


# ---- FP8 -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Narrow:
    """One set of tensors in FP8. All sets have one weight, of whose experts others have the tokens."""

    x: Tensor
    w: Tensor
    offsets: Tensor
    scale_a: Tensor
    scale_b: Tensor
    out: Tensor
    math: Math | None = None


def draw_narrow(
    case: Case, n: int, k: int, sets: int, device: str = "cuda", math: Math | None = "fast"
) -> list[Narrow]:
    """Draw sets of inputs, quantised by row, and by column of each expert."""
    plain, found = draw(case, n, k, sets, device), []
    weights = torch.empty(case.experts, n, k, dtype=E4M3, device=device)
    scale_b = torch.empty(case.experts, n, device=device)
    for expert in range(case.experts):  # by one, since FP32 of all takes four times their memory
        weights[expert], scale_b[expert] = quantised(plain[0].w[expert].mT)
    for each in plain:
        x, scale_a = quantised(each.x)
        found.append(Narrow(x, weights.mT, each.offsets, scale_a, scale_b, each.out, math))
    return found


def quantised(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Return a matrix in e4m3, and the scale of each row."""
    scale = matrix.float().abs().amax(-1) / torch.finfo(E4M3).max
    return (matrix.float() / scale[:, None]).to(E4M3), scale


def our_narrow(x: Narrow) -> Tensor:
    """Compute D into its memory by this library."""
    found = co.gemm(
        co.Scaled(x.x, x.scale_a), co.Scaled(x.w, x.scale_b), groups=co.Groups(x.offsets), out=x.out, math=x.math
    )
    assert isinstance(found, Tensor)
    return found


def their_narrow(x: Narrow) -> Tensor:
    """Compute D by PyTorch, which adds up in the same way."""
    return torch._scaled_grouped_mm(
        x.x, x.w, x.scale_a, x.scale_b, offs=x.offsets, out_dtype=DTYPE, use_fast_accum=x.math == "fast"
    )


def stands_for(matrix: Tensor, scale: Tensor) -> Tensor:
    """Return the matrix that quantised rows stand for, in float64: with a scale for each row, or for each block."""
    spread = scale.double()
    if spread.ndim < 2:
        return matrix.double() * spread[:, None]
    down = 1 if spread.shape[0] == matrix.shape[0] else BLOCK
    each = spread.repeat_interleave(down, 0).repeat_interleave(BLOCK, 1)
    return matrix.double() * each[: matrix.shape[0], : matrix.shape[1]]


def narrow_errors(x: Narrow, results: dict[str, Tensor]) -> dict[str, float]:
    """Return the relative error of each result in the Frobenius norm, for the quantised operands."""
    begin, wrong, whole = 0, dict.fromkeys(results, 0.0), 0.0
    for expert, end in enumerate(x.offsets.tolist()):
        weight = stands_for(x.w[expert].mT, x.scale_b[expert]).mT if end > begin else None
        for first in range(begin, end, 4096):
            rows = slice(first, min(end, first + 4096))
            wanted = stands_for(x.x[rows], x.scale_a[rows]) @ weight
            whole += float(wanted.square().sum())
            for name, found in results.items():
                wrong[name] += float((found[rows].double() - wanted).square().sum())
        begin = end
    return {name: (value / whole) ** 0.5 for name, value in wrong.items()}


def run_narrow(case: Case, form: str) -> dict[str, Any]:
    """Check and time one case in FP8: of the form "fp8" or "promoted".

    Raises
    ------
    AssertionError
        If our result is more than twice as far from float64 as PyTorch's, or parts of it were not written.
    """
    n, k = WEIGHTS[case.experts]
    active = sum(size > 0 for size in case.sizes)
    moved = case.tokens * k + active * n * k + case.tokens * n * DTYPE.itemsize
    sets = draw_narrow(case, n, k, rotation(moved), math=SUMS[form])
    first = sets[0]
    first.out.fill_(float("nan"))
    results = {"ours": our_narrow(first), "grouped_mm": their_narrow(first)}
    assert not first.out.isnan().any(), "parts of D were not written"
    errors = narrow_errors(first, results)
    assert errors["ours"] <= 2 * errors["grouped_mm"], f"errors are {errors}"
    arguments = first.x, first.w, first.offsets, first.scale_a, first.scale_b
    decision = op_for(None, "grouped", (True, True, False)).plan(*arguments, out=first.out, math=first.math)
    variants = {
        "ours": lambda index: our_narrow(sets[index % len(sets)]),
        "grouped_mm": lambda index: their_narrow(sets[index % len(sets)]),
    }
    times = harness.time_interleaved(variants, expected_us(Problem(max(1, case.tokens // active), n, k, active), 1))
    return row_of(form, case, times, errors, moved, decision.spec.config.slug)


def draw_blocks(case: Case, n: int, k: int, sets: int, device: str = "cuda") -> list[Narrow]:
    """Draw sets of inputs, quantised by blocks: 1x128 of x, and 128x128 of each weight."""
    plain, found = draw(case, n, k, sets, device), []
    weights = torch.empty(case.experts, n, k, dtype=E4M3, device=device)
    scale_b = torch.empty(case.experts, -(-n // BLOCK), -(-k // BLOCK), device=device)
    for expert in range(case.experts):
        weights[expert], scale_b[expert] = in_blocks(plain[0].w[expert].mT, BLOCK)
    for each in plain:
        x, scale_a = in_blocks(each.x, 1)
        found.append(Narrow(x, weights.mT, each.offsets, scale_a, scale_b, each.out))
    return found


def in_blocks(matrix: Tensor, down: int) -> tuple[Tensor, Tensor]:
    """Return a matrix in e4m3, and the scale of each block of so many rows and of 128 columns."""
    rows, columns = matrix.shape
    padded = F.pad(matrix.float(), (0, -columns % BLOCK, 0, -rows % down))
    blocks = padded.view(padded.shape[0] // down, down, -1, BLOCK)
    scale = blocks.abs().amax((1, 3)) / torch.finfo(E4M3).max
    narrow = (blocks / scale[:, None, :, None]).to(E4M3).view(padded.shape)
    return narrow[:rows, :columns], scale


def run_blocks(case: Case) -> dict[str, Any]:
    """Check and time one case in FP8 with scales of blocks, against PyTorch's with scales of rows and columns.

    Raises
    ------
    AssertionError
        If our result is more than twice as far from float64 as PyTorch's, or parts of it were not written.
    """
    n, k = WEIGHTS[case.experts]
    active = sum(size > 0 for size in case.sizes)
    moved = case.tokens * k + active * n * k + case.tokens * n * DTYPE.itemsize
    sets, theirs = (drawn(case, n, k, rotation(moved)) for drawn in (draw_blocks, draw_narrow))
    first = sets[0]
    first.out.fill_(float("nan"))
    errors = narrow_errors(first, {"ours": our_narrow(first)})
    assert not first.out.isnan().any(), "parts of D were not written"
    errors |= narrow_errors(theirs[0], {"grouped_mm": their_narrow(theirs[0])})
    assert errors["ours"] <= 2 * errors["grouped_mm"], f"errors are {errors}"
    arguments = first.x, first.w, first.offsets, first.scale_a, first.scale_b
    decision = op_for(None, "grouped", (False, False, True)).plan(*arguments, out=first.out)
    variants = {
        "ours": lambda index: our_narrow(sets[index % len(sets)]),
        "grouped_mm": lambda index: their_narrow(theirs[index % len(theirs)]),
    }
    times = harness.time_interleaved(variants, expected_us(Problem(max(1, case.tokens // active), n, k, active), 1))
    return row_of("blocks", case, times, errors, moved, decision.spec.config.slug)


# ---- Experts with room -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Padded:
    """One set of tensors in which each expert has room for the same rows, and the same rows without."""

    x: Tensor
    counts: Tensor
    out: Tensor
    rows: Inputs


def room(case: Case) -> int:
    """Return for how many rows each expert has room."""
    return max(case.sizes)


def fits(case: Case) -> bool:
    """Whether all rooms are small enough."""
    return case.experts * room(case) * max(WEIGHTS[case.experts]) * DTYPE.itemsize <= MOST_ROOM


def draw_padded(case: Case, n: int, k: int, sets: int, device: str = "cuda") -> list[Padded]:
    """Draw sets of inputs: in each, other experts have the tokens."""
    found = []
    for rows in draw(case, n, k, sets, device):
        counts = rows.offsets.diff(prepend=rows.offsets.new_zeros(1)).int()
        x = torch.zeros(case.experts, room(case), k, dtype=DTYPE, device=device)
        for expert, (end, count) in enumerate(zip(rows.offsets.tolist(), counts.tolist(), strict=True)):
            x[expert, :count] = rows.x[end - count : end]
        found.append(Padded(x, counts, x.new_empty(case.experts, room(case), n), rows))
    return found


def our_padded(x: Padded) -> Tensor:
    """Compute the rows that there are into their memory by this library."""
    found = co.gemm(x.x, x.rows.w, groups=co.Groups(counts=x.counts, expected=mean_of(x)), out=x.out)
    assert isinstance(found, Tensor)
    return found


def mean_of(x: Padded) -> int:
    """Return how many rows an expert has on average."""
    return max(1, round(x.rows.x.shape[0] / x.counts.shape[0]))


def without_room(x: Padded, d: Tensor) -> Tensor:
    """Return the rows of D that there are."""
    return torch.cat([d[expert, :count] for expert, count in enumerate(x.counts.tolist())])


def run_padded(case: Case) -> dict[str, Any]:
    """Check and time one case in which experts have room, against PyTorch's product of the rows alone.

    Raises
    ------
    AssertionError
        If our result is more than twice as far from float64 as PyTorch's, or others than the rows there are were
        written.
    """
    n, k = WEIGHTS[case.experts]
    active = sum(size > 0 for size in case.sizes)
    moved = (case.tokens * (k + n) + active * n * k) * DTYPE.itemsize
    sets, theirs = draw_padded(case, n, k, rotation(moved)), peers("none")["grouped_mm"]
    first = sets[0]
    first.out.fill_(float("nan"))
    mine = without_room(first, our_padded(first))
    written = int((~first.out.isnan()).sum())
    assert (written, bool(mine.isnan().any())) == (mine.numel(), False), "others than the rows there are were written"
    errors = exact_errors("none", first.rows, {"ours": mine, "grouped_mm": theirs(first.rows)})
    assert errors["ours"] <= 2 * errors["grouped_mm"], f"errors are {errors}"
    decision = op_for(None, "masked", None, mean_of(first)).plan(first.x, first.rows.w, first.counts, out=first.out)
    variants = {
        "ours": lambda index: our_padded(sets[index % len(sets)]),
        "grouped_mm": lambda index: theirs(sets[index % len(sets)].rows),
    }
    problem = Problem(max(1, case.tokens // active), n, k, active)
    times = harness.time_interleaved(variants, expected_us(problem, DTYPE.itemsize))
    return row_of("masked", case, times, errors, moved, decision.spec.config.slug)


# ---- All cases -------------------------------------------------------------------------------------------------------


def build_ahead(cases: Iterable[tuple[Case, str]], form: str) -> None:
    """Compile what the cases need, as many kernels at a time as there are processors."""
    device, specs = device_of(torch.device("cuda", 0)), {}
    for case, epilogue in cases:
        n, k = WEIGHTS[case.experts]
        x = torch.empty(case.tokens, k, dtype=DTYPE, device="meta")
        offsets = torch.empty(case.experts, dtype=torch.int32, device="meta")
        if form == "wgrad":
            gradient = torch.empty(case.tokens, n, dtype=DTYPE, device="meta")
            call = op_for(None, "ragged_k").checked(x.mT, gradient, (offsets,), {}, None, None)
        elif form in SUMS:
            w, blocks = torch.empty(case.experts, n, k, dtype=E4M3, device="meta").mT, form == "blocks"
            steps = -(-k // BLOCK)
            of_x = (case.tokens, steps) if blocks else (case.tokens,)
            of_w = (case.experts, -(-n // BLOCK), steps) if blocks else (case.experts, n)
            scales = torch.empty(of_x, device="meta"), torch.empty(of_w, device="meta")
            op, math = op_for(None, "grouped", (not blocks, not blocks, blocks)), SUMS[form]
            op = op if math is None else op.in_math(math)
            call = op.checked(x.to(E4M3), w, (offsets, *scales), {}, None, None)
        elif form == "masked":
            w = torch.empty(case.experts, n, k, dtype=DTYPE, device="meta").mT
            x = torch.empty(case.experts, room(case), k, dtype=DTYPE, device="meta")
            op = op_for(None, "masked", None, max(1, round(case.tokens / case.experts)))
            call = op.checked(x, w, (offsets,), {}, None, None)
        else:
            w = torch.empty(case.experts, n, k, dtype=DTYPE, device="meta").mT
            call = op_for(EPILOGUE[epilogue], "grouped").checked(x, w, (offsets,), {}, None, None)
        specs[dispatch.choose(signature_of(call, device), device, call.chosen_for)[0]] = None
    build_many(list(specs))


def run_case(case: Case, epilogue: str) -> dict[str, Any]:
    """Check and time one case.

    Raises
    ------
    AssertionError
        If our result is more than twice as far from float64 as the best peer's, or parts of it were not written.
    """
    n, k = WEIGHTS[case.experts]
    active = sum(size > 0 for size in case.sizes)
    moved = (case.tokens * (k + n) + active * n * k) * DTYPE.itemsize
    sets = draw(case, n, k, rotation(moved))
    first = sets[0]
    first.out.fill_(float("nan"))
    results = {"ours": ours(epilogue, first), **{name: peer(first) for name, peer in peers(epilogue).items()}}
    assert not first.out.isnan().any(), "parts of D were not written"
    errors = exact_errors(epilogue, first, results)
    mine = errors.pop("ours")
    assert mine <= 2 * min(errors.values()), f"error is {mine:.2g}, and peers have {errors}"
    decision = op_for(EPILOGUE[epilogue], "grouped").plan(first.x, first.w, first.offsets, out=first.out)
    variants: dict[str, Callable[[int], object]] = {"ours": lambda index: ours(epilogue, sets[index % len(sets)])}
    for name, function in peers(epilogue).items():
        variants[name] = lambda index, f=function: f(sets[index % len(sets)])
    problem = Problem(max(1, case.tokens // active), n, k, active)
    times = harness.time_interleaved(variants, expected_us(problem, DTYPE.itemsize))
    own = times.pop("ours")
    best = min(times, key=lambda peer: times[peer].median)
    ratio = harness.ratios(own, times[best])
    return {
        "experts": case.experts,
        "tokens": case.tokens,
        "n": n,
        "k": k,
        "groups": case.groups,
        "active": active,
        "epilogue": epilogue,
        "ours_ms": round(own.median, 5),
        "peers": {peer: round(each.median, 5) for peer, each in times.items()},
        "best_peer": best,
        "ratio_to_best_peer": ratio["median"],
        "ratio_range": [ratio["min"], ratio["max"]],
        "tflops": round(2 * case.tokens * n * k / own.median / 1e9, 1),
        "gb_per_s": round(moved / own.median / 1e6, 1),
        "error": round(mine, 6),
        "peers_error": {peer: round(each, 6) for peer, each in errors.items()},
        "kernel": decision.spec.config.slug,
    }


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Summarise the ratios by epilogue and by how tokens are spread."""
    result = {}
    for what, groups in product((*EPILOGUES, *FORMS[1:]), GROUPS):
        members = [r for r in rows if (_what(r), r["groups"]) == (what, groups)]
        if not members:
            continue
        worst = min(members, key=lambda r: r["ratio_to_best_peer"])
        result[f"{what}, {groups}"] = {
            "geomean": round(harness.geomean([r["ratio_to_best_peer"] for r in members]), 4),
            "worst": worst["ratio_to_best_peer"],
            "worst_case": f"{worst['experts']} experts, {worst['tokens']} tokens",
            "losses": sum(r["ratio_to_best_peer"] < 1 for r in members),
            "cases": len(members),
        }
    return result


def _what(row: dict[str, Any]) -> str:
    """Return what a row measures: an epilogue, or another form."""
    return str(row.get("form") or row["epilogue"])


def main() -> None:
    """Run the cases and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experts", nargs="+", type=int, default=list(WEIGHTS), choices=WEIGHTS)
    parser.add_argument("--tokens", nargs="+", type=int, default=list(TOKENS))
    parser.add_argument("--groups", nargs="+", default=list(GROUPS), choices=GROUPS)
    parser.add_argument("--epilogues", nargs="+", default=list(EPILOGUES), choices=EPILOGUES)
    parser.add_argument("--form", default="rows", choices=FORMS)
    parser.add_argument("--limit", type=float, default=1e9, help="stop after this many seconds")
    parser.add_argument("--resume", nargs="+", type=Path, default=[], help="result with rows to keep")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    environment = harness.begin()
    begin, rows = time.monotonic(), harness.measured(args.resume, environment)
    done = {(r["experts"], r["tokens"], r["groups"], _what(r)) for r in rows}
    every = product(args.experts, args.tokens, args.groups, args.epilogues if args.form == "rows" else [args.form])
    left = [each for each in every if each not in done and (args.form != "masked" or fits(Case(*each[:3])))]
    build_ahead(((Case(experts, tokens, groups), epilogue) for experts, tokens, groups, epilogue in left), args.form)
    for experts, tokens, groups, epilogue in left:
        if time.monotonic() - begin > args.limit:
            print(f"stopped at the limit before {experts} experts, {tokens} tokens, {groups}, {epilogue}")
            break
        case = Case(experts, tokens, groups)
        narrow = {form: partial(run_narrow, form=form) for form in ("fp8", "promoted")}
        runs = {"wgrad": run_gradient, **narrow, "blocks": run_blocks, "masked": run_padded}
        rows.append(run_case(case, epilogue) if args.form == "rows" else runs[args.form](case))
        row = rows[-1]
        others = " ".join(f"{peer} {ms * 1e3:.1f}" for peer, ms in row["peers"].items())
        print(
            f"{experts} experts {tokens} tokens {groups} {epilogue}: ours {row['ours_ms'] * 1e3:.1f} us, {others}, "
            f"ratio {row['ratio_to_best_peer']} {row['kernel']}",
            flush=True,
        )
        harness.save(args.out, {**environment, "summary": summary(rows), "rows": rows})
        torch.cuda.empty_cache()
    print(summary(rows))


if __name__ == "__main__":
    main()
