"""Every kernel that the GPU tests need, so that they are compiled side by side before the first test runs."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import lru_cache
from typing import Any

from hypothesis import given, settings

import cutlass_ops as co
from cutlass_ops.choose import dispatch
from cutlass_ops.declare.config import Config
from cutlass_ops.declare.spec import KernelSpec
from cutlass_ops.epilogue import builtin, composed
from cutlass_ops.epilogue.nodes import Kind
from cutlass_ops.kinds.legality import is_legal
from cutlass_ops.operand.call import device_of, signature_of
from cutlass_ops.run import norms, ops, requests
from cutlass_ops.run.named import NAMED
from cutlass_ops.run.registry import Registry
from tests import own_store
from tests.strategies import Program, programs

DTYPES = ("bf16", "f16")
MAJORS = (("row", "col"), ("row", "row"), ("col", "col"), ("col", "row"))
OPS = {op.name: op for op in NAMED}

# Small tiles: quick to compile, and problems of a few hundred have edges in every direction.
SM90 = co.Sm90Config(co.ThreadblockShape(64, 64, 64), schedule="warp_specialized")
# Where CUTLASS's epilogue stores, reductions need a kernel that gives it a workspace.
SM90_REDUCING = co.Sm90Config(co.ThreadblockShape(64, 64, 64), schedule="pingpong")
SM80 = co.Sm80Config(co.ThreadblockShape(64, 64, 32), co.WarpShape(32, 32, 32), stages=2)


def _six(z, d):
    sums = {"row_sum": co.sum(d, dim=1), "row_square": co.sum_square(z, dim=1), "row_max": co.max(d, dim=1)}
    return sums | {"col_sum": co.sum(z, dim=0), "col_square": co.sum_square(d, dim=0), "col_max": co.max(d, dim=0)}


@co.epilogue
def everything(acc, bias: co.Row, scale: co.Col, residual: co.Tile, other: co.Tile, alpha: co.Scalar):
    z = acc * scale + bias
    d = co.silu(z) * alpha + residual - other
    return {"d": d, "pre": z, **_six(z, d)}


@co.epilogue
def summed(acc, bias: co.Row, scale: co.Col, residual: co.Tile, alpha: co.Scalar):
    """The same reductions where no other tile is stored."""
    z = acc * scale + bias
    d = co.silu(z) * alpha + residual
    return {"d": d, **_six(z, d)}


@co.epilogue
def summed_alone(acc, bias: co.Row, scale: co.Col, alpha: co.Scalar):
    """And where none is read."""
    z = acc * scale + bias
    d = z * alpha
    return {"d": d, **_six(z, d)}


@co.epilogue
def summed_twice(acc, bias: co.Row):
    """Reductions of the same kind, which must not count each other's parts."""
    z = acc + bias
    d = co.relu(z)
    ways = {"row": 1, "col": 0}
    return {"d": d} | {f"{way}_{of}": co.sum(v, dim=dim) for way, dim in ways.items() for of, v in (("z", z), ("d", d))}


@co.epilogue
def out_of_order(acc, bias: co.Row, scale: co.Col, residual: co.Tile, alpha: co.Scalar):
    """Inputs used in another order than they are declared in, where it matters."""
    return (residual - alpha * acc) / (2 + scale * scale) - bias


@co.epilogue
def scaled(acc, alpha: co.Scalar):
    return co.relu(acc * alpha)


@co.epilogue
def turned(acc, bias: co.Row, scale: co.Col, residual: co.Tile):
    """Values of the column beside: of what was loaded, of what was computed, and of both."""
    z = co.swap_pairs(acc + bias) * scale
    return {"d": z + co.swap_pairs(residual), "sums": co.sum(co.swap_pairs(z) + acc, dim=1)}


@co.epilogue
def turned_alone(acc, bias: co.Row, scale: co.Col, residual: co.Tile):
    """The same without a sum, which kernels of ordinary loads do not have."""
    z = co.swap_pairs(acc + bias) * scale
    return {"d": z + co.swap_pairs(residual), "once_more": co.swap_pairs(z) - acc}


@co.epilogue
def beside(acc, scale: co.Scalar):
    """D itself is what lies beside."""
    return co.swap_pairs(acc * scale)


@co.epilogue
def rotary(acc, position: co.Col, frequency: co.Row):
    """A rotary embedding of neighbouring columns."""
    angle = position * frequency
    return acc * co.cos(angle) + co.swap_pairs(acc) * co.sin(angle)


def declare(types: str, epilogue: Any, config: Config, form: str = "dense", **inputs: Any) -> KernelSpec:
    """Return a kernel for Hopper by the types of A, B and D in one text, and those of inputs by name."""
    a, b, d = types.split()
    target, outputs = None if isinstance(config, co.Sm90Config) else "sm_90", inputs.pop("outputs", {})
    return KernelSpec(
        a=a, b=b, d=d, epilogue=epilogue, inputs=inputs, outputs=outputs, config=config, target=target, form=form
    )


