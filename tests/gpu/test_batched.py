"""Batches on the device: every kind of kernel against float64, with D and what surrounds it poisoned with NaN."""

import itertools

import pytest
import torch

import cutlass_ops as co
from cutlass_ops.artifacts.loader import Reason, refusal
from cutlass_ops.choose import dispatch
from cutlass_ops.declare.config import Ordered
from cutlass_ops.declare.problem import Problem
from cutlass_ops.run import named, ops, requests
from cutlass_ops.run.call import check_call, device_of, signature_of
from cutlass_ops.run.registry import OpSignature, Registry
from cutlass_ops.tuner.trial import Trial
from tests.gpu import kernels, oracle, tensors

pytestmark = pytest.mark.gpu

BF16 = torch.bfloat16
SPECS = kernels.batched()
ALPHA = 0.5


def normal(*shape, dtype=BF16, scale=1.0):
    return (torch.randn(*shape, device="cuda") * scale).to(dtype)


def exact(graph, a, b, inputs):
    """Return every output in float64, batch by batch: no code of the library says how batches lie."""
    lead = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    a, b = (x.expand(*lead, *x.shape[-2:]) for x in (a, b))
    own = {i.name: 1 if i.kind.name in ("ROW", "COL") else 2 for i in graph.inputs}
    found: dict[str, list[torch.Tensor]] = {}
    for place in itertools.product(*map(range, lead)):
        given = {
            name: x[place] if isinstance(x, torch.Tensor) and x.ndim > own[name] else x for name, x in inputs.items()
        }
        for name, value in oracle.exact(graph, a[place], b[place], given).items():
            found.setdefault(name, []).append(value)
    return {name: torch.stack(values).view(*lead, *values[0].shape) for name, values in found.items()}


