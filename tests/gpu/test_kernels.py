"""Every declared kernel over shapes with edges: against float64, to the last bit, and in every way of a call."""

import itertools
import math
import statistics

import pytest
import torch

import cutlass_ops as co
from cutlass_ops.run import named
from cutlass_ops.tuner.timing import Stopwatch
from tests.gpu import cases, edges, kernels, multiplied, oracle, tensors
from tests.gpu.cases import Case, check

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("hopper")]

# Ones, primes, tile − 1, tile and tile + 1 of the 64×64×64 tile, more than one tile, more than one wave of K.
SHAPES = [
    (1, 1, 1), (1, 130, 64), (13, 7, 17), (63, 65, 31), (64, 64, 64), (65, 63, 127), (127, 129, 257), (211, 307, 509),
]  # fmt: skip
# Whole numbers: sums leave BF16's eight and FP16's eleven bits, so that rounding in between would show.
WHOLE = [(1, 1, 1), (63, 65, 129), (65, 1, 64), (1, 131, 67), (197, 331, 257)]
# 18 × 18 tiles of 64 × 64: more than two for each multiprocessor, so that persistent kernels take several in a row.
MANY_TILES = (1093, 1127, 131)
ROWS = [(1, 4096, 4096), (3, 1000, 14336), (8, 264, 2056), (5, 1, 40)]
TYPES = [(1, 256, 512), (65, 264, 528), (333, 512, 1024), (129, 251, 1037), (3, 7, 5)]
LARGER = [(200, 264, 1000), (1500, 2056, 520), (3, 4096, 4096)]  # of means: a part of a step, several tiles a block
COPIED = [(1, 8, 8), (63, 72, 129), (200, 264, 1001), (1500, 2056, 521)]
# Lines of less than a piece of eight elements, of a few, and of more than a warp copies at a time.
LINES = [(3, 7, 8), (9, 15, 16), (5, 23, 25), (70, 1031, 2053)]
# Tiles of clusters of which each has a part.
TAILS = [
    shape
    for tail in (8, 24, 64, 72, 96, 128, 136, 200)
    for shape in ((tail, 208 - tail, 72), (256 + tail, 384 + tail, 200))
]


# Kernels whose results are not whole numbers: GELU, SiLU, means, products of two sums.
FRACTIONS = ("gemm_bias_gelu", "gemm_bias_silu", "norm", "gate", "normed_gate", "summed", "rms", "layer", "both")
REDUCING = kernels.multi_output() | kernels.reductions() | kernels.twice()
REALIGNED = kernels.realigned()
OF_TYPES = multiplied.specs()
# Kernels, and the shapes that they are tested with: normal numbers, and whole ones.
GROUPS = {
    "ops": (kernels.matrix(), SHAPES, WHOLE),
    "configurations": (kernels.configurations(), [*SHAPES, (257, 385, 1025), (1000, 520, 72)], [*WHOLE, MANY_TILES]),
    "few rows": (kernels.few_rows(), [*SHAPES, *ROWS], [*WHOLE, (1, 4097, 333), (7, 33, 2049)]),
    "reductions": (REDUCING, SHAPES, []),
    "another order": (kernels.unordered(), SHAPES, []),
    "means": (kernels.gathering(), [*SHAPES, *LARGER], []),
    "copies": (REALIGNED, COPIED, [*WHOLE, *LINES, MANY_TILES]),
    "multicast": (kernels.multicast(), SHAPES[-2:], TAILS),
    "mixed types": (edges.mixed(), SHAPES, [*WHOLE, MANY_TILES]),
    "pairs": (
        {n: s for n, s in kernels.pairs().items() if s.epilogue != kernels.rotary.graph},
        SHAPES,
        [*WHOLE, MANY_TILES],
    ),
    "types": (OF_TYPES, TYPES, []),
}
EVERY = [(group, name) for group, (specs, _, _) in GROUPS.items() for name in specs]
EXACT = [
    (group, name)
    for group, name in EVERY
    if GROUPS[group][2] and (name.split("-")[0] not in FRACTIONS or (group == "copies" and name.startswith("both")))
]