def spec(
    op: ops.Op,
    dtype: str,
    majors: tuple[str, str],
    config: Config,
    *,
    aligned: bool = True,
    d_aligned: bool | None = None,
    d: str | None = None,
    odd: str = "",
) -> KernelSpec:
    """Return the kernel of an op for operands of one dtype; D and tiles are row-major. `odd` are not aligned."""
    a_tail, b_tail = ("" if aligned and name not in odd else ".align1" for name in "ab")
    tail = "" if (aligned if d_aligned is None else d_aligned) else ".align1"
    tiles = {i.name: f"{dtype}.row{tail}" for i in op.graph.inputs if i.kind is Kind.TILE}
    vectors = {i.name: dtype for i in op.graph.inputs if i.kind in (Kind.ROW, Kind.COL)}
    outputs = {o.name: f"{dtype}.row{tail}" for o in op.graph.outputs[1:] if o.reduce is None}
    types = f"{dtype}.{majors[0]}{a_tail} {dtype}.{majors[1]}{b_tail} {d or dtype}.row{tail}"
    return declare(types, op.graph, config, outputs=outputs, **tiles, **vectors)


def matrix() -> dict[str, KernelSpec]:
    """Every op, dtype and operand major, aligned (Sm90) and not (Sm80); on Sm90 an odd number of columns as well."""
    odd = {
        f"{name}-{dtype}-row-col-tma_odd": spec(op, dtype, ("row", "col"), SM90, d_aligned=False)
        for name, op in OPS.items()
        for dtype in DTYPES
    }
    return odd | {
        f"{name}-{dtype}-{a}-{b}-{'tma' if aligned else 'unaligned'}": spec(
            op, dtype, (a, b), SM90 if aligned else SM80, aligned=aligned
        )
        for name, op in OPS.items()
        for dtype in DTYPES
        for a, b in MAJORS
        for aligned in (True, False)
    }


def configurations() -> dict[str, KernelSpec]:
    """Schedules, clusters, schedulers, stages and alignments, on bias + ReLU."""
    shape, cluster = co.ThreadblockShape, co.ClusterShape
    sm90 = (
        co.Sm90Config(shape(128, 128, 64), schedule="pingpong"),
        co.Sm90Config(shape(64, 96, 64), cluster(2, 1), schedule="pingpong"),
        co.Sm90Config(shape(128, 192, 64), cluster(2, 2), schedule="cooperative"),
        co.Sm90Config(shape(256, 128, 64), cluster(1, 4), schedule="cooperative"),
        co.Sm90Config(shape(128, 128, 64), schedule="cooperative", scheduler="stream_k"),
        co.Sm90Config(shape(128, 64, 128), cluster(2, 1), schedule="cooperative", scheduler="stream_k", swap_ab=True),
        co.Sm90Config(shape(64, 8, 64), schedule="warp_specialized", swap_ab=True),
        co.Sm90Config(shape(64, 256, 32), schedule="warp_specialized", stages=2),
        co.Sm90Config(shape(64, 48, 128), schedule="warp_specialized"),
        co.Sm90Config(shape(128, 112, 64), cluster(2, 1), schedule="pingpong"),
        co.Sm90Config(shape(256, 208, 64), cluster(2, 1), schedule="cooperative"),
        co.Sm90Config(shape(64, 80, 64), schedule="warp_specialized", swap_ab=True),
        co.Sm90Config(shape(128, 128, 64), schedule="cooperative", split_k=2),
        co.Sm90Config(shape(64, 64, 128), schedule="warp_specialized", split_k=4, swap_ab=True),
        co.Sm90Config(shape(128, 64, 64), schedule="warp_specialized", split_k=8),
        co.Sm90Config(shape(256, 96, 64), schedule="cooperative", split_k=2, swap_ab=True),
        co.Sm90Config(shape(128, 16, 128), schedule="warp_specialized", swap_ab=True, resident=2),
        # Sides that 16 does not divide, parts of the epilogue of 8 columns, and warpgroups side by side.
        co.Sm90Config(shape(128, 104, 64), schedule="pingpong", swap_ab=True),
        co.Sm90Config(shape(64, 72, 64), cluster(4, 1), schedule="warp_specialized", swap_ab=True),
        co.Sm90Config(shape(256, 152, 64), cluster(1, 2), schedule="cooperative", swap_ab=True),
        co.Sm90Config(shape(64, 40, 128), schedule="pingpong"),
        co.Sm90Config(shape(192, 176, 64), cluster(1, 2), schedule="cooperative", swap_ab=True),
        co.Sm90Config(shape(192, 192, 64), cluster(2, 1), schedule="cooperative"),
    )
    op = OPS["gemm_bias_relu"]
    found = {c.slug: spec(op, "bf16", ("row", "col"), c) for c in sm90}
    wide = co.Sm90Config(shape(64, 176, 64), schedule="pingpong")
    found[f"{wide.slug}-f16-col-row"] = spec(op, "f16", ("col", "row"), wide)
    # Warpgroups whose halves of the columns begin within a swizzle, and at its edge.
    for n in (64, 256):
        halves = co.Sm90Config(shape(192, n, 64), schedule="cooperative")
        found[f"{halves.slug}-f16-col-row"] = spec(op, "f16", ("col", "row"), halves)
    large = co.ThreadblockShape(128, 128, 32)
    for alignment, stages, stream_k in ((8, 3, False), (4, 4, False), (2, 5, True), (1, 2, True)):
        config = co.Sm80Config(large, co.WarpShape(64, 64, 32), stages=stages, stream_k=stream_k)
        types = " ".join(f"bf16.{major}.align{alignment}" for major in ("row", "col", "row"))
        found[f"{config.slug}-align{alignment}"] = declare(types, op.graph, config)
    for d in ("f32", "bf16"):
        found[f"{SM90.slug}-d-{d}-from-f16"] = spec(op, "f16", ("row", "col"), SM90, d=d)
    for config in (SM90, SM80):
        found[f"{config.slug}-col-major-d"] = declare("bf16.row bf16.col bf16.col", op.graph, config)
    return found


