"""Backwards that run again by the calls that an earlier one made: the bits are those of one that decides everything."""

import pytest
import torch
from fake_device import fake_device
from torch.utils.flop_counter import FlopCounterMode

import cutlass_ops as co
from cutlass_ops.run import chained, tape, warm
from cutlass_ops.run.ops import op_of
from cutlass_ops.run.tape import Tapes

BF16 = torch.bfloat16
STEPS = 6  # the second of a kind is recorded, later ones run from the record


@co.epilogue
def scaled(acc, scale: co.Scalar, bias: co.Row, column: co.Col):
    return co.e.silu(acc * scale + bias) * column


@co.epilogue
def several(acc, bias: co.Row):
    z = acc + bias
    return {"d": co.e.gelu(z), "pre": z, "greatest": co.e.max(z, dim=1), "square": co.e.sum(z * z, dim=1)}


@co.epilogue
def per_row(acc, column: co.Col):
    return acc * column


def leaf(*shape, dtype=BF16):
    return torch.randn(shape).to(dtype).requires_grad_()


def linear(op, *inputs, m=(24,), dtype=BF16, b=None):
    """Return what draws a call's tensors and what computes its results."""

    def drawn():
        x, w = leaf(*m, 32, dtype=dtype), leaf(*(b or ()), 16, 32, dtype=dtype)
        return [x, w, *(leaf(*shape, dtype=dtype) for shape in inputs)]

    return drawn, lambda x, w, *rest: op(x, w.mT, *rest)


def residual_is_x():
    return [leaf(24, 32), leaf(32, 32)]


def groups():
    return [leaf(24, 32), leaf(3, 16, 32), leaf(3, 16)]


def mlp():
    return [leaf(24, 32), leaf(16, 32), leaf(16), leaf(32, 16)]


OFFSETS = torch.tensor([5, 5, 24], dtype=torch.int32)
CASES = {
    "bias and ReLU": linear(co.gemm_bias_relu, (16,)),
    "what is stored": linear(co.gemm_bias_gelu, (16,)),
    "leading dimensions": linear(co.gemm_bias_gelu, (16,), m=(2, 3, 4)),
    "FP16": linear(co.gemm_bias_gelu, (16,), dtype=torch.float16),
    "FP64": linear(co.gemm_bias_relu, (16,), dtype=torch.float64),
    "a residual": linear(co.gemm_bias_relu_residual, (16,), (24, 16)),
    "batches": linear(co.gemm_bias_relu, (16,), m=(3, 8), b=(3,)),
    "a row of each batch": linear(co.gemm_bias_relu, (3, 16), m=(3, 8), b=(3,)),
    "a shared weight": linear(co.gemm_bias_relu, (16,), m=(3, 8), b=(1,)),
    "a gate": (lambda: [leaf(24, 32), leaf(16, 32), leaf(16, 32)], lambda x, w, v: co.gemm_swiglu(x, w.t(), v.t())),
    "a norm": (
        lambda: [leaf(24, 32), leaf(16, 32), leaf(32)],
        lambda x, w, gamma: co.rmsnorm_gemm(x, w.t(), gamma, eps=1e-5),
    ),
    "several results": (
        lambda: [leaf(24, 32), leaf(16, 32), leaf(16)],
        lambda x, w, bias: co.gemm(x, w.t(), epilogue=several, bias=bias),
    ),
    "a number": (
        lambda: [leaf(24, 32), leaf(16, 32), leaf(16), leaf(24)],
        lambda x, w, bias, column: co.gemm(x, w.t(), epilogue=scaled, scale=0.5, bias=bias, column=column),
    ),
    "a scalar": (
        lambda: [leaf(24, 32), leaf(16, 32), leaf(dtype=torch.float32), leaf(16), leaf(24)],
        lambda x, w, scale, bias, column: co.gemm(x, w.t(), epilogue=scaled, scale=scale, bias=bias, column=column),
    ),
    "x is the residual": (residual_is_x, lambda x, w: co.gemm_residual(x, w.t(), x)),
    "groups": (groups, lambda x, w, rows: co.gemm(x, w.mT, groups=co.Groups(OFFSETS))),
    "a column of groups": (
        lambda: [leaf(24, 32), leaf(3, 16, 32), leaf(24)],
        lambda x, w, column: co.gemm(x, w.mT, groups=co.Groups(OFFSETS), epilogue=per_row, column=column),
    ),
    "a chain": (mlp, lambda x, w, bias, v: chained.chain(co.gemm_bias_gelu, op_of(None), x, w.t(), v.t(), [bias], [])),
}


