"""Records which kernels dispatch chooses, so that a test shows unintended changes.

    python benchmarks/choices.py    # a few minutes; writes tests/golden/choices.json.gz, which tests/golden compares

It covers every problem of every shipped table, and random ones: epilogues, element types, majors, alignments and
devices with and without tables. Run it after a change that should change choices (a table, the model, the space), and
check the number of changes that it prints. Kernels as fast as the chosen one up to rounding are recorded beside it.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import random
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import cutlass_ops as co
from cutlass_ops.base import resources
from cutlass_ops.choose import dispatch, policies, tables
from cutlass_ops.declare.config import Config, Ordered, config_from_json, config_to_json
from cutlass_ops.declare.device import Device
from cutlass_ops.declare.order import TileOrder
from cutlass_ops.declare.problem import Problem
from cutlass_ops.declare.signature import OpSignature, signature_from_json, signature_to_json
from cutlass_ops.declare.spec import Operand
from cutlass_ops.epilogue import builtin, composed
from cutlass_ops.epilogue.graph import Graph
from cutlass_ops.run import norms
from cutlass_ops.tuner.tuning import signature_at

GOLDEN = Path(__file__).parents[1] / "tests" / "golden" / "choices.json.gz"

# Times closer than this are equal, up to the order of sums.
TIE = 1e-9
WEIGHTS, ROWS = 3, 40  # of each drawn case
TIMED = 16  # one in so many has its time written down

H100 = Device((9, 0), 132, "NVIDIA H100 80GB HBM3")
H200 = Device((9, 0), 132, "NVIDIA H200")
PCIE = Device((9, 0), 114, "NVIDIA H100 PCIe")
A100 = Device((8, 0), 108, "NVIDIA A100-SXM4-80GB")
A10 = Device((8, 6), 72, "NVIDIA A10")
L40S = Device((8, 9), 142, "NVIDIA L40S")

# N and K at which contiguous tensors have lines aligned to 8 elements; D's to one; A's and B's; and all to 1, 2 and 4.
EVEN, ODD_N, ODD_K = (4096, 4096), (4097, 4096), (4096, 4097)
UNALIGNED = ((4097, 4097), (4098, 4098), (4100, 4100))


@co.epilogue
def statistics(acc, bias: co.Row):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
    """Reduce along each side, and store another tile."""
    pre = acc + bias
    return {"d": co.relu(pre), "pre": pre, "square": co.sum_square(pre, dim=1), "top": co.max(pre, dim=0)}


@co.epilogue
def geglu(acc, up: co.Product):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
    """Two products, for which no table ships."""
    return co.gelu(acc) * up


@dataclass(frozen=True)
class Case:
    """The problems of one signature on one device."""

    device: Device
    signature: OpSignature
    problems: tuple[Problem, ...]

    def answers(self) -> Iterator[tuple[Ordered, list[Ordered]]]:
        """Yield for each problem what is chosen, and what is as fast but for a rounding."""
        policy = policies.policy(self.signature, self.device)
        for problem in self.problems:
            kept = policies.kept(policy, problem.n, problem.k, problem.count)
            chosen, *others = policy.ranked(problem, kept, count=4)
            yield chosen.ordered, [c.ordered for c in others if c.microseconds <= chosen.microseconds * (1 + TIE)]

    def times(self) -> list[tuple[float, str]]:
        """Return the expected times of some chosen kernels, and their sources."""
        policy = policies.policy(self.signature, self.device)
        found = (policy.choose(problem) for problem in self.problems[::TIMED])
        return [(float(f"{c.microseconds:.9g}"), c.source) for c in found]

    def kept(self) -> tuple[Config, ...]:
        """Return the kernels of the first weight."""
        first = self.problems[0]
        return tuple(s.config for s in dispatch.specs_for(self.signature, self.device, first.n, first.k))


def shipped() -> Iterator[Case]:
    """Yield the measured problems of the shipped tables."""
    for path in sorted(resources.tuned().glob("*.json")):
        table = tables.load(path)
        device = Device((9, 0), table.multiprocessors, table.device)
        yield Case(device, table.signature, tuple(p.problem for p in table.points))


def drawn() -> Iterator[Case]:
    """Yield random problems of many kinds of calls."""
    rng = random.Random(2026)
    for device, graph, dtype, a, b, (n, k) in _kinds():
        signature = signature_at(graph, Problem(1024, n, k), dtype, a, b, None, device)
        yield Case(device, signature, _problems(rng, n % 8, k % 8))
    # One operand with lower alignment than the other, such as a view of a larger tensor.
    for alignments in ((1, 8, 8), (8, 1, 8), (4, 8, 4), (8, 2, 1)):
        of = signature_at(builtin.bias_gelu.graph, Problem(1024, *EVEN), "bf16", "row", "col", None, H100)
        a, b, d = (Operand(o.dtype, o.major, to) for o, to in zip((of.a, of.b, of.d), alignments, strict=True))
        yield Case(H100, replace(of, a=a, b=b, d=d), _problems(rng, 0, 0))


def _problems(rng: random.Random, odd_n: int, odd_k: int) -> tuple[Problem, ...]:
    """Draw weights of all sizes, and for each of them numbers of rows, each scale as likely."""

    def extent(largest: float, odd: int) -> int:
        unit = rng.choice((8, 64, 128, 512))
        return max(1, round(2 ** rng.uniform(6, largest) / unit)) * unit + odd

    weights = [(extent(16, odd_n), extent(15, odd_k)) for _ in range(WEIGHTS)]
    return tuple(Problem(round(2 ** rng.uniform(0, 14)), n, k) for n, k in weights for _ in range(ROWS))


Kind = tuple[Device, Graph, str, Any, Any, tuple[int, int]]


def _kinds() -> Iterator[Kind]:
    """Yield devices, epilogues, element types, majors of A and of B, and N and K that decide the alignments."""
    usual = ("row", "col", EVEN)
    graphs = [e.graph for e in (*builtin.BY_OP.values(), statistics, geglu)]
    graphs += [norms.rmsnorm_op(given=given).graph for given in (None, "sums", "rstd")]
    graphs += [norms.layernorm_op().graph, norms.rmsnorm_op(composed.swiglu).graph, norms.rmsnorm_op(geglu).graph]
    graphs += [composed.swiglu.graph, composed.residual_rms_bf16.graph]
    for at, graph in enumerate(graphs):
        yield H100, graph, "bf16", *usual
        yield (H100, H200, PCIE)[at % 3], graph, "f16", *usual
    relu, norm = builtin.bias_relu.graph, composed.rms_norm.graph
    for a, b in (("row", "row"), ("col", "col"), ("col", "row")):
        for graph in (builtin.identity.graph, relu, norm):
            yield H100, graph, "bf16", a, b, EVEN
        yield H200, builtin.residual.graph, "f16", a, b, EVEN
    for extents in (ODD_N, ODD_K, *UNALIGNED):
        for graph in (relu, norm, statistics.graph):
            yield H100, graph, "bf16", "row", "col", extents
        yield H200, composed.swiglu.graph, "f16", "row", "col", extents
        yield PCIE, builtin.residual.graph, "bf16", "row", "row", extents
    for device in (A100, A10, L40S):
        for graph, dtype in ((relu, "bf16"), (builtin.bias_residual.graph, "f16"), (norm, "bf16")):
            yield device, graph, dtype, *usual
        yield device, relu, "bf16", "row", "col", UNALIGNED[0]
        yield device, relu, "f16", "col", "row", UNALIGNED[1]


def written(found: Iterable[Case]) -> dict[str, Any]:
    """Return what is to be written down of cases, as plain values."""
    known: dict[Ordered, int] = {}

    def places(found: Iterable[Ordered]) -> list[int]:
        return [known.setdefault(each, len(known)) for each in found]

    cases = []
    for case in found:
        device = case.device
        if not dispatch.specs(case.signature, device):
            continue
        cases.append(
            {
                "device": [list(device.capability), device.multiprocessors, device.name],
                "signature": signature_to_json(case.signature),
                "problems": [p.to_json() for p in case.problems],
                "chosen": [places([chosen, *ties]) for chosen, ties in case.answers()],
                "times": case.times(),
                "kept": places(map(Ordered, case.kept())),
            }
        )
    return {"kernels": [[config_to_json(each.config), each.order.to_json()] for each in known], "cases": cases}


@dataclass(frozen=True)
class Golden:
    """One recorded case: the possible choices at each problem, chosen first; some times; the first weight's kernels."""

    case: Case
    chosen: tuple[tuple[Ordered, ...], ...]
    times: tuple[tuple[float, str], ...]
    kept: tuple[Config, ...]