def gathering() -> dict[str, KernelSpec]:
    """Kernels that take means of A's rows, each way in each schedule and orientation, and kernels with two weights."""
    shape, cluster = co.ThreadblockShape, co.ClusterShape
    gathered = (
        co.Sm90Config(shape(64, 96, 128), schedule="pingpong"),
        co.Sm90Config(shape(64, 128, 64), cluster(2, 2), schedule="pingpong"),
        co.Sm90Config(shape(64, 64, 128), schedule="warp_specialized"),
        co.Sm90Config(shape(64, 8, 256), schedule="warp_specialized", swap_ab=True),
        co.Sm90Config(shape(128, 40, 64), cluster(4, 1), schedule="pingpong", swap_ab=True),
        co.Sm90Config(shape(256, 56, 64), cluster(1, 2), schedule="cooperative", swap_ab=True),
        co.Sm90Config(shape(192, 64, 64), cluster(1, 2), schedule="cooperative", swap_ab=True),
    )
    whole = (
        co.Sm90Config(shape(128, 128, 64), cluster(2, 1), schedule="pingpong"),
        co.Sm90Config(shape(256, 128, 64), cluster(1, 2), schedule="cooperative"),
        co.Sm90Config(shape(192, 176, 64), cluster(2, 1), schedule="cooperative"),
        co.Sm90Config(shape(64, 64, 32), schedule="warp_specialized"),
        co.Sm90Config(shape(128, 72, 64), cluster(4, 2), schedule="pingpong", swap_ab=True),
        co.Sm90Config(shape(256, 208, 64), cluster(1, 2), schedule="cooperative", swap_ab=True),
        co.Sm90Config(shape(64, 8, 256), schedule="warp_specialized", swap_ab=True),
        co.Sm90Config(shape(128, 80, 64), cluster(2, 1), schedule="warp_specialized", swap_ab=True),
    )
    split = (
        co.Sm90Config(shape(128, 128, 64), schedule="cooperative", scheduler="stream_k"),
        co.Sm90Config(shape(64, 64, 128), schedule="warp_specialized", split_k=4, swap_ab=True),
    )
    norm, centred, gate = (ops.op(e) for e in (composed.rms_norm, composed.layer_norm, composed.swiglu))
    normed_gate = norms.rmsnorm_op(composed.swiglu)
    beside = tuple(replace(c, means="beside") for c in whole)
    ahead = tuple(replace(c, means="ahead") for c in (*whole[:2], whole[4], *split))
    found = {f"norm-{c.slug}": spec(norm, "bf16", ("row", "col"), c) for c in (*gathered, *beside, *ahead)}
    for c in (gathered[0], gathered[3], beside[0], beside[5], ahead[1], SM80):
        found[f"centred-{c.slug}"] = spec(centred, "f16", ("row", "col"), c)
    # D and A as the main loop's gathering does not have them.
    late = co.Sm90Config(shape(64, 64, 64), schedule="pingpong", means="ahead")
    found["norm-odd_d"] = spec(norm, "bf16", ("row", "col"), late, d_aligned=False)
    found["norm-column_major_a"] = spec(norm, "f16", ("col", "col"), late)
    found["norm-unaligned"] = spec(norm, "bf16", ("row", "col"), SM80, aligned=False)
    found["centred-column_major_unaligned"] = spec(centred, "f16", ("col", "row"), SM80, aligned=False)
    gates = (
        co.Sm90Config(shape(128, 128, 64), cluster(2, 1), schedule="pingpong"),
        co.Sm90Config(shape(128, 208, 64), cluster(1, 2), schedule="pingpong"),
        co.Sm90Config(shape(256, 128, 64), cluster(2, 1), schedule="cooperative"),
        co.Sm90Config(shape(64, 64, 128), schedule="warp_specialized"),
        co.Sm90Config(shape(128, 16, 256), cluster(1, 2), schedule="warp_specialized", swap_ab=True),
        co.Sm90Config(shape(128, 104, 64), cluster(2, 2), schedule="pingpong", swap_ab=True),
        co.Sm90Config(shape(256, 72, 64), schedule="cooperative", swap_ab=True),
    )
    found |= {f"gate-{c.slug}": spec(gate, "bf16", ("row", "col"), c) for c in gates}
    normed = (gates[4], replace(gates[0], means="beside"), replace(gates[6], means="beside"))
    for c in (*normed, replace(gates[2], means="ahead")):
        found[f"normed_gate-{c.slug}"] = spec(normed_gate, "f16", ("row", "col"), c)
    return found


