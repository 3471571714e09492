"""``python -m cutlass_ops``."""

from cutlass_ops.tools.cli import main

if __name__ == "__main__":
    main()
