"""Measures errors of gradients against float64, beside those of the same operations in PyTorch.

    python benchmarks/accuracy_gradients.py --out benchmarks/results/accuracy_gradients_cpu.json
    python benchmarks/accuracy_gradients.py --drawn 20 --dtypes f16    # without --out it only prints

It runs on the CPU if there is no GPU. Epilogues are those of the named ops, and drawn ones, the same at every run.
PyTorch's is torch.mm and one operation after another in the same dtype. Each row: {"epilogue", "dtype", "recompute",
"m", "n", "k", "ratio", "of", "error", "pytorch"}: the relative errors of one gradient in the Frobenius norm, and the
first over the second, of the gradient where that is largest. `recompute` is under ``co.recompute()``.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping
from itertools import product
from pathlib import Path
from typing import Any

import harness
import torch
from hypothesis import given, settings
from torch import Tensor

import cutlass_ops as co
from cutlass_ops.epilogue import builtin, composed
from cutlass_ops.epilogue.graph import Graph
from cutlass_ops.epilogue.nodes import Kind
from cutlass_ops.operand import reference
from cutlass_ops.run import ops

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.strategies import Program, programs

DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16}
M, N, K = 192, 160, 256


def named() -> dict[str, Graph]:
    """Return the epilogues of the named ops, and of norms and gates."""
    found = {f"gemm_{each.name}": each.graph for each in builtin.BY_OP.values()}
    return found | {each.name: each.graph for each in (composed.rms_norm, composed.swiglu)}


def drawn(count: int) -> dict[str, Graph]:
    """Draw epilogues of one D without kinks, each with a node of its own."""
    found: dict[Graph, str] = {}

    @settings(max_examples=20 * count, derandomize=True, database=None, deadline=None)
    @given(programs(tame=True, max_outputs=1))
    def collect(program: Program) -> None:
        graph = program.epilogue().graph
        if len(found) < count and len(graph.nodes) > 3 and not _KINKED & {node.op for node in graph.nodes}:
            found.setdefault(graph, f"drawn{len(found)}")

    collect()
    return {name: graph for graph, name in found.items()}


# Where a rounded value is on the other side, all ways to compute a gradient differ by as much as it is.
_KINKED = frozenset(("relu", "leaky_relu", "abs", "sign", "maximum", "minimum", "where", "floor", "ceil", "round"))


def tensors(graph: Graph, dtype: torch.dtype, device: str) -> tuple[list[Tensor], Tensor]:
    """Return A, B and the inputs, of order one, and the gradient of D."""
    generator = torch.Generator(device).manual_seed(0)
    shapes = {Kind.ROW: (N,), Kind.COL: (M,), Kind.TILE: (M, N), Kind.SCALAR: (), Kind.PRODUCT: (K, N)}
    every = [(M, K), (K, N), *(shapes[i.kind] for i in graph.inputs), (M, N)]
    found = [torch.randn(s, generator=generator, device=device) for s in every]
    for x, i in zip(found[1:-1], (None, *graph.inputs), strict=True):
        if i is None or i.kind is Kind.PRODUCT:
            x /= K**0.5
        elif i.name == "eps":
            x.fill_(1e-5)
    *given, grad = (x.to(dtype) for x in found)
    # Weights (N, K), transposed: gates have no others.
    of_b = {1, *(2 + at for at, i in enumerate(graph.inputs) if i.kind is Kind.PRODUCT)}
    return [x.mT.contiguous().mT if at in of_b else x for at, x in enumerate(given)], grad


def in_pytorch(graph: Graph, values: list[Tensor], dtype: torch.dtype) -> Tensor:
    """Compute D by torch.mm and one operation after another."""
    a, b, *inputs = values
    by_name = dict(zip((i.name for i in graph.inputs), inputs, strict=True))
    found: Mapping[str, Tensor] = reference.evaluate(graph, torch.mm(a, b), by_name, dtype, a=a)
    return found["d"].to(dtype)


def measure(graphs: Mapping[str, Graph], dtypes: list[str], device: str) -> Iterator[dict[str, Any]]:
    """Yield a row for each epilogue and dtype, with and without stored values."""
    for (name, graph), dtype in product(graphs.items(), dtypes):
        values, grad = tensors(graph, DTYPES[dtype], device)
        names = ["a", "b", *(i.name for i in graph.inputs)]

        def gradients(run: Any, to: torch.dtype, values: list[Tensor] = values, grad: Tensor = grad) -> list[Tensor]:
            given = [x.to(to).requires_grad_() for x in values]
            d = run(given)
            found = torch.autograd.grad(d, given, grad.to(d.dtype), materialize_grads=True, allow_unused=True)
            return [x.double() for x in found]

        exact = gradients(lambda v, g=graph: in_pytorch(g, v, torch.float64), torch.float64)
        if not any(x.any() for x in exact):
            continue  # such as that of a product with 0
        theirs = gradients(lambda v, g=graph, t=DTYPES[dtype]: in_pytorch(g, v, t), DTYPES[dtype])
        for recompute in (False, True):

            def ours(v: list[Tensor], graph: Graph = graph, recompute: bool = recompute) -> Tensor:
                op = ops.op_of_graph(graph)
                if not recompute:
                    return op.as_list(*v)[0]
                with co.recompute():
                    return op.as_list(*v)[0]

            yield {
                "epilogue": name if name in named() else f"{name} {graph.title}",
                "dtype": dtype, "recompute": recompute, "m": M, "n": N, "k": K,
                **_worst(names, gradients(ours, DTYPES[dtype]), theirs, exact, torch.finfo(DTYPES[dtype]).eps),
            }  # fmt: skip


def _worst(names: list[str], ours: list[Tensor], theirs: list[Tensor], exact: list[Tensor], eps: float) -> Any:
    rows = []
    for name, x, y, z in zip(names, ours, theirs, exact, strict=True):
        norm = z.norm().item()
        if not norm:
            assert not x.any(), f"the gradient of {name} is not 0"
            continue
        mine, other = ((v - z).norm().item() / norm for v in (x, y))
        # Below one rounding, a ratio says nothing.
        rows.append({"ratio": round(mine / max(other, eps / 4), 3), "of": name, "error": mine, "pytorch": other})
    return max(rows, key=lambda row: row["ratio"])


def main() -> None:
    """Print all rows and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--drawn", type=int, default=200, help="number of drawn epilogues")
    parser.add_argument("--dtypes", nargs="+", default=list(DTYPES), choices=list(DTYPES))
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows = []
    for row in measure(named() | drawn(args.drawn), args.dtypes, device):
        rows.append(row)
        print(row, flush=True)
    over = [row for row in rows if row["ratio"] > 2]
    print(f"{len(rows)} rows, {len(over)} over 2, the largest ratio {max(row['ratio'] for row in rows)}")
    if args.out:
        harness.save(args.out, {**harness.about(device), "rows": rows})


if __name__ == "__main__":
    main()
