"""What surrounds a call: tensors of other classes, modes and tracers, copies and pickles, numbers, saved programs.

The ways that calls go are the same for every device, so that the CPU shows them; tests/gpu/test_surroundings.py has
what only a device can do.
"""

import contextlib
import copy
import multiprocessing
import pickle
import subprocess
import sys
import textwrap
import weakref

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.distributed.utils import _apply_to_tensors
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.data import default_collate
from torch.utils.flop_counter import FlopCounterMode

import cutlass_ops as co
from cutlass_ops.run import call, gated, kernels, norms, ops, plan, portable
from cutlass_ops.run.results import Outputs
from cutlass_ops.run.tensors import require_memory
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


def of_class(kind, tensor):
    if kind == "two":
        return TwoTensor(tensor, tensor)
    if kind == "functional":
        return torch._to_functional_tensor(tensor)
    if kind == "parameter":
        return torch.nn.Parameter(tensor, requires_grad=False)
    if kind == "buffer":
        return torch.nn.Buffer(tensor)
    return tensor.as_subclass(Own)


def plain(tensor):
    if isinstance(tensor, TwoTensor):
        assert torch.equal(tensor.a, tensor.b)
        return tensor.a
    return torch._from_functional_tensor(tensor) if torch._is_functional_tensor(tensor) else tensor


CLASSES = ("two", "functional", "parameter", "buffer", "own")


@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize("argument", ["a", "b", "bias", "scalar"])
def test_tensors_of_other_classes_give_the_right_result(kind, argument):
    def wrap(name, tensor):
        return of_class(kind, tensor) if name == argument else tensor

    bias, scale = wrap("bias", BIAS), wrap("scalar", torch.tensor(0.5))
    found = co.gemm(wrap("a", X), wrap("b", W), epilogue=several, bias=bias, scale=scale)
    wanted = co.gemm(X, W, epilogue=several, bias=BIAS, scale=0.5)
    assert found._fields == wanted._fields
    assert all(map(torch.equal, map(plain, found), wanted))
    if argument != "scalar":
        named = co.gemm_bias_relu(wrap("a", X), wrap("b", W), bias)
        assert torch.equal(plain(named), WANTED)
        assert kind not in ("own", "two") or type(named) in (Own, TwoTensor)


@pytest.mark.parametrize("kind", ["two", "own", "parameter"])
def test_an_output_of_another_class_is_written(kind):
    d = torch.full((M, N), torch.nan, dtype=BF16)
    out = of_class(kind, d)
    assert co.gemm_bias_relu(X, W, BIAS, out=out) is out
    assert torch.equal(plain(out), WANTED)


def test_a_functional_output_is_refused():
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


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (lambda: torch.nested.nested_tensor([X, X]), "a is a nested tensor"),
        (lambda: torch.nested.nested_tensor([X, X], layout=torch.jagged), "a is a nested tensor"),
        (lambda: X.float().to_sparse().to(BF16), "a has layout torch.sparse_coo"),
    ],
    ids=["nested", "jagged", "sparse"],
)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_what_is_no_dense_matrix_is_refused(tensor, message):
    with pytest.raises(TypeError, match=message):
        co.gemm_bias_relu(tensor(), W, BIAS)


def test_lazy_negations_are_carried_out():
    wanted = co.gemm(-X, -W, epilogue=several, bias=-BIAS, scale=1.0)
    found = co.gemm(torch._neg_view(X), torch._neg_view(W), epilogue=several, bias=torch._neg_view(BIAS), scale=1.0)
    assert all(map(torch.equal, found, wanted))
    with pytest.raises(ValueError, match="out is a lazy negation"):
        co.gemm(X, W, out=torch._neg_view(torch.empty(M, N, dtype=BF16)))


def test_a_tensor_without_memory_never_reaches_a_kernel():
    freed = torch.empty(M, K, dtype=BF16)
    freed.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match="a has no memory, since its storage was freed"):
        require_memory("a", freed)
    with pytest.raises(TypeError, match="a is a TwoTensor, which has no memory of its own"):
        require_memory("a", TwoTensor(X, X))
    checked = call.check_call(ops.op_of(None).graph, X, W, {}, None, None)
    assert [name for name, _ in checked.tensors()] == ["a", "b", "out"]


