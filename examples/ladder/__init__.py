"""One GEMM as a ladder: from a naive kernel to cuBLAS, each rung a file that can be read by itself.

    python -m examples.ladder                        # build, prove, check and time every rung
    python -m examples.ladder --rungs 5 8 --shapes 4096x4096x4096 --out ladder.json --plot ladder.svg

docs/ladder.md tells the story.
"""
