"""The folder in which tests keep kernels. They leave the user's own store, tables and bundles alone."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).parents[1]

# Kernels and tables of the user's, and where kernels are published.
USERS = (
    "CUTLASS_OPS_TUNING_DIR",
    "CUTLASS_OPS_BUNDLES",
    "CUTLASS_OPS_BUNDLE_KEY",
    "CUTLASS_OPS_BUNDLE_VERSION",
    "CUTLASS_OPS_REMOTE_STORE",
    "CUTLASS_OPS_REMOTE_STORE_KEY",
    "CUTLASS_OPS_REMOTE_STORE_SIGNING_KEY",
)


def use() -> None:
    """Have this process and its children use the tests' store: build/kernels, or the folder that CI_KERNELS names."""
    os.environ["CUTLASS_OPS_CACHE_DIR"] = str((ROOT / (os.environ.get("CI_KERNELS") or "build/kernels")).resolve())
    for name in USERS:
        os.environ.pop(name, None)
