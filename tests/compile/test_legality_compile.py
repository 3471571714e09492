"""What :func:`cutlass_ops.kinds.legality.check` says against what the compiler says.

A few kernels always, and a random sample of the whole space on request::

    CUTLASS_OPS_LEGALITY_SAMPLE=100 pytest tests/compile/test_legality_compile.py -k sample -s
"""

import os
import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

import cutlass_ops as co
from cutlass_ops.base import arch
from cutlass_ops.base.errors import CompileError
from cutlass_ops.compilation.builder import build_artifact
from cutlass_ops.compilation.compiler import compile_kernel
from cutlass_ops.compilation.toolchain import find_toolchain
from cutlass_ops.declare.config import ClusterShape, InstructionShape, ThreadblockShape, WarpShape
from cutlass_ops.declare.spec import KernelSpec
from cutlass_ops.epilogue import Epilogue, composed
from cutlass_ops.epilogue.nodes import Kind
from cutlass_ops.kinds.common import COMMON, VALUES
from cutlass_ops.kinds.gemv.config import GemvConfig
from cutlass_ops.kinds.legality import check
from cutlass_ops.kinds.packed.config import PackedRowsConfig
from cutlass_ops.kinds.render import render
from cutlass_ops.kinds.sm80.config import Sm80Config
from cutlass_ops.kinds.sm90.config import Sm90Config
from cutlass_ops.kinds.sm90.footprint import pipeline_stages
from cutlass_ops.kinds.table import KINDS, shared_memory
from cutlass_ops.run import packed as of_packed
from cutlass_ops.run import sparse as of_sparse
from cutlass_ops.tools.inspection import inspect
from tests.sampling import compiled

pytestmark = [pytest.mark.compile, pytest.mark.slow]

SAMPLE = int(os.environ.get("CUTLASS_OPS_LEGALITY_SAMPLE", "0"))
SEED = int(os.environ.get("CUTLASS_OPS_LEGALITY_SEED", "0"))
GROUNDS = {r.name: r.ground for r in (*VALUES, *COMMON, *(rule for kind in KINDS for rule in kind.rules))}


@co.epilogue
def plain(acc):
    return acc


@co.epilogue
def bias_relu(acc, bias: co.Row):
    return co.relu(acc + bias)


@co.epilogue
def scaled(acc, scale: co.Col, alpha: co.Scalar):
    return acc * scale * alpha


@co.epilogue
def residual(acc, r: co.Tile):
    return acc + r


@co.epilogue
def gated(acc, bias: co.Row, r: co.Tile, gate: co.Tile, alpha: co.Scalar):
    return co.silu(acc + bias) * alpha + r * gate


@co.epilogue
def quantised(acc, bias: co.Row):
    return co.e.quantize(co.e.relu(acc + bias), "e4m3")


@co.epilogue
def saved(acc, bias: co.Row):
    x = acc + bias
    return {"d": co.gelu(x), "pre": x}


@co.epilogue
def column_sum(acc, r: co.Tile):
    x = acc + r
    return {"d": x, "total": co.sum(x, dim=0)}


@co.epilogue
def row_sums(acc, bias: co.Row):
    x = acc + bias
    return {"d": x, "squares": co.sum_square(x, dim=1), "largest": co.max(x, dim=1)}


@co.epilogue
def both_ways(acc, bias: co.Row):
    x = acc + bias
    return {"d": x, "squares": co.sum_square(x, dim=1), "largest": co.max(x, dim=0)}


@co.epilogue
def everything(acc, bias: co.Row, scale: co.Col, r: co.Tile, gate: co.Tile, alpha: co.Scalar):
    x = acc * scale + bias
    y = co.silu(x) * alpha + r * gate
    return {"d": y, "pre": x, "squares": co.sum_square(y, dim=1), "total": co.sum(y, dim=0)}


norm, centred, swiglu = composed.rms_norm, composed.layer_norm, composed.swiglu


@co.epilogue
def norm_gate(acc, up: co.Product, eps: co.Scalar):
    r = co.rsqrt(co.mean_square_of_a() + eps)
    return co.silu(acc * r) * (up * r)


@co.epilogue
def norm_turned(acc, eps: co.Scalar):
    z = acc * co.rsqrt(co.mean_square_of_a() + eps)
    return co.swap_pairs(z) + z


