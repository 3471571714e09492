"""What an epilogue keeps of its function: the graph, the name, the docstring and the signature, and nothing else."""

import copy
import functools
import gc
import inspect
import pickle
import pydoc
import weakref
from typing import NamedTuple

import pytest
import torch

import cutlass_ops as co
from cutlass_ops.epilogue import Epilogue
from cutlass_ops.epilogue.operations import to_fp32
from cutlass_ops.run import gemm, norms, ops

A, B, BIAS = torch.ones(2, 8).bfloat16(), torch.ones(8, 3).bfloat16(), torch.zeros(3)
W = torch.ones(1, 8, 8).bfloat16()


def is_freed(reference):
    gc.collect()
    return reference() is None


# ---- Memory ----------------------------------------------------------------------------------------------------------


def by_gemm(found):
    co.gemm(A, B, epilogue=found, bias=BIAS)


def by_groups(found):
    gemm.op_for(found, "grouped")
    gemm.op_for(found, "masked", None, 64)


def by_norm(found):
    norms.rmsnorm_op(found)


def by_compile(found):
    torch.compile(lambda a: co.gemm(a, B, epilogue=found, bias=BIAS), backend="eager", fullgraph=True)(A)
    torch._dynamo.reset()


def by_gradients(found):
    co.gemm(A.clone().requires_grad_(), B, epilogue=found, bias=BIAS).sum().backward()


def by_another(found):
    @co.epilogue
    def outer(acc, bias: co.Row):
        return found(acc, bias) + 1

    by_gemm(outer)


USES = {f.__name__: f for f in (by_gemm, by_groups, by_norm, by_compile, by_gradients, by_another)}


@pytest.mark.slow
@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_what_a_function_closes_over_is_freed(use):
    def made():
        whole = torch.ones(1000)

        def closes(acc, bias: co.Row):
            return (acc + bias) * whole.shape[0]

        return co.epilogue(closes), weakref.ref(whole), weakref.ref(closes)

    found, whole, function = made()
    use(found)
    assert is_freed(whole)
    assert is_freed(function)
    assert co.gemm(A, B, epilogue=found, bias=BIAS)[0, 0] == 8000


@pytest.mark.slow
def test_what_a_lambda_closes_over_is_freed():
    def used():
        whole = torch.ones(1000)
        for _ in range(2):
            co.gemm(A, B, epilogue=lambda acc: acc * whole.shape[0])
        co.gemm(A, W, groups=co.Groups(torch.tensor([2]).int()), epilogue=lambda acc: acc * whole.shape[0])
        return weakref.ref(whole)

    assert is_freed(used())


@pytest.mark.slow
def test_epilogues_that_are_defined_again_do_not_add_up():
    def defined(number):
        whole = torch.ones(100)

        def again(acc, bias: co.Row):
            return (acc + bias) * whole.shape[0]

        again.__name__ = f"again{number}"
        found = co.epilogue(again)
        by_gemm(found)
        return weakref.ref(whole), weakref.ref(found)

    references = [defined(number) for number in range(2000)]
    gc.collect()
    assert not any(whole() for whole, _ in references)
    # Ops of the last ones are kept.
    assert sum(found() is not None for _, found in references) <= 1024


# ---- Names -----------------------------------------------------------------------------------------------------------


@co.epilogue
def first(acc, offset: co.Row):
    """Add an offset."""
    return acc + offset


@co.epilogue
def second(acc, offset: co.Row):
    """Add
    something.
    """
    return acc + offset


def test_equal_epilogues_have_their_own_names_and_one_kernel():
    one, other = ops.op(first), ops.op(second)
    assert first == second
    assert (one.name, other.name) == ("first", "second")
    assert one.epilogue is first
    assert other.epilogue is second
    assert one.__doc__.startswith("Add an offset.\n\nParameters")
    assert other.__doc__.startswith("Add\nsomething.\n\nParameters")
    assert one.graph == other.graph
    config = co.Sm90Config(co.ThreadblockShape(64, 64, 64), schedule="pingpong")
    types = {"a": "bf16.row", "b": "bf16.col", "d": "bf16.row"}
    assert len({co.KernelSpec(**types, epilogue=each, config=config) for each in (first, second)}) == 1
    for each in (first, second):
        with pytest.raises(TypeError, match=rf"^{each.name} takes \(a, b, offset\)"):
            co.gemm(A, B, epilogue=each)
        assert each.name in str(co.explain(co.gemm, A, B, epilogue=each, offset=BIAS)).splitlines()[0]
        program = torch.export.export(Calls(each), (A,))
        assert f"'{each.name} {{" in program.graph_module.print_readable(print_output=False)