def test_meta_tensors_give_shapes():
    d, pre, square = co.gemm(X.to("meta"), W.to("meta"), epilogue=several, bias=BIAS.to("meta"), scale=2.0)
    assert (d.device.type, d.shape, pre.dtype, square.shape, square.dtype) == (
        "meta",
        (M, N),
        BF16,
        (M,),
        torch.float32,
    )
    for wrong in ((X.to("meta"), W, BIAS), (X, W.to("meta"), BIAS), (X, W, BIAS.to("meta"))):
        with pytest.raises(ValueError, match=r"is on (meta|cpu) and a is on"):
            co.gemm_bias_relu(*wrong)
    for gamma, w in ((X[0].to("meta"), W), (X[0], W.to("meta"))):
        with pytest.raises(ValueError, match=r"is on (meta|cpu)"):
            co.rmsnorm_gemm(X, w, gamma, eps=1e-5)


# ---- Modes and tracers ---------------------------------------------------------------------------------------------


class Names(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(str(function))
        return function(*args, **(kwargs or {}))


def targets(graph):
    return [str(n.target) for n in graph.nodes if n.op == "call_function" and "cutlass" in str(n.target)]


@pytest.mark.parametrize("out", [False, True])
def test_modes_see_one_operator(out):
    with Names() as mode:
        given = {"pre": torch.empty(M, N, dtype=BF16)} if out else None
        mode.names.clear()
        found = co.gemm(X, W, epilogue=several, bias=BIAS, scale=0.5, out=given)
    assert [n for n in mode.names if "cutlass" in n] == [f"cutlass_ops.fused_gemm{'_out' if out else ''}.default"]
    assert not out or found.pre is given["pre"]
    assert all(map(torch.equal, found, co.gemm(X, W, epilogue=several, bias=BIAS, scale=0.5)))


@pytest.mark.parametrize("given", [None, "d", "square"])
def test_fake_tensors_give_fake_results(given):
    shapes = {"d": (M, N), "square": (M,)}
    with FakeTensorMode():
        a, b, bias = torch.empty(M, K, dtype=BF16), torch.empty(N, K, dtype=BF16).t(), torch.empty(N, dtype=BF16)
        dtype = torch.float32 if given == "square" else BF16
        out = given and {given: torch.empty(shapes[given], dtype=dtype)}
        found = co.gemm(a, b, epilogue=several, bias=bias, scale=0.5, out=out)
    assert [tuple(t.shape) for t in found] == [(M, N), (M, N), (M,)]
    assert {type(t).__name__ for t in found} == {"FakeTensor"}
    # And where the mode has ended.
    assert type(co.gemm_bias_relu(a, b, bias)).__name__ == "FakeTensor"


def test_a_fake_tensor_is_not_planned_for():
    with FakeTensorMode() as mode:
        a = mode.from_tensor(X)
    with pytest.raises((TypeError, ValueError), match=r"FakeTensor|memory|device"):
        require_memory("a", a)


@pytest.mark.parametrize("before_dispatch", [False, True])
@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_make_fx_holds_the_operator(mode, before_dispatch):
    traced_function = make_fx(
        lambda x: co.gemm_bias_relu(x, W, BIAS),
        tracing_mode=mode,
        pre_dispatch=before_dispatch,
        _allow_non_fake_inputs=True,
    )(X)
    assert targets(traced_function.graph) == ["cutlass_ops.fused_gemm.default"]
    assert torch.equal(traced_function(X + X), co.gemm_bias_relu(X + X, W, BIAS))


@pytest.mark.filterwarnings("ignore")  # torch.jit is deprecated
def test_jit_trace_holds_the_operator():
    function = torch.jit.trace(
        lambda x: co.gemm(x, W, epilogue=several, bias=BIAS, scale=0.5), (X,), check_trace=False, strict=False
    )
    assert "cutlass_ops::fused_gemm" in str(function.graph)
    assert torch.equal(function(X + X)[1], co.gemm(X + X, W, epilogue=several, bias=BIAS, scale=0.5).pre)


def test_symbolic_trace_holds_the_op():
    class Layer(torch.nn.Module):
        def forward(self, x, s):
            y = co.gemm(x, W, epilogue=several, bias=BIAS, scale=s)
            return co.gemm_bias_relu(x, W, BIAS) + y.pre, co.rmsnorm_gemm(x, W, X[0].abs(), eps=1e-5)

    graph = torch.fx.symbolic_trace(Layer())
    assert all(map(torch.equal, graph(X + X, 0.5), Layer()(X + X, 0.5)))
    assert co.gemm_bias_relu in [n.target for n in graph.graph.nodes]


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


def test_an_epilogue_is_defined_outside_of_what_is_compiled():
    def function(x):
        @co.epilogue
        def mine(acc, bias: co.Row):
            return co.e.relu(acc + bias)

        return co.gemm(x, W, epilogue=mine, bias=BIAS)

    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"define it outside of the function that torch\.compile"):
        torch.compile(function, backend="aot_eager", fullgraph=True)(X)
    assert torch.equal(torch.compile(function, backend="aot_eager")(X), function(X))


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_program_holds_the_operator(strict, dynamic):
    module = Relu()
    shapes = ({0: torch.export.Dim("rows", min=2, max=4096)},) if dynamic else None
    program = torch.export.export(module, (X,), strict=strict, dynamic_shapes=shapes)
    assert targets(program.graph) == ["cutlass_ops.fused_gemm.default"]
    other = torch.randn(M + dynamic, K).to(BF16)
    assert torch.equal(program.module()(other), module(other))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_package_of_aotinductors_calls_the_operator():
    class Plain(torch.nn.Module):
        def forward(self, x):
            return co.gemm(x, W) + co.gemm_bias_relu(x, W, BIAS)

    program = torch.export.export(Plain(), (X,))
    package = torch._inductor.aoti_load_package(torch._inductor.aoti_compile_and_package(program))
    assert torch.equal(package(X), Plain()(X))


