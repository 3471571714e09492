"""Tracing: what an error shows of a function that cannot be traced."""

import inspect
import math
from typing import NamedTuple

import numpy as np
import pytest
import torch
from exports import co

from cutlass_ops.base.errors import EpilogueError
from cutlass_ops.epilogue.trace import Epilogue, epilogue
from cutlass_ops.epilogue.values import Col, Integer, Reduction, Row, Scalar, Tile


class Swapped(NamedTuple):
    """What no epilogue returns: its user would take the first for D."""

    pre: object
    d: object


def here(function):
    """Line number of the comment ``# <-`` in a function's source."""
    lines, start = inspect.getsourcelines(function)
    return start + next(i for i, line in enumerate(lines) if "# <-" in line)


def refused(function, *parts):
    """Check that tracing is refused with a message that shows the marked line."""
    with pytest.raises(EpilogueError) as caught:
        epilogue(function)
    first, where, source = str(caught.value).split("\n")
    assert first.startswith(f"{function.__name__}: ")
    assert where.strip() == f"{__file__}:{here(function)}"
    assert source.strip().endswith("# <-")
    for part in parts:
        assert part in first


def refused_use(use, *parts):
    """Check that a use of the accumulator is refused; the line shown is the innermost in this file."""

    def f(acc):
        return use(acc)

    with pytest.raises(EpilogueError) as caught:
        epilogue(f)
    first, where, source = str(caught.value).split("\n")
    assert first.startswith("f: ")
    assert where.strip().startswith(f"{__file__}:")
    assert "lambda x" in source or source.strip() == "return use(acc)"
    for part in parts:
        assert part in first


