"""Tracing: what graph a function gives."""

import math
import operator
import pickle
import sys
import textwrap
import threading
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given

import cutlass_ops as co
from cutlass_ops.base.errors import EpilogueError
from cutlass_ops.epilogue.nodes import Input, Kind, Node, Output
from cutlass_ops.epilogue.operations import OPS
from cutlass_ops.epilogue.trace import Epilogue, epilogue
from cutlass_ops.epilogue.values import Col, Integer, Row, Scalar, Tile, Value
from tests.strategies import PATIENT, programs


class Statistics(NamedTuple):
    """What some epilogues return."""

    d: object
    pre: object
    top: object


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

    def test_a_tuple_has_names_by_position_by_annotation_or_of_its_own(self):
        def by_name(acc):
            return {"d": co.relu(acc), "pre": acc, "top": co.max(acc, 1)}

        def annotated(acc) -> ("d", "pre", "top"):  # noqa: F821
            return co.relu(acc), acc, co.max(acc, 1)

        def as_text(acc) -> "('d', 'pre', 'top')":  # noqa: F821
            return [co.relu(acc), acc, co.max(acc, 1)]

        def by_class(acc) -> Statistics:
            return co.relu(acc), acc, co.max(acc, 1)

        def by_the_name_of_a_class(acc) -> "Statistics":
            return co.relu(acc), acc, co.max(acc, 1)

        def itself(acc):
            return Statistics(top=co.max(acc, 1), d=co.relu(acc), pre=acc)

        def numbered(acc) -> tuple:
            return co.relu(acc), acc, co.max(acc, 1)

        for function in (annotated, as_text, by_class, by_the_name_of_a_class, itself):
            assert epilogue(function) == epilogue(by_name)
        assert [o.name for o in epilogue(numbered).outputs] == ["d", "output1", "output2"]

        def dictionary(acc) -> ("d", "pre", "top"):  # noqa: F821
            return by_name(acc)

        def quantised(acc) -> ("d", "pre"):  # noqa: F821
            return {"pre": acc, "d": co.e.quantize(acc, "e4m3")}

        assert epilogue(dictionary) == epilogue(by_name)
        assert [o.name for o in epilogue(quantised).outputs] == ["d", "d_scale", "pre"]

        def too_few(acc) -> ("d", "pre"):  # noqa: F821
            return co.relu(acc), acc, co.max(acc, 1)

        def without_d(acc) -> ("y", "pre"):  # noqa: F821
            return co.relu(acc), acc

        for function in (too_few, without_d):
            with pytest.raises(EpilogueError, match="each needs a name of its own, and D's is 'd'"):
                epilogue(function)

    def test_a_graph_is_called_as_its_function_is(self):
        def several(acc, bias: Row, scale: Col, seed: Integer):
            kept = co.uniform(seed, 7) >= 0.5
            x = co.where(kept, acc + bias, 0.0) * scale + co.row_index()
            return {"d": co.relu(x), "pre": x, "top": co.max(x, 1)}

        traced = epilogue(several)
        graph = pickle.loads(pickle.dumps(traced))
        assert graph == traced == epilogue(traced.graph)
        assert str(graph.signature).startswith("(acc, /, bias:")
        assert list(graph.signature.parameters) == list(traced.signature.parameters)

        def around(called):
            def around(acc, bias: Row, gate: Tile, number: Integer):
                found = called(acc * gate, bias, seed=number, scale=2.0)
                return found | {"d": found["d"] + gate, "low": co.min(found["pre"], 0)}

            return epilogue(around)

        assert around(graph) == around(traced)

        def single(acc, scale: Col):
            return acc + epilogue(epilogue(identity).graph)(scale)

        assert [op for op, *_ in nodes(single)] == ["acc", "input", "add"]

        def wrong(acc):
            return graph(acc)

        with pytest.raises(EpilogueError, match=r"several\(acc, /, bias: .*\): missing a required argument: 'bias'"):
            epilogue(wrong)

    def test_it_is_immutable(self):
        traced = epilogue(identity)
        with pytest.raises(AttributeError):
            traced.graph = None
        assert epilogue(traced) is traced

    @given(programs())
    @PATIENT
    def test_drawn_functions_are_canonical(self, program):
        first, second = program.epilogue("one"), program.epilogue("two")
        assert first.graph == second.graph
        assert hash(first) == hash(second)
        assert len(set(first.graph.nodes)) == len(first.graph.nodes)
        assert [(i.name, i.kind) for i in first.inputs] == list(program.inputs)
        assert [o.name for o in first.outputs] == [o[0] for o in program.outputs]

    FLOATS = sorted(name for name, info in OPS.items() if not info.typed or name in ("add", "sub", "mul", "neg"))

    @pytest.mark.parametrize("name", sorted(set(FLOATS) - {"cast", "gelu_tanh"}))
    def test_every_function_gives_its_operation(self, name):
        def f(acc):
            return getattr(co, name)(*[acc] * OPS[name].arity)

        assert nodes(f) == [("acc", ()), (name, (0,) * OPS[name].arity)]

    @pytest.mark.parametrize("name", ["lt", "le", "gt", "ge", "eq", "ne"])
    def test_comparisons_are_kept_as_they_are_written(self, name):
        def written(acc, bias: Row, scale: Col):
            x = getattr(operator, name)(acc, bias) & getattr(operator, name)(bias, scale)
            return co.where(x & getattr(operator, name)(scale, acc), acc, 0.0)

        def called(acc, bias: Row, scale: Col):
            x = getattr(co, name)(acc, bias) & getattr(co, name)(bias, scale)
            return co.where(x & getattr(co, name)(scale, acc), acc, 0.0)

        def numpy(acc):
            return co.where(getattr(operator, mirrored)(np.float32(2.0), acc), acc, 0.0)

        mirrored = {"lt": "gt", "le": "ge", "gt": "lt", "ge": "le"}.get(name, name)
        assert epilogue(written) == epilogue(called)
        # What stands on the left comes first.
        assert [n.op for n in epilogue(numpy).graph.nodes].count(mirrored) == 1

    def test_indices_stay_whole_numbers_among_whole_numbers(self):
        def f(acc):
            return acc * (2 * co.row_index() - co.column_index() + 1 < 7) * (co.row_index() * 0.5)

        ops = nodes(f)
        assert [op for op, *_ in ops if op == "integer"] == ["integer"] * 3
        # One of a condition, and one of a row that a fraction multiplies.
        assert [ops[args[0]][0] for op, args, *_ in ops if op == "to_float"] == ["lt", "row_index"]

    @pytest.mark.parametrize("apply", [operator.add, operator.sub, operator.mul])
    @pytest.mark.parametrize("number", [2654435761, -(2**31) - 1, 2**40 + 3])
    def test_numbers_beyond_32_bits_wrap_as_indices_do(self, apply, number):
        def written(acc):
            return acc * (apply(co.row_index(), number) < 7)

        def kept(acc):
            return acc * (apply(co.row_index(), int(np.int64(number).astype(np.int32))) < 7)

        assert epilogue(written) == epilogue(kept)
        assert "to_float" not in [op for op, args, *_ in nodes(written) if args == [0]]

    @pytest.mark.parametrize(
        ("written", "spelled"),
        [
            (lambda x: 1 - (2 / (3 * (4 + x))), lambda x: co.sub(1.0, co.div(2.0, co.mul(3.0, co.add(4.0, x))))),
            (lambda x: +(-abs((x - 2) * 3 / 4)), lambda x: co.neg(co.abs(co.div(co.mul(co.sub(x, 2.0), 3.0), 4.0)))),
            (lambda x: np.float64(2.0) * x + x * np.float32(0.5), lambda x: 2.0 * x + x * 0.5),
            (lambda x: x**2, lambda x: co.square(x)),
            (lambda x: x**3, lambda x: co.square(x) * x),
            (lambda x: x**1, lambda x: x),
            (lambda x: x**0.5, lambda x: co.sqrt(x)),
            (lambda x: x**-0.5, lambda x: co.rsqrt(x)),
            (lambda x: x**-1, lambda x: co.reciprocal(x)),
            (lambda x: x**-2, lambda x: co.reciprocal(co.square(x))),
            (lambda x: co.pow(x, 2), lambda x: co.square(x)),
            (lambda x: x**2.5, lambda x: co.pow(x, 2.5)),
            (lambda x: np.float64(2) ** x, lambda x: co.pow(2, x)),
            (
                lambda x: co.where((x > 0) & (x < 1) | ~(x < 5), x, 0),
                lambda x: co.where(
                    co.logical_or(co.logical_and(co.gt(x, 0), co.lt(x, 1)), co.logical_not(co.lt(x, 5))), x, 0
                ),
            ),
            # Truth values and indices count where a number is needed.
            (lambda x: x * (x > 0) + co.row_index(), lambda x: x * co.to_float(x > 0) + co.to_float(co.row_index())),
            (lambda x: co.softplus(x, 2.0, 10.0), lambda x: co.where(x * 2.0 > 10.0, x, co.log1p(co.exp(x * 2.0)) / 2)),
            (lambda x: co.swap_pairs(2.5) - x, lambda x: 2.5 - x),
            (lambda x: co.clamp(x, -1, 2), lambda x: co.minimum(co.maximum(x, -1), 2)),
            (lambda x: co.clamp(x, min=-1), lambda x: co.maximum(x, -1)),
            (lambda x: co.clamp(x, max=2), lambda x: co.minimum(x, 2)),
            (lambda x: co.leaky_relu(x), lambda x: co.leaky_relu(x, 0.01)),
            (lambda x: co.cast(x, "f32"), lambda x: x),
            (lambda x: co.cast(x, "bfloat16"), lambda x: co.cast(x, torch.bfloat16)),
        ],
    )
    def test_other_spellings(self, written, spelled):
        assert epilogue(lambda acc: written(acc) + acc) == epilogue(lambda acc: spelled(acc) + acc)

    def test_what_is_stored_is_a_number(self):
        def implicit(acc):
            return {"d": acc, "mask": acc > 0, "total": co.sum(acc > 0, 1)}

        def explicit(acc):
            mask = co.to_float(acc > 0)
            return {"d": acc, "mask": mask, "total": co.sum(mask, 1)}

        assert epilogue(implicit) == epilogue(explicit)

    def test_random_numbers_of_one_seed_and_offset_are_one(self):
        def f(acc, seed: Integer):
            return acc * co.uniform(seed) + co.uniform(seed) * co.uniform(seed, 1)

        assert [op for op, *_ in nodes(f)].count("uniform") == 2

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
        def f(acc, bias: Row):
            # 0.1 + 0.2 in FP32 is not the FP64 sum rounded.
            return acc * (co.add(0.1, 0.2) - co.mul(3, 4)) + bias * co.mul(3e38, 2.0) + co.exp(1.0)

        one, two = torch.tensor(0.1), torch.tensor(0.2)
        assert [n[2] for n in nodes(f) if n[0] == "const"] == [(one + two - 12).item(), math.inf, 1.0]
        # Inexact functions of constants are left to the device.
        assert "exp" in [n[0] for n in nodes(f)]

    def test_python_control_flow_on_python_values_is_free(self):
        def f(acc, bias: Row):
            x = acc
            for i in range(3):
                x = x * bias if i % 2 else x + bias
            return x

        assert [op for op, *_ in nodes(f)] == ["acc", "input", "add", "mul", "add"]

    def test_keyword_only_and_positional_only_parameters(self):
        def plain(acc, bias: Row, gate: Col):
            return acc * gate + bias

        def marked(acc, /, bias: Row, *, gate: Col):
            return acc * gate + bias

        assert epilogue(plain) == epilogue(marked)
        assert epilogue(plain) != epilogue(identity)

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
