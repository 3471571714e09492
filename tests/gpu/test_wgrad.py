"""Groups of K on the device: against float64, group by group, with rows of no group poisoned with NaN."""

import pytest
import torch

import cutlass_ops as co
from cutlass_ops.artifacts.loader import Reason, refusal
from cutlass_ops.epilogue import builtin
from cutlass_ops.run.grouped import wgrad_op
from tests.gpu import kernels, oracle, tensors

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0), reason="groups of K need Hopper"
    ),
]

BF16 = torch.bfloat16
SPECS = kernels.ragged_k()
ALPHA = 0.5
GUARD = 300  # elements before and after D
SIZES = {
    "ragged": [5, 0, 130, 64, 1, 0, 77],
    "whole steps": [64, 128, 64],
    "empty ones first and last": [0, 0, 200, 0, 0],
    "all empty": [0, 0, 0],
    "one group": [300],
    "all rows in one of many": [0] * 40 + [300] + [0] * 20,
    "a row each": [1] * 50,
}
CHOSEN = ["ragged_k-pingpong-plain", "ragged_k-cooperative-plain", "ragged_k-swapped-plain"]


def normal(*shape, dtype=BF16, scale=1.0):
    return (torch.randn(*shape, device="cuda") * scale).to(dtype)


def offsets_of(sizes):
    return torch.tensor(sizes, device="cuda").cumsum(0).int()


