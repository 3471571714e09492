"""Print the C++ of a declaration, without a compiler or GPU.

Usage: python examples/read_the_source.py [sm80 | sm90]
"""

from __future__ import annotations

import sys

import cutlass_ops as co

CONFIGS = {
    "sm80": co.Sm80Config(
        threadblock=co.ThreadblockShape(128, 128, 32),
        warp=co.WarpShape(64, 64, 32),
        instruction=co.InstructionShape(16, 8, 16),
        stages=4,
    ),
    "sm90": co.Sm90Config(
        threadblock=co.ThreadblockShape(128, 256, 64), cluster=co.ClusterShape(2, 1), schedule="cooperative"
    ),
}


@co.epilogue
def gelu_residual(acc, bias: co.Row, residual: co.Tile):  # noqa: ANN001, ANN201
    """D = gelu(A @ B + bias) + residual."""
    return co.e.gelu(acc + bias) + residual


def main() -> None:
    """Declare a kernel and print its source."""
    name = sys.argv[1] if len(sys.argv) > 1 else "sm90"
    if name not in CONFIGS:
        sys.exit(__doc__)
    spec = co.KernelSpec(a="bf16.row", b="bf16.col", d="bf16.row", epilogue=gelu_residual, config=CONFIGS[name])
    for violation in co.check(spec):
        sys.exit(str(violation))
    print(co.source(spec), end="")


if __name__ == "__main__":
    main()
