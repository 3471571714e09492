"""Groups of rows on the device: against float64, group by group, with D and what surrounds it poisoned with NaN."""

import pytest
import torch

import cutlass_ops as co
from cutlass_ops.artifacts.loader import Reason, refusal
from cutlass_ops.base import mma
from cutlass_ops.choose import dispatch
from cutlass_ops.epilogue import builtin, composed
from cutlass_ops.run import named, ops, reference
from cutlass_ops.run.call import device_of, signature_of
from cutlass_ops.run.grouped import grouped_op
from cutlass_ops.run.registry import Registry
from tests.gpu import kernels, oracle, tensors

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0), reason="groups of rows need Hopper"
    ),
]

BF16 = torch.bfloat16
SPECS = kernels.grouped()
ALPHA = 0.5
SIZES = {
    "ragged": [5, 0, 130, 64, 1, 0, 77],
    "whole tiles": [64, 128, 64],
    "empty ones first and last": [0, 0, 200, 0, 0],
    "all empty": [0, 0, 0],
    "one group": [300],
    "all rows in one of many": [0] * 140 + [300] + [0] * 60,
    "a row each": [1] * 90,
}


# Inputs with a line for each row of x.
OF_ROWS = ("COL", "TILE", "BLOCKS_A")


def normal(*shape, dtype=BF16, scale=1.0):
    return (torch.randn(*shape, device="cuda") * scale).to(dtype)


def offsets_of(sizes):
    return torch.tensor(sizes, device="cuda").cumsum(0).int()


def exact(graph, x, w, sizes, inputs):
    """Return every output in float64 for the rows that have an expert: no code of the library says which these are."""
    found, first = {o.name: [] for o in graph.outputs}, 0
    for expert, size in enumerate(sizes):
        rows, first = slice(first, first + size), first + size
        given = {}
        for declared in graph.inputs:
            value = inputs[declared.name]
            if declared.kind.name in ("PRODUCT", "BLOCKS_B") or (declared.kind.name == "ROW" and value.ndim == 2):
                value = value[expert]
            elif declared.kind.name in OF_ROWS:
                value = value[rows]
            given[declared.name] = value
        if size:
            a, b = x[rows], w[expert]
            if graph.block_scales:
                a, b = reference.dequantised(a, b, *(given[name].double() for name in graph.block_scales))
            for name, value in oracle.exact(graph, a, b, given).items():
                found[name].append(value)
    return {name: torch.cat(values) if values else None for name, values in found.items()}


