"""The size of distributions of kernels over how far their pools may be behind the tables. It needs no GPU.

    python benchmarks/pool_sizes.py --sample 12 --out benchmarks/results/pool_sizes.json

The size of a kernel is the mean of a sample, evenly spaced over the pools at 3%, which is compiled into the store.
*Compressed* is what a wheel takes to download, in which libraries follow each other, and then their sources, as in a
bundle; *installed*, what its files take.
"""

from __future__ import annotations

import argparse
import datetime
import json
import zlib
from pathlib import Path

from cutlass_ops.compilation.builder import build_many
from cutlass_ops.ship import distributing

BEHIND = (0.01, 0.02, 0.03, 0.04, 0.05, 0.06, 0.08)
MB = 1e6


def sample(arch: str, count: int) -> tuple[float, float]:
    """Return the mean bytes of a kernel with its source, installed and compressed."""
    specs = [spec for part in distributing.parts(arch) for spec in part.specs]
    step = len(specs) / count
    artifacts = build_many(dict.fromkeys(specs[int(at * step)] for at in range(count)))
    archive = b"".join([a.read_library() for a in artifacts] + [a.read_source() for a in artifacts])
    return len(archive) / count, len(zlib.compress(archive, 9)) / count


def main() -> None:
    """Print a row for each limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", nargs="+", default=["sm_90a"])
    parser.add_argument("--sample", type=int, default=12)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    found = {"date": datetime.date.today().isoformat(), "sample": args.sample, "architectures": {}}
    for arch in args.arch:
        whole, packed = sample(arch, args.sample)
        rows = []
        for behind in BEHIND:
            parts = distributing.parts(arch, behind=behind)
            kernels = sum(len(part.specs) for part in parts)
            rows.append(
                {
                    "behind": behind,
                    "kernels": kernels,
                    "worst": round(max(part.pool.worst for part in parts), 4),
                    "mean": round(sum(part.pool.mean for part in parts) / len(parts), 4),
                    "compressed_mb": round(kernels * packed / MB, 1),
                    "installed_mb": round(kernels * whole / MB, 1),
                }
            )
            print(arch, rows[-1], flush=True)
        found["architectures"][arch] = {
            "signatures": len(parts),
            "bytes": round(whole),
            "compressed_bytes": round(packed),
            "rows": rows,
        }
    if args.out:
        args.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