def eager_of(group, name):
    """Return what PyTorch composes of a named op, of which a kernel may have twice the error."""
    return oracle.EAGER.get(name.split("-")[0]) if group in ("ops", "few rows") else None


@pytest.mark.parametrize(("group", "name"), EVERY)
def test_a_kernel_agrees_with_float64(group, name):
    specs, shapes, _ = GROUPS[group]
    for shape in shapes:
        check(specs[name], shape, eager=eager_of(group, name))


@pytest.mark.parametrize(("group", "name"), EVERY)
def test_a_kernel_is_right_in_every_way_of_a_call(group, name):
    check(GROUPS[group][0][name], (77, 136, 264), ways=cases.WAYS)


@pytest.mark.parametrize(("group", "name"), EXACT)
def test_whole_numbers_are_right_to_the_last_bit(group, name):
    specs, _, shapes = GROUPS[group]
    for shape in shapes:
        check(specs[name], shape, exact=True)


@pytest.mark.parametrize("name", list(kernels.drawn_specs()))
def test_drawn_epilogues(name):
    number, spec = int(name.removeprefix("drawn")), kernels.drawn_specs()[name]
    program = kernels.drawn()[number]
    for m, n, k in [(1, 8, 8), (65, 136, 72)]:
        case = Case(spec, m, n, k)
        _, inputs = program.tensors(m, n, seed=number, dtype=torch.bfloat16)
        inputs = {key: x.float().cuda() if x.ndim == 0 else x.cuda() for key, x in inputs.items()}
        for key, x in inputs.items():
            case.inputs[key] = x if x.ndim == 0 else case.inputs[key].copy_(x)
        co.build(spec)(*case.operands, out=case.out)
        case.assert_nothing_else_written()
        wanted = program.evaluate(case.a.double() @ case.b.double(), inputs, torch.float64)
        for key, tensor in case.out.items():
            # `cast` in the epilogue may round the other way from a last-bit difference: one unit of the dtype.
            found = oracle.error(tensor, wanted[key])
            assert found <= 2 * torch.finfo(torch.bfloat16).eps, f"{key}: {found:.3e}"


# ---- What other launches leave, and time ----------------------------------------------------------------------------

SM90 = {
    name: spec
    for name, spec in (kernels.matrix() | kernels.configurations() | REDUCING).items()
    if isinstance(spec.config, co.Sm90Config)
}


@pytest.mark.parametrize("name", SM90)
def test_what_shared_memory_has_of_other_launches_does_not_count(name):
    """Rows of a tile beyond the matrix are not loaded: here NaN lies in their place."""
    spec = SM90[name]
    for shape in [(1, 130, 64), (65, 63, 127), (211, 307, 509)]:
        before = Case(spec, *cases.fit(spec, (1536, 1536, 512)))
        before.a.fill_(math.nan), before.b.fill_(math.nan)
        co.build(spec)(*before.operands, out=before.out)
        check(spec, shape)


@pytest.mark.parametrize("rows", [136, 160, 192, 248])
def test_a_partly_filled_row_of_tiles_takes_no_longer_than_a_full_one(rows):
    kernel = co.build(kernels.configurations()["sm90_128x128x64_1x1_pp"])
    b, watch = tensors.matrix(4096, 4096, "bf16", "col"), Stopwatch(25.0)
    for m in (rows, 256):
        a, bias, d = tensors.matrix(m, 4096, "bf16"), tensors.vector(4096, "bf16"), tensors.matrix(m, 4096, "bf16")
        watch.add(str(m), lambda _, a=a, bias=bias, d=d: kernel(a, b, bias, out=d))
    times = [watch.round([str(rows), "256"]) for _ in range(9)]
    assert statistics.median(part / full for part, full in times) < 1.1


def expected_opcodes(spec):
    return ("HGMMA", "UTMALDG") if isinstance(spec.config, co.Sm90Config) else ("HMMA",)


