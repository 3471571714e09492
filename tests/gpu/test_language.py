"""What an epilogue can say besides functions of one value, in kernels of every kind."""

import math

import pytest
import torch

import cutlass_ops as co
from cutlass_ops.operand import reference
from tests.gpu import language

pytestmark = pytest.mark.gpu

NAN, INF = math.nan, math.inf
SEEDS = [(0, 0), (2**63 - 1, -1), (-(2**63), 2**40 + 5)]


def operands(m, n, k=64):
    a, b = (torch.randint(-2, 3, s, device="cuda").bfloat16() for s in ((m, k), (n, k)))
    return a, b.t()


def shapes(spec):
    return (
        [(1, 4), (3, 132), (16, 68)] if isinstance(spec.config, co.types.GemvConfig) else [(1, 4), (65, 68), (333, 516)]
    )


@pytest.mark.parametrize("name", list(language.places()))
def test_values_know_their_place(name):
    spec = language.places()[name]
    for (m, n), (seed, offset) in zip(shapes(spec), SEEDS, strict=True):
        if spec.d.major == "row" and spec.d.alignment == 1:
            m, n = m, n - 1
        if spec.d.major == "col" and spec.d.aligned:
            m = (m + 3) // 4 * 4
        a, b = operands(m, n)
        inputs = {"other": b} if spec.epilogue.products else {}
        inputs |= {"seed": seed} | ({} if spec.epilogue.products else {"offset": offset})
        found = co.build(spec)(a, b, **inputs)
        wanted = reference.gemm_reference(a, b, spec.epilogue, inputs, d_dtype=torch.float32)
        values = found._asdict() if isinstance(found, tuple) else {"d": found}
        for key, value in values.items():
            assert torch.equal(value, wanted[key]), f"{key} at {(m, n)}"


@pytest.mark.parametrize("name", list(language.wrapping()))
def test_indices_wrap(name):
    spec = language.wrapping()[name]
    for m, n in shapes(spec):
        a, b = operands(m, n)
        wanted = reference.gemm_reference(a.cpu(), b.cpu(), spec.epilogue, {}, d_dtype=torch.float32)["d"]
        assert wanted.unique().numel() > 1
        assert torch.equal(co.build(spec)(a, b).cpu(), wanted), f"at {(m, n)}"


