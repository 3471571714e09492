"""Fp8State: the scales that greatest absolute values give, what is kept of them, and what is refused."""

import copy
import io
import math

import pytest
import torch
from torch import nn

import cutlass_ops as co
from cutlass_ops.operand import reference
from cutlass_ops.run import fp8

E4M3, E5M2, BF16 = torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16
INF, NAN = math.inf, math.nan


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_special_values(dtype):
    amax = torch.tensor([0.0, -0.0, INF, NAN, 2.0**-149, 2.0**-126, torch.finfo(torch.float32).max])
    found = fp8.scale_of(amax, dtype)
    assert found[:4].tolist() == [1.0] * 4
    assert (found[4:] >= torch.finfo(torch.float32).tiny).all()
    # What a kernel multiplies by is finite, so nothing becomes NaN that was none.
    assert found.reciprocal().isfinite().all()
    x = torch.tensor([0.0, 2.0**-149, 1.0, -INF])
    assert fp8.divided(x, found[4], dtype).float().isfinite().all()


@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
def test_delayed_scaling_uses_what_earlier_passes_gave(algorithm):
    state = co.nn.Fp8State(history=3, algorithm=algorithm)
    given = [448.0, 896.0, 224.0, 0.0, 112.0, 112.0, 112.0]
    scales = []
    for amax in given:
        state.record(torch.tensor([amax / 2, amax]))
        state.record(torch.tensor(amax / 4, dtype=BF16))  # the greatest of a pass counts
        state.step()
        scales.append(state.scale.item())
    wanted = {
        "max": [1.0, 2.0, 2.0, 2.0, 0.5, 0.25, 0.25],
        # Nothing but zeros says nothing.
        "most_recent": [1.0, 2.0, 0.5, 0.5, 0.25, 0.25, 0.25],
    }
    assert scales == wanted[algorithm]


@pytest.mark.parametrize("bad", [INF, NAN, -INF])
def test_a_value_that_is_no_number_does_not_undo_a_scale(bad):
    state = co.nn.Fp8State(history=2)
    state.record(torch.tensor([bad, 224.0]))
    state.step()
    assert state.scale == 0.5
    for given in ([bad], [], [bad]):
        state.record(torch.tensor(given))
        state.step()
    assert state.scale == 0.5
    assert state.history.isfinite().all()


def test_the_amax_of_an_epilogue_is_what_it_records():
    @co.epilogue
    def quantised(acc, scale: co.Scalar):
        return {"d": acc * co.e.reciprocal(scale), "amax": co.e.amax(acc, dim=1)}

    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randn(*shape, generator=generator).to(BF16) for shape in ((32, 64), (64, 48)))
    state, exact = co.nn.Fp8State(margin=0), x.double() @ w.double()
    errors = []
    for _ in range(2):
        d, amax = co.gemm(x, w, epilogue=quantised, scale=state.scale, out_dtype=E4M3)
        errors.append(float((d.double() * state.scale - exact).norm() / exact.norm()))
        state.record(amax)
        state.step()
    assert state.scale == fp8.scale_of(exact.float().abs().amax(), E4M3)
    assert errors[1] <= 0.03


@pytest.mark.parametrize("scaling", ["delayed", "static", "current"])
def test_nothing_waits_for_a_value(scaling):
    """Tensors on "meta" have none: reading one would fail."""
    state = co.nn.Fp8State(scaling=scaling, device="meta")
    x = torch.empty(4, 8, device="meta", dtype=BF16)
    data, scale = state.quantize(x)
    assert (data.dtype, data.shape, scale.shape) == (E4M3, (4, 8), ())
    if scaling != "current":
        state.record(torch.empty(4, device="meta"))
        state.step()


# ---- Quantising ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("of", [BF16, torch.float16, torch.float32])
def test_current_scaling_of_the_tensor_and_of_rows(dtype, known, of):
    x = (torch.randn(2, 5, 64, generator=torch.Generator().manual_seed(1)) * 3).to(of)
    rows = x.abs().amax(-1)
    for recipe, amax in (("TensorWise", rows.amax()), ("RowWise", rows)):
        state = co.nn.Fp8State(recipe, dtype=dtype, scaling="current")
        data, scale = state.quantize(x, rows if known else None)
        assert torch.equal(scale, fp8.scale_of(amax, dtype))
        full = scale.reshape(*scale.shape, *(1,) * (3 - scale.ndim)) if recipe == "RowWise" else scale
        assert torch.equal(data.float(), reference.rounded(x.float() * full.reciprocal(), dtype).float())
        assert (data.double() * full - x.double()).norm() <= torch.finfo(dtype).eps / 2 * x.double().norm()
        assert data.float().abs().max() == torch.finfo(dtype).max


