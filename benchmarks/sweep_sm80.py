"""Times Sm80 kernels at problems that TMA cannot load: raw data for their cost model.

    python benchmarks/sweep_sm80.py --out benchmarks/results/sweep_sm80_h100.json

Bias + ReLU, BF16, A row-major and B column-major, lines of 4097 elements (aligned to one) and of 4098 (to two). Each
row: {"alignment", "m", "n", "k", "peer_ms", "times": {slug: ms}}; the peer is cuBLASLt's fused bias + ReLU.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import harness
import sweep
import torch

from cutlass_ops.declare.config import ThreadblockShape, WarpShape
from cutlass_ops.declare.device import Device
from cutlass_ops.declare.problem import Problem
from cutlass_ops.kinds import legality
from cutlass_ops.kinds.sm80.config import Sm80Config
from cutlass_ops.operand.call import device_of
from cutlass_ops.run import named
from cutlass_ops.run.registry import OpSignature, Registry
from cutlass_ops.tuner.timing import expected_us
from cutlass_ops.tuner.tuning import signature_at

# M, N and K of the tile, then M and N of the warps' tiles.
TILES = (
    *((32, 32, 64, 32, 32), (32, 64, 64, 32, 32), (32, 128, 64, 32, 32), (32, 256, 32, 32, 64)),
    *((64, 32, 64, 32, 32), (64, 64, 32, 32, 32), (64, 64, 64, 32, 32), (64, 64, 64, 64, 32)),
    *((64, 128, 32, 32, 64), (64, 128, 64, 32, 64), (64, 256, 32, 32, 64), (64, 256, 64, 32, 64)),
    *((128, 64, 32, 64, 32), (128, 64, 64, 64, 32), (128, 64, 64, 32, 32)),
    *((128, 128, 32, 64, 64), (128, 128, 32, 64, 32), (128, 128, 64, 64, 32), (128, 128, 64, 64, 64)),
    *((128, 256, 32, 64, 64), (128, 256, 64, 64, 64), (256, 128, 32, 64, 64), (256, 128, 64, 64, 64)),
    *((256, 64, 32, 64, 64), (256, 64, 64, 64, 32)),
)
# Stream-K is tried with these too.
STREAM_K = ((32, 128, 64), (32, 256, 32), (64, 256, 64), (128, 128, 32), (128, 256, 32), (256, 128, 32))
STAGES = {1: (2,), 2: (3, 5)}
LINES = {1: 4097, 2: 4098}
ROWS = (1, 16, 64, 128, 256, 512, 1024, 4096)
COLUMNS = (4096, 11008)


def pool(signature: OpSignature, device: Device, alignment: int) -> list[Sm80Config]:
    """Return the legal configurations for an alignment."""
    found = []
    for m, n, k, warp_m, warp_n in TILES:
        for stages in STAGES[alignment]:
            for stream_k in (False, True) if (m, n, k) in STREAM_K and stages == STAGES[alignment][0] else (False,):
                tile, warp = ThreadblockShape(m, n, k), WarpShape(warp_m, warp_n, k)
                config = Sm80Config(tile, warp, stages=stages, stream_k=stream_k)
                if not legality.check(device.spec(signature, config)):
                    found.append(config)
    return found


def main() -> None:
    """Build the pools, check each kernel, time it at each problem and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit", type=float, default=1e9, help="stop after this many seconds")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    begin, rows = time.monotonic(), []
    device = device_of(torch.device("cuda", 0))
    graph = named.gemm_bias_relu.graph
    for alignment, k in LINES.items():
        signature = signature_at(graph, Problem(64, COLUMNS[0], k), "bf16", "row", "col", None, device)
        configs = pool(signature, device, alignment)
        kernels = Registry.current().kernels([device.spec(signature, c) for c in configs])
        print(f"{len(kernels)} kernels after {time.monotonic() - begin:.0f} s", flush=True)
        for n in COLUMNS:
            for m in ROWS:
                if time.monotonic() - begin > args.limit:
                    print(f"stopped at the limit before {m}x{n}x{k}")
                    return
                launches = {}
                for config, kernel in zip(configs, kernels, strict=True):
                    size = int(kernel.workspace_size(m, n, k, 1, 0, 1))
                    workspace = torch.empty(size, dtype=torch.uint8, device="cuda") if size else None
                    launches[config.slug] = sweep.launching(kernel, 0, 1, workspace)
                peer_ms, times = sweep.measure((m, n, k), launches, 2 * expected_us(Problem(m, n, k)), rounds=7)
                rows.append({"alignment": alignment, "m": m, "n": n, "k": k, "peer_ms": peer_ms, "times": times})
                best = min(times, key=lambda name: times[name])
                print(f"{m}x{n}x{k}: peer {peer_ms * 1e3:.1f} us, {best} {times[best] * 1e3:.1f}", flush=True)
                harness.save(args.out, {**harness.environment(), "rows": rows})


if __name__ == "__main__":
    main()