def realigned() -> dict[str, KernelSpec]:
    """Kernels of Sm90 that copy A, B or both to aligned lines: every major, every kind of main loop and epilogue."""
    shape, cluster = co.ThreadblockShape, co.ClusterShape
    configs = (
        co.Sm90Config(shape(128, 128, 64), cluster(2, 1), schedule="pingpong", realign=True),
        co.Sm90Config(shape(64, 8, 256), schedule="warp_specialized", swap_ab=True, realign=True),
        co.Sm90Config(shape(128, 64, 64), schedule="cooperative", scheduler="stream_k", realign=True),
        co.Sm90Config(shape(64, 64, 128), schedule="warp_specialized", split_k=4, swap_ab=True, realign=True),
    )
    usual = configs[0]
    norm, gate, normed_gate = (ops.op(composed.rms_norm), ops.op(composed.swiglu), norms.rmsnorm_op(composed.swiglu))
    found = {f"both-{c.slug}": spec(OPS["gemm_bias_relu"], "bf16", ("row", "col"), c, aligned=False) for c in configs}
    for (a, b), left, right in zip(MAJORS, (8, 1, 2, 1), (1, 8, 8, 4), strict=True):
        types = f"f16.{a}.align{left} f16.{b}.align{right} f16.row"
        found[f"{a}_{left}-{b}_{right}"] = declare(types, builtin.bias_relu, usual)
    small = replace(usual, threadblock=shape(64, 64, 64), cluster=cluster())
    for means, of in (("gathered", small), ("beside", usual), ("ahead", usual)):
        found[f"norm-{means}"] = spec(norm, "bf16", ("row", "col"), replace(of, means=means), odd="ab")
    found["norm-column_major"] = spec(norm, "bf16", ("col", "col"), replace(usual, means="ahead"), odd="ab")
    late = replace(usual, means="ahead")
    further = (
        ("gate", gate, usual, "ab"),
        ("normed_gate", normed_gate, late, "ab"),
        ("summed", ops.op(summed), usual, "ab"),
    )
    found |= {name: spec(op, "bf16", ("row", "col"), c, odd=odd) for name, op, c, odd in further}
    found["scaled"] = spec(ops.op(scaled), "bf16", ("row", "col"), usual, odd="b")
    return found


def multicast() -> dict[str, KernelSpec]:
    """Kernels whose clusters multicast operands of every major: blocks share their rows in one, and K in the other."""
    shape, cluster = co.ThreadblockShape, co.ClusterShape
    usual = shape(128, 128, 64)
    configs = {
        ("row", "row"): (
            co.Sm90Config(usual, cluster(2, 1), schedule="pingpong"),
            co.Sm90Config(shape(64, 64, 128), cluster(1, 4), schedule="warp_specialized", swap_ab=True),
            co.Sm90Config(shape(256, 192, 64), cluster(2, 1), schedule="cooperative"),
        ),
        ("col", "col"): (
            co.Sm90Config(usual, cluster(1, 2), schedule="pingpong"),
            co.Sm90Config(shape(64, 16, 128), cluster(4, 1), schedule="warp_specialized", swap_ab=True),
        ),
        ("col", "row"): (co.Sm90Config(shape(128, 96, 64), cluster(2, 2), schedule="pingpong"),),
        ("row", "col"): (co.Sm90Config(shape(128, 96, 64), cluster(2, 2), schedule="pingpong"),),
    }
    return {
        f"multicast-{a}-{b}-{c.slug}": spec(OPS["gemm_bias_relu"], "bf16", (a, b), c)
        for (a, b), each in configs.items()
        for c in each
    }


def overlapping() -> dict[str, KernelSpec]:
    """Return a kernel of every schedule for chains of launches."""
    shape, cluster = co.ThreadblockShape, co.ClusterShape
    configs = (
        co.Sm90Config(shape(64, 128, 128), schedule="warp_specialized"),
        co.Sm90Config(shape(128, 128, 64), cluster(2, 1), schedule="pingpong"),
        co.Sm90Config(shape(128, 256, 64), cluster(2, 1), schedule="cooperative"),
        co.types.GemvConfig(4),
        co.types.GemvConfig(16, 8, 4),
    )
    return {c.slug: spec(OPS["gemm_bias_relu"], "bf16", ("row", "col"), c) for c in configs}