class Framed:
    """Outputs of all batches inside a buffer of NaN, with lines and batches apart."""

    def __init__(self, lead, rows, columns, dtype, major="row", *, aligned=True):
        outer, inner = (rows, columns) if major == "row" else (columns, rows)
        step = 8 if aligned else 1
        left, ld = step, -(-inner // step) * step + 3 * step
        self.buffer = torch.full((*lead, outer + 2, ld), torch.nan, device="cuda", dtype=dtype)
        window = self.buffer[..., 1 : outer + 1, left : left + inner]
        self.out = window if major == "row" else window.mT
        self._window = window

    def assert_frame_untouched(self):
        stray = (~self.buffer.isnan()).sum() - (~self._window.isnan()).sum()
        assert stray == 0, f"the kernel wrote {int(stray)} elements outside of its output"


def operands(spec, lead, m, n, k):
    """Draw A and B of a kernel's types, with lines longer than the extents."""

    def matrix(rows, columns, operand):
        outer, inner = (rows, columns) if operand.major == "row" else (columns, rows)
        width = -(-inner // 8) * 8 + 8 if operand.aligned else inner + 1
        x = normal(*lead, outer, width, dtype=tensors.DTYPES[operand.dtype.name], scale=k**-0.25)[..., :inner]
        return x if operand.major == "row" else x.mT

    return matrix(m, k, spec.a), matrix(k, n, spec.b)


def inputs_of(spec, lead, m, n):
    """Draw the epilogue's inputs, each with all batches."""
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


def run(spec, a, b, inputs, lead, m, n):
    """Run a kernel into framed outputs, and compare all of them with float64."""
    kernel = co.build(spec)
    types = (spec.d, *spec.outputs)
    framed = [Framed(lead, m, n, tensors.DTYPES[of.dtype.name], of.major, aligned=of.aligned) for of in types]
    names = [o.name for o in spec.epilogue.outputs]
    kernel(a, b, *inputs.values(), out={name: f.out for name, f in zip(names, framed, strict=True)})
    wanted = exact(spec.epilogue, a, b, inputs)
    for name, f in zip(names, framed, strict=True):
        f.assert_frame_untouched()
        oracle.assert_close(f.out, wanted[name])


# ---- Kernels ---------------------------------------------------------------------------------------------------------


# Edges in every direction; extents of D that TMA stores are multiples of 8.
EXTENTS = [(3, 130, 72, 96), (5, 64, 64, 64), (1, 8, 200, 24), (140, 40, 40, 40)]


@pytest.mark.parametrize("extents", EXTENTS, ids=str)
@pytest.mark.parametrize("name", SPECS)
def test_every_kernel(name, extents):
    spec, (count, m, n, k) = SPECS[name], extents
    if "col" in (spec.a.major, spec.d.major):
        m = -(-m // 8) * 8  # whole accesses along M
    a, b = operands(spec, (count,), m, n, k)
    run(spec, a, b, inputs_of(spec, (count,), m, n), (count,), m, n)


@pytest.mark.parametrize("name", [n for n in SPECS if n.endswith("inputs")])
def test_two_dimensions_of_batches(name):
    spec, lead, (m, n, k) = SPECS[name], (3, 4), (72, 136, 80)
    a, b = operands(spec, lead, m, n, k)
    run(spec, a, b, inputs_of(spec, lead, m, n), lead, m, n)


@pytest.mark.parametrize("name", [n for n in SPECS if n.endswith(("inputs", "registers"))])
def test_what_batches_share(name):
    spec, lead, (m, n, k) = SPECS[name], (3, 4), (72, 136, 80)
    a, b = operands(spec, lead, m, n, k)
    every = inputs_of(spec, lead, m, n)
    shared = {name: x[0, 0] if isinstance(x, torch.Tensor) else x for name, x in every.items()}
    run(spec, a, b, shared, lead, m, n)  # all inputs
    run(spec, a[0, 0], b, every, lead, m, n)  # A by all
    run(spec, a[0], b, every, lead, m, n)  # A by the outer dimension
    run(spec, a, b[:, :1], every, lead, m, n)  # B by the inner one
    run(spec, a[:1], b[:, :1], every, lead, m, n)
    partly = {name: x[:1].expand_as(x) if isinstance(x, torch.Tensor) else x for name, x in every.items()}
    run(spec, a, b, partly, lead, m, n)  # stride 0


@pytest.mark.parametrize("name", [n for n in SPECS if n.endswith("plain")])
def test_permuted_views_of_heads(name):
    spec = SPECS[name]
    tokens, heads, head = 72, 3, 64
    packed = normal(2, tokens, 3, heads, head, scale=head**-0.25)  # (sequences, tokens, q k v, heads, head)
    q, k, _ = (packed[:, :, at].transpose(1, 2) for at in range(3))
    out = torch.full((2, tokens, heads, tokens), torch.nan, device="cuda", dtype=BF16).transpose(1, 2)
    assert co.build(spec)(q, k.mT, out=out) is out
    oracle.assert_close(out, q.double() @ k.mT.double())


def test_heads_of_one_buffer_are_read_and_written():
    packed = normal(2, 72, 2, 3, 64, scale=0.3)
    x, out = packed[:, :, 0].transpose(1, 2), packed[:, :, 1].transpose(1, 2)
    b = normal(2, 3, 64, 64, scale=0.3)
    before, wanted = x.clone(), x.double() @ b.double()
    out.fill_(torch.nan)
    co.gemm(x, b, out=out)
    oracle.assert_close(out, wanted)
    assert torch.equal(x, before)


def test_a_residual_in_place():
    a, b, residual = normal(3, 72, 64, scale=0.3), normal(3, 64, 136, scale=0.3), normal(3, 72, 136)
    wanted = a.double() @ b.double() + residual.double()
    assert co.gemm_residual(a, b, residual, out=residual) is residual
    oracle.assert_close(residual, wanted)


@pytest.mark.parametrize(
    "name", ["batched-warp_specialized-plain", "batched-pingpong-plain", "batched-sm80-plain", "batched-small-plain"]
)
def test_more_batches_than_a_grid_has(name):
    spec, count = SPECS[name], 70_000
    a, b = normal(count, 8, 8), normal(count, 8, 8).mT
    out = torch.full((count, 8, 8), torch.nan, device="cuda", dtype=BF16)
    if "warp_specialized" in name:
        with pytest.raises(ValueError, match="a has a shape"):
            co.build(spec)(a, b, out=out)
        return
    co.build(spec)(a, b, out=out)
    oracle.assert_close(out, a.double() @ b.double())


@pytest.mark.parametrize("order", [(0, 1), (1, 1), (1, 2), (2, 1), (2, 4), (5, 1), (6, 2)], ids=str)
@pytest.mark.parametrize("name", ["batched-pingpong-plain", "batched-cooperative-plain", "batched-cluster-plain"])
def test_every_order_of_tiles(name, order):
    kernel = co.build(SPECS[name])
    count, m, n, k = 40, 200, 136, 72
    a, b = normal(count, m, k, scale=0.3), normal(count, n, k, scale=0.3).mT
    out = torch.full((count, m, n), torch.nan, device="cuda", dtype=BF16)
    assert kernel.loaded.launch(a, b, out, *order, None) == 0
    oracle.assert_close(out, a.double() @ b.double())


# ---- Refusals of kernels, which a warm call relies on ----------------------------------------------------------------


def refused(name, a, b, out, *inputs):
    status = co.build(SPECS[name]).loaded.launch(a, b, out, *inputs, 0, 1, None)
    torch.cuda.synchronize()
    return refusal(status) if status else None


@pytest.mark.parametrize("name", ["batched-pingpong-plain", "batched-sm80-plain", "batched-small-plain"])
def test_a_kernel_refuses_what_it_cannot_address(name):
    a, b, out = normal(3, 64, 64), normal(3, 64, 64).mT, normal(3, 64, 64)
    assert refused(name, a, b, out) is None
    assert refused(name, a[:2], b, out) == (0, Reason.SHAPE)
    assert refused(name, a, b[:2], out) == (1, Reason.SHAPE)
    assert refused(name, a, b, out[:2])[1] is Reason.SHAPE
    assert refused(name, a[:1], b[:1], out) == (2, Reason.SHAPE)
    assert refused(name, a[0], b[0], out[0]) == (2, Reason.SHAPE)
    assert refused(name, a, b, normal(1, 1, 3, 64, 64)) == (2, Reason.SHAPE)
    assert refused(name, a, b, normal(64, 64).expand(3, 64, 64)) == (2, Reason.MAJOR)
    assert refused(name, a, b.mT, out) == (1, Reason.MAJOR)
    assert refused(name, a, b, a) == (2, Reason.OVERLAP)
    odd = normal(3 * (64 * 64 + 4)).as_strided((3, 64, 64), (64 * 64 + 4, 64, 1))
    assert refused(name, odd, b, out) == (0, Reason.ALIGNMENT)


def test_a_kernel_refuses_inputs_of_other_batches():
    name, (m, n) = "batched-pingpong-inputs", (64, 64)
    a, b, out = normal(2, 3, m, 64), normal(2, 3, n, 64).mT, normal(2, 3, m, n)
    bias, scale, residual = normal(2, 3, n), normal(m), normal(m, n)
    assert refused(name, a, b, out, bias, scale, residual, 1.0) is None
    assert refused(name, a, b, out, bias[0], scale, residual, 1.0) == (3, Reason.SHAPE)
    assert refused(name, a, b, out, bias, scale[None], residual, 1.0) == (4, Reason.SHAPE)
    assert refused(name, a, b, out, bias, scale, residual[None], 1.0) == (5, Reason.SHAPE)
    assert refused(
        name, a, b, out, bias[..., ::2].repeat_interleave(2, -1).mT.contiguous().mT, scale, residual, 1.0
    ) == (
        3,
        Reason.MAJOR,
    )


# ---- Ops -------------------------------------------------------------------------------------------------------------


SHAPES = [
    ((1000, 64, 64), (1000, 64, 64)),
    ((8, 300, 256), (8, 256, 200)),
    ((3, 65, 63), (3, 63, 33)),
    ((2, 3, 100, 64), (3, 64, 72)),
    ((40, 72), (5, 72, 48)),
    ((2, 2, 3, 40, 64), (3, 64, 48)),
    ((4, 1, 256), (4, 256, 512)),
]


@pytest.mark.parametrize(("of_a", "of_b"), SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_calls(of_a, of_b, dtype):
    k = of_a[-1]
    a, b = normal(*of_a, dtype=dtype, scale=k**-0.25), normal(*of_b, dtype=dtype, scale=k**-0.25)
    op = ops.graph_op(f"calls_{dtype}", requests.called(co.gemm).graph)
    wanted = a.double() @ b.double()
    for _ in range(2):
        oracle.assert_close(op(a, b), wanted, a @ b)
    assert op.refused_warm == 0


def test_every_named_op():
    a, b = normal(3, 200, 128, scale=0.3), normal(3, 128, 136, scale=0.3)
    for op in named.NAMED:
        given = {i.name: normal(3, 136) if i.kind.name == "ROW" else normal(3, 200, 136) for i in op.graph.inputs}
        oracle.assert_close(op(a, b, **given), exact(op.graph, a, b, given)["d"])


def test_fp8():
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("FP8 needs Hopper")
    a, b = (normal(3, rows, 256, scale=0.25).to(torch.float8_e4m3fn) for rows in (200, 136))
    wanted = a.double() @ b.mT.double()
    found = co.gemm(a, b.mT)
    assert oracle.error(found, wanted) <= 2.0**-8


def test_epilogues_of_one_gemm_take_a_launch_for_each_batch():
    a, b = normal(3, 200, 128, scale=0.3), normal(3, 128, 136, scale=0.3)
    found = co.gemm(a, b, epilogue=kernels.summed_twice, bias=normal(136).zero_())
    oracle.assert_close(found.row_z, (a.double() @ b.double()).sum(-1))


def test_launches_are_captured_and_replayed():
    a, b = normal(16, 64, 64, scale=0.3), normal(16, 64, 64, scale=0.3)
    out = torch.empty(16, 64, 64, device="cuda", dtype=BF16)
    co.gemm(a, b, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        co.gemm(a, b, out=out)
    a.copy_(normal(16, 64, 64, scale=0.3))
    out.fill_(torch.nan)
    graph.replay()
    oracle.assert_close(out, a.double() @ b.double())


def test_a_prepared_launch():
    a, b = normal(16, 64, 64, scale=0.3), normal(16, 64, 64, scale=0.3)
    launch = co.prepare_launch(co.gemm, a, b)
    a.copy_(normal(16, 64, 64, scale=0.3))
    oracle.assert_close(launch(), a.double() @ b.double())


def test_a_compiled_program():
    a, b = normal(2, 3, 72, 64, scale=0.3), normal(3, 64, 136, scale=0.3)
    bias = normal(136)
    compiled = torch.compile(lambda a, b, bias: co.gemm_bias_relu(a, b, bias), fullgraph=True)
    wanted = torch.relu(a.double() @ b.double() + bias.double())
    oracle.assert_close(compiled(a, b, bias), wanted)


@pytest.mark.parametrize("name", ["batched-pingpong-inputs", "batched-sm80-inputs", "batched-small-inputs"])
def test_a_trial_finds_a_kernel_right_and_races_pytorch(name):
    spec = SPECS[name]
    trial = Trial(OpSignature.of(spec), Problem(64, 64, 64, 100), torch.device("cuda", torch.cuda.current_device()))
    assert trial.admit(Ordered(spec.config), Registry.current().kernel(spec)) is None
    trial.admit_peers()
    measured, peers = trial.race(3, lambda: None)
    assert measured[0].microseconds > 0
    assert [peer for peer, _ in peers] == ["eager"]


def drawn(seed):
    """Return random extents, broadcasting, majors and permuted memory: A, B and the inputs of an epilogue."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*choices):
        return choices[int(torch.randint(len(choices), (), generator=generator))]

    lead = draw((3,), (17,), (2, 5), (1, 4))
    m, n, k = (draw(1, 8, 24, 63, 64, 136, 200) for _ in range(3))

    def matrix(rows, columns):
        own = draw(lead, lead, lead[1:] if len(lead) > 1 else lead, tuple(draw(1, x) for x in lead))
        outer, inner, turned = draw((rows, columns, False), (columns, rows, True))
        x = normal(*own, outer, inner, scale=k**-0.25)
        if len(own) == 2 and draw(True, False):
            x = normal(own[0], outer, own[1], inner, scale=k**-0.25).transpose(1, 2)
        return x.mT if turned else x

    a, b = matrix(m, k), matrix(k, n)
    if torch.broadcast_shapes(a.shape[:-2], b.shape[:-2]) != lead:
        a = a.expand(*lead, m, k).contiguous()
    bias, residual = normal(*draw((n,), (*lead, n))), normal(*draw((m, n), (*lead, m, n)))
    return a, b, {"bias": bias, "scale": normal(m), "residual": residual, "alpha": ALPHA}


SEEDS = range(40)


@pytest.fixture(scope="module")
def built():
    """Compile what serves the calls below, side by side."""
    op, device = requests.called(kernels.of_batches), device_of(torch.device("cuda", torch.cuda.current_device()))
    calls = [check_call(op.graph, a, b, inputs, None, None) for a, b, inputs in map(drawn, SEEDS)]
    specs = [dispatch.choose(signature_of(each, device), device, each.problem)[0] for each in calls]
    Registry.current().kernels(dict.fromkeys(specs))


@pytest.mark.usefixtures("built")
@pytest.mark.parametrize("seed", SEEDS)
def test_drawn_batches(seed):
    """By whatever kernel serves."""
    a, b, inputs = drawn(seed)
    found = co.gemm(a, b, epilogue=kernels.of_batches, **inputs)
    oracle.assert_close(found, exact(requests.called(kernels.of_batches).graph, a, b, inputs)["d"])
