"""``python -m cutlass_ops``."""

from cutlass_ops.cli import main

if __name__ == "__main__":
    main()