def multi_output() -> dict[str, KernelSpec]:
    """Five inputs, two tiles and six reductions in one kernel."""
    shape = co.ThreadblockShape
    configs: tuple[Config, ...] = (
        SM90_REDUCING,
        co.Sm90Config(shape(128, 128, 64), co.ClusterShape(2, 1), schedule="cooperative"),
        co.Sm90Config(shape(64, 32, 64), schedule="pingpong", swap_ab=True),
        SM80,
    )
    op = ops.op(everything)
    found = {c.slug: spec(op, "bf16", ("row", "col"), c) for c in configs}
    unaligned = spec(op, "f16", ("row", "col"), SM80, aligned=False)
    return found | {f"{SM80.slug}-unaligned": unaligned}


def reductions() -> dict[str, KernelSpec]:
    """Six reductions in kernels of every kind, which whichever tile comes last joins."""
    shape, cluster = co.ThreadblockShape, co.ClusterShape
    beside_a_tile = (
        co.Sm90Config(shape(128, 128, 64), cluster(2, 1), schedule="pingpong"),
        co.Sm90Config(shape(128, 104, 64), cluster(1, 2), schedule="pingpong", swap_ab=True),
        co.Sm90Config(shape(256, 64, 64), cluster(2, 2), schedule="cooperative"),
        co.Sm90Config(shape(64, 48, 64), schedule="warp_specialized"),
        co.Sm90Config(shape(64, 8, 128), schedule="warp_specialized", swap_ab=True),
    )
    alone = (
        co.Sm90Config(shape(192, 176, 64), cluster(2, 1), schedule="cooperative"),
        co.Sm90Config(shape(192, 48, 64), cluster(1, 2), schedule="cooperative", swap_ab=True),
        co.Sm90Config(shape(64, 40, 64), cluster(1, 4), schedule="pingpong"),
        co.Sm90Config(shape(128, 64, 64), schedule="cooperative", scheduler="stream_k"),
    )
    found = {f"summed-{c.slug}": spec(ops.op(summed), "bf16", ("row", "col"), c) for c in beside_a_tile}
    return found | {f"summed_alone-{c.slug}": spec(ops.op(summed_alone), "bf16", ("row", "col"), c) for c in alone}


def twice() -> dict[str, KernelSpec]:
    """Two reductions of one type for each direction."""
    shape, cluster = co.ThreadblockShape, co.ClusterShape
    configs = (
        co.Sm90Config(shape(128, 64, 64), cluster(2, 1), schedule="pingpong"),
        co.Sm90Config(shape(192, 48, 64), cluster(1, 2), schedule="cooperative", swap_ab=True),
    )
    return {f"summed_twice-{c.slug}": spec(ops.op(summed_twice), "bf16", ("row", "col"), c) for c in configs}


GEMV = co.types.GemvConfig(4, 8, 8)


def few_rows() -> dict[str, KernelSpec]:
    """Kernels of ordinary loads: every op, and every epilogue that they have, in several shapes of thread block."""
    configs = (
        co.types.GemvConfig(1),
        co.types.GemvConfig(2, 4, 16),
        GEMV,
        co.types.GemvConfig(8, 16, 2),
        co.types.GemvConfig(16, 4, 4),
    )
    norm, centred = ops.op(composed.rms_norm), ops.op(composed.layer_norm)
    gate, normed_gate = ops.op(composed.swiglu), norms.rmsnorm_op(composed.swiglu)
    found = {f"{name}-{d}-gemv": spec(op, d, ("row", "col"), GEMV) for name, op in OPS.items() for d in DTYPES}
    found["d-f32-from-f16"] = spec(OPS["gemm_bias_relu"], "f16", ("row", "col"), GEMV, d="f32")
    for c in configs:
        found |= {
            f"{name}-{c.slug}": spec(op, dtype, ("row", "col"), c, d_aligned=False)
            for name, op, dtype in (
                ("bias", OPS["gemm_bias_relu"], "bf16"),
                ("rms", norm, "bf16"),
                ("layer", centred, "f16"),
            )
        }
        found |= {
            f"{name}-{c.slug}": spec(op, "bf16", ("row", "col"), c)
            for name, op in (("gate", gate), ("both", normed_gate))
        }
    return found