def operands(spec, rows, m, n):
    """Draw x and the gradient of a kernel's types, with lines longer than the extents."""
    dtype = tensors.DTYPES[spec.a.dtype.name]
    return [normal(rows, -(-extent // 8) * 8 + 8, dtype=dtype, scale=0.3)[:, :extent] for extent in (m, n)]


def inputs_of(spec, experts, m, n, *, shared=False):
    lead = () if shared else (experts,)
    shapes = {"ROW": (n,), "COL": (m,), "TILE": (m, n)}
    found = {}
    for declared, operand in spec.typed_inputs:
        dtype = tensors.DTYPES[operand.dtype.name]
        if declared.kind.name == "SCALAR":
            found[declared.name] = ALPHA
        elif declared.kind.name == "TILE" and operand.aligned:
            found[declared.name] = normal(*lead, m, -(-n // 8) * 8 + 8, dtype=dtype)[..., :n]
        else:
            found[declared.name] = normal(*lead, *shapes[declared.kind.name], dtype=dtype)
    return found


def exact(graph, x, y, sizes, inputs):
    """Return every output in float64: no code of the library says which rows a group has."""
    found, first = {o.name: [] for o in graph.outputs}, 0
    own = {"ROW": 1, "COL": 1, "TILE": 2}
    for expert, size in enumerate(sizes):
        rows, first = slice(first, first + size), first + size
        given = {}
        for declared in graph.inputs:
            value = inputs[declared.name]
            each = declared.kind.name in own and value.ndim > own[declared.kind.name]
            given[declared.name] = value[expert] if each else value
        for name, value in oracle.exact(graph, x[rows].mT, y[rows], given).items():
            found[name].append(value)
    return {name: torch.stack(values) for name, values in found.items()}


class Framed:
    """A D inside a buffer of NaN, with lines longer than N."""

    def __init__(self, operand, experts, m, n):
        dtype, step = tensors.DTYPES[operand.dtype.name], 8 if operand.aligned else 1
        lines, length = (m, n) if operand.major == "row" else (n, m)
        ld = -(-length // step) * step + 3 * step
        self.buffer = torch.full((experts * lines * ld + 2 * GUARD * step,), torch.nan, device="cuda", dtype=dtype)
        inner = self.buffer[GUARD * step : -GUARD * step].view(experts, lines, ld)[..., step : step + length]
        self.out = inner if operand.major == "row" else inner.mT

    def assert_whole(self):
        assert not self.out.isnan().any(), "the kernel left elements of D out"
        stray = int((~self.buffer.isnan()).sum()) - self.out.numel()
        assert stray == 0, f"the kernel wrote {stray} elements outside of D"


def launched(spec, x, y, ends, inputs):
    """Run a kernel into framed outputs and return them by name."""
    types, (experts, m, n) = (spec.d, *spec.outputs), (ends.numel(), x.shape[1], y.shape[1])
    framed = {o.name: Framed(of, experts, m, n) for o, of in zip(spec.epilogue.outputs, types, strict=True)}
    given = {name: f.out for name, f in framed.items()}
    co.build(spec)(x.mT, y, ends, *inputs.values(), out=given)
    torch.cuda.synchronize()
    for f in framed.values():
        f.assert_whole()
    return given


def run(spec, sizes, m, n, unused=0, *, shared=False):
    """Run a kernel, and compare all outputs with float64."""
    used = sum(sizes)
    x, y = operands(spec, max(1, used + unused), m, n)
    x[used:], y[used:] = torch.nan, torch.nan
    inputs = inputs_of(spec, len(sizes), m, n, shared=shared)
    found = launched(spec, x, y, offsets_of(sizes), inputs)
    for name, wanted in exact(spec.epilogue, x, y, sizes, inputs).items():
        if wanted.any():
            oracle.assert_close(found[name], wanted)
        else:
            assert not found[name].any()


# ---- Kernels ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("name", SPECS)
def test_every_kernel(name, sizes):
    run(SPECS[name], sizes, m=200, n=136)


@pytest.mark.parametrize("name", SPECS)
def test_rows_of_no_group_reach_nothing(name):
    run(SPECS[name], SIZES["ragged"], m=200, n=136, unused=90)


@pytest.mark.parametrize("name", [n for n in SPECS if n.endswith(("inputs", "tiles", "registers"))])
def test_inputs_that_all_experts_share(name):
    run(SPECS[name], SIZES["ragged"], m=200, n=136, shared=True)


@pytest.mark.parametrize("name", [n for n, spec in SPECS.items() if not spec.d.aligned])
def test_odd_columns(name):
    run(SPECS[name], SIZES["ragged"], m=197, n=131, unused=3)


@pytest.mark.parametrize("name", [n for n in SPECS if n.endswith("plain")])
def test_many_tiles_of_many_waves(name):
    run(SPECS[name], [700, 3, 0, 2500, 64, 1], m=520, n=1096)


@pytest.mark.parametrize("name", CHOSEN)
def test_more_than_a_thousand_groups(name):
    generator = torch.Generator().manual_seed(1)
    run(SPECS[name], torch.randint(0, 90, (1100,), generator=generator).tolist(), m=72, n=40, unused=5)


@pytest.mark.parametrize("name", SPECS)
def test_no_group_sees_another(name):
    """Rows that are not finite reach the D of their group alone."""
    spec, sizes, poisoned = SPECS[name], [70, 33, 100], 1
    x, y = operands(spec, sum(sizes), 136, 72)
    inputs, ends = inputs_of(spec, len(sizes), 136, 72), offsets_of(sizes)
    wanted = exact(spec.epilogue, x, y, sizes, inputs)
    x[70:103] = y[70:103] = torch.inf
    given = {o.name: torch.empty(3, 136, 72, device="cuda", dtype=tensors.DTYPES[of.dtype.name])
             for o, of in zip(spec.epilogue.outputs, (spec.d, *spec.outputs), strict=True)}  # fmt: skip
    if spec.d.major == "col":
        given = {name: torch.empty_like(d.mT.contiguous()).mT for name, d in given.items()}
    co.build(spec)(x.mT, y, ends, *inputs.values(), out=given)
    for name, d in given.items():
        for expert in range(3):
            if expert != poisoned:
                oracle.assert_close(d[expert], wanted[name][expert])


FALSE = {
    "falling": [200, 50, 250, 10, 300],
    "beyond the last row": [100, 5000, 1 << 30, 2147483647, 200],
    "negative": [-5, -2147483648, 100, -1, 300],
}


@pytest.mark.parametrize("offsets", FALSE.values(), ids=FALSE)
@pytest.mark.parametrize("name", SPECS)
def test_false_offsets_reach_nothing_outside(name, offsets):
    spec = SPECS[name]
    x, y = operands(spec, 300, 200, 136)
    ends = torch.tensor(offsets, device="cuda", dtype=torch.int32)
    launched(spec, x, y, ends, inputs_of(spec, len(offsets), 200, 136))


@pytest.mark.parametrize("name", CHOSEN)
def test_offsets_are_what_the_kernel_before_computes(name):
    """Kernels overlap with what runs before them, and still see what it wrote."""
    kernel, experts, rows = co.build(SPECS[name]), 40, 512
    x, y = normal(rows, 64, scale=0.3), normal(rows, 136, scale=0.3)
    generator = torch.Generator("cuda").manual_seed(0)
    before, counts = [], []
    for _ in range(50):
        expert = torch.randint(0, experts, (rows,), device="cuda", generator=generator)
        counted = torch.bincount(expert, minlength=experts)
        before.append(kernel(x.mT, y, counted.cumsum(0, dtype=torch.int32)))
        counts.append(counted)
    for d, counted in zip(before, counts, strict=True):
        oracle.assert_close(d, exact(SPECS[name].epilogue, x, y, counted.tolist(), {})["d"])


@pytest.mark.parametrize("name", CHOSEN)
def test_offsets_change_between_replays(name):
    spec, rows, experts = SPECS[name], 300, 9
    x, y = operands(spec, rows, 136, 72)
    kernel, ends = co.build(spec), offsets_of([300] + [0] * 8)
    out = torch.empty(experts, 136, 72, device="cuda", dtype=BF16)
    kernel(x.mT, y, ends, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernel(x.mT, y, ends, out=out)
    for sizes in ([0] * 8 + [300], [33] * 9, [1, 0, 128, 5, 0, 0, 64, 65, 2]):
        ends.copy_(offsets_of(sizes))
        out.fill_(torch.nan)
        graph.replay()
        oracle.assert_close(out, exact(spec.epilogue, x, y, sizes, {})["d"])


@pytest.mark.parametrize("name", CHOSEN)
def test_each_launch_gives_the_same_bits(name):
    spec, sizes = SPECS[name], [700, 3, 0, 1500, 64, 1]
    x, y = operands(spec, sum(sizes), 520, 392)
    kernel, ends = co.build(spec), offsets_of(sizes)
    first = kernel(x.mT, y, ends)
    assert all(torch.equal(kernel(x.mT, y, ends), first) for _ in range(20))


# ---- Refusals of kernels, which a warm call relies on ----------------------------------------------------------------


@pytest.mark.parametrize("name", CHOSEN)
def test_a_kernel_refuses_what_it_cannot_address(name):
    x, y, out, ends = normal(96, 64), normal(96, 136), normal(3, 64, 136), offsets_of([10, 20, 60])

    def refused(x, y, out, ends):
        status = co.build(SPECS[name]).loaded.launch(x.mT, y, out, ends, 0, 1, None)
        torch.cuda.synchronize()
        return refusal(status) if status else None

    assert refused(x, y, out, ends) is None
    assert refused(x, y[:90], out, ends) == (1, Reason.SHAPE)
    assert refused(x, y, out[0], ends) == (2, Reason.SHAPE)
    assert refused(x, y, out[:2], ends) == (3, Reason.SHAPE)
    assert refused(x, y, out, ends.long()) == (3, Reason.DTYPE)
    assert refused(x, y, out, ends.cpu()) == (3, Reason.DEVICE)
    assert refused(x.mT.contiguous().mT, y, out, ends) == (0, Reason.MAJOR)
    assert refused(x, y, out[:1].expand(3, 64, 136), ends) == (2, Reason.MAJOR)


# ---- Calls -----------------------------------------------------------------------------------------------------------


@co.epilogue
def accumulate(acc, before: co.Tile, alpha: co.Scalar):
    return acc * alpha + before


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
@pytest.mark.parametrize(("experts", "rows", "m", "n"), [(7, 264, 200, 96), (3, 8, 104, 64), (4, 3000, 512, 256)])
def test_calls(dtype, experts, rows, m, n):
    x, y = normal(rows, m, dtype=dtype, scale=0.3), normal(rows, n, dtype=dtype, scale=0.3)
    sizes = torch.bincount(torch.randint(0, experts, (rows,)), minlength=experts).tolist()
    op = wgrad_op()
    before = op.served_warm
    for _ in range(3):
        oracle.assert_close(co.grouped_gemm_wgrad(x, y, offsets_of(sizes)), exact(op.graph, x, y, sizes, {})["d"])
    assert op.served_warm >= before + 2
    found = co.grouped_gemm_wgrad(x, y, offsets_of(sizes), out_dtype=torch.float32)
    oracle.assert_close(found, exact(op.graph, x, y, sizes, {})["d"])


def test_it_is_added_in_place():
    x, y, sizes = normal(90, 64, scale=0.3), normal(90, 136, scale=0.3), [30, 0, 50]
    total = torch.randn(3, 64, 136, device="cuda")
    wanted = exact(wgrad_op().graph, x, y, sizes, {})["d"] * 2 + total.double()
    inputs = {"before": total, "alpha": 2.0, "out": total}
    assert co.grouped_gemm_wgrad(x, y, offsets_of(sizes), epilogue=accumulate, **inputs) is total
    oracle.assert_close(total, wanted)


def test_no_rows():
    ends = torch.zeros(3, device="cuda", dtype=torch.int32)
    found = co.grouped_gemm_wgrad(normal(0, 64), normal(0, 136), ends)
    assert found.shape == (3, 64, 136)
    assert not found.any()


def test_one_row():
    x, y = normal(1, 64), normal(1, 72)
    found = co.grouped_gemm_wgrad(x, y, offsets_of([0, 1]))
    oracle.assert_close(found, exact(builtin.identity.graph, x, y, [0, 1], {})["d"])


def test_nothing_waits_for_the_device():
    x, y, ends = normal(96, 64), normal(96, 136), offsets_of([10, 20, 60])
    co.grouped_gemm_wgrad(x, y, ends)
    with tensors.without_synchronisation():
        co.grouped_gemm_wgrad(x, y, ends)


def test_a_compiled_program():
    x, y = normal(96, 64, scale=0.3), normal(96, 136, scale=0.3)
    compiled = torch.compile(
        lambda x, y, counts: co.grouped_gemm_wgrad(x * 2, y, counts.cumsum(0, dtype=torch.int32)), fullgraph=True
    )
    for sizes in ([10, 20, 66], [0, 96, 0]):
        found = compiled(x, y, torch.tensor(sizes, device="cuda"))
        oracle.assert_close(found, exact(wgrad_op().graph, x * 2, y, sizes, {})["d"])
