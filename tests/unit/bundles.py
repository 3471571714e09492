"""Bundles of kernels that a compiler made that takes no time."""

from __future__ import annotations

import os
from pathlib import Path

from fake_toolkit import HMMA, FakeToolkit, library, sm80_spec

from cutlass_ops import packing, shipping
from cutlass_ops.store import KernelStore

SPECS = (sm80_spec(3), sm80_spec(4), sm80_spec(3, "f16"))


def use(kit: FakeToolkit, store: Path, monkeypatch) -> None:
    """Have this process compile with a fake compiler, into a store of its own."""
    monkeypatch.setenv("CUTLASS_OPS_NVCC", str(kit.nvcc))
    monkeypatch.setenv("NVCC_CCBIN", str(kit.host))
    monkeypatch.setenv("CUTLASS_OPS_CACHE_DIR", str(store))
    for name in ("CUDA_HOME", "CUDA_PATH", "CUTLASS_OPS_JIT", "CUTLASS_OPS_BUNDLES", "CUTLASS_OPS_BUNDLE_KEY"):
        monkeypatch.delenv(name, raising=False)


def packed(root: Path, specs=SPECS, data: bytes | None = None) -> packing.Packed:
    """Contents of a bundle of some declarations, compiled in a folder."""
    kit = FakeToolkit(root / f"toolkit{len(os.listdir(root)) if root.exists() else 0}")
    kit.makes(data or library(HMMA))
    wanted = shipping.Catalogue(specs=tuple(specs))
    store = KernelStore(root / f"store{len(os.listdir(root))}")
    return packing.pack(wanted, store=store, toolchain=kit.find())