def pairs() -> dict[str, KernelSpec]:
    """Return kernels whose epilogues swap pairs of columns, of every kind and orientation that may."""
    shape, cluster = co.ThreadblockShape, co.ClusterShape
    whole = (
        co.Sm90Config(shape(128, 128, 64), cluster(2, 1), schedule="pingpong"),
        co.Sm90Config(shape(128, 104, 64), cluster(1, 2), schedule="pingpong", swap_ab=True),
        co.Sm90Config(shape(256, 208, 64), cluster(2, 1), schedule="cooperative"),
        co.Sm90Config(shape(64, 8, 128), schedule="warp_specialized", swap_ab=True),
        co.Sm90Config(shape(64, 40, 64), schedule="warp_specialized"),
        SM80,
    )
    alone = (
        co.Sm90Config(shape(192, 176, 64), cluster(2, 1), schedule="cooperative"),
        co.Sm90Config(shape(192, 48, 64), schedule="cooperative", swap_ab=True),
        co.Sm90Config(shape(128, 64, 64), schedule="cooperative", scheduler="stream_k"),
        co.Sm90Config(shape(64, 64, 128), schedule="warp_specialized", split_k=4, swap_ab=True),
    )
    found = {f"turned-{c.slug}": spec(ops.op(turned), "bf16", ("row", "col"), c) for c in whole}
    found |= {f"beside-{c.slug}": spec(ops.op(beside), "f16", ("row", "col"), c) for c in (*alone, whole[0], SM80)}
    found["beside-even"] = declare("f16.row f16.col f16.row.align2", beside, SM80)
    found["beside-column_major"] = declare("f16.row f16.col f16.col", beside, whole[0])
    for c in (co.types.GemvConfig(1, 4, 16), co.types.GemvConfig(4, 2, 4), GEMV, co.types.GemvConfig(16, 4, 4)):
        found[f"turned_alone-{c.slug}"] = spec(ops.op(turned_alone), "bf16", ("row", "col"), c, d_aligned=False)
    for c in (whole[0], whole[1], SM80, co.types.GemvConfig(1, 4, 16)):
        for name, d in (("rotary", "bf16"), ("rotary-f32", "f32")):
            types = f"bf16.row bf16.col {d}.row"
            found[f"{name}-{c.slug}"] = declare(types, rotary, c, position="f32", frequency="f32")
    return found


@co.epilogue
def of_batches(acc, bias: co.Row, scale: co.Col, residual: co.Tile, alpha: co.Scalar):
    """Every kind of input that batches have or share."""
    return co.relu(acc * scale + bias) * alpha + residual


@co.epilogue
def tiles_of_batches(acc, bias: co.Row, scale: co.Col, residual: co.Tile, other: co.Tile, alpha: co.Scalar):
    """Two tiles in, two out: what CUTLASS's epilogue does."""
    z = acc * scale + bias
    return {"d": co.relu(z) * alpha + residual - other, "pre": z}


BATCHED = {
    "plain": (ops.graph_op("gemm", builtin.identity.graph), {}),
    "inputs": (requests.called(of_batches), {}),
    "tiles": (requests.called(tiles_of_batches), {}),
    "registers": (requests.called(of_batches), {"d_aligned": False}),
}


def batched() -> dict[str, KernelSpec]:
    """Kernels of batches: each way in which a kernel finds a batch's operands, tiles and outputs."""
    tile = co.ThreadblockShape(64, 64, 64)
    configs: dict[str, Config] = {
        "warp_specialized": SM90,
        "pingpong": SM90_REDUCING,
        "cooperative": co.Sm90Config(co.ThreadblockShape(128, 64, 64), schedule="cooperative"),
        "swapped": co.Sm90Config(co.ThreadblockShape(128, 32, 64), schedule="cooperative", swap_ab=True),
        "cluster": co.Sm90Config(tile, co.ClusterShape(2, 1), schedule="pingpong"),
        "sm80": SM80,
        "small": co.types.SmallConfig(co.ThreadblockShape(32, 64, 32)),
    }
    found = {}
    for (name, config), (what, (op, changes)) in itertools.product(configs.items(), BATCHED.items()):
        one = spec(op, "bf16", ("row", "col"), config, **changes)
        found[f"batched-{name}-{what}"] = with_form(one, "batched")
    for major in ("row", "col"):
        one = spec(OPS["gemm"], "f16", ("col", "row"), SM90_REDUCING)
        found[f"batched-majors-{major}"] = with_form(one, "batched", d=f"f16.{major}")
    for majors in MAJORS:
        for d in ("bf16.row", "bf16.col", "f32.row.align1"):
            one = spec(OPS["gemm"], "bf16", majors, co.types.SmallConfig(co.ThreadblockShape(64, 32, 16), 2, 4))
            found[f"batched-small-{'-'.join(majors)}-{d}"] = with_form(one, "batched", d=d)
    odd = spec(
        OPS["gemm"], "bf16", ("row", "row"), co.types.SmallConfig(co.ThreadblockShape(16, 16, 64), 4, 1), aligned=False
    )
    found["batched-small-misaligned"] = with_form(odd, "batched")
    found["batched-misaligned"] = with_form(spec(OPS["gemm"], "bf16", ("row", "col"), SM80, aligned=False), "batched")
    return found


@co.epilogue
def of_groups(acc, bias: co.Row, scale: co.Col, alpha: co.Scalar):
    """Every kind of vector, and no tile."""
    return co.relu(acc * scale + bias) * alpha