def test_functionalized_and_checkpointed_and_counted_calls_are_right():
    functional = torch.func.functionalize(lambda x: co.gemm_bias_relu(x, W, BIAS))
    assert torch.equal(functional(X), WANTED)
    assert torch.equal(checkpoint(lambda x: co.gemm_bias_relu(x, W, BIAS), X, use_reentrant=False), WANTED)
    with FlopCounterMode(display=False):
        assert torch.equal(co.gemm_bias_relu(X, W, BIAS), WANTED)


TRANSFORMED = {
    "vmap": lambda f: torch.vmap(f)(torch.stack([X, X])),
    "jvp": lambda f: torch.func.jvp(f, (X,), (X,)),
    "grad": lambda f: torch.func.grad(lambda x: f(x).sum())(X),
}


@pytest.mark.parametrize("transformed", TRANSFORMED.values(), ids=TRANSFORMED)
@pytest.mark.filterwarnings("ignore:.torch.jit")  # PyTorch's own
def test_transforms_are_refused_in_words(transformed):
    for function in (lambda x: co.gemm_bias_relu(x, W, BIAS), lambda x: co.rmsnorm_gemm(x, W, eps=1e-5)):
        with pytest.raises(NotImplementedError, match=r"does not support torch\.func\.grad, jvp or vmap"):
            transformed(function)


@pytest.mark.parametrize("transformed", TRANSFORMED.values(), ids=TRANSFORMED)
@pytest.mark.filterwarnings("ignore:.torch.jit")  # PyTorch's own
def test_transforms_are_refused_where_a_function_is_compiled(transformed):
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda: transformed(lambda x: co.gemm_bias_relu(x, W, BIAS)), backend="eager", fullgraph=True
    )
    with pytest.raises(Exception, match=r"maybe_current_level|does not support torch\.func"):
        compiled()


def test_what_a_transform_does_not_touch_is_right():
    found = torch.func.grad(lambda y: (co.gemm_bias_relu(X, W, BIAS).float() * y).sum())(torch.ones(N))
    torch.testing.assert_close(found, WANTED.float().sum(0))


@pytest.mark.filterwarnings("ignore:.torch.jit")  # PyTorch's own
def test_tangents_are_refused_and_not_lost():
    with forward_ad.dual_level():
        assert torch.equal(co.gemm_bias_relu(X, W, BIAS), WANTED)
        with pytest.raises(ValueError, match=r"^bias has a tangent"):
            co.gemm_bias_relu(X, W, forward_ad.make_dual(BIAS, BIAS))
        with pytest.raises(ValueError, match=r"^a has a tangent"):
            co.gemm_bias_relu(forward_ad.make_dual(X, X), W, BIAS)


