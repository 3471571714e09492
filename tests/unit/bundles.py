"""Bundles of kernels that a compiler made that takes no time."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from fake_toolkit import HMMA, FakeToolkit, library, sm80_spec

from cutlass_ops.artifacts.manifest import Manifest
from cutlass_ops.artifacts.store import KernelStore
from cutlass_ops.base.checked_json import sealed
from cutlass_ops.ship import packing, shipping

SPECS = (sm80_spec(3), sm80_spec(4), sm80_spec(3, "f16"))


def packed(root: Path, specs=SPECS, data: bytes | None = None, version: int | None = None) -> packing.Packed:
    """Contents of a bundle of some declarations, compiled in a folder."""
    kit = FakeToolkit(root / f"toolkit{len(os.listdir(root)) if root.exists() else 0}")
    kit.makes(data or library(HMMA))
    wanted = shipping.Catalogue(specs=tuple(specs), version=version)
    store = KernelStore(root / f"store{len(os.listdir(root))}")
    return packing.pack(wanted, store=store, toolchain=kit.find())


def changed(manifest: Manifest, change: Callable[[dict], object]) -> bytes:
    """A manifest's text as somebody changes it who knows the format."""
    data = json.loads(manifest.to_bytes())
    del data["sha256"]
    change(data)
    return sealed(data)


def write_keys(folder: Path, name: str, key: Any) -> tuple[Path, Path]:
    """A private key and its public one as PEM files."""
    private, public = folder / f"{name}.pem", folder / f"{name}.pub"
    private.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    public.write_bytes(key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
    private.chmod(0o600)
    public.chmod(0o644)
    return private, public
