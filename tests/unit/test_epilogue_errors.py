"""Tracing: what an error shows of a function that cannot be traced."""

import inspect
import math
import re
import sys
from decimal import Decimal
from fractions import Fraction
from typing import NamedTuple

import numpy as np
import pytest
import torch

import cutlass_ops as co
from cutlass_ops.base.errors import EpilogueError
from cutlass_ops.epilogue.trace import Epilogue, epilogue
from cutlass_ops.epilogue.values import Col, Integer, Reduction, Row, Scalar, Tile
from cutlass_ops.run.gemm import gemm


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
    assert "lambda" in source or source.strip() == "return use(acc)"
    for part in parts:
        assert part in first


BRANCHES = "cannot branch", "co.where(condition, x, y), co.maximum, co.minimum, co.clamp, co.relu"
NUMBERS = "is not a Python number", "co.exp, not math.exp"
SEQUENCES = ("cannot be indexed, iterated",)
NO_VALUE = ("a value or a number is needed here",)
TENSOR = ("a tensor or array cannot be a constant",)
REDUCTION = ("a reduction can only be an output",)
SEEDS = ("co.uniform takes whole numbers of 64 bits: annotate the parameter co.Integer",)

# Uses of the accumulator, and what the error says.
REFUSED = [
    *(
        (use, *BRANCHES)
        for use in (
            lambda x: 1.0 if x else -x,
            lambda x: x if x > 0 else -x,
            lambda x: x if x == 0 else -x,
            lambda x: x and x,
            lambda x: not x,
            lambda x: max(x, 0.0),
            lambda x: x + (x in [x + 1, x]),
            lambda x: co.where(0.0 < x < 1.0, x, 0.0),
        )
    ),
    (lambda x: co.where(x, 1.0, 0.0), "co.where takes a condition, such as x > 0", "write x != 0"),
    (lambda x: co.where(True, x, x), "a value or a number is needed here, not bool", "truth value is known already"),
    (lambda x: (x > 0) & (1 < 2), "truth value is known already"),
    (lambda x: (x > 0) & x, "the operator & is not supported for numbers: it takes conditions", "(x > 0) & (x < 1)"),
    (lambda x: (x > 0) ^ (x < 1), "of conditions, use !="),
    (lambda x: x * co.uniform(2**63), *SEEDS),
    (lambda x: x * co.uniform(1, 0.5), *SEEDS),
    *((use, *NUMBERS) for use in (int, float, complex, math.exp, range, "{0!r:}%d".__mod__, hex)),
    *((use, *SEQUENCES) for use in (len, iter, reversed, lambda x: x[0], lambda x: 1 in x, lambda x: [*x])),
    *((use, "co.cast") for use in (round, math.floor, math.ceil, math.trunc)),
    *((use, *NO_VALUE) for use in (lambda x: x ** [2], lambda x: x ** "2", lambda x: True**x)),
    (lambda x: pow(x, 2, 3), "pow takes no modulus"),
    *(
        (use, f"operator {symbol} is not supported")
        for symbol, use in {
            "@": lambda x: x @ x,
            "%": lambda x: 2 % x,
            "//": lambda x: x // 2,
            "divmod": lambda x: divmod(x, 2),
            "&": lambda x: x & x,
            "|": lambda x: x | x,
            "^": lambda x: x ^ x,
            "~": lambda x: ~x,
            "<<": lambda x: x << 1,
            ">>": lambda x: 1 >> x,
        }.items()
    ),
    (torch.relu, "PyTorch's relu cannot take a traced value: use co.relu"),
    (lambda x: torch.nn.functional.softmax(x, 0), "PyTorch's softmax", "softmax needs a whole row of D"),
    (lambda x: torch.clamp(x, 0), "PyTorch's clamp cannot take a traced value: use co.clamp"),
    (lambda x: torch.max(x, x), "use co.maximum(x, y), or as an output co.max(x, dim)"),
    (lambda x: torch.sum(x), "as an output, use co.sum(x, dim)"),
    (torch.nn.functional.dropout, "use co.dropout_mask"),
    (torch.nn.functional.softsign, "write x / (1 + co.e.abs(x))"),
    (np.abs, "NumPy's absolute cannot take a traced value: use co.abs"),
    (np.exp, "NumPy's exp cannot take a traced value: use co.exp"),
    (lambda x: np.multiply.reduce(x), "NumPy's multiply"),
    *((use, "is not a NumPy array") for use in (np.sum, np.asarray)),
    *((lambda x, n=n: n.ones(3) * x, *TENSOR) for n in (torch, np)),
    *((lambda x, n=n: x * n.ones(3), *TENSOR) for n in (torch, np)),
    (lambda x: torch.add(torch.ones(3), x), *TENSOR),
    (lambda x: x.clamp(0), "has no attribute clamp: use co.clamp"),
    (lambda x: x.relu(), "no attribute relu: use co.relu"),
    (lambda x: x.swish(), "no attribute swish: did you mean silu?"),
    (lambda x: x.shape, "no attribute shape"),
    (lambda x: x.to(torch.float16), "use co.cast(x, dtype)"),
    (lambda x: x.float(), "leave it out"),
    (lambda x: x(), "is not a function"),
    (lambda x: co.softplus(x, beta=x), "takes Python numbers for beta and threshold"),
    (lambda x: co.gelu(x, "erf"), "approximate is 'erf': use 'none' or 'tanh'"),
    (lambda x: co.gelu(x, []), "approximate is []: use 'none'"),
    (lambda x: co.clamp(x), "needs min, max or both"),
    (lambda x: co.cast(x, "i8"), "dtype 'i8' is not supported here", "bf16"),
    *((lambda x, n=n: x * n, "outside FP32's range") for n in (1e39, -1e39, 1e-46, 10**400)),
    *(
        (lambda x, use=use: x * use(co.row_index()), "more than the 32 bits of an index", "up to 2**31 - 1")
        for use in (lambda i: i < 2**31, lambda i: co.where(i > 0, i, -(2**31) - 1))
    ),
    *(
        (lambda x, use=use: use(x, co.sum(x, dim=1)), *REDUCTION)
        for use in (
            lambda x, total: x / total,
            lambda x, total: 2.0 * total,
            lambda x, total: np.float64(2.0) * total,
            lambda x, total: -total,
            lambda x, total: total**2,
            lambda x, total: total < x,
            lambda x, total: co.rsqrt(total),
            lambda x, total: co.sum(total, 0),
            lambda x, total: total.relu(),
        )
    ),
    *(
        (lambda x, dim=dim: co.sum(x, dim), "co.sum reduces over a row with dim=1 or over a column with dim=0")
        for dim in (2, -3, None, True, 1.0, "1")
    ),
    (lambda x: co.max(x, x), "for the greater of two values use co.maximum"),
    # Python refuses to write ints of thousands of digits.
    (lambda x: co.where(co.row_index() > 0, co.row_index(), 10**5000), "an int of 16610 bits has more than the 32"),
    (lambda x: co.sum(x, 10**5000), "not dim=an int of 16610 bits"),
    (lambda x: co.e.quantize(x, "e4m3", 10**5000), "block is an int of 16610 bits"),
]