@co.epilogue
def placed(acc, seed: co.Integer):
    x = co.where(co.column_index() <= co.row_index(), acc, co.uniform(seed))
    down = {"at": co.argmax(x, dim=0), "most": co.max(x, dim=0)}
    return {"d": x, **down, "lse": co.logsumexp(x, dim=1), "least": co.min(x, dim=1)}


EPILOGUES = (
    *(plain, bias_relu, scaled, residual, gated, saved, column_sum, row_sums, both_ways, everything),
    *(norm, centred, swiglu, norm_gate, norm_turned, placed),
)


def first_error(spec):
    """Compile a spec, legal or not, and with it the claim about its shared memory; return the first error or None."""
    size = "sizeof(GemmKernel::SharedStorage)"
    claim = f'static_assert({size} == {shared_memory(spec)}, "footprint.shared_memory is wrong");\n'
    if isinstance(spec.config, GemvConfig | Sm90Config):
        claim = ""  # nothing but static shared memory, which ptxas counts; or an Sm90 kernel's source claims it itself
    with TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "kernel.cu").write_text(render(spec) + claim)
        try:
            compile_kernel(folder, "kernel.cu", "kernel.so", arch.target(spec.target), find_toolchain())
        except CompileError as exc:
            return str(exc).partition("\n")[0]
    return None


def sm90(m, n, k, **changes):
    types = {name: changes.pop(name) for name in ("a", "b", "d", "epilogue") if name in changes}
    defaults = {"a": "bf16.row", "b": "bf16.col", "d": "bf16.row", "epilogue": bias_relu}
    return KernelSpec(**defaults | types, config=Sm90Config(ThreadblockShape(m, n, k), **changes))


def sm80(threadblock, warp, **changes):
    types = {name: changes.pop(name) for name in ("a", "b", "d", "epilogue") if name in changes}
    defaults = {"a": "bf16.row", "b": "bf16.col", "d": "bf16.row", "epilogue": bias_relu}
    config = Sm80Config(ThreadblockShape(*threadblock), WarpShape(*warp), **changes)
    return KernelSpec(**defaults | types, config=config)


def gemv(rows, warps, pieces, *, epilogue, d="bf16.row", target="sm_80"):
    config = GemvConfig(rows, warps, pieces)
    return KernelSpec(a="bf16.row", b="bf16.col", d=d, epilogue=epilogue, config=config, target=target)


def packed(config, numbers="int4", target="sm_90a"):
    """Declare a kernel of a packed weight, with an epilogue after its scales."""
    scales = of_packed._SCALED[numbers]
    epilogue = Epilogue("gated", "A packed weight.", scales.graph.then(gated.graph))
    b, inputs = {"int4": "i4.col.blocks128x1", "uint4": "u4.col.blocks32x1"}[numbers], {"scale_b": "bf16"}
    return KernelSpec(a="bf16.row", b=b, d="bf16.row", epilogue=epilogue, inputs=inputs, config=config, target=target)


def sparse(config, a="bf16", d="bf16"):
    """Declare a kernel of a sparse weight, with an epilogue after its metadata."""
    epilogue = Epilogue("gated", "A sparse weight.", of_sparse._SPARSE.graph.then(gated.graph))
    b = f"{a}s.col.blocks64x64"
    return KernelSpec(a=f"{a}.row", b=b, d=f"{d}.row", epilogue=epilogue, config=config, target="sm_90a")


def swapped(m, n, k, **changes):
    return Sm90Config(ThreadblockShape(m, n, k), swap_ab=True, **changes)


