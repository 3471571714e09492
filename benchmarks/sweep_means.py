"""Times each way to compute means of A's rows against the same tiles without: raw data for the cost model.

    python benchmarks/sweep_means.py --out benchmarks/results/sweep_means_h100.json
    python benchmarks/sweep_means.py --ways beside --out benchmarks/results/sweep_beside_h100.json

RMSNorm + GEMM, BF16. Each row: {"m", "n", "k", "config", "us": {"given": us, way: us, ...}}: `given` is the kernel with
the statistic as an argument and the tiles of `config`; the others compute it from A (`Sm90Config.means`).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import bench_rmsnorm
import harness
import shapes
import torch

from cutlass_ops.choose import policies
from cutlass_ops.compilation.builder import build_many
from cutlass_ops.declare.config import Means, Ordered, config_to_json
from cutlass_ops.declare.device import Device
from cutlass_ops.declare.problem import Problem
from cutlass_ops.declare.spec import KernelSpec
from cutlass_ops.kinds import legality
from cutlass_ops.kinds.sm90 import model
from cutlass_ops.kinds.sm90.config import Sm90Config
from cutlass_ops.operand.call import device_of
from cutlass_ops.run import norms
from cutlass_ops.run.kernels import build
from cutlass_ops.tuner.timing import expected_us, rotation
from cutlass_ops.tuner.tuning import signature_at

_SUMS = {"row_sum_square": "f32"}


# A configuration with the order of its tiles, and the kernels to compare by name.
Tile = tuple[Ordered, dict[str, KernelSpec]]


def kernels(problem: shapes.Shape, device: Device, tiles: int, ways: Sequence[Means] = model.WAYS) -> list[Tile]:
    """Return the tiles that come first at a problem, and for each of them the kernels to compare."""
    taking, given = (
        signature_at(norms.rmsnorm_op(given=name).graph, Problem(*problem), "bf16", "row", "col", None, device, inputs)
        for name, inputs in ((None, None), ("sums", _SUMS))
    )
    policy = policies.policy(taking, device)
    first = [(c.config, c.order) for c in policy.ranked(Problem(*problem), count=4 * tiles)]
    found = []
    for config, order in [(c, order) for c, order in first if isinstance(c, Sm90Config)][:tiles]:
        plain = replace(config, means=Sm90Config.means)
        specs = {"given": given.spec(plain, order=order)}
        specs |= {way: taking.spec(replace(config, means=way), order=order) for way in ways}
        found.append((Ordered(plain, order), {name: spec for name, spec in specs.items() if not legality.check(spec)}))
    return [(tile, specs) for tile, specs in found if "given" in specs and len(specs) > 1]


def run_problem(problem: shapes.Shape, tiles: list[Tile]) -> list[dict[str, Any]]:
    """Check and time all kernels at a problem, against each other."""
    m, n, k = Problem.of(problem).extents
    sets = [bench_rmsnorm.Inputs.draw(m, n, k, torch.bfloat16) for _ in range(rotation(2 * (m * k + n * k + m * n)))]
    sampled = torch.randint(m, (64,), device="cuda")
    first = sets[0]
    exact = bench_rmsnorm.eager(first.x[sampled].double(), first.weight.double(), first.gamma.double())
    theirs = bench_rmsnorm.eager(first.x, first.weight, first.gamma)[sampled]
    variants: dict[Any, Callable[[int], object]] = {}
    for number, (_, specs) in enumerate(tiles):
        for name, spec in specs.items():
            run = _launching(spec, name == "given", sets)
            first.out.fill_(float("nan"))
            run(0)
            harness.check(first.out[sampled], exact, theirs)
            variants[number, name] = run
    times = harness.time_interleaved(variants, expected_us(Problem(m, n, k)))
    return [
        {
            "m": m, "n": n, "k": k,
            "config": config_to_json(tile.config),
            "order": tile.order.to_json(),
            "us": {name: round(times[number, name].median * 1e3, 3) for name in specs},
        }
        for number, (tile, specs) in enumerate(tiles)
    ]  # fmt: skip


def _launching(spec: KernelSpec, given: bool, sets: list[bench_rmsnorm.Inputs]) -> Callable[[int], object]:
    kernel = build(spec)

    def run(index: int) -> object:
        x = sets[index % len(sets)]
        if given:
            inverse = 1 / x.x.shape[1]
            return kernel(x.x, x.prepared.matrix, x.statistic.sum_square, inverse, bench_rmsnorm.EPS, out=x.out)
        return kernel(x.x, x.prepared.matrix, bench_rmsnorm.EPS, out=x.out)

    return run


def main() -> None:
    """Run all problems and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiles", type=int, default=4, help="number of tiles per problem")
    parser.add_argument("--ways", nargs="+", choices=model.WAYS, default=list(model.WAYS), help="only these")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    device = device_of(torch.device("cuda", 0))
    wanted = {problem: kernels(problem, device, args.tiles, args.ways) for problem in shapes.MEANS}
    build_many(list(dict.fromkeys(s for tiles in wanted.values() for _, specs in tiles for s in specs.values())))
    head, rows = harness.begin(), []
    with torch.no_grad():
        for problem, tiles in wanted.items():
            rows += run_problem(problem, tiles)
            print(rows[-1], flush=True)
            harness.save(args.out, {**head, "rows": rows})


if __name__ == "__main__":
    main()
