"""Tracing: what graph a function gives, and what an error shows."""

import inspect
import math
import sys
import textwrap
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given

from cutlass_ops.epilogue import functions
from cutlass_ops.epilogue.graph import Input, Kind, Node, Output
from cutlass_ops.epilogue.ops import OPS
from cutlass_ops.epilogue.trace import Epilogue, epilogue
from cutlass_ops.epilogue.values import Col, Reduction, Row, Scalar, Tile, Value
from cutlass_ops.errors import EpilogueError
from tests.strategies import PATIENT, programs

# What the package exports, under the name that its users import it by.
co = SimpleNamespace(
    **{n: f for n, f in vars(functions).items() if inspect.isfunction(f) and f.__module__ == functions.__name__},
    epilogue=epilogue,
    Row=Row,
    Col=Col,
    Tile=Tile,
    Scalar=Scalar,
)


def nodes(function):
    return [(n.op, n.args) if n.attr is None else (n.op, n.args, n.attr) for n in epilogue(function).graph.nodes]


class TestGraph:
    def test_a_function_becomes_a_graph(self):
        @co.epilogue
        def swish_residual(acc, bias: co.Row, residual: co.Tile, scale: co.Scalar):
            """Swish, scaled, and a residual."""
            return co.silu(acc + bias) * scale + residual

        assert isinstance(swish_residual, Epilogue)
        assert swish_residual.name == "swish_residual"
        assert swish_residual.doc == "Swish, scaled, and a residual."
        assert swish_residual.inputs == (
            Input("bias", Kind.ROW),
            Input("residual", Kind.TILE),
            Input("scale", Kind.SCALAR),
        )
        assert swish_residual.outputs == (Output("d", 7),)
        assert swish_residual.graph.nodes == (
            Node("acc"),
            Node("input", (), "bias"),
            Node("add", (0, 1)),
            Node("silu", (2,)),
            Node("input", (), "scale"),
            Node("mul", (3, 4)),
            Node("input", (), "residual"),
            Node("add", (5, 6)),
        )
        assert list(swish_residual.signature.parameters) == ["acc", "bias", "residual", "scale"]
        assert repr(swish_residual) == "<epilogue swish_residual(acc, bias: Row, residual: Tile, scale: Scalar) -> d>"

    def test_it_is_immutable(self):
        traced = epilogue(identity)
        with pytest.raises(AttributeError):
            traced.graph = None
        assert epilogue(traced) is traced

    def test_names_of_functions_locals_and_the_accumulator_do_not_matter(self):
        def one(acc, bias: Row, gate: Col):
            x = acc + bias
            y = co.exp(gate)
            return {"d": x * y, "pre": x, "unit": co.max(y, 1)}

        def two(product, bias: Row, gate: Col):
            scale = co.exp(gate)
            co.tanh(product)
            d = (product + bias) * scale
            return {"pre": product + bias, "unit": co.max(co.exp(gate), -1), "d": d}

        first, second = epilogue(one), epilogue(two)
        assert [o.name for o in first.outputs] == ["d", "pre", "unit"]
        assert first == second
        assert hash(first) == hash(second)
        assert first.graph == second.graph
        assert first.graph.to_json() == second.graph.to_json()

    @pytest.mark.parametrize(
        "other",
        [
            lambda acc, bias, gate: acc + bias - gate,
            lambda acc, bias, gate: bias + acc * gate,
            lambda acc, bias, gate: {"d": acc * bias + gate, "pre": acc},
        ],
    )
    def test_different_expressions_are_different(self, other):
        def one(acc, bias: Row, gate: Col):
            return acc * bias + gate

        def two(acc, bias: Row, gate: Col):
            return other(acc, bias, gate)

        assert epilogue(one) != epilogue(two)

    def test_kinds_and_names_of_inputs_are_part_of_it(self):
        def row(acc, bias: Row):
            return acc + bias

        def col(acc, bias: Col):
            return acc + bias

        def named(acc, shift: Row):
            return acc + shift

        assert len({epilogue(row), epilogue(col), epilogue(named)}) == 3

    def test_shared_subexpressions_appear_once(self):
        def f(acc):
            return co.exp(acc) * 2.0 + co.exp(acc) * 2.0

        assert [op for op, *_ in nodes(f)] == ["acc", "exp", "const", "mul", "add"]

    @given(programs())
    @PATIENT
    def test_drawn_functions_are_canonical(self, program):
        first, second = program.epilogue("one"), program.epilogue("two")
        assert first.graph == second.graph
        assert hash(first) == hash(second)
        assert len(set(first.graph.nodes)) == len(first.graph.nodes)
        assert [(i.name, i.kind) for i in first.inputs] == list(program.inputs)
        assert [o.name for o in first.outputs] == [o[0] for o in program.outputs]

    def test_operators_and_numbers_on_both_sides(self):
        def f(acc):
            return {"d": 1 - (2 / (3 * (4 + acc))), "other": +(-abs(((acc + 1) - 2) * 3 / 4))}

        def spelled(acc):
            inner = co.mul(co.sub(co.add(acc, 1.0), 2.0), 3.0)
            return {
                "d": co.sub(1.0, co.div(2.0, co.mul(3.0, co.add(4.0, acc)))),
                "other": co.neg(co.abs(co.div(inner, 4.0))),
            }

        assert epilogue(f) == epilogue(spelled)
        assert [op for op, *_ in nodes(spelled)] == [
            *("const", "const", "const", "const", "acc", "add", "mul", "div", "sub"),
            *("add", "sub", "mul", "div", "abs", "neg"),
        ]

    def test_numpy_scalars_are_numbers_on_either_side(self):
        def plain(acc):
            return 2.0 * acc + acc * 0.5

        def numpy(acc):
            return np.float64(2.0) * acc + acc * np.float32(0.5)

        assert epilogue(plain) == epilogue(numpy)

    @pytest.mark.parametrize("name", sorted(set(OPS) - {"cast", "gelu_tanh"}))
    def test_every_function_gives_its_operation(self, name):
        def f(acc):
            return getattr(co, name)(*[acc] * OPS[name].arity)

        assert nodes(f) == [("acc", ()), (name, (0,) * OPS[name].arity)]

    def test_clamp_is_maximum_then_minimum(self):
        def clamped(acc):
            return {
                "d": co.clamp(acc, -1, 2),
                "low": co.clamp(acc, min=-1),
                "high": co.clamp(acc, max=2),
            }

        def spelled(acc):
            return {
                "d": co.minimum(co.maximum(acc, -1), 2),
                "low": co.maximum(acc, -1),
                "high": co.minimum(acc, 2),
            }

        assert epilogue(clamped) == epilogue(spelled)

    def test_gelu_leaky_relu_and_cast(self):
        def f(acc):
            return {
                "d": co.gelu(acc),
                "one": co.gelu(acc, approximate="tanh"),
                "two": co.leaky_relu(acc),
                "three": co.cast(acc, "bfloat16"),
                "four": co.cast(acc, "f32"),
            }

        traced = epilogue(f)
        found = {o.name: traced.graph.nodes[o.node] for o in traced.outputs}
        assert found["d"] == Node("gelu", (0,))
        assert found["one"] == Node("gelu_tanh", (0,))
        assert traced.graph.nodes[found["two"].args[1]].attr == torch.tensor(0.01).item()
        assert found["three"] == Node("cast", (0,), "bf16")
        assert found["four"] == Node("acc")

    def test_reductions(self):
        def f(acc):
            return {
                "d": acc,
                "r1": co.sum(acc, dim=1),
                "r2": co.sum_square(acc, -1),
                "c1": co.max(acc, 0),
                "c2": co.sum(acc, -2),
            }

        assert epilogue(f).outputs == (
            Output("d", 0),
            Output("r1", 0, Kind.COL, "sum"),
            Output("r2", 0, Kind.COL, "sum_square"),
            Output("c1", 0, Kind.ROW, "max"),
            Output("c2", 0, Kind.ROW, "sum"),
        )

    def test_constants_are_rounded_and_folded_in_fp32(self):
        def f(acc):
            # 0.1 + 0.2 in FP32 is not the FP64 sum rounded.
            return acc * (co.add(0.1, 0.2) - co.mul(3, 4)) + co.neg(co.abs(-5))

        one, two = torch.tensor(0.1), torch.tensor(0.2)
        assert nodes(f) == [
            ("acc", ()),
            ("const", (), (one + two - 12).item()),
            ("mul", (0, 1)),
            ("const", (), -5.0),
            ("add", (2, 3)),
        ]

    def test_folding_overflows_as_fp32_does(self):
        def f(acc):
            return acc + co.mul(3e38, 2.0)

        assert ("const", (), math.inf) in nodes(f)

    def test_inexact_functions_of_constants_are_left_to_the_device(self):
        def f(acc):
            return acc + co.exp(1.0)

        assert ("exp", (1,)) in nodes(f)

    def test_infinity_and_nan_are_constants(self):
        def f(acc, bias: Row):
            return co.minimum(acc, math.inf) + bias * math.nan

        assert [n.attr.hex() for n in epilogue(f).graph.nodes if n.op == "const"] == ["inf", "nan"]

    def test_python_control_flow_on_python_values_is_free(self):
        def f(acc, bias: Row):
            x = acc
            for i in range(3):
                x = x * bias if i % 2 else x + bias
            return x

        assert [op for op, *_ in nodes(f)] == ["acc", "input", "add", "mul", "add"]

    def test_epilogues_inline_into_each_other(self):
        @epilogue
        def scaled(acc, scale: Scalar):
            return acc * scale

        def outer(acc, factor: Scalar):
            return co.relu(scaled(acc, factor)) + scaled(acc, 2.0)

        def flat(acc, factor: Scalar):
            return co.relu(acc * factor) + acc * 2.0

        assert epilogue(outer) == epilogue(flat)
        with pytest.raises(TypeError, match=r"apply it with gemm\(a, b, epilogue=scaled"):
            scaled(torch.ones(2, 2), 1.0)

    def test_keyword_only_and_positional_only_parameters(self):
        def plain(acc, bias: Row, gate: Col):
            return acc * gate + bias

        def marked(acc, /, bias: Row, *, gate: Col):
            return acc * gate + bias

        assert epilogue(plain) == epilogue(marked)

    def test_threads_trace_independently(self):
        barrier = threading.Barrier(4)
        results = {}

        def work(index):
            def f(acc):
                x = acc
                for _ in range(20):
                    barrier.wait()
                    x = x + float(index)
                return x

            results[index] = epilogue(f)

        threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [sorted({n.attr for n in results[i].graph.nodes if n.op == "const"}) for i in range(4)] == [
            [0.0],
            [1.0],
            [2.0],
            [3.0],
        ]