GROUPED = {**BATCHED, "vectors": (requests.called(of_groups), {}), "tiles": (BATCHED["tiles"][0], {"d_aligned": False})}


def grouped() -> dict[str, KernelSpec]:
    """Kernels of groups of rows: each way in which a tile finds its group, and in which what it stores ends there."""
    tile, narrow = co.ThreadblockShape(64, 64, 64), co.ThreadblockShape(64, 16, 64)
    rows, columns = co.ClusterShape(2, 1), co.ClusterShape(1, 2)
    every, own = ("plain", "inputs", "tiles", "registers"), ("vectors", "inputs")
    configs = {
        "pingpong": (co.Sm90Config(tile, schedule="pingpong"), every),
        "swapped": (co.Sm90Config(co.ThreadblockShape(128, 32, 64), schedule="cooperative", swap_ab=True), every),
        "narrow": (co.Sm90Config(narrow, schedule="pingpong", swap_ab=True), own),
        "cooperative": (co.Sm90Config(co.ThreadblockShape(128, 64, 64), schedule="cooperative"), own),
        "side_by_side": (co.Sm90Config(co.ThreadblockShape(192, 64, 64), schedule="cooperative"), own[:1]),
        "rows": (co.Sm90Config(tile, rows, schedule="pingpong"), own),
        "columns": (co.Sm90Config(tile, columns, schedule="pingpong"), own[:1]),
        "swapped_rows": (co.Sm90Config(narrow, columns, schedule="pingpong", swap_ab=True), own[:1]),
        "swapped_columns": (co.Sm90Config(narrow, co.ClusterShape(4, 1), schedule="pingpong", swap_ab=True), own[:1]),
    }
    found = {}
    for name, (config, whats) in configs.items():
        for what in whats:
            op, changes = GROUPED[what]
            found[f"grouped-{name}-{what}"] = with_form(spec(op, "bf16", ("row", "col"), config, **changes), "grouped")
    gate = requests.called(composed.swiglu)
    for name, config in (
        ("pingpong", configs["pingpong"][0]),
        ("swapped", co.Sm90Config(co.ThreadblockShape(128, 16, 64), schedule="pingpong", swap_ab=True)),
    ):
        found[f"grouped-{name}-gated"] = with_form(spec(gate, "bf16", ("row", "col"), config), "grouped")
    for name, narrow_tile in (
        ("pingpong", co.ThreadblockShape(64, 64, 128)),
        ("swapped", co.ThreadblockShape(128, 32, 128)),
    ):
        config = replace(configs[name][0], threadblock=narrow_tile)
        types, scaled = "e4m3.row e4m3.col bf16.row", composed.SCALED[True, True]
        found[f"grouped-{name}-fp8"] = declare(types, scaled, config, "grouped", scale_a="f32", scale_b="f32")
    for name, narrow_tile, of_b in (
        ("pingpong", co.ThreadblockShape(64, 64, 128), "128x128"),
        ("swapped", co.ThreadblockShape(128, 32, 128), "128x128"),
        ("rows", co.ThreadblockShape(64, 96, 128), "128x1"),
    ):
        config = replace(configs[name][0], threadblock=narrow_tile, accumulation="promoted")
        types = f"e4m3.row.blocks1x128 e4m3.col.blocks{of_b} bf16.row"
        found[f"grouped-{name}-blocks"] = declare(types, composed.scaled_blocks, config, "grouped")
    for name in ("pingpong", "swapped"):
        one = spec(OPS["gemm"], "f16", ("row", "row"), configs[name][0])
        found[f"grouped-{name}-majors"] = with_form(one, "grouped", d="f32.row")
    return found


def ragged_k() -> dict[str, KernelSpec]:
    """Kernels of groups of K: each way in which a tile finds the steps of its group, and in which D is stored."""
    tile, narrow = co.ThreadblockShape(64, 64, 64), co.ThreadblockShape(128, 32, 128)
    rows, columns = co.ClusterShape(2, 1), co.ClusterShape(1, 2)
    every, own = ("plain", "inputs", "tiles", "registers"), ("plain",)
    configs = {
        "pingpong": (co.Sm90Config(tile, schedule="pingpong"), every),
        "cooperative": (co.Sm90Config(co.ThreadblockShape(128, 64, 64), schedule="cooperative"), ("plain", "inputs")),
        "side_by_side": (co.Sm90Config(co.ThreadblockShape(192, 64, 64), schedule="cooperative"), own),
        "rows": (co.Sm90Config(tile, rows, schedule="pingpong"), own),
        "columns": (co.Sm90Config(co.ThreadblockShape(128, 64, 64), columns, schedule="cooperative"), own),
        "short": (co.Sm90Config(co.ThreadblockShape(64, 128, 32), rows, schedule="pingpong"), own),
        "swapped": (co.Sm90Config(narrow, schedule="pingpong", swap_ab=True), ("plain", "inputs")),
        "swapped_columns": (co.Sm90Config(tile, columns, schedule="pingpong", swap_ab=True), own),
    }
    found = {}
    for name, (config, whats) in configs.items():
        for what in whats:
            op, changes = BATCHED[what]
            found[f"ragged_k-{name}-{what}"] = with_form(
                spec(op, "bf16", ("col", "row"), config, **changes), "ragged_k"
            )
    for d in ("f32.row", "f16.col"):
        one = spec(OPS["gemm"], "f16", ("col", "row"), configs["pingpong"][0])
        found[f"ragged_k-pingpong-{d}"] = with_form(one, "ragged_k", d=d)
    return found