@pytest.fixture(params=["PyTorch", "kernels"])
def device(request, monkeypatch):
    if request.param == "PyTorch":
        yield None
        return
    monkeypatch.setattr("cutlass_ops.run.backward.has_kernels", lambda a: a.dtype in (torch.float16, BF16))
    with fake_device(monkeypatch) as fake:
        yield fake


@pytest.fixture
def programs(monkeypatch):
    """Note each run of a recorded program, of those that the test records."""
    ran, made = [], tape._Tape.program
    for op in warm._ALL:
        op.recorders.clear()

    def program(recording, results):
        found = made(recording, results)
        return found and (lambda tensors: ran.append(1) or found(tensors))

    monkeypatch.setattr(tape._Tape, "program", program)
    return ran


def steps(drawn, run, backward, count=STEPS):
    torch.manual_seed(0)
    found = []
    for _ in range(count):
        tensors = drawn()
        results = run(*tensors)
        results = [results] if isinstance(results, torch.Tensor) else list(results)
        found.append([*results, *backward(results, tensors)])
    return found


def undecided(monkeypatch):
    """Have every backward decide everything."""
    monkeypatch.setattr(Tapes, "run", lambda tapes, what, compute, tensors: compute(tensors))


def of_all(results, tensors):
    results = [x for x in results if x.requires_grad]
    return torch.autograd.grad(results, tensors, [torch.randn_like(x) for x in results], allow_unused=True)


def of_one_value(results, tensors):
    """Gradients that repeat one value, as those of a sum."""
    return torch.autograd.grad(sum(x.float().sum() for x in results if x.requires_grad), tensors, allow_unused=True)


def of_some(results, tensors):
    """Other gradients at every other step."""
    of_some.count += 1
    asked = tensors[of_some.count % 2 :: 2]
    return torch.autograd.grad(results[0], asked, torch.randn_like(results[0]), allow_unused=True)


def of_leaves(results, tensors):
    torch.autograd.backward(results[0], torch.randn_like(results[0]))
    return [x.grad for x in tensors]


def twice(results, tensors):
    """A graph that is retained: what is saved must survive the first backward."""
    grad = torch.randn_like(results[0])
    first = torch.autograd.grad(results[0], tensors, grad, retain_graph=True, allow_unused=True)
    second = torch.autograd.grad(results[0], tensors, grad, allow_unused=True)
    assert all(x is y is None or torch.equal(x, y) for x, y in zip(first, second, strict=True))
    return second


def transposed(results, tensors):
    """Gradients by columns, which kernels read in another way."""
    grad = torch.randn_like(results[0].mT.contiguous()).mT
    return torch.autograd.grad(results[0], tensors, grad, allow_unused=True)


BACKWARDS = [of_all, of_one_value, of_some, of_leaves, twice, transposed]


