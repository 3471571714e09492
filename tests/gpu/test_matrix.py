"""Every op × dtype × operand major × alignment, every configuration, and drawn epilogues, over shapes with edges."""

import math
import statistics

import pytest
import torch

import cutlass_ops as co
from cutlass_ops.epilogue.nodes import Kind
from cutlass_ops.tuner.timing import Stopwatch
from tests.gpu import kernels, oracle, tensors

pytestmark = pytest.mark.gpu

# Ones, primes, tile − 1, tile and tile + 1 of the 64×64×64 tile, more than one tile, more than one wave of K.
SHAPES = [
    (1, 1, 1),
    (1, 130, 64),
    (13, 7, 17),
    (63, 65, 31),
    (64, 64, 64),
    (65, 63, 127),
    (127, 129, 257),
    (211, 307, 509),
]


def draw_inputs(spec, m, n, k):
    values = {}
    for i, operand in zip(spec.epilogue.inputs, spec.inputs, strict=True):
        dtype = operand.dtype.name
        if i.kind is Kind.TILE:
            values[i.name] = tensors.matrix(m, n, dtype, operand.major, aligned=operand.alignment > 1)
        elif i.kind is Kind.PRODUCT:
            values[i.name] = tensors.matrix(k, n, dtype, operand.major, aligned=operand.alignment > 1)
        elif i.kind is Kind.SCALAR:
            values[i.name] = 0.75
        else:
            values[i.name] = tensors.vector(n if i.kind is Kind.ROW else m, dtype, offset=1)
    return values


def draw_outputs(spec, m, n):
    """Return framed tiles and NaN vectors by name."""
    framed, vectors = {}, {}
    for o, operand in zip(spec.epilogue.outputs, (spec.d, *spec.outputs), strict=True):
        if o.kind is Kind.TILE:
            framed[o.name] = tensors.Framed(m, n, operand.dtype.name, operand.major, aligned=operand.alignment > 1)
        else:
            vectors[o.name] = torch.full((n if o.kind is Kind.ROW else m,), float("nan"), device="cuda")
    return framed, vectors