ACCEPTED = {
    "sm90-packed": packed(swapped(128, 128, 128, schedule="cooperative")),
    "sm90-packed-zeros": packed(swapped(64, 64, 128, cluster=ClusterShape(2, 1)), "uint4"),
    "sm90-packed-split_k": packed(swapped(128, 32, 256, schedule="cooperative", split_k=2)),
    "sm90-packed-two": packed(swapped(64, 8, 256, schedule="warp_specialized", resident=2)),
    "sm90-sparse": sparse(swapped(128, 192, 64, cluster=ClusterShape(2, 1))),
    "sm90-sparse-split_k": sparse(swapped(128, 32, 256, schedule="cooperative", split_k=2)),
    "sm90-sparse-e4m3": sparse(swapped(128, 256, 128, schedule="cooperative", cluster=ClusterShape(1, 2)), "e4m3"),
    "sm90-sparse-i8": sparse(swapped(64, 16, 256, schedule="warp_specialized", resident=2), "i8"),
    "packed_rows": packed(PackedRowsConfig(8, 8, 2, 2), "uint4", "sm_90"),
    "sm90": sm90(128, 48, 64, schedule="cooperative", epilogue=everything, swap_ab=True, d="f32.row"),
    "sm90-stream_k": sm90(
        128, 112, 64, schedule="cooperative", scheduler="stream_k", a="f16.col", b="f16.row", d="f16.row"
    ),
    "sm90-split_k": sm90(128, 64, 64, schedule="cooperative", split_k=4, epilogue=gated, swap_ab=True),
    "sm90-gathered": sm90(64, 40, 256, schedule="warp_specialized", epilogue=centred, swap_ab=True),
    "sm90-beside-swapped": sm90(256, 208, 64, schedule="cooperative", epilogue=centred, swap_ab=True, means="beside"),
    "sm90-beside": sm90(128, 64, 32, epilogue=norm, means="beside", a="f16.row", b="f16.col", d="f16.row"),
    "sm90-ahead": sm90(128, 104, 64, epilogue=norm, means="ahead", swap_ab=True, a="f16.row", b="f16.col", d="f16.row"),
    "sm90-reductions": sm90(192, 128, 64, schedule="cooperative", epilogue=both_ways),
    "sm90-second_weight": sm90(
        256, 64, 128, schedule="cooperative", epilogue=swiglu, swap_ab=True, cluster=ClusterShape(2, 1)
    ),
    "sm90-quantized": sm90(192, 256, 64, schedule="cooperative", epilogue=quantised, d="e4m3.row"),
    "sm80": sm80((64, 256, 32), (32, 64, 32), epilogue=everything, d="f32.col", stages=2),
    "sm80-means": sm80((64, 64, 32), (32, 32, 32), epilogue=norm, a="bf16.col"),
    "gemv": gemv(16, 8, 4, epilogue=gated, d="f32.col"),
    "gemv-sm90-second_weight-means": gemv(4, 4, 16, epilogue=norm_gate, target="sm_90"),
    "gemv-sm90-pairs-means": gemv(2, 8, 8, epilogue=norm_turned, target="sm_90"),
}


@pytest.mark.parametrize(
    "spec",
    compiled(
        {name: (spec,) for name, spec in ACCEPTED.items()}, beside_gpu_tests={"sm90-beside", "sm90-second_weight"}
    ),
)
def test_what_is_accepted_compiles_and_takes_the_memory_that_was_foretold(spec):
    assert check(spec) == ()
    report = inspect(build_artifact(spec))
    assert report.static_shared_memory + report.dynamic_shared_memory == shared_memory(spec)
    stages = (
        pipeline_stages(spec) if spec.config.arch == "sm90" else spec.config.stages if spec.config.arch == "sm80" else 1
    )
    assert report.stages == stages
    if spec.epilogue.gathered:  # who reads rows may have 24 registers: a few words go elsewhere, and no more
        assert report.spill_stores <= (64 if spec.config.arch == "sm90" and spec.config.means == "beside" else 0)


@pytest.mark.parametrize(
    ("spec", "rule", "error"),
    [
        (sm80((128, 96, 32), (64, 48, 32)), "store_map", "every lane has accesses of its own"),
        (sm80((32, 8, 32), (32, 8, 32), b="bf16.row", d="bf16.row.align1"), "short_lines", "incomplete type"),
    ],
    ids=["store_map", "short_lines"],
)
def test_what_is_refused_on_the_compilers_behalf_does_not_compile(spec, rule, error):
    assert rule in [v.rule for v in check(spec)]
    assert error in first_error(spec)


# ---- A sample ------------------------------------------------------------------------------------------------------


def draw_operand(rng, dtypes, misaligned):
    alignment = f".align{rng.choice((1, 2))}" if rng.random() < misaligned else ""
    return f"{rng.choice(dtypes)}.{rng.choice(('row', 'col'))}{alignment}"