class TestErrors:
    @pytest.mark.parametrize(("use", "parts"), [(use, parts) for use, *parts in REFUSED])
    def test_uses_of_a_value(self, use, parts):
        refused_use(use, *parts)

    def test_the_line_is_shown(self):
        def comparison(acc, bias: Row):
            return (
                acc + bias
                if acc > 0  # <-
                else acc
            )

        def loop(acc):
            while acc < 1.0:  # <-
                acc = acc * 2
            return acc

        def seed(acc, seed: Integer):
            return acc * seed  # <-

        def scalar(acc, seed: Scalar):
            return acc * co.uniform(seed)  # <-

        refused(comparison, *BRANCHES)
        refused(loop, *BRANCHES)
        refused(seed, "an Integer is a seed or an offset of co.uniform and co.dropout_mask: use a co.Scalar")
        refused(scalar, *SEEDS)

    def test_probing_for_protocols_is_no_error(self):
        def f(acc):
            assert not hasattr(acc, "_repr_html_")
            assert not hasattr(acc, "__cuda_array_interface__")
            assert "acc" in f"{acc}"
            return acc

        epilogue(f)

    def test_a_reduction_cannot_be_d(self):
        def alone(acc):  # <-
            return co.sum(acc, 1)

        def named(acc):  # <-
            return {"d": co.sum(acc, 1)}

        refused(alone, "a reduction cannot be D")
        refused(named, "cannot be a reduction")

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

    @pytest.mark.parametrize(
        ("parameters", "problem"),
        [
            ("", "needs a first parameter"),
            ("acc, bias", "parameter bias has no annotation: annotate it co.Row (N,)"),
            ("acc, bias: int", "parameter bias has annotation <class 'int'>"),
            ("acc, bias: 'co.Rows'", "parameter bias has annotation co.Rows"),
            ("acc, bias: Row = 1.0", "parameter bias has a default"),
            ("acc, *inputs: Row", "is not possible: declare each input by name"),
            ("acc, **inputs: Row", "is not possible: declare each input by name"),
            ("bias: Row, gate: Col", "the first parameter is the accumulator, so bias cannot be an input"),
            ("acc, out: Row", "input name 'out' is an argument of every call"),
            ("acc, größe: Row", "ASCII"),
        ],
    )
    def test_signatures(self, parameters, problem):
        namespace = {"Row": Row, "Col": Col}
        exec(f"def f({parameters}):\n    return 1.0", namespace)
        with pytest.raises(EpilogueError, match=f"^f: .*{re.escape(problem)}"):
            epilogue(namespace["f"])

    def test_the_def_line_is_found_below_decorators(self):
        with pytest.raises(EpilogueError) as caught:

            @epilogue
            def f(acc, bias):
                return acc + bias

        assert str(caught.value).endswith("def f(acc, bias):")

    def test_what_is_no_function(self):
        def generator(acc):  # <-
            yield acc

        async def coroutine(acc):  # <-
            return acc

        with pytest.raises(EpilogueError, match="a lambda cannot annotate its inputs: write a function with def"):
            epilogue(lambda acc, bias: acc + bias)
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