def identity(acc):
    return acc


class TestAnnotations:
    def test_strings(self, tmp_path, monkeypatch):
        (tmp_path / "as_strings.py").write_text(
            textwrap.dedent(
                """
                from __future__ import annotations

                from typing import TYPE_CHECKING

                from cutlass_ops.epilogue import trace, values
                from cutlass_ops.epilogue.values import Row as Bias

                if TYPE_CHECKING:
                    from cutlass_ops.epilogue.values import Scalar


                @trace.epilogue
                def module_level(acc, bias: Bias, gate: values.Col, factor: Scalar) -> values.Value:
                    return (acc + bias) * gate * factor


                def local():
                    from cutlass_ops.epilogue import values as language
                    from cutlass_ops.epilogue.values import Tile

                    @trace.epilogue
                    def f(acc: language.Value, residual: Tile, bias: language.Row, gate: "values.Col"):
                        return acc + residual + bias + gate

                    return f


                def closure():
                    from cutlass_ops.epilogue.values import Row as Alias

                    @trace.epilogue
                    def f(acc, bias: Alias):
                        assert isinstance(bias, Alias)
                        return acc + bias

                    return f
                """
            )
        )
        monkeypatch.syspath_prepend(tmp_path)
        import as_strings

        del sys.modules["as_strings"]
        assert [i.kind for i in as_strings.module_level.inputs] == [Kind.ROW, Kind.COL, Kind.SCALAR]
        assert [i.kind for i in as_strings.local().inputs] == [Kind.TILE, Kind.ROW, Kind.COL]
        assert [i.kind for i in as_strings.closure().inputs] == [Kind.ROW]

    def test_annotations_are_values_for_type_checkers(self):
        for kind in (Row, Col, Tile, Scalar):
            assert issubclass(kind, Value)


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

        for function in (conditional, conjunction, negation):
            refused(function, "cannot branch", "co.maximum, co.minimum, co.clamp, co.relu")
        for function in (comparison, equality, loop, built_in_max, membership):
            refused(function, "cannot compare", "co.maximum")

    @pytest.mark.parametrize("convert", [int, float, complex, math.exp, math.sqrt, range, "{0!r:}%d".__mod__, hex])
    def test_numbers(self, convert):
        refused_use(convert, "no Python number", "co.exp, not math.exp")

    @pytest.mark.parametrize(
        "use", [len, iter, list, tuple, reversed, lambda x: x[0], lambda x: 1 in x, lambda x: [*x]]
    )
    def test_sequences(self, use):
        refused_use(use, "cannot be indexed, iterated")

    @pytest.mark.parametrize("use", [round, math.floor, math.ceil, math.trunc])
    def test_rounding(self, use):
        refused_use(use, "co.cast")

    @pytest.mark.parametrize(
        ("use", "instead"),
        [
            (lambda x: x**2, "co.square(x)"),
            (lambda x: x**0.5, "co.sqrt(x)"),
            (lambda x: x**-0.5, "co.rsqrt(x)"),
            (lambda x: x**-1, "1 / x"),
            (lambda x: x**3, "a product or co.exp"),
            (lambda x: x**x, "a product or co.exp"),
            (lambda x: x ** [2], "a product or co.exp"),
            (lambda x: 2**x, "co.exp(x * math.log(base))"),
        ],
    )
    def test_powers(self, use, instead):
        refused_use(use, "**", f"use {instead}")

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
            (lambda x: torch.ones(3) * x, "a tensor or array cannot be a constant"),
            (lambda x: x * torch.ones(3), "a tensor or array cannot be a constant"),
            (lambda x: torch.add(torch.ones(3), x), "a tensor or array cannot be a constant"),
            (np.exp, "NumPy's exp cannot take a traced value: use co.exp"),
            (lambda x: np.multiply.reduce(x), "NumPy's multiply"),
            (np.sum, "no NumPy array"),
            (np.asarray, "no NumPy array"),
            (lambda x: np.ones(3) * x, "a tensor or array cannot be a constant"),
            (lambda x: x * np.ones(3), "a tensor or array cannot be a constant"),
            (lambda x: x.relu(), "no attribute relu: use co.relu"),
            (lambda x: x.shape, "no attribute shape"),
            (lambda x: x(), "no function"),
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

        refused(approximation, "approximate='none' and approximate='tanh', not 'erf'")
        refused(bounds, "needs min, max or both")
        refused(element, "unknown dtype 'i8'", "bf16")

    @pytest.mark.parametrize(
        ("result", "problem"),
        [
            (lambda acc: None, "returns nothing"),
            (lambda acc: 1.0, "returns float"),
            (lambda acc: (acc, acc), "returns tuple: return D's value, or a dictionary"),
            (lambda acc: torch.ones(2), "returns Tensor"),
            (lambda acc: {}, "lacks 'd'"),
            (lambda acc: {"y": acc}, "lacks 'd'"),
            (lambda acc: {"d": None}, "output 'd' is NoneType"),
            (lambda acc: {"d": acc, "y": 2.0}, "output 'y' is float"),
            (lambda acc: {"d": acc, 3: acc}, "output name 3 is not a string"),
            (lambda acc: {"d": acc, "two words": acc}, "output name 'two words'"),
            (lambda acc: {"d": acc, "float": acc}, "C++ keyword"),
            (lambda acc: {"d": acc, "stream": acc}, "reserved"),
        ],
    )
    def test_results(self, result, problem):
        def f(acc):  # <-
            return result(acc)

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

        def named_d(acc, d: Row):  # <-
            return acc + d

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
        refused(named_d, "input name 'd' is reserved")
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
        with pytest.raises(EpilogueError, match="f: an epilogue cannot compare") as caught:
            epilogue(namespace["f"])
        assert str(caught.value).endswith("<string>:2")