class Calls(torch.nn.Module):
    def __init__(self, found):
        super().__init__()
        self.found = found

    def forward(self, a):
        return co.gemm(a, B, epilogue=self.found, offset=BIAS)


def test_it_has_what_people_and_tools_read_of_its_function():
    def plain(acc, bias: co.Row, *, scale: co.Scalar) -> ("d", "row"):  # noqa: F821
        """Scale.

        And more.
        """
        return acc * scale + bias, co.e.sum(acc, 1)

    def silent(acc):
        return acc + 1

    found = co.epilogue(plain)
    for name in ("__doc__", "__name__", "__qualname__", "__module__"):
        assert getattr(found, name) == getattr(plain, name)
        assert getattr(co.epilogue(silent), name) == getattr(silent, name)
    assert inspect.signature(found) == inspect.signature(plain) == found.signature
    assert inspect.getdoc(found) == inspect.getdoc(plain) == found.doc
    assert inspect.getdoc(co.epilogue(silent)) is None
    shown, own = (pydoc.plain(pydoc.render_doc(each)).splitlines()[2:] for each in (found, plain))
    assert shown == own
    assert pydoc.plain(pydoc.render_doc(co.epilogue(silent))).splitlines()[2:] == ["silent(acc)"]


def test_copies_and_pickles_keep_it():
    @co.epilogue
    def local(acc, bias: co.Row):
        """A docstring."""
        return acc + bias, acc > 0

    again = pickle.loads(pickle.dumps(local))
    assert again == local
    assert (again.name, again.__doc__, again.__module__, again.__qualname__) == (
        local.name, local.__doc__, local.__module__, local.__qualname__
    )  # fmt: skip
    assert again.returned == local.returned == ("tuple", ("output1",))
    assert pickle.loads(pickle.dumps(first)) is copy.deepcopy(first) is first


def test_in_a_class_it_is_no_method():
    class Holder:
        @staticmethod
        @co.epilogue
        def outside(acc):
            return acc + 1

        @co.epilogue
        @staticmethod
        def inside(acc):
            return acc + 2

        @co.epilogue
        def bare(acc):  # noqa: N805
            return acc + 3

    for name in ("outside", "inside", "bare"):
        for holder in (Holder, Holder()):
            found = getattr(holder, name)
            assert isinstance(found, Epilogue)
            assert (found.name, found.__qualname__.endswith(f"Holder.{name}")) == (name, True)
    with pytest.raises(
        co.errors.EpilogueError, match=r"self is the first parameter, .* @staticmethod above @co.epilogue"
    ):

        class Wrong:
            @co.epilogue
            def scaled(self, acc, scale: co.Scalar):
                return acc * scale


# ---- Calls in other epilogues ----------------------------------------------------------------------------------------


class Results(NamedTuple):
    d: object
    largest: object


RETURNED = {
    "a value": (lambda acc: acc * 2, lambda found: found),
    "a dictionary": (lambda acc: {"d": acc * 2}, lambda found: found["d"]),
    "several": (lambda acc: {"largest": co.e.max(acc, 1), "d": acc * 2}, lambda found: (found["d"], found["largest"])),
    "a tuple": (lambda acc: (acc * 2, acc + 1), lambda found: (found[0], found[1])),
    "a named tuple": (lambda acc: Results(acc * 2, co.e.max(acc, 1)), lambda found: (found.d, found.largest)),
    "a truth value": (lambda acc: acc > 2, lambda found: co.e.where(found, 1.0, 2.0)),
    "an index": (lambda acc: (acc, co.e.row_index()), lambda found: found[0] + (found[1] * 3 + 2**30)),
    "a number of it": (lambda acc: co.e.to_float(co.e.row_index()) + acc, lambda found: found + 1),
    "quantised": (lambda acc: co.e.quantize(acc, "e4m3"), lambda found: found),
}