# ---- Functions that do not end ---------------------------------------------------------------------------------------


inner = epilogue(lambda acc: acc * 2)
# One step of a loop. A pair keeps its first value.
STEPS = {
    "grows": lambda acc: acc + 1.0,
    "repeats": lambda acc: (acc, acc + 1.0)[0],
    "stays": lambda acc: +acc,
    "reduces": lambda acc: (acc, co.sum(acc, 1))[0],
    "folds": lambda acc: (acc, co.add(1.0, 2.0))[0],
    "casts": lambda acc: co.cast(acc, "f32"),
    "inlines": lambda acc: inner(acc),
}


@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
def test_a_loop_without_an_end_is_refused(step):
    def endless(acc):
        while True:
            acc = step(acc)

    with pytest.raises(EpilogueError, match=r"the function has taken 16,384 steps, .*: does each of its loops end\?"):
        epilogue(endless)


def test_recursion_without_an_end_is_refused():
    def doubled(x):
        return doubled(x * 2)

    def recursive(acc):
        return doubled(acc)

    def without_steps(acc):
        def again():
            return again()

        return again()

    before = sys.getrecursionlimit()
    try:
        sys.setrecursionlimit(3_000)  # another package may have raised it
        for function in (recursive, without_steps):
            with pytest.raises(EpilogueError, match=f"^{function.__name__}: the function calls itself without an end"):
                epilogue(function)
        sys.setrecursionlimit(1_000_000)
        with pytest.raises(EpilogueError, match="does each of its loops end"):
            epilogue(recursive)
    finally:
        sys.setrecursionlimit(before)


# ---- Constants -------------------------------------------------------------------------------------------------------