def draw_sm90(rng):
    config = Sm90Config(
        ThreadblockShape(
            rng.choice((64, 64, 128, 128, 128, 192, 256, 96)),
            rng.choice((*range(8, 257, 8), 16, 32, 32, 64, 64, 96, 128, 128, 192, 256, 12)),
            rng.choice((16, 32, 48, 64, 64, 64, 64, 96, 128, 128, 256, 40)),
        ),
        ClusterShape(*rng.choice(((1, 1), (1, 1), (2, 1), (1, 2), (2, 2), (4, 1), (1, 8), (4, 4), (3, 1)))),
        schedule=rng.choice(("pingpong", "cooperative", "warp_specialized")),
        scheduler=rng.choice(("persistent", "persistent", "stream_k")),
        stages=rng.choice((None, None, None, 2, 3, 4, 5)),
        swap_ab=rng.random() < 0.5,
        means=rng.choice(("gathered",) * 8 + ("beside", "ahead")),
        resident=rng.choice((1, 1, 1, 2)),
    )
    if rng.random() < 0.8:
        return config
    # Blocks that split K are the cluster, and work on one tile.
    schedule = rng.choice(("cooperative", "warp_specialized"))
    return replace(
        config, cluster=ClusterShape(1, 1), schedule=schedule, scheduler="persistent", split_k=rng.choice((2, 4))
    )


def draw_sm80(rng):
    sides = (16, 32, 32, 64, 64, 64, 128, 48, 96)
    warp = WarpShape(rng.choice(sides), rng.choice((8, *sides)), rng.choice((16, 32, 32, 32, 64, 64, 128)))
    return Sm80Config(
        ThreadblockShape(
            warp.m * rng.choice((1, 2, 2, 4, 3)),
            warp.n * rng.choice((1, 2, 2, 4, 3)),
            warp.k * rng.choice((1, 1, 1, 2)),
        ),
        warp,
        InstructionShape(16, 8, rng.choice((16, 16, 16, 8, 4))),
        stages=rng.choice((2, 3, 3, 4, 5)),
        stream_k=rng.random() < 0.2,
    )


def draw_gemv(rng):
    return GemvConfig(rng.choice((1, 2, 4, 8, 16)), rng.choice((4, 8, 16)), rng.choice((1, 2, 4, 8, 16)))


DRAWS = {"sm80": draw_sm80, "sm90": draw_sm90, "gemv": draw_gemv}
# How often A and B are misaligned, in kernels of each kind.
MISALIGNED = {"sm80": 0.4, "sm90": 0.2, "gemv": 0.0}


def draw_spec(rng, kind, legal):
    """Draw until one is legal, or breaks a single rule that is not about the operands alone."""
    while True:
        epilogue = rng.choice(EPILOGUES)
        dtype = rng.choice(("f16", "bf16"))
        anything = ("f16", "bf16", "f32")
        tiles = {i.name: draw_operand(rng, anything, 0.3) for i in epilogue.graph.inputs if i.kind is not Kind.INTEGER}
        outputs = {
            o.name: draw_operand(rng, anything, 0.3)
            for o in epilogue.graph.outputs[1:]
            if o.reduce not in ("argmax", "argmin")
        }
        a, b = (draw_operand(rng, (dtype,), MISALIGNED[kind]) for _ in range(2))
        config = DRAWS[kind](rng)
        if isinstance(config, Sm90Config):
            config = replace(config, realign=("align" in a + b) == (rng.random() < 0.9))
        spec = KernelSpec(
            a=a,
            b=b,
            d=draw_operand(rng, anything, 0.25),
            epilogue=epilogue,
            config=config,
            inputs=tiles,
            outputs=outputs,
            target=None if kind == "sm90" else rng.choice(("sm_80", "sm_86", "sm_90")),
        )
        broken = {v.rule for v in check(spec)}
        if not broken if legal else len(broken) == 1:
            return spec


def judge(spec):
    """Compare both verdicts; return a line for the log and whether they agree."""
    broken = [v.rule for v in check(spec)]
    error = first_error(spec)
    agree = error is None if not broken else error is not None or GROUNDS[broken[0]] != "compiler"
    return f"{'' if agree else 'DISAGREE '}{spec.canonical()} check: {broken} compiler: {error or 'ok'}", agree


@pytest.mark.skipif(not SAMPLE, reason="set CUTLASS_OPS_LEGALITY_SAMPLE to the number of kernels")
def test_a_sample_of_the_space_agrees_with_the_compiler():
    rng = random.Random(SEED)
    kinds = ("sm90", "sm80", "sm90", "gemv")
    specs = [draw_spec(rng, kinds[i % 4], i % 8 < 4) for i in range(SAMPLE)]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        verdicts = []
        for line, agree in pool.map(judge, specs):
            print(line, flush=True)
            verdicts.append((line, agree))
    assert [line for line, agree in verdicts if not agree] == []
