"""Distributions of ready kernels: for one architecture, the pools of the default catalogue's signatures as one wheel.

It has one bundle for each signature (:mod:`cutlass_ops.artifacts.installed`). What is compiled stays in the store, so
that building takes up where it was left.
"""

from __future__ import annotations

import itertools
import tempfile
import zlib
from collections.abc import Iterable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch

from cutlass_ops.artifacts.bundle import manifest_of
from cutlass_ops.artifacts.bundles import Bundles
from cutlass_ops.artifacts.installed import file_name
from cutlass_ops.base import dtypes, resources
from cutlass_ops.base.errors import ConfigError
from cutlass_ops.choose import tables
from cutlass_ops.compilation.builder import build_many, stored
from cutlass_ops.declare.chips import CHIPS
from cutlass_ops.declare.device import Device
from cutlass_ops.declare.gpus import BY_TARGET
from cutlass_ops.declare.problem import Problem
from cutlass_ops.declare.signature import OpSignature
from cutlass_ops.declare.spec import KernelSpec
from cutlass_ops.declare.spelling import INPUT_DTYPES
from cutlass_ops.epilogue import builtin
from cutlass_ops.operand.call import call_at, signature_of
from cutlass_ops.run import gated
from cutlass_ops.run.ops import Op, graph_op
from cutlass_ops.ship import packing, pools, shipping
from cutlass_ops.ship.pools import Pool

OPS = (*builtin.BY_OP, "rmsnorm_gemm", "gemm_residual_rms", "gemm_swiglu")
DTYPES = ("bf16", "f16")
# How far a pool may be behind its table, as a part of the time.
BEHIND = 0.03
# Any problem that TMA can address: its signature is that of all aligned calls.
_ALIGNED = Problem(1024, 4096, 4096)


@dataclass(frozen=True)
class Part:
    """The kernels of one signature."""

    # Name of the op, and dtype of A and B.
    op: str
    dtype: str
    pool: Pool  # what was chosen
    specs: tuple[KernelSpec, ...]  # its kernels


def name_of(arch: str) -> str:
    """Return the name of an architecture's distribution."""
    return f"cutlass-ops-kernels-{arch.replace('_', '')}"


def parts(
    arch: str,
    ops: Iterable[str] = OPS,
    dtypes_of_a: Iterable[str] = DTYPES,
    *,
    behind: float = BEHIND,
    most: int | None = None,
) -> tuple[Part, ...]:
    """Choose the pools of a distribution. Nothing is compiled."""
    require_arch(arch)
    devices = devices_of(arch)
    found: dict[OpSignature, Part] = {}
    # What other people are given must not depend on bundles that are loaded here.
    with Bundles.aside():
        for op in ops:
            require_op(op)
            for dtype in dtypes_of_a:
                for signature in _signatures(op, dtype, devices[0]):
                    if signature not in found:
                        pool = pools.pool(signature, devices, behind, most)
                        specs = tuple(devices[0].spec(signature, config) for config in pool.kernels)
                        found[signature] = Part(op, dtype, pool, specs)
    return tuple(found.values())


def require_arch(name: str) -> None:
    """Require the name of an architecture; a ConfigError lists them."""
    if name not in BY_TARGET:
        raise ConfigError(f"{name!r} is not an architecture: use {', '.join(BY_TARGET)}")


def require_op(name: str) -> None:
    """Require the name of an op that distributions have; a ConfigError lists them."""
    if name not in OPS:
        raise ConfigError(f"{name!r} is not an op of distributions: use {', '.join(OPS)}")


def require_served(arch: str, ops: Iterable[str], dtypes_of_a: Iterable[str]) -> None:
    """Require that an architecture has kernels of all ops for all dtypes; a ConfigError says which it lacks."""
    device = devices_of(arch)[0]
    with Bundles.aside():
        for op, dtype in itertools.product(ops, dtypes_of_a):
            _signatures(op, dtype, device)


def devices_of(arch: str) -> tuple[Device, ...]:
    """Return the devices for which an architecture's pools are chosen, first the one that its target stands for."""
    first = BY_TARGET[arch]
    known = [first, *(chip.device for chip in CHIPS.values() if chip.device != first)]
    here = [device for device in known if device.capability == first.capability]
    measured = [device for device in here if tables.has_any(resources.tuned(), device.name)]
    return tuple(measured or here)


def _signatures(op: str, dtype: str, device: Device) -> list[OpSignature]:
    """Return the signature of an op's aligned calls with a linear layer's majors, or of the ops that serve them."""
    graph = shipping.graph_named(op, dtype).graph
    element = dtypes.dtype(dtype, dtypes.DECLARED)
    # Other types are of operands only, or have one type of results.
    out = cast(torch.dtype, getattr(torch, element.torch_name)) if element in dtypes.STORED else None
    call = call_at(graph, _ALIGNED, dtype, "row", "col", out, INPUT_DTYPES.get(op))
    asked: Op = gated.swiglu_op(None) if op == "gemm_swiglu" else graph_op(op, graph)
    signature = signature_of(call, device)
    if pools.is_served(signature, device):
        return [signature]
    instead = [signature_of(part, device) for _, part in asked.instead_of(call)]
    if not instead or not all(pools.is_served(each, device) for each in instead):
        raise ConfigError(f"no kernel serves {op} in {dtype} on {device.name}")
    return instead


def missing(of: Sequence[Part]) -> list[KernelSpec]:
    """Return the kernels that the store lacks, the most useful of each signature first."""
    return [spec for part in of for spec in part.specs if stored(spec) is None]


def compressed(of: Sequence[Part]) -> tuple[int, int, int]:
    """Return how many of the kernels the store has, their bytes, and their bytes when compressed as in a wheel."""
    found = [[a for spec in part.specs if (a := stored(spec)) is not None] for part in of]
    archives = [b"".join([a.read_library() for a in each] + [a.read_source() for a in each]) for each in found]
    return sum(map(len, found)), sum(map(len, archives)), sum(len(zlib.compress(data, 9)) for data in archives if data)


def build(
    arch: str,
    of: Sequence[Part],
    folder: Path,
    *,
    version: str | None = None,
    private_key: Path | None = None,
    jobs: int | None = None,
    executor: Executor | None = None,
) -> Path:
    """Compile what the store lacks, and write the wheel. The same kernels give the same bytes."""
    specs = [spec for part in of for spec in part.specs]
    built = dict(zip(specs, build_many(specs, jobs=jobs, executor=executor), strict=True))
    bundles = {}
    with tempfile.TemporaryDirectory(prefix="cutlass_ops.") as temporary, Bundles.aside():
        for part in of:
            chosen = pools.choices(part.pool, BY_TARGET[arch])
            artifacts = [built[spec] for spec in part.specs]
            manifest = manifest_of(artifacts, {part.pool.signature: chosen}, [])
            path = Path(temporary, file_name(part.pool.signature))
            packing.packed(manifest, artifacts, []).write(path, private_key=private_key)
            bundles[path.name] = path.read_bytes()
    return packing.write_distribution(bundles, folder, name_of(arch), version or resources.library_version())