@pytest.mark.parametrize("bad", [INF, NAN, -INF])
def test_current_scaling_leaves_out_what_is_no_number(bad):
    x = torch.tensor([[448.0, bad], [2.0, 896.0], [bad, bad]])
    assert co.nn.Fp8State(scaling="current").quantize(x).scale == 2
    assert co.nn.Fp8State(scaling="current").quantize(x, x[1]).scale == 2
    data, scale = co.nn.Fp8State("RowWise", scaling="current").quantize(x)
    assert scale.tolist() == [1, 2, 1]
    saturated = {INF: 448.0, -INF: -448.0}.get(bad, NAN)
    assert data.float()[:2].tolist() == [[448.0, pytest.approx(saturated, nan_ok=True)], [1, 448]]
    assert not x[0].isfinite().all()


def test_delayed_scaling_quantises_by_the_scale_it_has_and_static_scaling_keeps_it():
    state = co.nn.Fp8State(history=1)
    x = torch.tensor([[896.0, -1.0]])
    assert state.quantize(x).values.float().tolist() == [[448.0, -1.0]]
    state.step()
    found = state.quantize(x / 2)
    assert found.scale is state.scale
    assert found.values.float().tolist() == [[224.0, -0.25]]
    state.scaling = "static"
    history = state.history.clone()
    state.quantize(x * 100)
    state.record(x.amax(1))
    state.step()
    assert state.scale == 2
    assert torch.equal(state.history, history)


@pytest.mark.parametrize("shape", [(0, 8), (3, 0)])
@pytest.mark.parametrize(
    ("recipe", "scaling"), [("TensorWise", "current"), ("RowWise", "current"), ("TensorWise", "delayed")]
)
def test_nothing_is_quantised_to_nothing(shape, recipe, scaling):
    data, scale = co.nn.Fp8State(recipe, scaling=scaling).quantize(torch.empty(shape))
    assert data.shape == shape
    assert (scale == 1).all()


# ---- As a module -----------------------------------------------------------------------------------------------------