@pytest.mark.parametrize("name", [*kernels.matrix(), *kernels.configurations(), *edges.specs()])
def test_machine_code_uses_the_tensor_cores(name):
    spec = (kernels.matrix() | kernels.configurations() | edges.specs())[name]
    counts = co.build(spec).loaded.artifact.manifest["sass"]
    assert [opcode for opcode in expected_opcodes(spec) if not counts.get(opcode)] == [], counts


def test_every_named_op_is_among_the_kernels():
    assert {op.name for op in named.NAMED} == {name.split("-")[0] for name in kernels.matrix()}


# ---- Batches, groups of rows, groups of K ----------------------------------------------------------------------------

BATCHED, GROUPED, RAGGED_K = kernels.batched(), kernels.grouped(), kernels.ragged_k()
SIZES = {
    "ragged": [5, 0, 130, 64, 1, 0, 77],
    "whole tiles": [64, 128, 64],
    "empty ones first and last": [0, 0, 200, 0, 0],
    "all empty": [0, 0, 0],
    "one group": [300],
    "all rows in one of many": [0] * 140 + [300] + [0] * 60,
    "a row each": [1] * 90,
}
COUNTS = {
    "ragged": [5, 0, 130, 64, 1, 0, 77],
    "full": [130] * 3,
    "all empty": [0, 0, 0],
    "the last one alone": [0] * 140 + [70],
    "a row each": [1] * 90,
    "beyond their room": [-5, 131, 2147483647, -2147483648, 1 << 30, 3],
}
PLAIN = ("plain", "vectors")


def ending(specs, *ends):
    return [name for name in specs if name.endswith(ends)]


@pytest.mark.parametrize("extents", [(3, 130, 72, 96), (5, 64, 64, 64), (1, 8, 200, 24), (140, 40, 40, 40)], ids=str)
@pytest.mark.parametrize("name", BATCHED)
def test_batches(name, extents):
    count, *shape = extents
    check(BATCHED[name], tuple(shape), lead=(count,), ways=cases.WAYS)


@pytest.mark.parametrize("name", ending(BATCHED, "inputs"))
def test_two_dimensions_of_batches(name):
    check(BATCHED[name], (72, 136, 80), lead=(3, 4))


@pytest.mark.parametrize("name", ending(BATCHED, "inputs", "registers"))
def test_what_batches_share(name):
    spec, names = BATCHED[name], tuple(i.name for i in BATCHED[name].epilogue.inputs)
    check(spec, (72, 136, 80), lead=(3, 4), shared=names)
    first, last = (slice(None, 1),), (slice(None), slice(None, 1))
    # A by all; by the outer dimension; B by the inner one; both; inputs with a stride of 0.
    for of_a, of_b, of_inputs in (
        ((0, 0), ..., ...), (0, ..., ...), (..., last, ...), (first, last, ...), (..., ..., first),
    ):  # fmt: skip
        case = Case(spec, 72, 136, 80, lead=(3, 4))
        case.a, case.b = case.a[of_a], case.b[of_b]
        for key, x in case.inputs.items():
            case.inputs[key] = x[of_inputs].expand_as(x) if isinstance(x, torch.Tensor) else x
        co.build(spec)(*case.operands, out=case.out)
        case.assert_right(case.wanted())


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("name", GROUPED)
def test_groups_of_rows(name, sizes):
    check(GROUPED[name], (0, 136, 72), sizes=sizes)


@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
@pytest.mark.parametrize("name", GROUPED)
def test_groups_with_room(name, counts):
    check(GROUPED[name], (0, 136, 72), sizes=counts, room=130)


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("name", RAGGED_K)
def test_groups_of_k(name, sizes):
    check(RAGGED_K[name], (200, 136, 0), sizes=sizes)


OF_GROUPS = GROUPED | RAGGED_K