def test_a_seed_on_the_device_is_read_there_also_in_a_graph():
    spec = language.places()[f"placed-{language.SM90.slug}"]
    a, b = operands(65, 68)
    kernel = co.build(spec)
    seed = torch.tensor(2**40 + 3, device="cuda")
    assert torch.equal(kernel(a, b, seed=seed, offset=1), kernel(a, b, seed=2**40 + 3, offset=1))
    assert torch.equal(kernel(a, b, seed=seed.int() % 7, offset=1), kernel(a, b, seed=int(seed.int() % 7), offset=1))
    out = torch.empty(65, 68, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernel(a, b, seed=seed, offset=1, out=out)
    for number in (5, -9):
        seed.fill_(number)
        graph.replay()
        assert torch.equal(out, kernel(a, b, seed=number, offset=1))


# ---- Reductions ----------------------------------------------------------------------------------------------------


def check_reductions(spec, a, b, residual, what):
    found = co.build(spec)(a, b, residual=residual)
    x = found.d
    dim = 1 if spec.epilogue.outputs[1].kind.value == "col" else 0
    for key, function in {"most": torch.argmax, "least": torch.argmin}.items():
        if hasattr(found, key):
            value = getattr(found, key)
            assert value.dtype == torch.int32
            assert torch.equal(value.long(), function(x.cpu(), dim).to(x.device)), f"{key}, {what}"
    if hasattr(found, "lse"):
        torch.testing.assert_close(
            found.lse.double(), x.double().logsumexp(dim), rtol=2e-6, atol=2e-6, equal_nan=True, msg=what
        )
    for key, along in {"low": 1 if hasattr(found, "lowest") else dim, "lowest": 0}.items():
        if hasattr(found, key):
            assert torch.equal(getattr(found, key).nan_to_num(7e37), x.amin(along).nan_to_num(7e37)), f"{key}, {what}"
    again = co.build(spec)(a, b, residual=residual)
    assert all(torch.equal(y.nan_to_num(7), z.nan_to_num(7)) for y, z in zip(found, again, strict=True)), what


@pytest.mark.parametrize("name", list(language.reductions()))
def test_reductions(name):
    spec = language.reductions()[name]
    for m, n in [(4, 4), (64, 68), (332, 516), (1092, 1128)]:
        a, b = operands(m, n)
        nothing = torch.zeros(m, n, device="cuda")
        # Whole numbers: many are equal, and the first of them counts.
        check_reductions(spec, a, b, nothing, f"ties at {(m, n)}")
        check_reductions(spec, a * 0, b, nothing, f"all equal at {(m, n)}")
        check_reductions(spec, a, b, torch.randn_like(nothing), f"{(m, n)}")
        check_reductions(spec, a, b, nothing - 1e4, f"far below zero at {(m, n)}")
        check_reductions(spec, a, b, nothing + 1e4, f"far above zero at {(m, n)}")
        special = nothing.clone()
        special[0], special[-1, -2:] = -INF, INF
        special[m // 2, n // 2 :], special[:, 1] = NAN, -INF
        check_reductions(spec, a, b, special, f"special values at {(m, n)}")


# ---- Names and shapes of inputs ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(language.names()))
def test_inputs_have_any_name(name):
    spec = language.names()[name]
    a, b = operands(65, 68)
    inputs = {
        "c": torch.randn(68, device="cuda"),
        "d": torch.randn(65, device="cuda"),
        "n": torch.randn(65, 68, device="cuda"),
        "float_": 0.5,
        "threadIdx": 3,
    }
    found = co.build(spec)(a, b, **inputs)
    wanted = reference.gemm_reference(a, b, spec.epilogue, inputs, d_dtype=torch.float32)
    for key, value in found._asdict().items():
        torch.testing.assert_close(value, wanted[key], rtol=1e-5, atol=1e-4)


def test_what_is_broadcast_is_served_and_counted():
    op = co.gemm_bias_residual
    a, b = operands(64, 128)
    bias, residual = torch.randn(1, device="cuda").bfloat16(), torch.randn(1, 128, device="cuda").bfloat16()
    full = op(a, b, bias.expand(128).contiguous(), residual.expand(64, 128).contiguous())
    before = op.copied_inputs
    for _ in range(2):
        assert torch.equal(op(a, b, bias.expand(128), residual), full)
        assert torch.equal(op(a, b, bias.expand(1, 128), residual.expand(64, 128)), full)
    assert op.copied_inputs == before + 8
    assert torch.equal(op(a, b, bias.expand(128).contiguous()[None], residual.expand(64, 128).contiguous()), full)
    assert op.copied_inputs == before + 8


# ---- Drawn epilogues -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(language.drawn()))
def test_drawn_epilogues_against_float64(name):
    spec, programs = language.drawn_specs()[name], language.drawn()[name]
    m, n = (13, 72) if isinstance(spec.config, co.types.GemvConfig) else (77, 72)
    a, b = operands(m, n, 8)
    draw = {"bias": (n,), "scale": (m,), "residual": (m, n)}
    inputs = {key: torch.randn(shape, device="cuda").bfloat16() for key, shape in draw.items()}
    found = co.build(spec)(a, b, **inputs, gate=0.625)
    leaves = {key: x.double() for key, x in inputs.items()} | {"acc": a.double() @ b.double()}
    leaves |= {"scale": leaves["scale"][:, None], "gate": torch.tensor(0.625, dtype=torch.float64, device=a.device)}
    for at, program in enumerate(programs):
        exact = language.value_of(program, leaves, (m, n)).double().expand(m, n)
        value = getattr(found, f"v{at}").double()
        # A value of the order of what came before it may be a small difference of two.
        assert ((value - exact).abs() <= 2e-5 * (exact.abs() + 1 + leaves["acc"].abs())).all(), program.steps