def read(path: Path = GOLDEN) -> list[Golden]:
    """Return the recorded cases."""
    data = json.loads(gzip.decompress(path.read_bytes()))
    kernels = [Ordered(config_from_json(config), TileOrder.from_json(order)) for config, order in data["kernels"]]
    found = []
    for each in data["cases"]:
        capability, multiprocessors, name = each["device"]
        device = Device(tuple(capability), multiprocessors, name)
        problems = tuple(map(Problem.from_json, each["problems"]))
        case = Case(device, signature_from_json(each["signature"]), problems)
        chosen = tuple(tuple(kernels[at] for at in row) for row in each["chosen"])
        times = tuple((us, source) for us, source in each["times"])
        found.append(Golden(case, chosen, times, tuple(kernels[at].config for at in each["kept"])))
    return found


def changed(golden: Golden) -> list[tuple[Problem, Ordered, Ordered]]:
    """Return at which problems another kernel is chosen than was: that which was and that which is."""
    case = golden.case
    found = []
    for problem, before in zip(case.problems, golden.chosen, strict=True):
        spec, order = dispatch.choose(case.signature, case.device, problem)
        now = Ordered(spec.config, order)
        if now not in before:
            found.append((problem, before[0], now))
    return found


def main() -> None:
    """Print what changed, and write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=GOLDEN)
    out = parser.parse_args().out
    # Ignore the user's tables.
    with tempfile.TemporaryDirectory() as nothing:
        os.environ |= {"CUTLASS_OPS_TUNING_DIR": nothing, "CUTLASS_OPS_CHOICES": "0"}
        if out.exists():
            before = read(out)
            others = [one for each in before for one in changed(each)]
            print(f"{len(others)} of {sum(len(g.chosen) for g in before)} choices are others than before")
            for problem, old, new in others[:20]:
                print("   ", problem, old, "→", new)
        found = written([*shipped(), *drawn()])
    text = json.dumps(found, separators=(",", ":"))
    out.write_bytes(gzip.compress(text.encode(), mtime=0))
    asked = sum(len(case["problems"]) for case in found["cases"])
    ties = sum(len(row) > 1 for case in found["cases"] for row in case["chosen"])
    print(f"{asked} choices, {ties} of them ties, among {len(found['kernels'])} kernels in their orders of tiles")


if __name__ == "__main__":
    main()