def extents(shape, spec):
    """Round up what whole accesses need to divide: where TMA loads, that is D's contiguous extent alone."""
    m, n, k = shape

    def up(x, operand):
        return -(-x // operand.alignment) * operand.alignment

    m, n = (m, up(n, spec.d)) if spec.d.major == "row" else (up(m, spec.d), n)
    if not isinstance(spec.config, co.Sm80Config):
        return m, n, k
    step = max(spec.a, spec.b, key=lambda o: o.alignment)
    return up(m, step), up(n, step), up(k, step)


def run_and_check(spec, shape, eager=None):
    m, n, k = extents(shape, spec)
    aligned, dtype = spec.a.alignment > 1, spec.a.dtype.name
    a = tensors.matrix(m, k, dtype, spec.a.major, aligned=aligned)
    b = tensors.matrix(k, n, dtype, spec.b.major, aligned=aligned)
    inputs = draw_inputs(spec, m, n, k)
    framed, vectors = draw_outputs(spec, m, n)
    out = {name: f.out for name, f in framed.items()} | vectors
    co.build(spec)(a, b, out=out, **inputs)
    wanted = oracle.exact(spec.epilogue, a, b, inputs)
    for name, tensor in out.items():
        composed = eager(a, b, **inputs) if eager is not None and name == "d" else None
        oracle.assert_close(tensor, wanted[name], composed)
    for name, f in framed.items():
        f.assert_frame_untouched(f"{name} at {(m, n, k)}")


@pytest.mark.parametrize("name", list(kernels.matrix()))
def test_named_ops(name):
    spec = kernels.matrix()[name]
    for shape in SHAPES:
        run_and_check(spec, shape, oracle.EAGER[name.split("-")[0]])


@pytest.mark.parametrize("name", list(kernels.configurations()))
def test_configurations(name):
    spec = kernels.configurations()[name]
    for shape in [*SHAPES, (257, 385, 1025), (1000, 520, 72)]:
        run_and_check(spec, shape)


@pytest.mark.parametrize("name", list(kernels.few_rows()))
def test_kernels_for_few_rows(name):
    spec = kernels.few_rows()[name]
    op = name.split("-")[0]
    for shape in [*SHAPES, (1, 4096, 4096), (3, 1000, 14336), (8, 264, 2056), (5, 1, 40)]:
        run_and_check(spec, shape, oracle.EAGER.get(op))


REDUCING = kernels.multi_output() | kernels.reductions() | kernels.twice()


@pytest.mark.parametrize("name", list(REDUCING))
def test_many_outputs_and_reductions(name):
    spec = REDUCING[name]
    for shape in SHAPES:
        run_and_check(spec, shape)


SM90 = {
    name: spec
    for name, spec in (kernels.matrix() | kernels.configurations() | REDUCING).items()
    if isinstance(spec.config, co.Sm90Config)
}


@pytest.mark.parametrize("name", list(SM90))
def test_what_shared_memory_has_of_other_launches_does_not_count(name):
    """Rows of a tile beyond the matrix are not loaded: here NaN lies in their place."""
    spec = SM90[name]
    m, n, k = extents((1536, 1536, 512), spec)
    dtype, aligned = spec.a.dtype.name, spec.a.alignment > 1
    a = tensors.matrix(m, k, dtype, spec.a.major, aligned=aligned).fill_(math.nan)
    b = tensors.matrix(k, n, dtype, spec.b.major, aligned=aligned).fill_(math.nan)
    for shape in [(1, 130, 64), (65, 63, 127), (211, 307, 509)]:
        framed, vectors = draw_outputs(spec, m, n)
        out = {name: f.out for name, f in framed.items()} | vectors
        co.build(spec)(a, b, out=out, **draw_inputs(spec, m, n, k))
        run_and_check(spec, shape)


@pytest.mark.parametrize("rows", [136, 160, 192, 248])
def test_a_partly_filled_row_of_tiles_takes_no_longer_than_a_full_one(rows):
    kernel = co.build(kernels.configurations()["sm90_128x128x64_1x1_pp"])
    b, watch = tensors.matrix(4096, 4096, "bf16", "col"), Stopwatch(25.0)
    for m in (rows, 256):
        a, bias, d = tensors.matrix(m, 4096, "bf16"), tensors.vector(4096, "bf16"), tensors.matrix(m, 4096, "bf16")
        watch.add(str(m), lambda _, a=a, bias=bias, d=d: kernel(a, b, bias, out=d))
    times = [watch.round([str(rows), "256"]) for _ in range(9)]
    assert statistics.median(part / full for part, full in times) < 1.1


@pytest.mark.parametrize("name", list(kernels.unordered()))
def test_inputs_in_another_order_than_they_are_used_in(name):
    for shape in SHAPES:
        run_and_check(kernels.unordered()[name], shape)


@pytest.mark.parametrize("name", list(kernels.drawn_specs()))
def test_drawn_epilogues(name):
    number = int(name.removeprefix("drawn"))
    program, spec = kernels.drawn()[number], kernels.drawn_specs()[name]
    for m, n, k in [(1, 8, 8), (65, 136, 72)]:
        a, b = tensors.matrix(m, k, "bf16"), tensors.matrix(k, n, "bf16", "col")
        _, inputs = program.tensors(m, n, seed=number, dtype=torch.bfloat16)
        inputs = {name: x.float().cuda() if x.ndim == 0 else x.cuda() for name, x in inputs.items()}
        padded = {name: pad(x) if x.ndim == 2 else x for name, x in inputs.items()}
        out = {
            o.name: tensors.Framed(m, n, "bf16").out if o.reduce is None else torch.full_like(
                torch.empty(n if o.kind is Kind.ROW else m, device="cuda"), float("nan"))
            for o in spec.epilogue.outputs
        }  # fmt: skip
        co.build(spec)(a, b, out=out, **padded)
        wanted = program.evaluate(a.double() @ b.double(), inputs, torch.float64)
        for name, tensor in out.items():
            # `cast` in the epilogue may round the other way from a last-bit difference: one unit of the dtype.
            found = oracle.error(tensor, wanted[name])
            assert found <= 2 * torch.finfo(torch.bfloat16).eps, f"{name}: {found:.3e}"


def pad(x):
    buffer = torch.empty(x.shape[0], (x.shape[1] + 15) // 8 * 8, device="cuda", dtype=x.dtype)
    buffer[:, : x.shape[1]] = x
    return buffer[:, : x.shape[1]]


@pytest.mark.parametrize("name", [name for name, spec in REDUCING.items() if len(spec.inputs) > 3])
def test_reductions_are_deterministic_and_pass_nan(name):
    spec = REDUCING[name]
    m, n, k = extents((193, 257, 128), spec)
    aligned = spec.a.alignment > 1
    dtype = spec.a.dtype.name
    a = tensors.matrix(m, k, dtype, aligned=aligned)
    b = tensors.matrix(k, n, dtype, "col", aligned=aligned)
    inputs = draw_inputs(spec, m, n, k)
    tiles = [o.name for o in spec.epilogue.outputs if o.reduce is None]
    out = {name: tensors.Framed(m, n, dtype, aligned=aligned).out for name in tiles}
    kernel = co.build(spec)
    first = kernel(a, b, out=out, **inputs)
    for _ in range(5):
        again = kernel(a, b, out=out, **inputs)
        for x, y in zip(first[len(tiles) :], again[len(tiles) :], strict=True):
            assert torch.equal(x, y)
    inputs["residual"][100, 200] = float("nan")
    result = kernel(a, b, out=out, **inputs)
    assert result.row_max[100].isnan()
    assert result.col_max[200].isnan()
    assert result.row_max.isnan().sum() == 1
    assert result.col_max.isnan().sum() == 1


@pytest.mark.parametrize("name", ["gemm_bias_relu-bf16-row-col-tma", "gemm_bias_relu-bf16-row-col-unaligned"])
def test_relu_passes_nan_and_infinity(name):
    spec = kernels.matrix()[name]
    aligned = spec.a.alignment > 1
    a, b = tensors.matrix(9, 16, "bf16", aligned=aligned), tensors.matrix(16, 16, "bf16", "col", aligned=aligned)
    bias = torch.tensor([float("nan"), float("inf"), -float("inf"), *[0.0] * 13], device="cuda", dtype=torch.bfloat16)
    out = tensors.Framed(9, 16, "bf16", aligned=aligned).out
    co.build(spec)(a, b, bias, out=out)
    assert out[:, 0].isnan().all()
    assert (out[:, 1] == float("inf")).all()
    assert (out[:, 2] == 0).all()
    assert not out[:, 3:].isnan().any()


@pytest.mark.parametrize("name", [*kernels.matrix(), *kernels.configurations()])
def test_machine_code_uses_the_tensor_cores(name):
    spec = (kernels.matrix() | kernels.configurations())[name]
    counts = co.build(spec).loaded.artifact.manifest["sass"]
    expected = ("HGMMA", "UTMALDG") if isinstance(spec.config, co.Sm90Config) else ("HMMA",)
    assert [opcode for opcode in expected if not counts.get(opcode)] == [], counts
