"""The table of operations and how constants and operations are spelled in C++."""

import math
import re
import struct
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from cutlass_ops.epilogue import functions
from cutlass_ops.epilogue.nodes import Node
from cutlass_ops.epilogue.operations import GATHERED, INDICES, OPS, REDUCTIONS, Type, to_fp32
from cutlass_ops.kinds.cpp import cpp_expression, exact_inverse, float_literal
from cutlass_ops.kinds.lower import REDUCERS
from tests.strategies import PATIENT

ROOT = Path(__file__).parents[2]


def neighbours(value: float) -> tuple[Fraction, Fraction]:
    """FP32 values below and above, the infinities as the next power of two."""
    (bits,) = struct.unpack("<i", struct.pack("<f", abs(value)))
    above = Fraction(2) ** 128 if bits == 0x7F7FFFFF else Fraction(struct.unpack("<f", struct.pack("<i", bits + 1))[0])
    below = -above if bits == 0 else Fraction(struct.unpack("<f", struct.pack("<i", bits - 1))[0])
    return (below, above) if value >= 0 else (-above, -below)


def test_every_operation_and_gathered_value_has_a_function_in_the_language():
    assert {name for name in (*OPS, *GATHERED, *INDICES, *REDUCTIONS) if not hasattr(functions, name)} == {"gelu_tanh"}


def test_the_language_does_not_import_torch():
    for path in (ROOT / "cutlass_ops/epilogue").glob("*.py"):
        assert not re.search(r"^\s*(import|from) (torch|numpy)", path.read_text(encoding="utf-8"), re.MULTILINE), path


def test_every_device_function_is_defined_in_the_header():
    def defined(header):
        text = (ROOT / "templates/include" / header).read_text()
        within = "".join(f"{name}::" for name in re.findall(r"^namespace (\w+) {", text, re.MULTILINE))
        return {within + name for name in re.findall(r"CUTLASS_DEVICE (?:float|bool) (\w+)\(", text)}

    usual = "cutlass_ops/epilogue_math.h"
    assert {"cutlass_ops::infinity", "cutlass_ops::nan"} <= defined(usual)
    for name, info in OPS.items():
        if "::" in info.cpp:
            assert info.cpp in defined(info.header or usual), name


def test_every_operation_is_documented():
    text = (ROOT / "docs/epilogues.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `(\w+)` \| .*? \| (.* \| .*) \|$", text, re.MULTILINE))
    tables = OPS | GATHERED | INDICES | REDUCTIONS
    assert rows == {name: f"{info.formula} | `{info.torch}`" for name, info in tables.items()}


def test_every_reduction_is_in_the_header():
    include = ROOT / "templates/include"
    for name, info in REDUCTIONS.items():
        text = (include / (info.header or "cutlass_ops/reduce.h")).read_text()
        assert re.search(rf"^(struct|using) {REDUCERS[name]}\b", text, re.MULTILINE)


@given(st.floats(allow_nan=False))
@example(-0.0)
@PATIENT
def test_to_fp32_rounds_as_pytorch_does(value):
    assert to_fp32(value).hex() == torch.tensor(value, dtype=torch.float64).to(torch.float32).item().hex()


@given(st.floats(width=32, allow_nan=False, allow_infinity=False))
@PATIENT
def test_a_literal_is_read_back_exactly(value):
    text = float_literal(value).strip("()")
    assert re.fullmatch(r"-?\d+(\.\d+)?(e[+-]\d+)?f", text)
    decimal = Fraction(text.removesuffix("f"))
    below, above = neighbours(value)
    # Strictly nearer than halfway to either neighbour, so any correct compiler reads this value.
    assert (below + Fraction(value)) / 2 < decimal < (above + Fraction(value)) / 2
    assert text.startswith("-") == (math.copysign(1, value) < 0)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0.0f"),
        (-0.0, "(-0.0f)"),
        (-0.5, "(-0.5f)"),
        (to_fp32(1 / 3), "0.33333334f"),
        (1e10, "1e+10f"),
        (to_fp32(3.4028234663852886e38), "3.4028235e+38f"),
        (2.0**-149, "1e-45f"),
        (math.inf, "cutlass_ops::infinity()"),
        (-math.inf, "(-cutlass_ops::infinity())"),
        (math.nan, "cutlass_ops::nan()"),
    ],
)
def test_literals(value, text):
    assert float_literal(value) == text


def test_a_literal_that_fp32_cannot_hold_is_refused():
    with pytest.raises(ValueError, match="not an FP32 value"):
        float_literal(0.1)


@pytest.mark.parametrize(
    ("value", "inverse"),
    [(2.0, 0.5), (-0.25, -4.0), (1.0, 1.0), (2.0**126, 2.0**-126), (2.0**-126, 2.0**126)]
    + [(x, None) for x in (3.0, 0.0, math.inf, math.nan, 2.0**127, 2.0**-127)],
)
def test_a_power_of_two_has_an_exact_inverse(value, inverse):
    assert exact_inverse(Node("const", (), value)) == inverse


@pytest.mark.parametrize(
    ("node", "args", "text"),
    [
        (Node("sub", (0, 1)), ("x", "(-0.5f)"), "(x - (-0.5f))"),
        (Node("neg", (0,)), ("(-0.5f)",), "(-(-0.5f))"),
        (Node("div", (0, 1)), ("1.0f", "x"), "cutlass_ops::divide(1.0f, x)"),
        (Node("cast", (0,), "f16"), ("x",), "cutlass_ops::cast<cutlass::half_t>(x)"),
        (Node("logical_not", (0,)), ("x",), "(!x)"),
        (Node("integer", (), -7), (), "(-7)"),
        (Node("integer", (), -(2**31)), (), "(-2147483647 - 1)"),
    ],
)
def test_expressions(node, args, text):
    assert cpp_expression(node, args) == text


@pytest.mark.parametrize(
    ("node", "args", "text"),
    [
        (Node("add", (0, 1)), ("x", "(-7)"), "int(unsigned(x) + unsigned((-7)))"),
        (Node("mul", (0, 1)), ("x", "y"), "int(unsigned(x) * unsigned(y))"),
        (Node("neg", (0,)), ("x",), "int(-unsigned(x))"),
    ],
)
def test_indices_wrap_as_unsigned_numbers_do(node, args, text):
    """A compiler takes a signed overflow not to happen: it would make x < 0 of x * 3 < 0."""
    assert cpp_expression(node, args, kind=Type.INDEX) == text


@pytest.mark.parametrize("name", ["acc", "mean_of_a", "row_index", "uniform", "seed", "x); //"])
def test_what_is_no_operation_has_no_expression(name):
    with pytest.raises(ValueError, match="is not an operation"):
        cpp_expression(Node(name), ())


def test_a_wrong_number_of_arguments_is_refused():
    with pytest.raises(ValueError, match="add takes 2 arguments, not 1"):
        cpp_expression(Node("add", (0, 1)), ("x",))