@pytest.mark.sample(5)
@pytest.mark.parametrize("backward", BACKWARDS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("case", CASES)
def test_later_steps_have_the_bits_of_ones_that_decide_everything(device, programs, monkeypatch, case, backward):
    of_some.count = 0
    found = steps(*CASES[case], backward)
    if case != "x is the residual":  # two arguments are one tensor
        assert len(programs) >= 1
    of_some.count = 0
    undecided(monkeypatch)
    for ours, wanted in zip(found, steps(*CASES[case], backward), strict=True):
        for x, y in zip(ours, wanted, strict=True):
            assert (x is None) == (y is None)
            if x is not None:
                assert x.stride() == y.stride()
                assert torch.equal(x, y)


def test_no_step_is_repeated_for_tensors_that_lie_otherwise(device, programs):
    x, w = leaf(24, 32), leaf(16, 32)
    for _ in range(3):
        torch.autograd.grad(co.gemm(x, w.t()).sum(), (x, w))
    assert len(programs) == 1
    half = torch.float16
    others = [
        (leaf(32, 24).t(), w),
        (x, leaf(32, 16).t()),
        (leaf(23, 32), w),
        (leaf(24, 32, dtype=half), leaf(16, 32, dtype=half)),
    ]
    for a, b in others:
        first, second = torch.autograd.grad(co.gemm(a, b.t()).float().sum(), (a, b))
        assert (first.shape, second.shape) == (a.shape, b.shape)
    assert len(programs) == 1


def test_numbers_of_a_call_are_those_of_its_own_step(device, programs):
    x, w, bias, column = leaf(24, 32), leaf(16, 32), leaf(16), leaf(24)
    sizes = []
    for scale in (1.0, 1.0, 1.0, 2.0, 4.0, 1.0):
        d = co.gemm(x, w.t(), epilogue=scaled, scale=scale, bias=bias, column=column)
        sizes.append(torch.autograd.grad(d.float().sum(), w)[0].float().norm().item())
    assert sizes[0] == sizes[1] == sizes[2] == sizes[5]
    assert len({*sizes}) == 3


def test_a_lazily_negated_gradient_keeps_its_sign_after_steps_were_recorded(device):
    x, w, bias, grad = leaf(24, 32), leaf(16, 32), leaf(16), torch.randn(24, 16).to(BF16)
    step = lambda g: torch.autograd.grad(co.gemm_bias(x, w.mT, bias), [x, w, bias], g)  # noqa: E731
    for _ in range(STEPS):
        wanted = step(grad)
    assert all(map(torch.equal, step(torch._neg_view(-grad)), wanted))


def test_where_two_arguments_are_one_tensor_a_later_step_may_have_two(device):
    @co.epilogue
    def times(acc, tile: co.Tile):
        return acc * tile

    w = leaf(32, 32)
    for _ in range(3):
        x = leaf(24, 32)
        torch.autograd.grad(co.gemm(x, w.t(), epilogue=times, tile=x).float().sum(), x)
    x, tile = leaf(24, 32), leaf(24, 32)
    found = torch.autograd.grad(co.gemm(x, w.t(), epilogue=times, tile=tile).float().sum(), (x, tile))
    wanted = torch.autograd.grad(((x.float() @ w.float().t()) * tile.float()).sum(), (x, tile))
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours.float(), theirs.float(), rtol=2**-6, atol=2**-3)


def test_gradients_added_to_main_grad(device, programs, monkeypatch):
    def total():
        torch.manual_seed(0)
        w = torch.nn.Parameter(torch.randn(16, 32).to(BF16))
        w.main_grad = torch.zeros(16, 32)
        for _ in range(STEPS):
            x = leaf(24, 32)
            co.gemm(x, w.t()).backward(torch.randn(24, 16).to(BF16))
        return w.main_grad

    found = total()
    assert programs
    undecided(monkeypatch)
    assert torch.equal(found, total())


def test_a_gradient_may_be_differentiated_again_after_steps_were_recorded(device, programs):
    x, w = leaf(24, 32), leaf(16, 32)
    for _ in range(3):
        torch.autograd.grad(co.gemm_bias_relu(x, w.t(), torch.zeros(16).to(BF16)).sum(), (x, w))
    count = len(programs)
    d = co.gemm(x, w.t()).float()
    (of_x,) = torch.autograd.grad(d.square().sum(), x, create_graph=True)
    (again,) = torch.autograd.grad(of_x.float().sum(), w)
    assert again.shape == w.shape
    assert len(programs) == count


def test_hooks_of_saved_tensors_see_each_step(device):
    packed = []
    x, w = leaf(24, 32), leaf(16, 32)
    wanted = None
    for _ in range(STEPS):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(1) or t.clone(), lambda t: t):
            d = co.gemm_bias_gelu(x, w.t(), torch.ones(16).to(BF16))
        found = torch.autograd.grad(d.float().sum(), (x, w))
        wanted = wanted or found
        assert all(map(torch.equal, found, wanted))
    assert len(packed) % STEPS == 0


@torch.no_grad()
def test_a_step_that_reads_other_tensors_is_not_repeated(programs):
    tapes, other = Tapes(), torch.ones(3)
    for at in range(3):
        other.fill_(at)
        (found,) = tapes.run("a key", lambda tensors: [tensors[0] * other], [torch.ones(3)])
        assert found.tolist() == [at] * 3
    assert programs == []


def test_where_something_watches_every_step_decides(programs):
    x, w = leaf(24, 32), leaf(16, 32)
    for _ in range(4):
        d = co.gemm(x, w.t())
        with FlopCounterMode(display=False) as counter:
            torch.autograd.grad(d.float().sum(), (x, w))
        assert counter.get_total_flops() == 2 * 2 * 24 * 16 * 32
    assert programs == []