@pytest.mark.parametrize(("function", "use"), RETURNED.values(), ids=RETURNED)
def test_a_call_gives_what_the_function_gives(function, use):
    inner = co.epilogue(function)
    for callee in (inner, pickle.loads(pickle.dumps(inner))):
        assert co.epilogue(lambda acc: use(callee(acc + 1))) == co.epilogue(lambda acc: use(function(acc + 1)))  # noqa: B023


@co.epilogue
def powered(x, y: co.Scalar, bias: co.Row):
    return co.e.pow(x, y) + bias * 0.5


def test_numbers_given_to_it_are_as_if_they_were_written():
    def written(acc, bias: co.Row):
        return co.e.pow(acc, 2.0) + bias * 0.5

    assert co.epilogue(lambda acc: powered(acc, 2, bias=4.0)).graph == co.epilogue(lambda acc: acc**2 + 2.0).graph

    @co.epilogue
    def called(acc, bias: co.Row):
        return powered(bias=bias, y=2.0, x=acc)

    assert called == co.epilogue(written)
    # Folded as exactly as where it is written.
    add = co.epilogue(lambda acc: acc + 2.0**-30)
    assert co.epilogue(lambda acc: acc * add(1.0)).graph.rounded == (1 + 2.0**-30,)
    assert to_fp32(1 + 2.0**-30) == 1.0


def test_wrong_arguments_of_it_show_the_line():
    with pytest.raises(
        co.errors.EpilogueError, match=r"powered\(x, y.*\): missing a required argument: 'bias'"
    ) as error:

        @co.epilogue
        def called(acc):
            return powered(acc, 2.0)  # here

    assert "return powered(acc, 2.0)  # here" in str(error.value)
    with pytest.raises(TypeError, match="powered is an epilogue: apply it with gemm"):
        powered(1.0, 2.0, 3.0)


# ---- Lambdas and what is no function ---------------------------------------------------------------------------------


def test_a_lambda_without_inputs_works():
    x = torch.randn(4, 8).bfloat16()
    assert torch.equal(co.gemm(x, B, epilogue=lambda acc: co.e.relu(acc)), torch.relu(x @ B))
    found = co.gemm(x, W, groups=co.Groups(torch.tensor([4]).int()), epilogue=lambda acc: co.e.relu(acc))
    assert torch.equal(found, torch.relu(x @ W[0]))
    scales = [1.0, 2.0]
    found = [co.gemm(x, B, epilogue=lambda acc: acc * scale) for scale in scales]  # noqa: B023
    assert torch.equal(found[1], found[0] * 2)
    with pytest.raises(co.errors.EpilogueError, match=r"a lambda cannot .* def fused\(acc, bias: co.Row\)"):
        co.gemm(x, B, epilogue=lambda acc, bias: acc + bias, bias=BIAS)


def scaled(acc, scale):
    return acc * scale


class Method:
    def scaled(self, acc):
        return acc


NO_EPILOGUES = {
    "torch.relu": (torch.relu, r"not relu: write lambda acc: co.e.relu\(acc\)$"),
    "F.gelu": (torch.nn.functional.gelu, r"not gelu: write lambda acc: co.e.gelu\(acc\)$"),
    "a module": (torch.nn.SiLU(), r"not SiLU: write lambda acc: co.e.silu\(acc\)$"),
    "a class": (torch.nn.ReLU6, r"not ReLU6: write lambda acc: co.e.clamp\(acc, 0, 6\)$"),
    "a name": ("swish", r"not 'swish': write lambda acc: co.e.silu\(acc\)$"),
    "another name": ("banana", "not 'banana': write a function of acc with def, and decorate it"),
    "partial": (functools.partial(scaled, scale=2.0), "not a functools.partial: .* calls scaled with these values"),
    "a method": (Method().scaled, "not the method scaled: .* outside of the class, or as @staticmethod"),
    "a class method": (classmethod(scaled), "not the method scaled"),
    "a function": (scaled, "not scaled: decorate that function"),
    "a number": (3, "not int: write a function"),
}


@pytest.mark.parametrize(("given", "said"), NO_EPILOGUES.values(), ids=NO_EPILOGUES)
def test_what_is_no_epilogue_says_what_to_write(given, said):
    with pytest.raises(TypeError, match=f"^epilogue must be a function decorated with @cutlass_ops.epilogue, {said}"):
        co.gemm(A, B, epilogue=given)
    if not inspect.isfunction(given):
        with pytest.raises(co.errors.EpilogueError, match=said):
            co.epilogue(given)
