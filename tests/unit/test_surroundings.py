"""What surrounds a call: tensors of other classes, modes and tracers, copies and pickles, numbers, saved programs.

The ways that calls go are the same for every device, so that the CPU shows them; tests/gpu/test_surroundings.py has
what only a device can do.
"""

import contextlib
import copy
import pickle
import subprocess
import sys
import textwrap
import weakref

import numpy as np
import pytest
import torch
from torch.autograd import forward_ad
from torch.distributed.utils import _apply_to_tensors
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.data import default_collate
from torch.utils.flop_counter import FlopCounterMode

import cutlass_ops as co
from cutlass_ops.operand.results import Outputs
from cutlass_ops.run import gated, kernels, norms, ops, portable
from tests.sampling import sampled

BF16 = torch.bfloat16
M, N, K = 8, 32, 64


@co.epilogue
def several(acc, bias: co.Row, scale: co.Scalar):
    z = acc * scale + bias
    return {"d": co.relu(z), "pre": z, "square": co.sum_square(z, dim=1)}


X, W, BIAS = torch.randn(M, K).to(BF16), torch.randn(N, K).to(BF16).t(), torch.randn(N).to(BF16)
WANTED = co.gemm_bias_relu(X, W, BIAS)


class Relu(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.op, self.epilogue = co.gemm_bias_relu, several
        self.linear = torch.nn.Linear(K, N, dtype=BF16).requires_grad_(False)

    def forward(self, x):
        return self.op(x, self.linear.weight.t(), self.linear.bias)


# ---- Tensors of other classes --------------------------------------------------------------------------------------


class Own(torch.Tensor):
    """A class that changes nothing."""


class Halved(torch.Tensor):
    """A class that says itself what functions mean for it."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        plain = [x.as_subclass(torch.Tensor) / 2 if isinstance(x, Halved) else x for x in args]
        return function, function(*plain, **(kwargs or {}))


CLASSES = {
    "functional": (torch._to_functional_tensor, torch._from_functional_tensor),
    "buffer": (torch.nn.Buffer, lambda x: x),
    "own": (lambda x: x.as_subclass(Own), lambda x: x),
}


@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize("argument", ["a", "b", "bias", "scale"])
def test_tensors_of_other_classes_give_the_right_result(kind, argument):
    wrap, plain = CLASSES[kind]
    given = {"a": X, "b": W, "bias": BIAS, "scale": torch.tensor(0.5)}
    given[argument] = wrap(given[argument])
    found = co.gemm(**given, epilogue=several)
    wanted = co.gemm(X, W, epilogue=several, bias=BIAS, scale=0.5)
    assert found._fields == wanted._fields
    wrapped = kind == "functional" and argument != "scale"
    assert all(torch.equal(plain(x) if wrapped else x, y) for x, y in zip(found, wanted, strict=True))
    if kind == "own" and argument != "scale":
        assert type(co.gemm_bias_relu(*list(given.values())[:3])) is Own


def test_outputs_of_other_classes():
    for wrap, plain in ((lambda x: TwoTensor(x, x), lambda x: x.a), CLASSES["own"]):
        out = wrap(torch.full((M, N), torch.nan, dtype=BF16))
        assert co.gemm_bias_relu(X, W, BIAS, out=out) is out
        assert torch.equal(plain(out), WANTED)
    with pytest.raises(TypeError, match="out is a functional tensor"):
        co.gemm_bias_relu(X, W, BIAS, out=torch._to_functional_tensor(torch.empty(M, N, dtype=BF16)))


def test_a_class_may_say_itself_what_a_call_means():
    function, found = co.gemm_bias_relu(X.as_subclass(Halved), W, BIAS)
    assert function is co.gemm_bias_relu
    assert torch.equal(found, co.gemm_bias_relu(X / 2, W, BIAS))


@pytest.fixture
def group():
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.filterwarnings("ignore")  # torch.distributed's own
def test_a_distributed_tensor_is_refused_in_words_and_a_collectives_result_is_waited_for(group):
    from torch.distributed._functional_collectives import AsyncCollectiveTensor
    from torch.distributed.tensor import Replicate, distribute_tensor, init_device_mesh

    mesh = init_device_mesh("cpu", (1,))
    for name, arguments in {"a": [X, W, BIAS], "b": [X, W, BIAS], "bias": [X, W, BIAS]}.items():
        at = ("a", "b", "bias").index(name)
        arguments[at] = distribute_tensor(arguments[at].contiguous(), mesh, [Replicate()])
        with pytest.raises(TypeError, match=rf"^{name} is a DTensor.*pass {name}\.to_local\(\)"):
            co.gemm_bias_relu(*arguments)
    out = distribute_tensor(torch.empty(M, N, dtype=BF16), mesh, [Replicate()])
    with pytest.raises(TypeError, match=r"^out is a DTensor.*pass out\.to_local\(\)"):
        co.gemm_bias_relu(X, W, BIAS, out=out)
    assert torch.equal(co.gemm_bias_relu(AsyncCollectiveTensor(X), W, AsyncCollectiveTensor(BIAS)), WANTED)


# ---- Modes and tracers ---------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore")  # torch.jit is deprecated
def test_jit_trace_holds_the_operator():
    function = torch.jit.trace(
        lambda x: co.gemm(x, W, epilogue=several, bias=BIAS, scale=0.5), (X,), check_trace=False, strict=False
    )
    assert "cutlass_ops::fused_gemm" in str(function.graph)
    assert torch.equal(function(X + X)[1], co.gemm(X + X, W, epilogue=several, bias=BIAS, scale=0.5).pre)


def test_a_symbolic_trace_goes_through_pickle(monkeypatch):
    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = co.nn.Linear(K, N, activation="mish", dtype=BF16)

        def forward(self, x):
            y = co.gemm(x, W, epilogue=several, bias=BIAS, scale=0.5)
            return self.linear(x) + co.gemm(x, W) + y.pre, co.gemm_bias_relu(x, W, BIAS)

    layer = Layer()
    saved = pickle.dumps(torch.fx.symbolic_trace(layer))
    monkeypatch.setattr(portable, "_LIVE", weakref.WeakValueDictionary())  # as in a process that has not seen the ops
    assert all(map(torch.equal, pickle.loads(saved)(X), layer(X)))
    for name in ("other", "called_", "called_x", "called_ff"):
        with pytest.raises(AttributeError, match=rf"module 'cutlass_ops\.run\.portable' has no attribute '{name}'"):
            getattr(portable, name)


def test_a_symbolic_trace_calls_the_op_that_its_name_finds():
    op = co.gemm_bias_relu
    again = type(op)(op.name, op.epilogue)  # an equal op, as a session makes after another
    assert again.program_name == op.program_name
    saved = pickle.dumps(torch.fx.symbolic_trace(lambda x: again(x, W, BIAS)))
    assert torch.equal(pickle.loads(saved)(X), op(X, W, BIAS))


@pytest.mark.slow
def test_an_epilogue_is_defined_outside_of_what_is_compiled():
    def function(x):
        @co.epilogue
        def mine(acc, bias: co.Row):
            return co.e.relu(acc + bias)

        return co.gemm(x, W, epilogue=mine, bias=BIAS)

    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"define it outside of the function that torch\.compile"):
        torch.compile(function, backend="aot_eager", fullgraph=True)(X)
    assert torch.equal(torch.compile(function, backend="aot_eager")(X), function(X))


TRANSFORMED = {
    "vmap": lambda f: torch.vmap(f)(torch.stack([X, X])),
    "jvp": lambda f: torch.func.jvp(f, (X,), (X,)),
    "grad": lambda f: torch.func.grad(lambda x: f(x).sum())(X),
}


@pytest.mark.parametrize("transformed", TRANSFORMED.values(), ids=TRANSFORMED)
@pytest.mark.filterwarnings("ignore:.torch.jit")  # PyTorch's own
def test_transforms_are_refused_where_a_function_is_compiled(transformed):
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda: transformed(lambda x: co.gemm_bias_relu(x, W, BIAS)), backend="eager", fullgraph=True
    )
    with pytest.raises(Exception, match=r"maybe_current_level|does not support torch\.func"):
        compiled()


@pytest.mark.filterwarnings("ignore:.torch.jit")  # PyTorch's own, at the first tangent
@pytest.mark.parametrize("mode", [contextlib.nullcontext, lambda: FlopCounterMode(display=False)])
def test_calls_inside_a_level_of_forward_mode_differ_by_tangents_alone(mode):
    program = torch.export.export(Relu(), (X,)).module()
    for run in (program, lambda x: co.gemm(x, W), lambda x: co.rmsnorm_gemm(x, W, eps=1e-5)):
        expected = run(X)
        with forward_ad.dual_level(), mode():
            assert torch.equal(run(X), expected)
            with pytest.raises(ValueError, match="has a tangent"):
                run(forward_ad.make_dual(X, X))


@pytest.mark.filterwarnings("ignore:.torch.jit")  # PyTorch's own, at the first tangent
def test_a_function_compiles_inside_a_level_of_forward_mode():
    torch.compiler.reset()
    function = torch.compile(lambda x: co.gemm(x, W), backend="eager", fullgraph=True)
    with forward_ad.dual_level():
        assert torch.equal(function(X), co.gemm(X, W))
        with pytest.raises(ValueError, match=r"^a has a tangent"):
            function(forward_ad.make_dual(X, X))


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_a_backward_inside_of_autocast_computes_with_what_the_forward_did(dtype):
    given = [v.clone().requires_grad_() for v in (X, W, BIAS)]
    found = []
    for context in (torch.autocast("cpu", enabled=False), torch.autocast("cpu", dtype)):
        d = co.gemm_bias_silu(*given)
        with context:
            found.append(torch.autograd.grad(d.sum(), given))
    assert all(map(torch.equal, *found))


# ---- Copies and pickles --------------------------------------------------------------------------------------------

KERNEL = co.KernelSpec(
    a="bf16.row", b="bf16.col", d="bf16.row", epilogue=several, config=co.Sm90Config(co.ThreadblockShape(64, 64, 64))
)
OPS = {
    "named": co.gemm_bias_relu,
    "own": ops.op(several),
    "norm": norms.rmsnorm_op(several),
    "residual": norms.residual_rms_op(BF16),
    "gate": gated.swiglu_op(None),
}


@pytest.mark.parametrize("op", [*OPS.values(), kernels.Kernel(KERNEL, None), several], ids=[*OPS, "kernel", "epilogue"])
def test_copies_are_the_same_object(op):
    assert copy.copy(op) is op
    assert copy.deepcopy({"op": op})["op"] is op


def test_an_epilogue_goes_through_pickle_as_itself_or_as_its_graph():
    assert pickle.loads(pickle.dumps(several)) is several

    @co.epilogue
    def local(acc, bias: co.Row):
        return acc - bias

    again = pickle.loads(pickle.dumps(local))
    assert (again, again.name) == (local, "local")
    assert torch.equal(co.gemm(X, W, epilogue=again, bias=BIAS), co.gemm(X, W, epilogue=local, bias=BIAS))


class Several(torch.nn.Module):
    """A module that returns what a call with several outputs returns."""

    def forward(self, x):
        return co.gemm(x, W, epilogue=several, bias=BIAS, scale=0.5)


@pytest.mark.parametrize("hook", ["register_full_backward_hook", "register_full_backward_pre_hook"])
def test_results_go_through_backward_hooks_of_a_module(hook):
    module, x, seen = Several(), X.clone().requires_grad_(), []
    getattr(module, hook)(lambda module, *grads: seen.append(len(grads[-1])))
    wanted = Several()(x)
    found = module(x)
    assert all(map(torch.equal, found, wanted))
    grads = [torch.autograd.grad(y[0].float().sum() + y[1].float().sum(), x)[0] for y in (found, wanted)]
    assert torch.equal(*grads)
    assert seen == [len(wanted)]


def test_what_makes_tuples_again_gets_the_values_of_results():
    results = Several()(X)
    for found in (type(results)(*results), type(results)(iter(results)), type(results)._make(iter(results))):
        assert all(map(torch.equal, found, results))
    assert all(map(torch.equal, default_collate([results, results]), [torch.stack([x, x]) for x in results]))
    assert all(map(torch.equal, _apply_to_tensors(torch.neg, results), [-x for x in results]))  # as FSDP casts


def test_results_go_through_pickle_and_copies():
    found = co.gemm(X, W, epilogue=several, bias=BIAS, scale=0.5)
    for again in (pickle.loads(pickle.dumps(found)), copy.deepcopy(found), copy.copy(found)):
        assert type(again) is Outputs
        assert again._fields == ("d", "pre", "square")
        assert torch.equal(again.square, found.square)
    with pytest.raises(AttributeError, match="no output 'other': the outputs are d, pre, square"):
        _ = found.other
    assert set(found._asdict()) < set(dir(found))


def test_results_with_some_replaced():
    def call(x):
        found = co.gemm(x, W, epilogue=several, bias=BIAS, scale=0.5)
        return found._replace(square=found.square.sqrt())

    found = co.gemm(X, W, epilogue=several, bias=BIAS, scale=0.5)
    for again in (call(X), torch.compile(call, backend="aot_eager", fullgraph=True)(X)):
        assert type(again) is Outputs
        assert again._fields == ("d", "pre", "square")
        assert torch.equal(again.pre, found.pre)
        assert torch.equal(again.square, found.square.sqrt())
    with pytest.raises(ValueError, match="no output 'other': the outputs are d, pre, square"):
        found._replace(other=found.d)


def test_a_loaded_kernel_is_not_copied():
    from cutlass_ops.artifacts.loader import LoadedKernel

    kernel = LoadedKernel(*[None] * 6)
    assert copy.deepcopy(kernel) is kernel
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(kernel)


# ---- Numbers -------------------------------------------------------------------------------------------------------

NUMBERS = (
    *(0.5, 2, -0.0, float("inf"), np.float32(0.5), np.float64(0.5), np.int64(2), np.array(0.5), np.array([0.5])),
    *(torch.tensor(0.5), torch.tensor(0.5, dtype=torch.float64), torch.tensor([0.5]), torch.tensor(2)),
)
NOT_NUMBERS = (True, np.bool_(True), "1", None, 1j, 1e39, 10**400, torch.tensor(True), torch.tensor(1j), torch.ones(2))


def with_scale(scale):
    return co.gemm(X, W, epilogue=several, bias=BIAS, scale=scale).pre


@pytest.mark.sample(5)
@pytest.mark.parametrize("scale", NUMBERS, ids=repr)
def test_every_number_is_the_same_scalar_eager_and_compiled(scale):
    torch._dynamo.reset()
    wanted = with_scale(float(torch.as_tensor(scale).reshape(())))
    assert torch.equal(with_scale(scale), wanted)
    assert torch.equal(torch.compile(with_scale, backend="aot_eager", fullgraph=True)(scale), wanted)


@pytest.mark.sample(2)
@pytest.mark.parametrize("scale", NOT_NUMBERS, ids=lambda s: repr(s)[:12])
@pytest.mark.filterwarnings("ignore")
def test_what_is_no_number_is_refused_eager_and_compiled(scale):
    torch._dynamo.reset()
    with pytest.raises((TypeError, ValueError), match=r"^scale (is|must|has)"):
        with_scale(scale)
    with pytest.raises(Exception, match=r"scale|scalar|NoneType|unknown parameter type"):
        torch.compile(with_scale, backend="aot_eager", fullgraph=True)(scale)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("backend", "kind"), sampled(3, ("aot_eager", "inductor"), (float, int, np.float32, torch.tensor))
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_twelve_values_of_a_scalar_are_at_most_two_programs(kind, backend):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(with_scale, backend=backend, fullgraph=True)
    for at in range(12):
        scale = kind(at + 2)
        torch.testing.assert_close(compiled(scale), with_scale(float(scale)))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2


def test_a_tensors_item_is_no_constant_of_a_program():
    torch._dynamo.reset()
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        compiled = torch.compile(lambda s: with_scale(s.item()), backend="aot_eager", fullgraph=True)
        for at in range(4):
            assert torch.equal(compiled(torch.tensor(0.5 + at)), with_scale(0.5 + at))
    torch._dynamo.reset()


# ---- Saved programs ------------------------------------------------------------------------------------------------

SAVE = """
import sys, torch
import cutlass_ops as co
BF16 = torch.bfloat16

@co.epilogue
def mine(acc, bias: co.Row, scale: co.Scalar):
    return {"d": co.relu(acc + bias) * scale, "top": co.max(acc, dim=1)}

class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.w, self.gamma = (torch.nn.Buffer(torch.rand(*s).to(BF16)) for s in ((64, 64), (64,)))
        self.prepared = co.prepare(self.w.t(), self.gamma)
        self.centred = co.prepare(self.w.t(), self.gamma, self.gamma, norm="layer")

    def forward(self, x):
        y, statistic = co.gemm_residual_rms(x, self.w.t(), x, eps=1e-5)
        z = co.rmsnorm_gemm(y, self.w.t(), self.gamma, rstd=statistic)
        z = z + co.layernorm_gemm(z, self.centred, eps=1e-5) + co.rmsnorm_gemm(z, self.prepared, eps=1e-5)
        z = co.gemm_swiglu(z, self.w.t(), self.w.t()) + co.gemm_swiglu(z, self.prepared, self.prepared, eps=1e-5)
        return statistic, co.gemm(z / 64, self.w.t(), epilogue=mine, bias=self.gamma, scale=0.5)

layer, x = Layer(), torch.rand(8, 64).to(BF16)
for strict in (False, True):
    program = torch.export.export(layer, (x,), strict=strict)
    torch.export.save(program, f"{sys.argv[1]}/{strict}.pt2")
torch.save((x, *layer(x)[1]), f"{sys.argv[1]}/wanted.pt")
"""

LOAD = """
import sys, torch
import cutlass_ops
x, d, top = torch.load(f"{sys.argv[1]}/wanted.pt")
for strict in (False, True):
    statistic, found = torch.export.load(f"{sys.argv[1]}/{strict}.pt2").module()(x)
    assert torch.equal(found.d, d) and torch.equal(found.top, top), strict
    assert statistic.count == 64
"""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_saved_program_runs_in_a_process_that_has_only_imported_the_library(tmp_path):
    for text in (SAVE, LOAD):
        (tmp_path / "program.py").write_text(textwrap.dedent(text))
        command = [sys.executable, "-W", "ignore", tmp_path / "program.py", tmp_path]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.slow
def test_epilogues_are_not_kept_for_ever():
    import gc
    import weakref

    def one(value):
        @co.epilogue
        def scaled(acc):
            return acc * value

        op = ops.Op("scaled", scaled)
        return weakref.ref(op), op.about

    alive = [one(float(at)) for at in range(50)]
    gc.collect()
    assert sum(reference() is not None for reference, _ in alive) == 0
    # What a compiled program holds is enough all the same.
    made = portable.find(alive[7][1].split(";", 4)[4])
    assert torch.equal(made(X, W), co.gemm(X, W, epilogue=made.epilogue))
