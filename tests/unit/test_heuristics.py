"""The choice of a kernel without measuring: legal kernels only, few of them, and the right kind for the shape."""

import itertools
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

import cutlass_ops as co
from cutlass_ops import builtin, heuristics, legality
from cutlass_ops.config import Sm80Config, Sm90Config
from cutlass_ops.epilogue.graph import Kind
from cutlass_ops.heuristics import Device
from cutlass_ops.registry import OpSignature
from cutlass_ops.spec import Operand
from tests.strategies import PATIENT

H100 = Device((9, 0), 132)
A100 = Device((8, 0), 108)
MAJORS = [(a, b) for a in ("row", "col") for b in ("row", "col")]
MAX_KERNELS = 16


@co.epilogue
def statistics(acc, bias: co.Row):
    """A reduction over each side, and the value before the activation."""
    pre = acc + bias
    return {"d": co.relu(pre), "pre": pre, "square": co.sum_square(pre, dim=1), "top": co.max(pre, dim=0)}


@cache
def signature(
    epilogue=builtin.bias_relu,
    dtype="bf16",
    majors=("row", "col"),
    *,
    a=8,
    b=8,
    d=8,
    d_dtype=None,
):
    """Operand types of a call; ``a``, ``b`` and ``d`` are alignments in elements."""
    graph = epilogue.graph
    result = Operand.of(f"{d_dtype or dtype}.row")
    result = Operand(result.dtype, "row", min(d, result.alignment))
    vector = Operand(Operand.of(dtype).dtype, "row", 1)
    return OpSignature(
        epilogue=graph,
        a=Operand.of(f"{dtype}.{majors[0]}.align{a}"),
        b=Operand.of(f"{dtype}.{majors[1]}.align{b}"),
        d=result,
        inputs=tuple(result if i.kind is Kind.TILE else vector for i in graph.inputs),
        outputs=tuple(result if o.reduce is None else Operand.of("f32.align1") for o in graph.outputs[1:]),
    )


def chosen(shape, of=None, device=H100):
    return heuristics.choose(of or signature(), device, shape)


@pytest.mark.parametrize(("n", "k"), [(4096, 4096), (28672, 8192), (4096, 14336), (136, 72), (50257, 768)])
def test_every_number_of_rows_is_served_by_the_kernels_of_its_signature(n, k):
    d = 8 if n % 8 == 0 else 1
    of = signature(d=d)
    built = set(heuristics.specs(of, H100))
    used = {heuristics.choose(of, H100, (m, n, k))[0] for m in range(1, 8193)}
    assert used <= built
    assert len(built) <= MAX_KERNELS


@PATIENT
@given(m=st.integers(1, 1 << 26), n=st.integers(1, 1 << 20), k=st.integers(1, 1 << 16))
@pytest.mark.parametrize("device", [H100, A100, Device((8, 9), 142)])
def test_any_shape_gets_a_legal_kernel_of_its_signature(device, m, n, k):
    of = signature()
    spec, config = chosen((m, n, k), of, device)
    assert spec in heuristics.specs(of, device)
    assert not legality.check(spec)
    # The configuration is the kernel's own, with the order of tiles for this shape.
    assert config.binary() == spec.config.binary()


@pytest.mark.parametrize("majors", MAJORS, ids="-".join)
@pytest.mark.parametrize("dtype", ["bf16", "f16"])
@pytest.mark.parametrize("epilogue", [*builtin.BY_OP.values(), statistics], ids=lambda e: e.name)
def test_every_signature_has_kernels_for_few_rows_and_for_many(epilogue, dtype, majors):
    of = signature(epilogue, dtype, majors)
    for capability in [(9, 0), (8, 0), (8, 6), (8, 9)]:
        specs = heuristics.specs(of, Device(capability, 100))
        assert len(set(specs)) == len(specs)
        assert 2 <= len(specs) <= MAX_KERNELS
        assert not any(legality.check(s) for s in specs)
    assert {type(s.config) for s in heuristics.specs(of, H100)} == {Sm90Config}


@pytest.mark.parametrize("d_dtype", ["f16", "bf16", "f32"])
@pytest.mark.parametrize("d", [1, 2, 4, 8])
def test_any_alignment_and_dtype_of_d_can_be_served_by_tma(d, d_dtype):
    of = signature(builtin.bias_relu_residual, d=d, d_dtype=d_dtype)
    assert {type(s.config) for s in heuristics.specs(of, H100)} == {Sm90Config}