class TestErrors:
    def test_branches(self):
        def conditional(acc):
            if acc:  # <-
                return acc
            return -acc

        def comparison(acc, bias: Row):
            return (
                acc + bias
                if acc > 0  # <-
                else acc
            )

        def equality(acc):
            if acc == 0:  # <-
                return acc
            return -acc

        def conjunction(acc, bias: Row):
            return acc and bias  # <-

        def negation(acc):
            return not acc  # <-

        def loop(acc):
            while acc < 1.0:  # <-
                acc = acc * 2
            return acc

        def built_in_max(acc):
            return max(acc, 0.0)  # <-

        def membership(acc, bias: Row):
            return acc + (bias in [acc, acc])  # <-

        def chain(acc):
            return co.where(0.0 < acc < 1.0, acc, 0.0)  # <-

        functions = (conditional, conjunction, negation, comparison, equality, loop, built_in_max, membership, chain)
        for function in functions:
            refused(function, "cannot branch", "co.where(condition, x, y), co.maximum, co.minimum, co.clamp, co.relu")

    def test_conditions(self):
        def number(acc):
            return co.where(acc, 1.0, 0.0)  # <-

        def python(acc):
            return co.where(True, acc, 0.0)  # <-

        def both(acc):
            return co.where((acc > 0.0) & acc, acc, 0.0)  # <-

        def seed(acc, seed: Integer):
            return acc * seed  # <-

        def fraction(acc, seed: Integer):
            return acc * co.uniform(seed, 0.5)  # <-

        def wide(acc):
            return acc * co.uniform(2**63)  # <-

        def scalar(acc, seed: Scalar):
            return acc * co.uniform(seed)  # <-

        refused(number, "co.where takes a condition, such as x > 0", "write x != 0")
        refused(python, "a value or a number is needed here, not bool")
        refused(both, "the operator & is not supported for numbers: it takes conditions, such as (x > 0) & (x < 1)")
        refused(seed, "an Integer is a seed or an offset of co.uniform and co.dropout_mask: use a co.Scalar")
        for function in (fraction, wide, scalar):
            refused(function, "co.uniform takes whole numbers of 64 bits: annotate the parameter co.Integer")

    @pytest.mark.parametrize("convert", [int, float, complex, math.exp, math.sqrt, range, "{0!r:}%d".__mod__, hex])
    def test_numbers(self, convert):
        refused_use(convert, "is not a Python number", "co.exp, not math.exp")

    @pytest.mark.parametrize(
        "use", [len, iter, list, tuple, reversed, lambda x: x[0], lambda x: 1 in x, lambda x: [*x]]
    )
    def test_sequences(self, use):
        refused_use(use, "cannot be indexed, iterated")

    @pytest.mark.parametrize("use", [round, math.floor, math.ceil, math.trunc])
    def test_rounding(self, use):
        refused_use(use, "co.cast")

    @pytest.mark.parametrize("use", [lambda x: x ** [2], lambda x: x ** "2", lambda x: True**x])
    def test_powers(self, use):
        refused_use(use, "a value or a number is needed here")

    @pytest.mark.parametrize(
        ("use", "symbol"),
        [
            (lambda x: x @ x, "@"),
            (lambda x: x % 2, "%"),
            (lambda x: 2 % x, "%"),
            (lambda x: x // 2, "//"),
            (lambda x: divmod(x, 2), "divmod"),
            (lambda x: x & x, "&"),
            (lambda x: x | x, "|"),
            (lambda x: x ^ x, "^"),
            (lambda x: ~x, "~"),
            (lambda x: x << 1, "<<"),
            (lambda x: 1 >> x, ">>"),
        ],
    )
    def test_operators(self, use, symbol):
        refused_use(use, f"operator {symbol} is not supported")

    @pytest.mark.parametrize(
        ("use", "problem"),
        [
            (torch.relu, "PyTorch's relu cannot take a traced value: use co.relu"),
            (torch.nn.functional.relu, "use co.relu"),
            (torch.nn.functional.gelu, "use co.gelu"),
            (lambda x: torch.nn.functional.softmax(x, 0), "PyTorch's softmax"),
            (lambda x: torch.maximum(x, x), "use co.maximum"),
            (lambda x: x.clamp(0), "has no attribute clamp: use co.clamp"),
            (lambda x: torch.clamp(x, 0), "PyTorch's clamp cannot take a traced value: use co.clamp"),
            (lambda x: torch.max(x, x), "use co.maximum(x, y), or as an output co.max(x, dim)"),
            (lambda x: x.sum(1), "as an output, use co.sum(x, dim)"),
            (lambda x: torch.sum(x), "as an output, use co.sum(x, dim)"),
            (np.abs, "NumPy's absolute cannot take a traced value: use co.abs"),
            (lambda x: x.to(torch.float16), "use co.cast(x, dtype)"),
            (lambda x: x.float(), "leave it out"),
            (torch.nn.functional.dropout, "use co.dropout_mask"),
            (lambda x: co.sum(x, 1).relu(), "a reduction can only be an output"),
            (lambda x: co.softplus(x, beta=x), "takes Python numbers for beta and threshold"),
            (lambda x: co.where(True, x, x), "truth value is known already"),
            (lambda x: (x > 0) & (1 < 2), "truth value is known already"),
            (lambda x: (x > 0) ^ (x < 1), "of conditions, use !="),
            (lambda x: torch.ones(3) * x, "a tensor or array cannot be a constant"),
            (lambda x: x * torch.ones(3), "a tensor or array cannot be a constant"),
            (lambda x: torch.add(torch.ones(3), x), "a tensor or array cannot be a constant"),
            (np.exp, "NumPy's exp cannot take a traced value: use co.exp"),
            (lambda x: np.multiply.reduce(x), "NumPy's multiply"),
            (np.sum, "is not a NumPy array"),
            (np.asarray, "is not a NumPy array"),
            (lambda x: np.ones(3) * x, "a tensor or array cannot be a constant"),
            (lambda x: x * np.ones(3), "a tensor or array cannot be a constant"),
            (lambda x: x.relu(), "no attribute relu: use co.relu"),
            (lambda x: x.shape, "no attribute shape"),
            (lambda x: x(), "is not a function"),
        ],
    )
    def test_other_libraries(self, use, problem):
        refused_use(use, problem)

    def test_probing_for_protocols_is_no_error(self):
        def f(acc):
            assert not hasattr(acc, "_repr_html_")
            assert not hasattr(acc, "__cuda_array_interface__")
            assert "acc" in f"{acc}"
            return acc

        epilogue(f)

    @pytest.mark.parametrize("number", [1e39, -1e39, 1e-46, 10**400, -(10**400)])
    def test_constants_beyond_fp32(self, number):
        def f(acc):
            return acc * number  # <-

        refused(f, "outside FP32's range")

    @pytest.mark.parametrize("use", [lambda x: x < 2**31, lambda x: co.where(x > 0, x, -(2**31) - 1)])
    def test_whole_numbers_beyond_an_index_where_nothing_wraps(self, use):
        refused_use(lambda x: x * use(co.row_index()), "more than the 32 bits of an index", "up to 2**31 - 1")

    @pytest.mark.parametrize(
        ("thing", "name"), [("x", "str"), (None, "NoneType"), (True, "bool"), ([], "list"), (1j, "complex")]
    )
    def test_arguments_of_other_types(self, thing, name):
        def operator(acc):
            return acc + thing  # <-

        def function(acc):
            return co.maximum(acc, thing)  # <-

        refused(operator, f"not {name}")
        refused(function, f"not {name}")

    @pytest.mark.parametrize(
        "use",
        [
            lambda x, total: x / total,
            lambda x, total: total * 2.0,
            lambda x, total: 2.0 * total,
            lambda x, total: np.float64(2.0) * total,
            lambda x, total: -total,
            lambda x, total: abs(total),
            lambda x, total: total**2,
            lambda x, total: co.rsqrt(total),
            lambda x, total: co.sum(total, 0),
        ],
    )
    def test_reductions_are_outputs_only(self, use):
        refused_use(lambda x: use(x, co.sum(x, dim=1)), "a reduction can only be an output")

    def test_a_reduction_cannot_be_d(self):
        def alone(acc):  # <-
            return co.sum(acc, 1)

        def named(acc):  # <-
            return {"d": co.sum(acc, 1)}

        refused(alone, "a reduction cannot be D")
        refused(named, "cannot be a reduction")

    @pytest.mark.parametrize("dim", [2, -3, None, True, 1.0, "1"])
    def test_dimensions(self, dim):
        def f(acc):
            return {"d": acc, "total": co.sum(acc, dim)}  # <-

        refused(f, "co.sum reduces over a row with dim=1 or over a column with dim=0")

    def test_maximum_of_two_values(self):
        def f(acc, bias: Row):
            return co.max(acc, bias)  # <-

        refused(f, "for the greater of two values use co.maximum")

    def test_options(self):
        def approximation(acc):
            return co.gelu(acc, "erf")  # <-

        def bounds(acc):
            return co.clamp(acc)  # <-

        def element(acc):
            return co.cast(acc, "i8")  # <-

        refused(approximation, "approximate is 'erf': use 'none' or 'tanh'")
        refused(bounds, "needs min, max or both")
        refused(element, "dtype 'i8' is not supported here", "bf16")

    @pytest.mark.parametrize(
        ("result", "problem"),
        [
            (lambda acc: None, "returns nothing"),
            (lambda acc: 1.0, "returns float"),
            (lambda acc: (acc, 1.0), "output 'output1' is float"),
            (lambda acc: (), "returns 0 values, and they are called d"),
            (lambda acc: {acc}, "returns set: return D's value, or a dictionary"),
            (lambda acc: torch.ones(2), "returns Tensor"),
            (lambda acc: {}, "lacks 'd'"),
            (lambda acc: {"y": acc}, "lacks 'd'"),
            (lambda acc: {"d": None}, "output 'd' is NoneType"),
            (lambda acc: {"d": acc, "y": 2.0}, "output 'y' is float"),
            (lambda acc: {"d": acc, 3: acc}, "output name 3 is not a string"),
            (lambda acc: {"d": acc, "two words": acc}, "output name 'two words'"),
            (lambda acc: {"d": acc, "lambda": acc}, "Python keyword"),
            (lambda acc: {"d": acc, "out": acc}, "is an argument of every call"),
        ],
    )
    def test_results(self, result, problem):
        def f(acc):  # <-
            return result(acc)

        refused(f, problem)

    @pytest.mark.parametrize(
        ("annotation", "result", "problem"),
        [
            (Swapped, lambda acc: Swapped(acc, acc + 1), "D must come first: put 'd' first"),
            (None, lambda acc: Swapped(acc, acc + 1), "D must come first: put 'd' first"),
            (("pre", "d"), lambda acc: (acc, acc + 1), "D must come first: put 'd' first"),
            (("d", "y"), lambda acc: acc, "annotation names d, y, and it returns d: give both the same names"),
            (("d", "y"), lambda acc: {"d": acc, "z": acc}, "annotation names d, y, and it returns d, z: give both"),
            (("d", "y", "z"), lambda acc: {"d": acc, "z": acc, "y": acc + 1}, "the same names in the same order"),
        ],
    )
    def test_names_of_annotations(self, annotation, result, problem):
        def f(acc):  # <-
            return result(acc)

        f.__annotations__["return"] = annotation
        refused(f, problem)

    def test_names_clash(self):
        def f(acc, bias: Row):  # <-
            return {"d": acc + bias, "bias": acc}

        refused(f, "output name 'bias' is taken")

    def test_unused(self):
        def f(acc, bias: Row, gate: Col, residual: Tile):  # <-
            co.exp(gate)
            return acc + residual

        def constant(acc, bias: Row):  # <-
            return bias * 2.0

        refused(f, "no output depends on the input bias, gate")
        refused(constant, "no output depends on the accumulator")

    def test_too_large(self):
        def f(acc):  # <-
            for i in range(1000):
                acc = acc + float(i)
            return acc

        refused(f, "at most 256 nodes")

    def test_signatures(self):
        def nothing():  # <-
            return 1.0

        def bare(acc, bias):  # <-
            return acc + bias

        def wrong(acc, bias: int):  # <-
            return acc + bias

        def text(acc, bias: "co.Rows"):  # <-
            return acc + bias

        def default(acc, bias: Row = 1.0):  # <-
            return acc + bias

        def positional(acc, *inputs: Row):  # <-
            return acc

        def keywords(acc, **inputs: Row):  # <-
            return acc

        def no_accumulator(bias: Row, gate: Col):  # <-
            return bias + gate

        def named_out(acc, out: Row):  # <-
            return acc + out

        def unicode(acc, größe: Row):  # <-
            return acc + größe

        refused(nothing, "needs a first parameter")
        refused(bare, "parameter bias has no annotation: annotate it co.Row (N,)")
        refused(wrong, "parameter bias has annotation <class 'int'>")
        refused(text, "parameter bias has annotation co.Rows")
        refused(default, "parameter bias has a default")
        refused(positional, "*inputs", "declare each input by name")
        refused(keywords, "**inputs", "declare each input by name")
        refused(no_accumulator, "the first parameter is the accumulator, so bias cannot be an input")
        refused(named_out, "input name 'out' is an argument of every call")
        refused(unicode, "ASCII")

    def test_the_def_line_is_found_below_decorators(self):
        with pytest.raises(EpilogueError) as caught:

            @epilogue
            def f(acc, bias):
                return acc + bias

        assert str(caught.value).endswith("def f(acc, bias):")

    def test_what_is_no_function(self):
        add_one = lambda acc: acc + 1.0  # noqa: E731

        def generator(acc):  # <-
            yield acc

        async def coroutine(acc):  # <-
            return acc

        with pytest.raises(EpilogueError, match="a lambda cannot annotate its inputs: write the epilogue with def"):
            epilogue(add_one)
        for thing in (3, len, print, Epilogue):
            with pytest.raises(EpilogueError, match="a function defined with def"):
                epilogue(thing)
        refused(generator, "no generator or coroutine")
        refused(coroutine, "no generator or coroutine")

    def test_functions_outside_of_an_epilogue(self):
        with pytest.raises(EpilogueError, match=r"co.relu works on the values of an @epilogue function only") as caught:
            co.relu(torch.ones(3))  # here
        assert "co.relu(torch.ones(3))  # here" in str(caught.value)
        with pytest.raises(EpilogueError, match=r"co\.sum works"):
            co.sum(1.0, 0)

    def test_values_do_not_leave_their_tracing(self):
        leaked = []

        @epilogue
        def first(acc):
            leaked.extend([acc, co.sum(acc, 0)])
            return acc

        def second(acc):
            return acc + leaked[0]  # <-

        def third(acc):  # <-
            return {"d": acc, "total": leaked[1]}

        refused(second, "belongs to another epilogue's tracing")
        refused(third, "belongs to another epilogue's tracing")
        assert isinstance(leaked[1], Reduction)

    def test_errors_in_helpers_show_the_helpers_line(self):
        def helper(x):
            return x if x > 0 else -x

        def f(acc):
            return helper(acc)

        with pytest.raises(EpilogueError) as caught:
            epilogue(f)
        assert str(caught.value).startswith("f: ")
        assert str(caught.value).endswith("return x if x > 0 else -x")

    def test_the_users_own_errors_pass(self):
        def f(acc):
            raise KeyError("mine")

        with pytest.raises(KeyError, match="mine"):
            epilogue(f)
        # And the failed tracing is over.
        with pytest.raises(EpilogueError, match="of an @epilogue function only"):
            co.relu(1.0)

    def test_without_source_the_place_is_still_named(self):
        namespace = {"Row": Row}
        exec("def f(acc, bias: Row):\n    return acc if acc > bias else bias", namespace)
        with pytest.raises(EpilogueError, match="f: an epilogue cannot branch") as caught:
            epilogue(namespace["f"])
        assert str(caught.value).endswith("<string>:2")


@pytest.mark.parametrize("annotation", [Row, Col, Tile, Scalar, Integer])
def test_an_annotation_is_not_called(annotation):
    name = annotation.__name__
    with pytest.raises(EpilogueError, match=rf"^co\.{name} is an annotation, .*: write `bias: co\.{name}` in"):

        @epilogue
        def wrong(acc, bias: annotation()):
            return acc + bias


def test_a_power_has_no_modulus():
    def wrong(acc):
        return pow(acc, 2, 3)  # <-

    refused(wrong, "pow takes no modulus")