MODES = {"no mode": contextlib.nullcontext, "a mode": lambda: FlopCounterMode(display=False)}
CALLS = {
    "gemm": lambda x: co.gemm(x, W),
    "rmsnorm_gemm": lambda x: co.rmsnorm_gemm(x, W, eps=1e-5),
    "grouped_gemm": lambda x: co.grouped_gemm(x, W[None], torch.tensor([len(x)], dtype=torch.int32)),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", CALLS)
def test_calls_inside_a_level_of_forward_mode_differ_by_tangents_alone(name, mode):
    expected = CALLS[name](X)
    with forward_ad.dual_level(), MODES[mode]():
        assert torch.equal(CALLS[name](X), expected)
        with pytest.raises(ValueError, match=r"^[ax] has a tangent, and cutlass_ops has no forward"):
            CALLS[name](forward_ad.make_dual(X, X))


def test_a_function_compiles_inside_a_level_of_forward_mode():
    torch.compiler.reset()
    function = torch.compile(lambda x: co.gemm(x, W), backend="eager", fullgraph=True)
    with forward_ad.dual_level():
        assert torch.equal(function(X), co.gemm(X, W))
        with pytest.raises(ValueError, match=r"^a has a tangent"):
            function(forward_ad.make_dual(X, X))


@pytest.mark.filterwarnings("ignore::UserWarning:torch.fx")  # PyTorch's own, of constants
def test_linearize_runs_calls_that_depend_on_nothing_and_refuses_the_others():
    found, _ = torch.func.linearize(lambda factor: factor * co.gemm(X, W).float(), torch.tensor(2.0))
    assert torch.equal(found, 2 * co.gemm(X, W).float())
    with pytest.raises(ValueError, match=r"^a has a tangent"):
        torch.func.linearize(lambda x: co.gemm(x, W), X)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # of PyTorch's own import
def test_a_saved_program_refuses_tangents_under_a_mode_as_well():
    class Layer(torch.nn.Module):
        def forward(self, x):
            return co.gemm(x, W)

    program = torch.export.export(Layer(), (X,)).module()
    with forward_ad.dual_level(), FlopCounterMode(display=False), pytest.raises(ValueError, match="has a tangent"):
        program(forward_ad.make_dual(X, X))


def test_a_state_of_fp8_refuses_tangents():
    with forward_ad.dual_level(), pytest.raises(ValueError, match=r"^x has a tangent"):
        co.Fp8State().quantize(forward_ad.make_dual(X, X))


def test_autocast_reaches_an_epilogue_whatever_its_name_in_a_compiled_function():
    @co.epilogue
    def kernel_of_mine(acc, bias: co.Row):
        return acc + bias

    a, b, bias = torch.randn(3, 16), torch.randn(16, 8), torch.randn(8)

    def call():
        return co.gemm(a, b, epilogue=kernel_of_mine, bias=bias)

    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(torch.compile(call, backend="aot_eager", fullgraph=True)(), call())


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_autocast_casts_the_operands_that_f_linear_casts(dtype):
    wanted = co.gemm_bias_relu(X.to(dtype), W.to(dtype), BIAS)
    wide = torch.zeros(M, N)
    with torch.autocast("cpu", dtype=dtype):
        for x, w in ((X, W), (X.float(), W), (X.float(), W.float())):
            for op in (co.gemm_bias_relu, torch.compile(co.gemm_bias_relu, backend="eager", fullgraph=True)):
                found = op(x, w, BIAS)
                assert found.dtype is torch.nn.functional.linear(x, w.t()).dtype is dtype
                assert torch.equal(found, wanted)
        # What else is added stays as it is, and so does FP64.
        assert co.gemm_residual(X, W, wide, out_dtype=torch.float32).dtype is torch.float32
        assert co.gemm(X.double(), W.double()).dtype is torch.float64
        meta = co.gemm(X.to("meta"), W.to("meta"))
    assert meta.dtype is BF16
    # A backward inside of the context computes with what the forward did.
    given = [v.clone().requires_grad_() for v in (X, W, BIAS)]
    outside, inside = [], []
    for found, context in ((outside, torch.autocast("cpu", enabled=False)), (inside, torch.autocast("cpu", dtype))):
        d = co.gemm_bias_silu(*given)
        with context:
            found += torch.autograd.grad(d.sum(), given)
    assert all(map(torch.equal, inside, outside))


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


def test_a_copied_module_runs():
    module = Relu()
    module(X)
    assert torch.equal(copy.deepcopy(module)(X), module(X))


@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
def test_an_op_goes_through_pickle(op):
    again = pickle.loads(pickle.dumps(op))
    assert (again.name, again.graph, again.about) == (op.name, op.graph, op.about)
    # And where this process has never seen it.
    made = portable._made.__wrapped__(op.about.split(";", 4)[4])
    assert (made.name, made.graph, made.about) == (op.name, op.graph, op.about)
    assert (made._instead is None) == (op._instead is None)


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


def test_launches_are_ranges_of_a_profiler_on_request(monkeypatch):
    seen = []

    @contextlib.contextmanager
    def named(name):
        seen.append(name)
        yield

    monkeypatch.setattr(torch.cuda.nvtx, "range", named)
    launch = plan.in_range("gemm_bias", lambda *arguments: len(arguments))
    assert (launch(1, 2, 3), seen) == (3, ["gemm_bias"])


def _child(epilogue, op, queue):
    ones = torch.ones(4, 16, dtype=BF16)
    results = co.gemm(ones, torch.ones(16, 8, dtype=BF16), epilogue=epilogue, bias=torch.ones(8, dtype=BF16), scale=2.0)
    queue.put((results._fields, results.pre[0, 0].item(), op.name))


@pytest.mark.slow
def test_a_spawned_process_gets_an_epilogue_and_an_op():
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=_child, args=(several, co.gemm_bias_relu, queue))
    process.start()
    assert queue.get(timeout=600) == (("d", "pre", "square"), 33.0, "gemm_bias_relu")
    process.join()