@pytest.mark.parametrize("m", [1, 2, 8, 16, 32])
@pytest.mark.parametrize(("n", "k"), [(4096, 4096), (6144, 4096), (28672, 8192)])
def test_few_rows_go_on_the_narrow_side_of_the_instruction(m, n, k):
    spec, config = chosen((m, n, k))
    assert config.swap_ab
    # A wider tile would multiply rows that are not there.
    assert spec.config.threadblock.n <= max(16, 2 * m)


@pytest.mark.parametrize("m", [512, 4096, 8192])
def test_many_rows_use_large_tiles_and_are_not_swapped(m):
    spec, config = chosen((m, 8192, 8192))
    tile = spec.config.threadblock
    assert not config.swap_ab
    assert tile.m * tile.n >= 128 * 96


@pytest.mark.parametrize("pool", [heuristics.SM90, heuristics.SM80, heuristics.SM80_UNALIGNED])
@pytest.mark.parametrize("side", [0, 1, 2])
def test_more_work_is_never_predicted_to_be_much_faster(pool, side):
    for candidate in pool:
        times = []
        for extent in (512, 1024, 4096, 16384):
            shape = [4096, 4096, 4096]
            shape[side] = extent
            times.append(heuristics.cost(candidate, tuple(shape), 132))
        assert all(later >= 0.95 * earlier for earlier, later in itertools.pairwise(times)), candidate.config


def test_a_tile_is_never_predicted_to_cost_nothing():
    assert all(c.step + c.tile > 0 for c in (*heuristics.SM90, *heuristics.SM80))


@pytest.mark.parametrize("shape", [(64, 8_400_000, 64), (1, 16_800_000, 8), (8_388_608, 16, 1024)])
def test_no_grid_is_larger_than_the_hardware_allows(shape):
    config = chosen(shape)[1]
    columns = shape[0] if config.swap_ab else shape[1]
    assert config.schedule != "warp_specialized" or columns / config.threadblock.n <= 65535


@pytest.mark.parametrize(("a", "b"), [(1, 8), (8, 1), (1, 1), (2, 8), (8, 4)])
def test_operands_that_tma_cannot_address_go_to_mma_sync(a, b):
    specs = heuristics.specs(signature(a=a, b=b, d=1), H100)
    assert specs
    assert {type(s.config) for s in specs} == {Sm80Config}
    # sm_80 machine code does not run on Hopper.
    assert {s.target for s in specs} == {"sm_90"}
    for spec in specs:
        # cp.async copies 4 bytes and more; narrower loads leave two stages.
        assert spec.config.stages == 2 if min(a, b) == 1 else spec.config.stages > 2
        assert not legality.check(spec)


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (8, 9)])
def test_older_devices_get_kernels_for_their_own_target(capability):
    specs = heuristics.specs(signature(), Device(capability, 100))
    assert {s.target for s in specs} == {f"sm_{capability[0]}{capability[1]}"}
    assert {type(s.config) for s in specs} == {Sm80Config}


@pytest.mark.parametrize("capability", [(7, 5), (10, 0), (12, 0)])
def test_a_device_without_a_target_has_no_candidates(capability):
    assert heuristics.candidates(signature(), Device(capability, 100)) == ()


def test_the_order_of_tiles_covers_an_odd_strip_at_the_end():
    clustered = next(c.config for c in heuristics.SM90 if c.config.cluster.m == 2)
    rows = clustered.threadblock.m * clustered.cluster.m
    assert heuristics.with_order(clustered, (3 * rows, 4096, 4096)).swizzle == 1
    assert heuristics.with_order(clustered, (4 * rows, 4096, 4096)).swizzle == 2
    assert heuristics.with_order(clustered, (11 * rows, 4096, 4096)).swizzle == 2


def test_the_order_of_tiles_is_no_part_of_the_kernel():
    of = signature()
    orders = {chosen((m, 4096, 4096), of)[1] for m in range(1, 4096, 61)}
    kernels = {chosen((m, 4096, 4096), of)[0] for m in range(1, 4096, 61)}
    assert len(orders) > len(kernels)
