"""Measures epilogues with masks, random numbers, indices and reductions against PyTorch, eager and compiled.

    python benchmarks/bench_language.py --out benchmarks/results/language_h100.json

Programs are those of examples/: a clamped gate, dropout with a residual, and the statistics that a cross-entropy needs
of masked logits. PyTorch draws its dropout with a generator of its own. Each row: {"program", "m", "n", "k", "kernel",
"error_over_eager", "ms": {name: ms}, "over_ours": {name: ratio, range}}. `plain` is our GEMM without an epilogue, or
two of them for the gate: the limit for one with an epilogue.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import harness
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

import cutlass_ops as co
from cutlass_ops.declare.problem import Problem
from cutlass_ops.epilogue.nodes import Kind
from cutlass_ops.epilogue.trace import Epilogue
from cutlass_ops.operand import reference
from cutlass_ops.run import named, ops
from cutlass_ops.tuner.timing import expected_us, rotation

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from cross_entropy import masked_statistics
from dropout_residual import SEED, P, dropout_residual
from gpt_oss_gate import ALPHA, LIMIT, gpt_oss_gate, in_pytorch

GEMM = next(op for op in named.NAMED if op.name == "gemm")
ROWS = (16, 1024, 4096)
HIDDEN, GATES, PADDED, VOCABULARY = 4096, 14336, 32768, 32000


@dataclass(frozen=True)
class Program:
    """One epilogue at one weight.

    Attributes
    ----------
    epilogue : Epilogue
        What our kernel computes.
    n : int
        Columns of D.
    shapes : callable
        Shapes of the tensors among the epilogue's inputs, by D's rows.
    inputs : callable
        The epilogue's inputs in its order, from those tensors.
    pytorch : callable
        The same in PyTorch, of x, the transposed weight and those tensors. The first result is D.
    exact : callable
        D in FP64, of the same.
    """

    epilogue: Epilogue
    n: int
    shapes: Callable[[int], tuple[tuple[int, ...], ...]]
    inputs: Callable[[list[Tensor]], tuple[Any, ...]]
    pytorch: Callable[..., Any]
    exact: Callable[..., Tensor]


def dropped(x: Tensor, w: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
    """Compute dropout and a residual in PyTorch."""
    return F.dropout(x @ w + bias, P) + residual


def exactly_dropped(x: Tensor, w: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
    """Compute the same with the mask of our kernel."""
    mask = reference.uniform(SEED, 0, x.shape[0], w.shape[1], x.device) >= torch.tensor(P)
    return torch.where(mask, (x @ w + bias) / (1 - P), 0.0) + residual


def statistics(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    """Compute masked logits and their statistics in PyTorch."""
    logits = (x @ w).masked_fill(torch.arange(w.shape[1], device=x.device) >= VOCABULARY, float("-inf"))
    most, at = logits.max(1)
    return logits, most, at, logits.float().logsumexp(1)


def gated(x: Tensor, w: Tensor, up: Tensor, *biases: Tensor) -> Tensor:
    """Compute the gate in PyTorch; the second weight is (N, K) as well."""
    return in_pytorch(x, w, up.t(), *biases)


PROGRAMS = {
    "dropout_residual": Program(
        dropout_residual,
        HIDDEN,
        lambda m: ((HIDDEN,), (m, HIDDEN)),
        lambda given: (*given, P, SEED, 0),
        dropped,
        exactly_dropped,
    ),
    "cross_entropy": Program(
        masked_statistics,
        PADDED,
        lambda m: (),
        lambda given: (float(VOCABULARY),),
        statistics,
        lambda x, w: statistics(x, w)[0],
    ),
    "gpt_oss_gate": Program(
        gpt_oss_gate,
        GATES,
        lambda m: ((GATES, HIDDEN), (GATES,), (GATES,)),
        lambda given: (given[0].t(), *given[1:], ALPHA, LIMIT),
        gated,
        gated,
    ),
}


def draw(program: Program, m: int, device: str) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Draw x (M, K), a weight (N, K) and the tensors among the inputs."""
    shapes = (m, HIDDEN), (program.n, HIDDEN), *program.shapes(m)
    if device == "meta":
        x, w, *given = [torch.empty(s, device=device, dtype=torch.bfloat16) for s in shapes]
    else:
        x, w, *given = [torch.randn(s, device=device).div_(HIDDEN**0.25).bfloat16() for s in shapes]
    return x, w, given


def run_case(name: str, m: int) -> dict[str, Any]:
    """Check and time one program at one number of rows."""
    program = PROGRAMS[name]
    op, n = ops.op(program.epilogue), program.n
    weights = 1 + sum(i.kind is Kind.PRODUCT for i in op.graph.inputs)
    count = min(4, rotation(2 * (m * HIDDEN + weights * n * HIDDEN + m * n)))
    sets = [draw(program, m, "cuda") for _ in range(count)]

    def ours(index: int) -> Any:
        x, w, given = sets[index % count]
        return op(x, w.t(), *program.inputs(given))

    def plain(index: int) -> Any:
        x, w, given = sets[index % count]
        return [co.gemm(x, each.t()) for each in (w, *given[: weights - 1])]

    def others(function: Callable[..., Any]) -> Callable[[int], Any]:
        def run(index: int) -> Any:
            x, w, given = sets[index % count]
            return function(x, w.t(), *given)

        return run

    x, w, given = sets[0]
    found = ours(0)
    d = found if isinstance(found, Tensor) else found[0]
    wide = (x.double(), w.t().double(), *(t.double() for t in given))
    exact = program.exact(*wide)
    eager = program.exact(x, w.t(), *given)
    finite = exact.isfinite()
    assert torch.equal(finite, d.isfinite()), "the mask differs"
    zero = torch.zeros((), device="cuda", dtype=torch.float64)
    error = harness.check(*(torch.where(finite, t.double(), zero) for t in (d, exact, eager)))
    if name == "cross_entropy":
        torch.testing.assert_close(found.lse.double(), exact.logsumexp(1), rtol=1e-4, atol=1e-3)
        kept = d.float().gather(1, found.prediction.long()[:, None])[:, 0]
        torch.testing.assert_close(kept, d.float().amax(1), rtol=1e-2, atol=0)
    del wide, exact, eager, finite, found, d
    plan = op.plan(x, w.t(), *program.inputs(given))
    compiled = harness.compiled(program.pytorch)
    variants = {"ours": ours, "eager": others(program.pytorch), "compile": others(compiled), "plain": plain}
    return {
        "program": name, "m": m, "n": n, "k": HIDDEN,
        "kernel": plan.spec.config.slug,
        "error_over_eager": round(error, 3),
        **harness.compare(variants, expected_us(Problem(m, weights * n, HIDDEN))),
    }  # fmt: skip


def main() -> None:
    """Run all and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", nargs="+", default=list(PROGRAMS), choices=PROGRAMS)
    parser.add_argument("--rows", nargs="+", type=int, default=ROWS)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    head, rows = harness.begin(), []
    calls: list[tuple[ops.Op, tuple[Any, ...]]] = []
    for program in (PROGRAMS[name] for name in args.programs):
        for m in args.rows:
            x, w, given = draw(program, m, "meta")
            calls.append((ops.op(program.epilogue), (x, w.t(), *program.inputs(given))))
            calls.append((GEMM, (x, w.t())))
    harness.build_ahead(calls)
    with torch.no_grad():
        for name in args.programs:
            for m in args.rows:
                rows.append(run_case(name, m))
                print(rows[-1], flush=True)
                harness.save(args.out, {**head, "rows": rows})
                torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