# ---- Numbers -------------------------------------------------------------------------------------------------------

NUMBERS = (
    *(0.5, 2, -0.0, float("inf"), np.float32(0.5), np.float64(0.5), np.int64(2), np.array(0.5), np.array([0.5])),
    *(torch.tensor(0.5), torch.tensor(0.5, dtype=torch.float64), torch.tensor([0.5]), torch.tensor(2)),
)
NOT_NUMBERS = (True, np.bool_(True), "1", None, 1j, 1e39, 10**400, torch.tensor(True), torch.tensor(1j), torch.ones(2))


def with_scale(scale):
    return co.gemm(X, W, epilogue=several, bias=BIAS, scale=scale).pre


@pytest.mark.parametrize("scale", NUMBERS, ids=repr)
def test_every_number_is_the_same_scalar_eager_and_compiled(scale):
    torch._dynamo.reset()
    wanted = with_scale(float(torch.as_tensor(scale).reshape(())))
    assert torch.equal(with_scale(scale), wanted)
    assert torch.equal(torch.compile(with_scale, backend="aot_eager", fullgraph=True)(scale), wanted)


@pytest.mark.parametrize("scale", NOT_NUMBERS, ids=lambda s: repr(s)[:12])
@pytest.mark.filterwarnings("ignore")
def test_what_is_no_number_is_refused_eager_and_compiled(scale):
    torch._dynamo.reset()
    with pytest.raises((TypeError, ValueError), match=r"^scale (is|must|has)"):
        with_scale(scale)
    with pytest.raises(Exception, match=r"scale|scalar|NoneType|unknown parameter type"):
        torch.compile(with_scale, backend="aot_eager", fullgraph=True)(scale)


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


# ---- The same rules on the CPU -------------------------------------------------------------------------------------

LAYOUTS = {
    "a of stride 2": (lambda: co.gemm(torch.randn(M, 2 * K).to(BF16)[:, ::2], W), "a has shape"),
    "b of stride 2": (lambda: co.gemm(X, torch.randn(2 * K, 2 * N).to(BF16)[::2, ::2]), "b has shape"),
    "a residual of stride 2": (
        lambda: co.gemm_residual(X, W, torch.randn(M, 2 * N).to(BF16)[:, ::2]),
        "residual has shape",
    ),
    "an output of stride 2": (
        lambda: co.gemm(X, W, out=torch.empty(M, 2 * N, dtype=BF16)[:, ::2]),
        "out has shape",
    ),
    "weights of two majors": (lambda: co.gemm_swiglu(X, W, W.contiguous()), "both weights need the same major"),
}


@pytest.mark.parametrize(("function", "message"), LAYOUTS.values(), ids=LAYOUTS)
def test_the_cpu_takes_what_a_kernel_takes(function, message):
    with pytest.raises(ValueError, match=message):
        function()


def test_a_statistics_output_of_no_tensor_is_refused():
    with pytest.raises(TypeError, match=r"^out must be a torch\.Tensor, not str"):
        co.gemm_residual_rms(X, W, torch.zeros(M, N, dtype=BF16), eps=1e-5, out="x")


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
        self.centred = co.prepare_layernorm(self.w.t(), self.gamma, self.gamma)

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


def test_a_program_of_another_version_is_refused_in_words():
    for op in ("gemm", "gemm [1]", 'gemm {"other": 1}', "gemm {", 'gemm {"epilogue": 1, "kernel": 2}'):
        with pytest.raises(co.ConfigError, match=r"export it again|an epilogue graph is"):
            portable.find(op)


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