def with_form(one: KernelSpec, form: str, d: str | None = None) -> KernelSpec:
    """Return the same kernel in another form."""
    return KernelSpec(
        a=one.a,
        b=one.b,
        d=d or one.d,
        epilogue=one.epilogue,
        inputs={i.name: operand for i, operand in one.typed_inputs},
        outputs={o.name: operand for o, operand in one.typed_outputs},
        config=one.config,
        target=one.target,
        form=form,
    )


def unordered() -> dict[str, KernelSpec]:
    """Inputs that are used in another order than they are declared in."""
    op = ops.op(out_of_order)
    return {f"unordered-{c.slug}": spec(op, "bf16", ("row", "col"), c) for c in (SM90, SM90_REDUCING, SM80)}


@lru_cache(maxsize=1)
def drawn(count: int = 6) -> tuple[Program, ...]:
    """Draw epilogues, the same ones every time."""
    found: list[Program] = []

    @settings(max_examples=4 * count, derandomize=True, database=None, deadline=None)
    @given(programs(tame=True))
    def collect(program: Program) -> None:
        found.append(program)

    collect()
    unique = {p.epilogue().graph: p for p in found if len(p.epilogue().graph.nodes) > 3 and is_legal(_drawn_spec(p))}
    return tuple(list(unique.values())[-count:])


def _drawn_spec(program: Program) -> KernelSpec:
    return spec(ops.op(program.epilogue()), "bf16", ("row", "col"), SM90_REDUCING)


def drawn_specs() -> dict[str, KernelSpec]:
    """One kernel for each drawn epilogue."""
    return {f"drawn{number}": _drawn_spec(program) for number, program in enumerate(drawn())}


def named() -> dict[str, list[KernelSpec]]:
    """Return all kernels that tests know by name; several may have one."""
    from tests.gpu import edges, language, multiplied

    groups = (
        matrix(),
        configurations(),
        multi_output(),
        reductions(),
        twice(),
        few_rows(),
        pairs(),
        unordered(),
        drawn_specs(),
        overlapping(),
        gathering(),
        realigned(),
        multicast(),
        batched(),
        grouped(),
        ragged_k(),
    )
    found: dict[str, list[KernelSpec]] = {}
    for group in (*groups, edges.specs(), language.specs(), multiplied.specs()):
        for name, wanted in group.items():
            found.setdefault(name, []).append(wanted)
    return found


def build(names: Iterable[str]) -> None:
    """Compile and load the kernels of some names side by side; names that are no kernel's are passed over.

    What a test needs besides is compiled when it runs, unless ``foreseen.py`` had it compiled before.
    """
    known = named()
    Registry.current().kernels(dict.fromkeys(spec for name in names for spec in known.get(name, ())))


# ---- The kernels behind calls ----------------------------------------------------------------------------------------


def by_every_kernel(function: Any, *arguments: Any, most: int = 6, **named: Any) -> Iterator[Any]:
    """Yield a call's results by each of the first kernels that its weight may need."""
    op, call, positional = _asked(function, arguments, named)
    device = device_of(arguments[0].device)
    decision = dispatch.decide(signature_of(call, device), device, call.problem)
    assert decision is not None, f"two GEMMs serve {op.name}"
    for chosen in decision.specs[:most]:
        yield co.build(chosen)(*positional)


def by_kernel(config: Config, function: Any, *arguments: Any, **named: Any) -> Any:
    """Return a call's results by the kernel of a configuration."""
    _, call, positional = _asked(function, arguments, named)
    device = device_of(arguments[0].device)
    return co.build(device.spec(signature_of(call, device), config))(*positional)


def _asked(function: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> tuple[ops.Op, Any, tuple[Any, ...]]:
    """Return the op behind a call, the call as the op checks it, and the arguments of its kernels."""
    op, (a, b, *inputs), more = requests.requested(function, *arguments, **named)
    out_dtype = more.get("out_dtype")
    more = {name: x for name, x in more.items() if name not in ("out", "out_dtype")}
    positional = op.positional(tuple(inputs), more)
    return op, op.checked(a, b, positional, {}, None, out_dtype), (a, b, *positional)


if __name__ == "__main__":
    own_store.use()
    build(named())