class Framed:
    """An output inside a buffer of NaN: lines before, after and beside it, and its own last rows, stay as they are."""

    GUARD = 300  # rows before and after

    def __init__(self, rows, columns, dtype, *, aligned=True):
        step = 8 if aligned else 1
        ld = -(-columns // step) * step + 3 * step
        self.buffer = torch.full((rows + 2 * self.GUARD, ld), torch.nan, device="cuda", dtype=dtype)
        self.out = self.buffer[self.GUARD : self.GUARD + rows, step : step + columns]

    def assert_only(self, rows):
        """Require that the first rows alone were written, or those of a tensor of numbers."""
        own = self.out[:rows] if isinstance(rows, int) else self.out[rows]
        stray = (~self.buffer.isnan()).sum() - (~own.isnan()).sum()
        assert stray == 0, f"the kernel wrote {int(stray)} elements outside of the groups"


def operands(spec, rows, experts, n, k):
    """Draw x and w of a kernel's types, with lines longer than the extents."""
    dtype = tensors.DTYPES[spec.a.dtype.name]
    line = 16 // dtype.itemsize
    x = normal(rows, k + line, dtype=dtype, scale=k**-0.25)[:, :k]
    inner, outer = (n, k) if spec.b.major == "row" else (k, n)
    w = normal(experts, outer, -(-inner // line) * line + line, dtype=dtype, scale=k**-0.25)[..., :inner]
    return x, w if spec.b.major == "row" else w.mT


def inputs_of(spec, rows, experts, n, k):
    shapes = {"ROW": (experts, n), "COL": (rows,), "TILE": (rows, n), "BLOCKS_A": (rows, mma.blocks(k))}
    if spec.b.scaling is not None:
        shapes["BLOCKS_B"] = (experts, -(-n // spec.b.transposed.scaling[0]), mma.blocks(k))
    found = {}
    for declared, operand in spec.typed_inputs:
        dtype = tensors.DTYPES[operand.dtype.name]
        if declared.kind.name == "SCALAR":
            found[declared.name] = ALPHA
        elif declared.kind.name == "PRODUCT":
            found[declared.name] = normal(experts, n, k, dtype=dtype, scale=k**-0.25).mT
        elif declared.kind.name == "TILE" and operand.aligned:
            found[declared.name] = normal(rows, -(-n // 8) * 8 + 8, dtype=dtype)[:, :n]
        else:
            found[declared.name] = normal(*shapes[declared.kind.name], dtype=dtype)
    return found


def extent_of_k(spec, k):
    """Return a K of whole pieces of 16 bytes, and of several blocks if they have scales."""
    k += 2 * mma.BLOCK_K if spec.epilogue.block_scales else 0
    return -(-k * spec.a.dtype.bytes // 16) * 16 // spec.a.dtype.bytes


def run(spec, sizes, n, k, unused=0, shared=()):
    """Run a kernel into framed outputs, and compare all of them with float64."""
    used, k = sum(sizes), extent_of_k(spec, k)
    rows = max(1, used + unused)
    x, w = operands(spec, rows, len(sizes), n, k)
    x[used:] = torch.nan
    inputs = inputs_of(spec, rows, len(sizes), n, k)
    inputs |= {name: inputs[name][0] for name in shared if name in inputs}
    types = (spec.d, *spec.outputs)
    framed = [Framed(rows, n, tensors.DTYPES[of.dtype.name], aligned=of.aligned) for of in types]
    names = [o.name for o in spec.epilogue.outputs]
    given = {name: f.out for name, f in zip(names, framed, strict=True)}
    co.build(spec)(x, w, offsets_of(sizes), *inputs.values(), out=given)
    wanted = exact(spec.epilogue, x, w, sizes, inputs)
    for name, f in zip(names, framed, strict=True):
        f.assert_only(used)
        if used:
            oracle.assert_close(f.out[:used], wanted[name])


# ---- Kernels ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("name", SPECS)
def test_every_kernel(name, sizes):
    run(SPECS[name], sizes, n=136, k=72)


@pytest.mark.parametrize("name", SPECS)
def test_rows_of_no_group_are_left_as_they_are(name):
    run(SPECS[name], SIZES["ragged"], n=136, k=72, unused=90)


@pytest.mark.parametrize("name", [n for n in SPECS if n.endswith(("plain", "vectors"))])
def test_more_than_a_thousand_groups(name):
    generator = torch.Generator().manual_seed(1)
    sizes = torch.randint(0, 4, (1500,), generator=generator).tolist()
    run(SPECS[name], sizes, n=72, k=64, unused=5)
    run(SPECS[name], [0] * 1400 + [9], n=72, k=64)


@pytest.mark.parametrize("name", [n for n in SPECS if n.endswith(("inputs", "vectors", "registers"))])
def test_a_row_that_all_experts_share(name):
    run(SPECS[name], SIZES["ragged"], n=136, k=72, shared=("bias",))


@pytest.mark.parametrize("name", [n for n in SPECS if n.endswith(("tiles", "registers"))])
def test_odd_columns(name):
    run(SPECS[name], SIZES["ragged"], n=131, k=72, unused=3)


@pytest.mark.parametrize("name", [n for n in SPECS if n.endswith(("plain", "vectors"))])
def test_many_tiles_of_many_waves(name):
    run(SPECS[name], [700, 3, 0, 2500, 64, 1], n=1096, k=136)


FALSE = {
    "falling": [200, 50, 250, 10, 300],
    "beyond the last row": [100, 5000, 1 << 30, 2147483647, 200],
    "negative": [-5, -2147483648, 100, -1, 300],
}


@pytest.mark.parametrize("offsets", FALSE.values(), ids=FALSE)
@pytest.mark.parametrize("name", SPECS)
def test_false_offsets_reach_nothing_outside(name, offsets):
    spec, rows, n = SPECS[name], 300, 136
    x, w = operands(spec, rows, len(offsets), n, 80)
    inputs = inputs_of(spec, rows, len(offsets), n, 80)
    types = (spec.d, *spec.outputs)
    framed = [Framed(rows, n, tensors.DTYPES[of.dtype.name], aligned=of.aligned) for of in types]
    names = [o.name for o in spec.epilogue.outputs]
    ends = torch.tensor(offsets, device="cuda", dtype=torch.int32)
    co.build(spec)(x, w, ends, *inputs.values(), out={name: f.out for name, f in zip(names, framed, strict=True)})
    torch.cuda.synchronize()
    for f in framed:
        f.assert_only(rows)


@pytest.mark.parametrize("name", ["grouped-pingpong-plain", "grouped-swapped-plain"])
def test_offsets_are_what_the_kernel_before_computes(name):
    """Kernels overlap with what runs before them, and still see what it wrote."""
    kernel, experts, rows = co.build(SPECS[name]), 40, 512
    x, w = normal(rows, 64, scale=0.3), normal(experts, 136, 64, scale=0.3).mT
    generator = torch.Generator("cuda").manual_seed(0)
    before, counts = [], []
    for _ in range(50):
        expert = torch.randint(0, experts, (rows,), device="cuda", generator=generator)
        counted = torch.bincount(expert, minlength=experts)
        before.append(kernel(x, w, counted.cumsum(0, dtype=torch.int32)))
        counts.append(counted)
    for d, counted in zip(before, counts, strict=True):
        oracle.assert_close(d, exact(SPECS[name].epilogue, x, w, counted.tolist(), {})["d"])


@pytest.mark.parametrize("name", ["grouped-pingpong-plain", "grouped-swapped-plain"])
def test_kernels_in_a_row_wait_for_each_other(name):
    """Each may start while the one before it ends, which writes what it reads and reads what it writes."""
    kernel, experts, rows = co.build(SPECS[name]), 12, 500
    down, up = (normal(experts, n, k, scale=0.15).mT for n, k in ((64, 256), (256, 64)))
    generator = torch.Generator().manual_seed(0)
    sizes = torch.bincount(torch.randint(0, experts, (rows,), generator=generator), minlength=experts).tolist()
    ends, wide = offsets_of(sizes), torch.full((rows, 256), torch.nan, device="cuda", dtype=BF16)
    given = [normal(rows, 64) for _ in range(30)]
    found = [torch.full((rows, 64), torch.nan, device="cuda", dtype=BF16) for _ in given]
    torch.cuda.synchronize()
    for x, out in zip(given, found, strict=True):
        kernel(x, up, ends, out=wide)
        kernel(wide, down, ends, out=out)
    torch.cuda.synchronize()
    for x, out in zip(given, found, strict=True):
        kernel(x, up, ends, out=wide)
        torch.cuda.synchronize()
        assert torch.equal(out, kernel(wide, down, ends))


# ---- Groups with room for as many rows each --------------------------------------------------------------------------

COUNTS = {
    "ragged": [5, 0, 130, 64, 1, 0, 77],
    "full": [130] * 3,
    "all empty": [0, 0, 0],
    "the last one alone": [0] * 140 + [70],
    "a row each": [1] * 90,
    "beyond their room": [-5, 131, 2147483647, -2147483648, 1 << 30, 3],
}


def run_with_room(spec, counts, room, n, k, shared=()):
    """Run a kernel into framed outputs of groups with room, and compare all of them with float64."""
    groups, sizes, k = len(counts), [min(max(count, 0), room) for count in counts], extent_of_k(spec, k)
    used = torch.cat([group * room + torch.arange(size) for group, size in enumerate(sizes)]).cuda()
    x, w = operands(spec, groups * room, groups, n, k)
    for group, size in enumerate(sizes):
        x[group * room + size : (group + 1) * room] = torch.nan
    inputs = inputs_of(spec, groups * room, groups, n, k)
    inputs |= {name: inputs[name][0] for name in shared if name in inputs}
    of_rows = {i.name for i in spec.epilogue.inputs if i.kind.name in OF_ROWS}
    given = {name: x.unflatten(0, (groups, room)) if name in of_rows else x for name, x in inputs.items()}
    # Scales of blocks may lie as DeepGEMM has them, by columns.
    given |= {i.name: given[i.name].mT.contiguous().mT for i in spec.epilogue.inputs if i.kind.name == "BLOCKS_A"}
    types = (spec.d, *spec.outputs)
    framed = [Framed(groups * room, n, tensors.DTYPES[of.dtype.name], aligned=of.aligned) for of in types]
    names = [o.name for o in spec.epilogue.outputs]
    out = {name: f.out.unflatten(0, (groups, room)) for name, f in zip(names, framed, strict=True)}
    ends = torch.tensor(counts, device="cuda", dtype=torch.int32)
    co.build(spec)(x.unflatten(0, (groups, room)), w, ends, *given.values(), out=out)
    own = {name: value[used] if name in of_rows else value for name, value in inputs.items()}
    wanted = exact(spec.epilogue, x.double()[used], w, sizes, own)  # FP8 has no indices
    for name, f in zip(names, framed, strict=True):
        f.assert_only(used)
        if len(used):
            oracle.assert_close(f.out[used], wanted[name])


@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
@pytest.mark.parametrize("name", SPECS)
def test_every_kernel_serves_groups_with_room(name, counts):
    run_with_room(SPECS[name], counts, room=130, n=136, k=72)


@pytest.mark.parametrize("room", [1, 7, 64, 1000])
@pytest.mark.parametrize("name", [n for n in SPECS if n.endswith(("plain", "vectors", "inputs"))])
def test_rooms(name, room):
    run_with_room(SPECS[name], [room, 0, room // 2, 1], room, n=136, k=72, shared=("bias",))


@pytest.mark.parametrize("name", [n for n in SPECS if n.endswith(("tiles", "registers"))])
def test_odd_columns_of_groups_with_room(name):
    run_with_room(SPECS[name], COUNTS["ragged"], room=130, n=131, k=72)


@pytest.mark.parametrize("name", [n for n in SPECS if n.endswith("vectors")])
def test_more_than_a_thousand_groups_with_room(name):
    generator = torch.Generator().manual_seed(1)
    run_with_room(SPECS[name], torch.randint(0, 6, (1500,), generator=generator).tolist(), room=5, n=72, k=64)


@pytest.mark.parametrize("name", ["grouped-pingpong-plain", "grouped-swapped-plain"])
def test_counts_change_between_replays(name):
    spec, (groups, room, n) = SPECS[name], (9, 130, 136)
    x, w = normal(groups, room, 72, scale=0.3), normal(groups, n, 72, scale=0.3).mT
    kernel, counts = co.build(spec), torch.zeros(groups, device="cuda", dtype=torch.int32)
    out = torch.empty(groups, room, n, device="cuda", dtype=BF16)
    kernel(x, w, counts, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernel(x, w, counts, out=out)
    wanted = x.double() @ w.double()
    for sizes in ([130] * 9, [0] * 8 + [64], [0] * 9, [1, 0, 128, 5, 0, 0, 64, 65, 130]):
        counts.copy_(torch.tensor(sizes))
        out.fill_(torch.nan)
        graph.replay()
        for group, size in enumerate(sizes):
            assert out[group, size:].isnan().all()
            if size:
                oracle.assert_close(out[group, :size], wanted[group, :size])


@pytest.mark.parametrize("name", ["grouped-pingpong-plain", "grouped-swapped-plain"])
def test_a_kernel_refuses_groups_whose_rooms_do_not_follow_each_other(name):
    x, w, out = normal(3, 40, 64), normal(3, 136, 64).mT, normal(3, 40, 136)
    counts = torch.tensor([40, 0, 3], device="cuda", dtype=torch.int32)

    def refused(x, out):
        status = co.build(SPECS[name]).loaded.launch(x, w, out, counts, 0, 1, None)
        torch.cuda.synchronize()
        return refusal(status) if status else None

    assert refused(x, out) is None
    assert refused(x[:2], out) == (0, Reason.SHAPE)
    assert refused(normal(3, 80, 64)[:, :40], out) == (0, Reason.MAJOR)
    assert refused(x, normal(3, 80, 136)[:, :40]) == (2, Reason.MAJOR)
    assert refused(x, out.flatten(0, 1)) == (2, Reason.SHAPE)
    assert refused(x[:, :39].contiguous(), out) == (2, Reason.SHAPE)


# ---- Refusals of kernels, which a warm call relies on ----------------------------------------------------------------


@pytest.mark.parametrize("name", ["grouped-pingpong-plain", "grouped-swapped-plain"])
def test_a_kernel_refuses_what_it_cannot_address(name):
    x, w, out, ends = normal(96, 64), normal(3, 136, 64).mT, normal(96, 136), offsets_of([10, 20, 60])

    def refused(x, w, out, ends):
        status = co.build(SPECS[name]).loaded.launch(x, w, out, ends, 0, 1, None)
        torch.cuda.synchronize()
        return refusal(status) if status else None

    assert refused(x, w, out, ends) is None
    assert refused(x, w[0], out, ends) == (1, Reason.SHAPE)
    assert refused(x, w, out[:90], ends) == (2, Reason.SHAPE)
    assert refused(x, w, out, ends[:2]) == (3, Reason.SHAPE)
    assert refused(x, w, out, ends.long()) == (3, Reason.DTYPE)
    assert refused(x, w, out, ends.cpu()) == (3, Reason.DEVICE)
    assert refused(x, w.contiguous(), out, ends) == (1, Reason.MAJOR)
    assert refused(x[:0], w, out[:0], ends) == (0, Reason.SHAPE)
    within = out.view(-1).view(torch.int32)[8:11]  # offsets that the kernel would overwrite
    assert refused(x, w, out, within) == (2, Reason.OVERLAP)
    wide = normal(96, 200)
    assert refused(wide[:, :64], w, wide[:, 64:], ends) is None
    assert refused(wide[:, :64], w, wide[:, 56:192], ends) == (2, Reason.OVERLAP)


# ---- Calls -----------------------------------------------------------------------------------------------------------


@co.epilogue
def routed(acc, bias: co.Row, weight: co.Col, residual: co.Tile, alpha: co.Scalar):
    return (co.silu(acc + bias) * weight) * alpha + residual


@co.epilogue
def saved(acc, bias: co.Row):
    z = acc + bias
    return {"d": co.relu(z), "pre": z}


CALLS = [
    (BF16, 7, 264, 200, 96),
    (torch.float16, 3, 8, 100, 64),
    (BF16, 16, 40, 131, 128),
    (BF16, 4, 3000, 512, 256),
]


# What the tests below call besides: the epilogue, and how many rows and experts, N and K.
OTHERS = [
    *((epilogue, 90, 3, 136, 64) for epilogue in (saved, composed.swiglu, builtin.residual)),
    *((None, rows, 8, 136, 64) for rows in (100, 101, 64, 333)),
    *((epilogue, rows, 3, 136, 64) for epilogue, rows in ((None, 96), (None, 50), (builtin.bias, 96))),
]


def chosen(epilogue, rows, experts, n, k, dtype=BF16, out_dtype=None, *, turned=False):
    """Return the kernel that serves a call with tensors of these extents."""

    def empty(*shape):
        return torch.empty(*shape, dtype=dtype, device="meta")

    op = grouped_op(epilogue)
    w = empty(experts, k, n) if turned else empty(experts, n, k).mT
    drawn = {"ROW": (experts, n), "TILE": (rows, n)}
    inputs = {i.name: empty(*drawn[i.kind.name]) for i in op.graph.inputs if i.kind.name in drawn}
    inputs |= {i.name: empty(experts, n, k).mT for i in op.graph.inputs if i.kind.name == "PRODUCT"}
    inputs |= {i.name: torch.empty(rows, device="meta") for i in op.graph.inputs if i.kind.name == "COL"}
    inputs |= {i.name: ALPHA for i in op.graph.inputs if i.kind.name == "SCALAR"}
    offsets = torch.empty(experts, dtype=torch.int32, device="meta")
    call = op.checked(empty(rows, k), w, (), {"offsets": offsets, **inputs}, None, out_dtype)
    device = device_of(torch.device("cuda", torch.cuda.current_device()))
    return dispatch.choose(signature_of(call, device), device, call.chosen_for)[0]


@pytest.fixture(scope="module")
def built():
    """Compile what serves the calls below, side by side."""
    wanted = [chosen(*each) for each in OTHERS]
    for dtype, experts, rows, n, k in CALLS:
        for turned in (False, True) if n % 8 == 0 else (False,):
            wanted.append(chosen(routed, rows, experts, n, k, dtype, turned=turned))
            wanted += [chosen(None, rows, experts, n, k, dtype, out, turned=turned) for out in (dtype, torch.float32)]
    wanted.append(chosen(None, 96, 3, 144, 64, BF16, torch.float8_e4m3fn))
    wanted.append(chosen(None, 8 * 12, 8, 136, 64))
    Registry.current().kernels(dict.fromkeys(wanted))


@pytest.mark.usefixtures("built")
@pytest.mark.parametrize(("dtype", "experts", "rows", "n", "k"), CALLS, ids=str)
@pytest.mark.parametrize("turned", [False, True], ids=["E,N,K", "E,K,N"])
def test_calls(dtype, experts, rows, n, k, turned):
    if turned and n % 8:
        pytest.skip("lines of w would not be aligned")
    x = normal(rows, k, dtype=dtype, scale=k**-0.25)
    w = normal(experts, n, k, dtype=dtype, scale=k**-0.25).mT
    w = w.contiguous() if turned else w
    sizes = torch.bincount(torch.randint(0, experts, (rows,)), minlength=experts).tolist()
    inputs = {
        "bias": normal(experts, n, dtype=dtype),
        "weight": torch.rand(rows, device="cuda"),
        "residual": normal(rows, n, dtype=dtype),
        "alpha": ALPHA,
    }
    op = grouped_op(routed)
    before = op.served_warm
    for _ in range(3):
        found = co.grouped_gemm(x, w, offsets_of(sizes), epilogue=routed, **inputs)
        oracle.assert_close(found, exact(op.graph, x, w, sizes, inputs)["d"])
    assert op.served_warm >= before + 2
    for out_dtype in (dtype, torch.float32):
        found = co.grouped_gemm(x, w, offsets_of(sizes), out_dtype=out_dtype)
        oracle.assert_close(found, exact(ops.op_of(None).graph, x, w, sizes, {})["d"])


@pytest.mark.usefixtures("built")
def test_a_result_in_fp8():
    x, w = normal(96, 64, scale=0.3), normal(3, 144, 64, scale=0.3).mT
    found = co.grouped_gemm(x, w, offsets_of([30, 0, 66]), out_dtype=torch.float8_e4m3fn)
    wanted = exact(ops.op_of(None).graph, x, w, [30, 0, 66], {})["d"]
    assert oracle.error(found, wanted) <= 2.0**-4


@pytest.mark.usefixtures("built")
def test_a_further_output():
    x, w, bias = normal(90, 64, scale=0.3), normal(3, 136, 64, scale=0.3).mT, normal(3, 136)
    found = co.grouped_gemm(x, w, offsets_of([30, 0, 60]), epilogue=saved, bias=bias)
    wanted = exact(grouped_op(saved).graph, x, w, [30, 0, 60], {"bias": bias})
    oracle.assert_close(found.d, wanted["d"])
    oracle.assert_close(found.pre, wanted["pre"])


@pytest.mark.usefixtures("built")
def test_two_weights_of_each_expert():
    x, (w, up) = normal(90, 64, scale=0.3), (normal(3, 136, 64, scale=0.3).mT for _ in range(2))
    swiglu = composed.swiglu
    for sizes in ([30, 0, 60], [0, 90, 0]):
        found = co.grouped_gemm(x, w, offsets_of(sizes), epilogue=swiglu, up=up)
        oracle.assert_close(found, exact(swiglu.graph, x, w, sizes, {"up": up})["d"])


@pytest.mark.usefixtures("built")
def test_a_residual_in_place():
    x, w, out = normal(90, 64, scale=0.3), normal(3, 136, 64, scale=0.3).mT, normal(90, 136)
    sizes, inputs = [30, 0, 50], {"residual": out.clone()}
    op = builtin.residual
    assert co.grouped_gemm(x, w, offsets_of(sizes), epilogue=op, residual=out, out=out) is out
    oracle.assert_close(out[:80], exact(op.graph, x, w, sizes, inputs)["d"])
    assert torch.equal(out[80:], inputs["residual"][80:])


def test_no_rows():
    w = normal(3, 136, 64).mT
    ends = torch.zeros(3, device="cuda", dtype=torch.int32)
    assert co.grouped_gemm(normal(0, 64), w, ends).shape == (0, 136)


@pytest.mark.usefixtures("built")
def test_other_numbers_of_rows():
    w, op = normal(8, 136, 64, scale=0.3).mT, grouped_op()
    for rows in (100, 101, 64, 333):
        x = normal(rows, 64, scale=0.3)
        sizes = [rows // 8] * 8
        found = op(x, w, offsets_of(sizes))
        oracle.assert_close(found[: sum(sizes)], exact(op.graph, x, w, sizes, {})["d"])


@pytest.mark.usefixtures("built")
def test_nothing_waits_for_the_device():
    x, w, ends = normal(96, 64), normal(3, 136, 64).mT, offsets_of([10, 20, 60])
    co.grouped_gemm(x, w, ends)
    with tensors.without_synchronisation():
        co.grouped_gemm(x, w, ends)
        co.grouped_gemm(x[:50], w, ends)


@pytest.mark.parametrize("name", ["grouped-narrow-vectors", "grouped-swapped-inputs", "grouped-pingpong-plain"])
def test_offsets_change_between_replays(name):
    spec, rows, experts, n = SPECS[name], 300, 9, 136
    x, w = operands(spec, rows, experts, n, 72)
    inputs = inputs_of(spec, rows, experts, n, 72)
    kernel, ends = co.build(spec), offsets_of([300] + [0] * 8)
    out = torch.empty(rows, n, device="cuda", dtype=BF16)
    kernel(x, w, ends, *inputs.values(), out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernel(x, w, ends, *inputs.values(), out=out)
    for sizes in ([0] * 8 + [300], [33] * 9, [0] * 9, [1, 0, 128, 5, 0, 0, 64, 65, 2]):
        ends.copy_(offsets_of(sizes))
        out.fill_(torch.nan)
        graph.replay()
        used = sum(sizes)
        assert out[used:].isnan().all()
        if used:
            oracle.assert_close(out[:used], exact(spec.epilogue, x, w, sizes, inputs)["d"])


@pytest.mark.usefixtures("built")
def test_a_prepared_launch():
    x, w, ends = normal(96, 64, scale=0.3), normal(3, 136, 64, scale=0.3).mT, offsets_of([10, 20, 66])
    launch = co.prepare_launch(co.grouped_gemm, x, w, ends)
    ends.copy_(offsets_of([96, 0, 0]))
    oracle.assert_close(launch(), x.double() @ w[0].double())


@pytest.mark.usefixtures("built")
def test_a_compiled_program():
    x, w, bias = normal(96, 64, scale=0.3), normal(3, 136, 64, scale=0.3).mT, normal(3, 136)
    compiled = torch.compile(
        lambda x, w, counts, bias: co.grouped_gemm(
            x * 2, w, counts.cumsum(0, dtype=torch.int32), epilogue=named.gemm_bias.epilogue, bias=bias
        ),
        fullgraph=True,
    )
    for sizes in ([10, 20, 66], [0, 96, 0]):
        found = compiled(x, w, torch.tensor(sizes, device="cuda"), bias)
        wanted = exact(named.gemm_bias.graph, x * 2, w, sizes, {"bias": bias})["d"]
        oracle.assert_close(found, wanted)


@pytest.mark.usefixtures("built")
def test_calls_with_room():
    w, counts = normal(8, 136, 64, scale=0.3).mT, torch.tensor([12, 0, 3, 12, 1, 7, 0, 12], device="cuda").int()
    x, out = normal(8, 12, 64, scale=0.3), torch.full((8, 12, 136), torch.nan, device="cuda", dtype=BF16)
    with torch.no_grad():
        for _ in range(2):
            co.grouped_gemm_masked(x, w, counts, expected_rows=12, out=out)
    wanted = x.double() @ w.double()
    for group, size in enumerate(counts.tolist()):
        assert out[group, size:].isnan().all()
        if size:
            oracle.assert_close(out[group, :size], wanted[group, :size])


def test_groups_of_positive_fp8_are_added_up_in_fp32():
    """Where nothing cancels, the Tensor Cores' own sums are off by percents."""
    n, k, sizes = 256, 4096, [30, 0, 98]
    x = torch.rand(128, k, device="cuda").to(torch.float8_e4m3fn)
    w = torch.rand(3, n, k, device="cuda").to(torch.float8_e4m3fn).mT
    wanted = exact(builtin.identity.graph, x, w, sizes, {})["d"]
    oracle.assert_close(co.grouped_gemm(x, w, offsets_of(sizes)), wanted)
    fast = co.grouped_gemm(x, w, offsets_of(sizes), math="fast")
    assert 0.01 < oracle.error(fast, wanted) < 0.2
    promoted = co.grouped_gemm(x, w, offsets_of(sizes), math="promoted")
    assert oracle.error(promoted, wanted) < 0.004


@pytest.mark.parametrize("of_w", [128, 1], ids=["128x128", "128x1"])
def test_a_call_with_scales_of_blocks(of_w):
    """Groups that follow each other, and with room: one kernel serves both."""
    n, k, sizes = 264, 400, [30, 0, 66]
    x = normal(96, k).to(torch.float8_e4m3fn)
    w = normal(3, n, k).to(torch.float8_e5m2).mT
    scale_a = torch.rand(96, mma.blocks(k), device="cuda") + 0.1
    scale_b = torch.rand(3, -(-n // of_w), mma.blocks(k), device="cuda") + 0.1
    inputs = {"scale_a": scale_a, "scale_b": scale_b}
    wanted = exact(composed.scaled_blocks.graph, x, w, sizes, inputs)["d"]
    oracle.assert_close(co.scaled_grouped_gemm(x, w, offsets_of(sizes), scale_a, scale_b), wanted)
    counts = torch.tensor([30, 0, 32], device="cuda", dtype=torch.int32)
    room = x.view(3, 32, k), w, counts, scale_a.view(3, 32, -1), scale_b
    found = co.scaled_grouped_gemm_masked(*room, expected_rows=32)
    oracle.assert_close(found[0, :30], wanted[:30])
    of_last = {"scale_a": scale_a[64:], "scale_b": scale_b[2:]}
    oracle.assert_close(found[2], exact(composed.scaled_blocks.graph, x[64:], w[2:], [32], of_last)["d"])