RANGE, TENSORS = "a constant is outside FP32's range", "a tensor or array cannot be a constant"
# Constants, and what the error says.
CONSTANTS = {
    "an int": (-(10**400), RANGE),
    "digits beyond Python's limit": (10**5000, RANGE),
    "a fraction": (Fraction(10**400), RANGE),
    "a small fraction": (Fraction(1, 10**400), RANGE),
    "a double": (1e300, RANGE),
    "a small double": (1e-300, RANGE),
    "NumPy's double": (np.float64(1e300), RANGE),
    "NumPy's long double": (np.longdouble("1e400"), RANGE),
    "a decimal": (Decimal("0.5"), r"not Decimal: write float\(...\) of it"),
    "a complex number": (1j, "not complex: an epilogue computes with real numbers"),
    "NumPy's complex number": (np.complex64(1j), "not complex(64)?: an epilogue computes with real numbers"),
    "a truth value": (True, "not bool: a truth value is known already"),
    "NumPy's truth value": (np.bool_(True), "not bool_?: a truth value is known already"),
    "a text": ("2", "not str\n"),
    "NumPy's text": (np.str_("2"), "not str_\n"),
    "a date": (np.datetime64("2020-01-01"), "not date(time64)?\n"),
    "nothing": (None, "not NoneType\n"),
    "a list": ([1.0], "not list\n"),
    "an array": (np.ones(3), TENSORS),
}
# Each takes any number as an FP32 value.
TAKERS = {
    "+": lambda x, y: x + y,
    "reversed +": lambda x, y: y + x,
    "*": lambda x, y: x * y,
    "/": lambda x, y: x / y,
    "reversed /": lambda x, y: y / x,
    "**": lambda x, y: x**y,
    "pow": lambda x, y: co.pow(x, y),
    "pow of it": lambda x, y: co.pow(y, x),
    "<": lambda x, y: co.where(x < y, x, 0.0),
    "==": lambda x, y: co.where(x == y, x, 0.0),
    "where": lambda x, y: co.where(x > 0, x, y),
    "clamp": lambda x, y: co.clamp(x, 0, y),
    "leaky_relu": lambda x, y: co.leaky_relu(x, y),
    "elu": lambda x, y: co.elu(x, y),
    "softplus": lambda x, y: co.softplus(x, y),
    "softplus's threshold": lambda x, y: co.softplus(x, 1.0, y),
    "of constants": lambda x, y: x + co.mul(y, y),
    "dropout_mask": lambda x, y: co.where(co.dropout_mask(y, 3), x, 0.0),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("take", TAKERS.values(), ids=TAKERS)
@pytest.mark.parametrize(("value", "said"), CONSTANTS.values(), ids=CONSTANTS)
def test_constants_that_fp32_has_not_are_refused_in_words(value, said, take):
    if value is None and take is TAKERS["clamp"]:
        return  # no bound
    with pytest.raises(EpilogueError, match=said):
        epilogue(lambda acc: take(acc, value))


NUMBERS = [Fraction(1, 2), np.float16(0.5), np.float32(0.5), np.float64(0.5), np.longdouble("0.5"), 0.5]


def test_other_libraries_numbers_are_those_of_python():
    for take in TAKERS.values():
        graphs = {epilogue(lambda acc: take(acc, value)).graph for value in NUMBERS}  # noqa: B023
        assert len(graphs) == 1
    for value in (np.int8(2), np.int64(2), np.uint64(2), Fraction(2), 2):
        assert epilogue(lambda acc: acc**value) == epilogue(lambda acc: co.square(acc))  # noqa: B023


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, np.float32("inf"), 0.0, -0.0])
def test_numbers_that_are_not_finite_are_constants(value):
    nodes = epilogue(lambda acc: acc**value + value).graph.nodes
    assert [n.attr for n in nodes if n.op == "const"] == [pytest.approx(float(value), nan_ok=True)]


@pytest.mark.parametrize("value", [10**400, Fraction(10**400), 10**5000], ids=["int", "fraction", "digits"])
def test_numbers_of_calls_beyond_doubles_are_refused(value):
    a, b = torch.ones(2, 8).bfloat16(), torch.ones(8, 3).bfloat16()
    with pytest.raises(ValueError, match="s is beyond the range of a double"):
        gemm(a, b, epilogue=epilogue(scaled_by), s=value)
    if isinstance(value, int):
        with pytest.raises(ValueError, match=r"seed is an int of .* bits: an Integer has 64 bits"):
            gemm(a, b, epilogue=epilogue(seeded), seed=value)


def scaled_by(acc, s: co.Scalar):
    return acc * s


def seeded(acc, seed: Integer):
    return acc + co.uniform(seed)