@pytest.mark.parametrize("room", [None, 130], ids=["rows", "room"])
@pytest.mark.parametrize("name", OF_GROUPS)
def test_rows_of_no_group_are_neither_read_nor_written_in_every_way_of_a_call(name, room):
    if room is not None and name in RAGGED_K:
        pytest.skip("groups of K have no room")
    # Kernels of groups of K look at each call's inputs again.
    ways = [way for way in cases.WAYS if way != "warm" or name in GROUPED or name.endswith("plain")]
    check(OF_GROUPS[name], (200, 136, 72), sizes=SIZES["ragged"], unused=90, room=room, ways=ways)


@pytest.mark.parametrize("name", ending(OF_GROUPS, "inputs", "vectors", "registers", "tiles"))
def test_inputs_that_all_experts_share(name):
    shared = tuple(i.name for i in OF_GROUPS[name].epilogue.inputs if i.kind.name != "SCALAR")
    shared = ("bias",) if name in GROUPED else shared
    check(OF_GROUPS[name], (200, 136, 72), sizes=SIZES["ragged"], shared=shared)


@pytest.mark.parametrize("room", [None, 130], ids=["rows", "room"])
@pytest.mark.parametrize("name", [name for name, spec in OF_GROUPS.items() if not spec.d.aligned])
def test_odd_columns_of_groups(name, room):
    if room is None or name in GROUPED:
        check(OF_GROUPS[name], (197, 131, 72), sizes=SIZES["ragged"], unused=3, room=room)