class Network(torch.nn.Module):
    """A network with states among its parts."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)
        self.hidden = co.nn.Fp8State(history=4)
        self.rows = co.nn.Fp8State("RowWise", scaling="current")


def test_a_network_saves_and_loads_it():
    first, second = Network(), Network()
    first.hidden.record(torch.tensor(896.0))
    first.hidden.step()
    saved = io.BytesIO()
    torch.save(first.state_dict(), saved)
    saved.seek(0)
    loaded = torch.load(saved, weights_only=True)
    assert {name for name in loaded if "linear" not in name} == {"hidden.scale", "hidden.history"}
    second.load_state_dict(loaded)
    assert second.hidden.scale == 2
    assert second.hidden.history.tolist() == [0.0, 896.0, 0.0, 0.0]
    assert not list(first.hidden.parameters())
    other = copy.deepcopy(first)
    other.hidden.scale.zero_()
    assert first.hidden.scale == 2
    with pytest.raises(RuntimeError, match="size mismatch for history"):
        co.nn.Fp8State(history=2).load_state_dict(first.hidden.state_dict())


@pytest.mark.slow
def test_a_compiled_function_updates_it():
    def step(state, x):
        data, scale = state.quantize(x)
        state.step()
        return data, scale.clone()

    plain, compiled = co.nn.Fp8State(history=2), co.nn.Fp8State(history=2)
    torch._dynamo.reset()
    run = torch.compile(step, backend="aot_eager", fullgraph=True)
    for factor in (1.0, 3.0, 0.5):
        x = torch.full((2, 3), factor)
        for found, wanted in zip(run(compiled, x), step(plain, x), strict=True):
            assert torch.equal(found.float(), wanted.float())
    assert torch.equal(plain.history, compiled.history)


def test_inference_mode_and_no_grad():
    state = co.nn.Fp8State()
    x = torch.ones(2, 2, requires_grad=True)
    with torch.inference_mode():
        state.quantize(torch.ones(2, 2))
        state.step()
    with torch.no_grad():
        assert state.quantize(x).values.dtype is E4M3
    with pytest.raises(ValueError, match=r"^x requires grad, and no gradient passes through FP8.* torch\.no_grad\(\)"):
        state.quantize(x)
    state.record(x.abs().amax(1))  # only looked at
    assert not state.history.requires_grad


def test_a_state_of_inference_mode_goes_on_outside():
    with torch.inference_mode():
        state = co.nn.Fp8State()
        moved = co.nn.Fp8State().to("meta")
        state.record(torch.tensor(224.0))
        copied = copy.deepcopy(state)
    assert not moved.history.is_inference()
    state.record(torch.tensor(896.0))
    state.step()
    assert (state.scale.item(), state.quantize(torch.ones(2, 2)).scale is state.scale) == (2.0, True)
    # What PyTorch copied there, it changes nowhere else.
    loaded = co.nn.Fp8State()
    loaded.load_state_dict(copied.state_dict(), assign=True)
    for other in (copied, loaded):
        before = other.history.clone()
        for call in (lambda x=other: x.record(torch.ones(1)), other.step, lambda x=other: x.quantize(torch.ones(2, 2))):
            with pytest.raises(ValueError, match=r"come from torch\.inference_mode\(\).* by copy\.deepcopy\(state\)"):
                call()
        assert torch.equal(other.history, before)
    copy.deepcopy(copied).record(torch.ones(1))


def test_vmap_is_refused_where_a_state_would_change():
    state, x = co.nn.Fp8State(), torch.linspace(-3, 3, 24).reshape(2, 3, 4)
    amax = x.abs().amax((1, 2))
    for name, call, given in (
        ("amax", lambda amax: state.record(amax), (amax,)),
        ("x", lambda x: tuple(state.quantize(x)), (x,)),
        ("amax", lambda x, amax: tuple(state.quantize(x, amax)), (x, amax)),
    ):
        with pytest.raises(NotImplementedError, match=rf"^torch\.vmap goes over {name}, and .* use scaling='current'"):
            torch.vmap(call)(*given)
    assert not state.history.any()
    scales = torch.vmap(lambda x: co.nn.Fp8State(scaling="current").quantize(x).scale)(x)
    assert torch.equal(scales, fp8.scale_of(amax, E4M3))
    # One greatest value of all is recorded, as it is outside.
    torch.vmap(lambda x: state.quantize(x, torch.tensor(3.0)).scale)(x)
    assert state.history[0] == 3


STATE, CURRENT = co.nn.Fp8State(), co.nn.Fp8State(scaling="current")
ERRORS = {
    "dtype": (lambda: co.nn.Fp8State(dtype=BF16), TypeError, r"^dtype is torch.bfloat16: use torch.float8_e4m3fn or"),
    "recipe": (lambda: co.nn.Fp8State("rows"), ValueError, r"^recipe is 'rows': use 'TensorWise' or 'RowWise'$"),
    "scaling": (lambda: co.nn.Fp8State(scaling="late"), ValueError, r"^scaling is 'late': use 'delayed', 'cu"),
    "rows, delayed": (lambda: co.nn.Fp8State("RowWise"), ValueError, r"^scaling is 'delayed' with the recipe"),
    "history": (lambda: co.nn.Fp8State(history=0), ValueError, r"^history is 0: pass the number of passes"),
    "algorithm": (lambda: co.nn.Fp8State(algorithm="mean"), ValueError, r"^algorithm is 'mean': use 'max' or"),
    "margin": (lambda: co.nn.Fp8State(margin="1"), TypeError, r"^margin must be a number, not str: pass powers of two"),
    "record": (lambda: CURRENT.record(torch.ones(1)), ValueError, r"^record is for delayed scaling"),
    "step": (lambda: CURRENT.step(), ValueError, r"^step is for delayed scaling"),
    "amax": (lambda: STATE.record(3.0), TypeError, r"^amax must be a torch.Tensor, not float"),
    "amax of integers": (lambda: STATE.record(torch.ones(1).int()), TypeError, r"^amax is torch.int32: use torch"),
    "FP8": (lambda: STATE.quantize(torch.ones(2).to(E4M3)), TypeError, r"^x is torch.float8_e4m3fn: use torch.float32"),
    "no rows": (
        lambda: co.nn.Fp8State("RowWise", scaling="current").quantize(torch.ones(())), ValueError,
        "^x has no dimensions",
    ),
    **{
        f"margin {m}": (lambda m=m: co.nn.Fp8State(margin=m), ValueError, r"^margin is .*: pass powers of two, from")
        for m in (NAN, 200, -65)
    },
    **{
        f"amax of rows {s}": (
            lambda s=s: co.nn.Fp8State("RowWise", scaling="current").quantize(torch.ones(2, 4, 16), torch.ones(s)),
            ValueError, r"^amax has shape .*: with the recipe 'RowWise' it must have shape \(2, 4\)",
        )
        for s in ((3,), (4, 2), (2, 4, 2), ())
    },
    "amax elsewhere": (
        lambda: STATE.record(torch.ones(2, device="meta")), ValueError, "^amax is on meta and the state is on cpu",
    ),
    "amax beside x": (
        lambda: STATE.quantize(torch.ones(2, 16), torch.ones(2, device="meta")), ValueError,
        "^amax is on meta and x is on cpu",
    ),
    "x elsewhere": (
        lambda: STATE.quantize(torch.ones(2, 16, device="meta")), ValueError, "^x is on meta and the state is on cpu",
    ),
    "advice": (lambda: CURRENT.step(), ValueError, r"leave out this call, or set scaling = 'delayed'$"),
    "advice, rows": (
        lambda: co.nn.Fp8State("RowWise", scaling="current").step(), ValueError, r"leave out this call$",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("call", "kind", "message"), ERRORS.values(), ids=ERRORS)
def test_errors_say_what_to_do(call, kind, message):
    with pytest.raises(kind, match=message):
        call()


# ---- Where a state comes from ----------------------------------------------------------------------------------------


def net_of(**named):
    net = nn.Sequential(nn.Linear(4, 4), nn.ModuleDict({"state": co.nn.Fp8State(**named)}))
    return net, net[1]["state"]


def test_a_state_that_leaves_meta_is_a_new_one(monkeypatch):
    empty = torch.empty_like
    monkeypatch.setattr(torch, "empty_like", lambda x, **named: empty(x, **named).fill_(1e30))
    with torch.device("meta"):
        net, state = net_of(history=3)
    assert state.scale.is_meta
    net.to_empty(device="cpu")
    assert net[0].weight[0, 0] == 1e30  # as PyTorch's modules: they have to be initialised
    assert (state.scale.item(), state.history.tolist()) == (1.0, [0.0] * 3)
    state.record(torch.tensor(448.0))
    net.to_empty(device="cpu")  # not from meta: reset_parameters is for this
    assert state.scale == torch.tensor(1e30)


@pytest.mark.parametrize("scaling", ["delayed", "static", "current"])
def test_a_state_is_reset(scaling):
    net, state = net_of(scaling=scaling)
    net.to_empty(device="cpu")
    for x in net.buffers():
        x.fill_(1e30)  # what memory may hold
    state.reset_parameters()  # as FSDP does
    assert (state.scale.item(), state.history.abs().sum().item(), state.scaling) == (1.0, 0.0, scaling)
    co.nn.Fp8State("RowWise", scaling="current").reset_parameters()


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_loaded_state_stays_fp32(assign, dtype, device):
    if device == "meta" and not assign:
        return
    saved = {"scale": torch.tensor(0.5, dtype=dtype), "history": torch.full((16,), 224.0, dtype=dtype)}
    state = co.nn.Fp8State(device=device)
    state.load_state_dict(saved, assign=assign)
    assert {x.dtype for x in state.buffers()} == {torch.float32}
    state.record(torch.tensor(448.0))
    state.step()
    assert (state.scale.item(), state.quantize(torch.tensor([1.0])).scale.dtype) == (1.0, torch.float32)
    assert copy.deepcopy(state).scale.item() == 1.0