@pytest.mark.parametrize("room", [1, 7, 64, 1000])
@pytest.mark.parametrize("name", ending(GROUPED, *PLAIN, "inputs"))
def test_rooms(name, room):
    check(GROUPED[name], (0, 136, 72), sizes=[room, 0, room // 2, 1], room=room, shared=("bias",))


@pytest.mark.parametrize("name", ending(OF_GROUPS, *PLAIN))
def test_many_tiles_of_many_waves(name):
    check(OF_GROUPS[name], (520, 1096, 136), sizes=[700, 3, 0, 2500, 64, 1])


@pytest.mark.parametrize("name", ending(OF_GROUPS, *PLAIN))
def test_more_than_a_thousand_groups(name):
    generator = torch.Generator().manual_seed(1)
    sizes = torch.randint(0, 6, (1500,), generator=generator).tolist()
    check(OF_GROUPS[name], (72, 72, 64), sizes=sizes, unused=5)
    check(OF_GROUPS[name], (72, 72, 64), sizes=[0] * 1400 + [9])
    if name in GROUPED:
        check(OF_GROUPS[name], (72, 72, 64), sizes=sizes, room=5)


FALSE = {
    "falling": [200, 50, 250, 10, 300],
    "beyond the last row": [100, 5000, 1 << 30, 2147483647, 200],
    "negative": [-5, -2147483648, 100, -1, 300],
}


@pytest.mark.parametrize("offsets", FALSE.values(), ids=FALSE)
@pytest.mark.parametrize("name", OF_GROUPS)
def test_false_offsets_reach_nothing_outside(name, offsets):
    spec = OF_GROUPS[name]
    case = Case(spec, *cases.fit(spec, (200, 136, 72)), sizes=[60] * 5)
    case.form = (torch.tensor(offsets, device="cuda", dtype=torch.int32),)
    co.build(spec)(*case.operands, out=case.out)
    torch.cuda.synchronize()
    case.assert_nothing_else_written(rows=300)


CHOSEN = [
    *(f"grouped-{name}" for name in ("pingpong-plain", "swapped-plain", "narrow-vectors", "swapped-inputs")),
    *(f"ragged_k-{name}-plain" for name in ("pingpong", "cooperative", "swapped")),
]


@pytest.mark.parametrize("name", ending(CHOSEN, "plain"))
def test_offsets_are_what_the_kernel_before_computes(name):
    """Kernels overlap with what runs before them, and still see what it wrote."""
    spec, kernel, experts = OF_GROUPS[name], co.build(OF_GROUPS[name]), 40
    case, generator = Case(spec, 64, 136, 64, sizes=[512] + [0] * (experts - 1)), torch.Generator("cuda").manual_seed(0)
    found = []
    for _ in range(50):
        expert = torch.randint(0, experts, (512,), device="cuda", generator=generator)
        counted = torch.bincount(expert, minlength=experts)
        found.append((counted, kernel(case.a, case.b, counted.cumsum(0, dtype=torch.int32))))
    for counted, d in found:
        case.used = counted.tolist()
        case.refill()
        case.out["d"].copy_(d)
        case.assert_right(case.wanted())


@pytest.mark.parametrize("room", [None, 300], ids=["rows", "room"])
@pytest.mark.parametrize("name", CHOSEN)
def test_groups_change_between_replays(name, room):
    spec = OF_GROUPS[name]
    if room is not None and name in RAGGED_K:
        pytest.skip("groups of K have no room")
    case, kernel = Case(spec, 136, 136, 72, sizes=[300] + [0] * 8, room=room), co.build(spec)
    for x in (case.a, case.b):  # rows that other groups use later
        x.copy_(torch.randn(x.shape, device="cuda") * 0.3)
    kernel(*case.operands, out=case.out)
    graph, _ = cases.captured(lambda: kernel(*case.operands, out=case.out))
    for sizes in ([0] * 8 + [300], [33] * 9, [0] * 9, [1, 0, 128, 5, 0, 0, 64, 65, 2]):
        case.form[0].copy_(torch.tensor(sizes if room else list(itertools.accumulate(sizes))))
        case.used = sizes
        case.refill()
        graph.replay()
        case.assert_right(case.wanted())


@pytest.mark.parametrize("name", ["grouped-pingpong-plain", "grouped-swapped-plain"])
def test_kernels_of_groups_in_a_row_wait_for_each_other(name):
    """Each may start while the one before it ends, which writes what it reads and reads what it writes."""
    kernel, experts, rows = co.build(GROUPED[name]), 12, 500
    down, up = ((torch.randn(experts, n, k, device="cuda") * 0.15).bfloat16().mT for n, k in ((64, 256), (256, 64)))
    generator = torch.Generator().manual_seed(0)
    sizes = torch.bincount(torch.randint(0, experts, (rows,), generator=generator), minlength=experts)
    ends, wide = sizes.cumsum(0).int().cuda(), torch.full((rows, 256), math.nan, device="cuda", dtype=torch.bfloat16)
    given = [torch.randn(rows, 64, device="cuda").bfloat16() for _ in range(30)]
    found = [torch.full_like(x, math.nan) for x in given]
    torch.cuda.synchronize()
    for x, out in zip(given, found, strict=True):
        kernel(x, up, ends, out=wide)
        kernel(wide, down, ends, out=out)
    torch.cuda.synchronize()
    for x, out in zip(given, found, strict=True):
        kernel(x, up, ends, out=wide)
        torch.cuda.synchronize()
        assert torch.equal(out, kernel(wide, down, ends))


@pytest.mark.parametrize("name", RAGGED_K)
def test_no_group_of_k_sees_another(name):
    """Rows that are not finite reach the D of their group alone."""
    spec = RAGGED_K[name]
    case = Case(spec, 136, 72, 0, sizes=[70, 33, 100])
    wanted = case.wanted()
    case.a[:, 70:103] = case.b[70:103] = torch.inf
    co.build(spec)(*case.operands, out=case.out)
    for name_, (first, _, last) in wanted.items():
        oracle.assert_close(case.out[name_][0], first)
        oracle.assert_close(case.out[name_][2], last)


@pytest.mark.parametrize("name", ending(CHOSEN, "plain"))
def test_each_launch_of_groups_gives_the_same_bits(name):
    kernel, case = co.build(OF_GROUPS[name]), Case(OF_GROUPS[name], 520, 392, 72, sizes=[700, 3, 0, 1500, 64, 1])
    first = kernel(*case.operands)
    assert all(torch.equal(kernel(*case.operands), first) for _ in range(20))
