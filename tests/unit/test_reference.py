"""The PyTorch reference against arithmetic that shares nothing with it."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cutlass_ops.epilogue import functions
from cutlass_ops.epilogue.operations import OPS, SWAP_PAIRS
from cutlass_ops.epilogue.operations import REDUCTIONS as REDUCED
from cutlass_ops.epilogue.trace import epilogue
from cutlass_ops.epilogue.values import Col, Integer, Product, Row, Scalar, Tile
from cutlass_ops.operand import reference
from cutlass_ops.operand.reference import evaluate, gemm_reference
from tests.strategies import PATIENT, programs

NAN, INF = math.nan, math.inf


def sigmoid(x):
    return 1 / (1 + math.exp(-x)) if x > -700 else 0.0


# The formulas of docs/epilogues.md in Python's FP64 arithmetic.
FORMULAS = {
    "add": lambda x, y: x + y,
    "sub": lambda x, y: x - y,
    "mul": lambda x, y: x * y,
    "div": lambda x, y: x / y,
    "neg": lambda x: -x,
    "minimum": min,
    "maximum": max,
    "abs": abs,
    "square": lambda x: x * x,
    "sqrt": math.sqrt,
    "rsqrt": lambda x: 1 / math.sqrt(x),
    "exp": math.exp,
    "sin": math.sin,
    "cos": math.cos,
    "tanh": math.tanh,
    "sigmoid": sigmoid,
    "relu": lambda x: max(x, 0.0),
    "leaky_relu": lambda x, y: x if x > 0 else x * y,
    "gelu": lambda x: x / 2 * (1 + math.erf(x / math.sqrt(2))),
    "gelu_tanh": lambda x: x / 2 * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "silu": lambda x: x * sigmoid(x),
    "hardswish": lambda x: x * min(max(x + 3, 0), 6) / 6,
    "lt": lambda x, y: x < y,
    "le": lambda x, y: x <= y,
    "gt": lambda x, y: x > y,
    "ge": lambda x, y: x >= y,
    "eq": lambda x, y: x == y,
    "ne": lambda x, y: x != y,
    "isnan": math.isnan,
    "to_float": lambda x: x,
    "sign": lambda x: (x > 0) - (x < 0),
    "floor": math.floor,
    "ceil": math.ceil,
    "round": round,
    "trunc": math.trunc,
    "reciprocal": lambda x: 1 / x,
    "pow": lambda x, y: x**y,
    "exp2": lambda x: 2**x,
    "expm1": math.expm1,
    "log": math.log,
    "log2": math.log2,
    "log1p": math.log1p,
    "erf": math.erf,
    "ndtr": lambda x: math.erfc(-x / math.sqrt(2)) / 2,
    "elu": lambda x, y: x if x > 0 else y * math.expm1(x),
    "mish": lambda x: x * math.tanh(math.log1p(math.exp(x))),
    "softplus": lambda x: x + math.log1p(math.exp(-x)) if x > 0 else math.log1p(math.exp(x)),
}
# These take truth values, seeds or three arguments, and have tests of their own.
OTHERS = {"logical_and", "logical_or", "logical_not", "where", "uniform", SWAP_PAIRS}
# Where a function is real and finite.
DOMAINS = {
    "sqrt": lambda x: x > 0,
    "rsqrt": lambda x: x > 0,
    "log": lambda x: x > 0,
    "log2": lambda x: x > 0,
    "log1p": lambda x: x > -1,
    "reciprocal": lambda x: x != 0,
    "pow": lambda x: x > 0,
}
POINTS = (-80.0, -6.5, -3.0, -2.9, -1.0, -0.3, 0.0, 1e-6, 0.5, 1.0, 2.5, 3.0, 3.1, 7.0, 80.0)


def function_of(name):
    return (lambda x: functions.gelu(x, approximate="tanh")) if name == "gelu_tanh" else getattr(functions, name)


def unary(function):
    """Trace a function of one value as an epilogue."""

    def f(acc):
        return function(acc)

    return epilogue(f)


def binary(function):
    """Trace a function of two values as an epilogue of the accumulator and a tile."""

    def f(acc, other: Tile):
        return function(acc, other)

    return epilogue(f)


def apply(traced, x, other=None, dtype=torch.float32):
    """Evaluate an epilogue on a list of accumulator values, as a row of D."""
    inputs = {} if other is None else {"other": torch.tensor([other], dtype=dtype)}
    return evaluate(traced.graph, torch.tensor([x], dtype=dtype), inputs, dtype)["d"][0].tolist()


def test_the_table_is_complete():
    assert set(reference._FUNCTIONS) | {"cast", "to_float", "uniform"} == set(OPS) == set(FORMULAS) | {"cast"} | OTHERS
    assert set(reference._REDUCED) == set(REDUCED)


@pytest.mark.sample(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", sorted(FORMULAS))
def test_operations_follow_their_formulas(name, dtype):
    formula, function = FORMULAS[name], function_of(name)
    points = list(filter(DOMAINS.get(name, lambda x: True), POINTS))
    if OPS[name].arity == 1:
        found = apply(unary(function), points, dtype=dtype)
        expected = [float(formula(x)) for x in points]
    else:
        others = ([1.5, -0.25, 2.0, -3.0, 0.125] * 3)[: len(points)]
        found = apply(binary(function), points, others, dtype)
        expected = [float(formula(x, y)) for x, y in zip(points, others, strict=True)]
    tolerance = {torch.float32: 4e-6, torch.float64: 1e-13}[dtype]
    # The absolute part is for the cancellation in 1 + tanh and 1 + erf.
    assert found == pytest.approx(expected, rel=tolerance, abs=tolerance / 10)


def test_pairs_are_swapped_whatever_a_value_spans():
    def f(acc, bias: Row, scale: Col, residual: Tile, alpha: Scalar):
        swap = functions.swap_pairs
        return {"d": swap(acc), "row": swap(bias), "col": swap(scale), "two": swap(residual * 2), "one": swap(alpha)}

    acc, tile = torch.arange(12.0).view(3, 4), torch.arange(12.0).view(3, 4) + 100
    inputs = {"bias": torch.arange(4.0), "scale": torch.arange(3.0), "residual": tile, "alpha": 0.5}
    found = evaluate(epilogue(f).graph, acc, inputs)
    order = [1, 0, 3, 2]
    assert torch.equal(found["d"], acc[:, order])
    assert torch.equal(found["row"], torch.arange(4.0)[order].expand(3, 4))
    assert torch.equal(found["col"], torch.arange(3.0)[:, None].expand(3, 4))
    assert torch.equal(found["two"], 2 * tile[:, order])
    assert torch.equal(found["one"], torch.full((3, 4), 0.5))


def test_fp64_is_really_fp64():
    def f(acc, scale: Scalar):
        return functions.exp(acc * scale) / 3.0

    acc = torch.full((1, 1), 1.0, dtype=torch.float64)
    found = evaluate(epilogue(f).graph, acc, {"scale": torch.tensor(0.7, dtype=torch.float64)}, torch.float64)["d"]
    assert found.dtype == torch.float64
    assert found.item() == pytest.approx(math.exp(0.7) / 3, rel=1e-15)


@pytest.mark.parametrize(
    ("function", "x", "expected"),
    [
        (functions.relu, [NAN, INF, -INF], [NAN, INF, 0.0]),
        (lambda x: functions.leaky_relu(x, 0.5), [NAN, INF, -INF, -4.0], [NAN, INF, -INF, -2.0]),
        (lambda x: functions.clamp(x, -1, 2), [NAN, INF, -INF, 0.5], [NAN, 2.0, -1.0, 0.5]),
        (lambda x: functions.clamp(x, min=0), [NAN, INF, -INF], [NAN, INF, 0.0]),
        (lambda x: functions.clamp(x, max=0), [NAN, INF, -INF], [NAN, 0.0, -INF]),
        (lambda x: functions.clamp(x, 2, -1), [NAN, 5.0, -5.0, 0.0], [NAN, -1.0, -1.0, -1.0]),
        (lambda x: functions.clamp(x, NAN, 1), [0.0, INF], [NAN, NAN]),
        (functions.abs, [NAN, INF, -INF], [NAN, INF, INF]),
        (functions.sqrt, [NAN, INF, -1.0], [NAN, INF, NAN]),
        (functions.rsqrt, [NAN, INF, 0.0, -1.0], [NAN, 0.0, INF, NAN]),
        (functions.exp, [NAN, INF, -INF, 100.0], [NAN, INF, 0.0, INF]),
        (functions.tanh, [NAN, INF, -INF], [NAN, 1.0, -1.0]),
        (functions.sigmoid, [NAN, INF, -INF, -200.0], [NAN, 1.0, 0.0, 0.0]),
        (functions.silu, [NAN, INF], [NAN, INF]),
        (functions.gelu, [NAN, INF], [NAN, INF]),
        (lambda x: functions.gelu(x, "tanh"), [NAN, INF], [NAN, INF]),
        (functions.hardswish, [NAN, INF, -100.0], [NAN, INF, 0.0]),
        (lambda x: functions.cast(x, "f16"), [NAN, INF, 7e4, 1e-9], [NAN, INF, INF, 0.0]),
        (functions.erf, [NAN, INF, -INF], [NAN, 1.0, -1.0]),
        (functions.ndtr, [NAN, INF, -INF], [NAN, 1.0, 0.0]),
        (functions.log, [NAN, INF, 0.0, -0.0, -1.0], [NAN, INF, -INF, -INF, NAN]),
        (functions.log2, [NAN, INF, 0.0, -1.0, 2.0**-149], [NAN, INF, -INF, NAN, -149.0]),
        (functions.log1p, [NAN, INF, -1.0, -2.0], [NAN, INF, -INF, NAN]),
        (functions.exp2, [NAN, INF, -INF, 128.0, -150.0], [NAN, INF, 0.0, INF, 0.0]),
        (functions.expm1, [NAN, INF, -INF, 100.0], [NAN, INF, -1.0, INF]),
        (functions.reciprocal, [NAN, INF, 0.0, -0.0], [NAN, 0.0, INF, -INF]),
        (functions.floor, [NAN, INF, -INF, -0.5], [NAN, INF, -INF, -1.0]),
        (functions.ceil, [NAN, INF, -INF, 0.5], [NAN, INF, -INF, 1.0]),
        (functions.round, [NAN, INF, 0.5, 1.5, 2.5, -0.5, -1.5, 3e9], [NAN, INF, 0.0, 2.0, 2.0, -0.0, -2.0, 3e9]),
        (functions.trunc, [NAN, -INF, 0.9, -0.9], [NAN, -INF, 0.0, -0.0]),
        (functions.sign, [NAN, INF, -INF, 0.0, -0.0, 1e-40], [0.0, 1.0, -1.0, 0.0, 0.0, 1.0]),
        (functions.softplus, [NAN, INF, -INF, 100.0, -200.0], [NAN, INF, 0.0, 100.0, 0.0]),
        (lambda x: functions.elu(x, 0.5), [NAN, INF, -INF, -0.0], [NAN, INF, -0.5, -0.0]),
        (functions.mish, [NAN, INF, -INF, 100.0], [NAN, INF, NAN, 100.0]),
        (functions.isnan, [NAN, INF, 0.0], [1.0, 0.0, 0.0]),
        (lambda x: functions.where(x > 0, x, -1.0), [NAN, INF, -INF, -0.0], [-1.0, INF, -1.0, -1.0]),
        (lambda x: functions.where(x != x, 0.0, 1.0 / x), [NAN, INF, -0.0], [0.0, 0.0, -INF]),
        (lambda x: x < 0.0, [NAN, -0.0, -1e-40, -INF], [0.0, 0.0, 1.0, 1.0]),
        (lambda x: x >= -0.0, [NAN, 0.0, -0.0, -1e-40], [0.0, 1.0, 1.0, 0.0]),
        (lambda x: (x == 0) | ~(x <= 1), [NAN, 0.0, -0.0, 1.0, 2.0], [1.0, 1.0, 1.0, 0.0, 1.0]),
        (lambda x: x**3, [NAN, -2.0, INF], [NAN, -8.0, INF]),
        (lambda x: functions.pow(x, 0.0), [NAN, INF, 0.0], [1.0, 1.0, 1.0]),
        (lambda x: functions.pow(1.0, x), [NAN, INF, -INF], [1.0, 1.0, 1.0]),
        (lambda x: functions.pow(x, -0.25), [0.0, INF, -1.0], [INF, 0.0, NAN]),
    ],
)
def test_nan_and_infinity_of_one_argument(function, x, expected):
    assert apply(unary(function), x) == pytest.approx(expected, nan_ok=True)


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (functions.maximum, [NAN, NAN, NAN, INF, 1.0]),
        (functions.minimum, [NAN, NAN, NAN, 1.0, -INF]),
        (functions.add, [NAN, NAN, NAN, INF, -INF]),
    ],
)
def test_nan_and_infinity_of_two_arguments(function, expected):
    left, right = [NAN, 1.0, NAN, INF, -INF], [1.0, NAN, NAN, 1.0, 1.0]
    assert apply(binary(function), left, right) == pytest.approx(expected, nan_ok=True)


@pytest.mark.parametrize(("name", "dtype"), [("bf16", torch.bfloat16), ("f16", torch.float16)])
def test_cast_rounds_to_nearest_even(name, dtype):
    step = torch.finfo(dtype).eps
    x = [1 + step / 2, 1 + 3 * step / 2, 1 + 0.51 * step, 1 + 0.49 * step, -1 - 0.51 * step]
    expected = [1.0, 1 + 2 * step, 1 + step, 1.0, -1 - step]
    assert apply(unary(lambda v: functions.cast(v, name)), x) == expected


def test_broadcasting_of_each_kind():
    def f(acc, row: Row, col: Col, tile: Tile, scalar: Scalar):
        return acc + 10.0 * row + 100.0 * col + 1000.0 * tile + 10000.0 * scalar

    # A square result, so that a row taken for a column would go unnoticed by shapes.
    m = n = 3
    acc = torch.arange(9.0).view(m, n)
    row, col, tile = torch.tensor([1.0, 2, 3]), torch.tensor([4.0, 5, 6]), torch.arange(9.0).view(m, n).flip(0)
    expected = [
        [acc[i, j] + 10 * row[j] + 100 * col[i] + 1000 * tile[i, j] + 10000 * 2 for j in range(n)] for i in range(m)
    ]
    for scalar in (2, 2.0, torch.tensor(2.0), torch.tensor(2.0, dtype=torch.float16)):
        inputs = {"row": row, "col": col.to(torch.bfloat16), "tile": tile.half(), "scalar": scalar}
        assert evaluate(epilogue(f).graph, acc, inputs)["d"].tolist() == expected


def test_a_python_scalar_is_rounded_to_fp32_as_at_a_launch():
    def f(acc, scale: Scalar):
        return acc * scale

    one = torch.ones(1, 1, dtype=torch.float64)
    assert evaluate(epilogue(f).graph, one, {"scale": 0.1}, torch.float64)["d"].item() == torch.tensor(0.1).item()


REDUCTIONS = [
    ("sum", lambda values: sum(values)),
    ("sum_square", lambda values: sum(v * v for v in values)),
    ("max", max),
    ("min", min),
    ("argmax", lambda values: list(values).index(max(values))),
    ("argmin", lambda values: list(values).index(min(values))),
    ("logsumexp", lambda values: math.log(sum(math.exp(v) for v in values))),
]


@pytest.mark.parametrize(("name", "expected"), REDUCTIONS)
def test_reductions(name, expected):
    reduce = getattr(functions, name)

    def f(acc):
        return {"d": acc, "rows": reduce(acc, 1), "cols": reduce(acc, 0)}

    acc = torch.tensor([[1.0, -2.0, 3.0], [-4.0, -5.0, -6.0]])
    found = evaluate(epilogue(f).graph, acc, {})
    tolerance = 1e-6 if name == "logsumexp" else 0.0
    assert found["rows"].tolist() == pytest.approx([expected(row) for row in acc.tolist()], rel=tolerance, abs=0)
    assert found["cols"].tolist() == pytest.approx([expected(col) for col in acc.T.tolist()], rel=tolerance, abs=0)
    of_indices = name in ("argmax", "argmin")
    assert found["rows"].dtype == found["cols"].dtype == (torch.int32 if of_indices else torch.float32)


def test_indices_are_those_of_the_first_and_nan_is_before_all():
    def f(acc):
        return {"d": acc, "most": functions.argmax(acc, 1), "least": functions.argmin(acc, 1)}

    acc = [[1.0, 3.0, 3.0, 1.0], [INF, NAN, NAN, -INF], [0.0, -0.0, 0.0, -0.0], [-INF] * 4, [2.0, 1.0, -INF, INF]]
    found = evaluate(epilogue(f).graph, torch.tensor(acc), {})
    assert found["most"].tolist() == [1, 1, 0, 0, 3]
    assert found["least"].tolist() == [0, 1, 0, 0, 2]


def test_a_sum_of_exponentials_neither_overflows_nor_loses_infinities():
    def f(acc):
        return {"d": acc, "lse": functions.logsumexp(acc, 1)}

    acc = torch.tensor([[1000.0, 1000.0], [-1000.0, -INF], [-INF, -INF], [INF, INF], [INF, -INF], [NAN, INF]])
    expected = [1000 + math.log(2), -1000.0, -INF, INF, INF, NAN]
    assert evaluate(epilogue(f).graph, acc, {})["lse"].tolist() == pytest.approx(expected, nan_ok=True)


# ---- What depends on the place -------------------------------------------------------------------------------------


def test_indices_count_rows_and_columns():
    def f(acc, slope: Col):
        causal = functions.where(functions.column_index() <= functions.row_index() + 1, acc, 0.0)
        return {"d": causal, "bias": slope * functions.column_index(), "odd": functions.row_index() * 2 - 7 >= -3}

    found = evaluate(epilogue(f).graph, torch.ones(3, 4), {"slope": torch.tensor([0.0, 0.5, 1.0])})
    assert torch.equal(found["d"], torch.ones(3, 4).tril(1))
    assert found["bias"].tolist() == [[0.0] * 4, [0.0, 0.5, 1.0, 1.5], [0.0, 1.0, 2.0, 3.0]]
    assert found["odd"].tolist() == [[0.0] * 4, [0.0] * 4, [1.0] * 4]


def test_indices_are_whole_numbers_beyond_what_fp32_holds():
    def f(acc):
        return acc * (functions.row_index() + 2**24 + 1 == 2**24 + 2)

    assert evaluate(epilogue(f).graph, torch.ones(3, 1), {})["d"].flatten().tolist() == [0.0, 1.0, 0.0]


def test_indices_wrap():
    def f(acc):
        place = functions.column_index() * 1103515245
        return {"d": acc * (place < 0), "other": acc * (-place + 2654435761 >= 0)}

    found = evaluate(epilogue(f).graph, torch.ones(1, 9), {})
    place = [(n * 1103515245 + 2**31) % 2**32 - 2**31 for n in range(9)]
    assert found["d"][0].tolist() == [float(x < 0) for x in place]
    assert found["other"][0].tolist() == [float((2654435761 - x) % 2**32 < 2**31) for x in place]


# Of the authors of Philox: the known answers of philox4x32 with ten rounds.
ANSWERS = [
    ([0, 0, 0, 0], [0, 0], "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ([0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344], [0xA4093822, 0x299F31D0], "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


@pytest.mark.parametrize(("counter", "key", "answer"), ANSWERS)
def test_philox_gives_its_known_answers(counter, key, answer):
    words = reference.philox(tuple(map(torch.tensor, counter)), tuple(map(torch.tensor, key)))
    assert " ".join(f"{word.item():08x}" for word in words) == answer


@pytest.mark.sample(2)
@pytest.mark.parametrize(("seed", "offset"), [(0, 0), (1, 0), (2**63 - 1, -1), (-(2**63), 2**40 + 5)])
def test_random_numbers_are_words_of_a_counter_of_place_and_offset(seed, offset):
    m, n = 9, 11
    found = reference.uniform(seed, torch.tensor(offset), m, n)
    assert found.dtype == torch.float32
    low = 0xFFFFFFFF
    for row in range(m):
        for column in range(n):
            counter = (column & ~8, row & ~8, offset & low, (offset >> 32) & low)
            key = (seed & low, (seed >> 32) & low)
            words = reference.philox(tuple(map(torch.tensor, counter)), tuple(map(torch.tensor, key)))
            assert found[row, column].item() == (words[2 * (row // 8) + column // 8].item() >> 8) / 2**24
    # More rows or columns change nothing of those.
    assert torch.equal(reference.uniform(seed, offset, 15, 40)[:m, :n], found)


def test_a_dropout_mask_keeps_what_it_should():
    def f(acc, p: Scalar, seed: Integer, offset: Integer):
        return functions.where(functions.dropout_mask(p, seed, offset), acc, 0.0)

    graph, acc = epilogue(f).graph, torch.ones(400, 500)
    found = evaluate(graph, acc, {"p": 0.25, "seed": 7, "offset": torch.tensor(3)})["d"]
    assert torch.equal(found, (reference.uniform(7, 3, 400, 500) >= 0.25).float())
    assert found.mean().item() == pytest.approx(0.75, abs=0.01)
    for p, kept in ((0.0, 1.0), (1.0, 0.0)):
        assert evaluate(graph, acc, {"p": p, "seed": 7, "offset": 0})["d"].mean().item() == kept


@pytest.mark.parametrize(("m", "n"), [(0, 3), (3, 0), (0, 0)])
def test_empty_results(m, n):
    inputs = {"bias": torch.ones(n), "gate": torch.ones(m)}
    for name, _ in REDUCTIONS:

        def f(acc, bias: Row, gate: Col):
            x, reduce = acc * gate + bias, getattr(functions, name)  # noqa: B023
            return {"d": x, "rows": reduce(x, 1), "cols": reduce(x, 0)}

        found = evaluate(epilogue(f).graph, torch.empty(m, n), inputs)
        empty = {"max": -INF, "min": INF, "argmax": -1, "argmin": -1, "logsumexp": -INF}.get(name, 0.0)
        assert found["d"].shape == (m, n)
        assert found["rows"].tolist() == [empty] * m
        assert found["cols"].tolist() == [empty] * n


@pytest.mark.slow
@given(programs(), st.integers(1, 5), st.integers(1, 5), st.integers(0, 2**31), st.booleans())
@PATIENT
def test_drawn_epilogues_equal_pytorch(program, m, n, seed, double):
    dtype = torch.float64 if double else torch.float32
    acc, inputs = program.tensors(m, n, seed, torch.bfloat16)
    found = evaluate(program.epilogue().graph, acc, inputs, dtype)
    expected = program.evaluate(acc, inputs, dtype)
    assert list(found) == list(expected)
    for name in found:
        torch.testing.assert_close(found[name], expected[name], rtol=0, atol=0, equal_nan=True)


@pytest.mark.slow
@given(programs(tame=True), st.integers(0, 2**31))
@PATIENT
def test_tame_epilogues_are_well_conditioned(program, seed):
    acc, inputs = program.tensors(4, 3, seed)
    graph = program.epilogue().graph
    single, double = evaluate(graph, acc, inputs), evaluate(graph, acc, inputs, torch.float64)
    for name in single:
        assert single[name].isfinite().all()
        torch.testing.assert_close(single[name].double(), double[name], rtol=1e-5, atol=1e-5)


def test_gemm_rounds_once():
    def f(acc, bias: Row):
        x = acc + bias
        return {"d": x * 3.0, "pre": x, "total": functions.sum(x, 1)}

    # x is no BF16 value and rounds to 1: rounding before the multiplication by 3 would give 3.
    x = 1 + 3 * 2.0**-10
    a, b = torch.tensor([[1.0, 3 * 2.0**-10]]).bfloat16(), torch.tensor([[1.0], [1.0]]).bfloat16()
    inputs = {"bias": torch.tensor([0.0])}
    found = gemm_reference(a, b, epilogue(f).graph, inputs, d_dtype=torch.bfloat16)
    assert {name: t.dtype for name, t in found.items()} == {
        "d": torch.bfloat16,
        "pre": torch.bfloat16,
        "total": torch.float32,
    }
    assert found["d"].item() == 3 + 2.0**-6
    assert found["pre"].item() == 1
    assert found["total"].item() == x
    chosen = gemm_reference(
        a,
        b,
        epilogue(f).graph,
        inputs,
        d_dtype=torch.float32,
        output_dtypes={"pre": torch.float16, "total": torch.bfloat16},
    )
    assert [t.dtype for t in chosen.values()] == [torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.parametrize(("m", "n", "k"), [(5, 7, 3), (1, 1, 1), (4, 3, 0), (0, 3, 2), (3, 0, 2)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_gemm_of_every_major_equals_pytorch(m, n, k, dtype):
    def f(acc, bias: Row, residual: Tile):
        return functions.relu(acc + bias) + residual

    generator = torch.Generator().manual_seed(0)
    a = torch.randn(k, m, generator=generator).to(dtype).T
    b = torch.randn(k, 2 * n, generator=generator).to(dtype)[:, ::2]
    bias, residual = torch.randn(n, generator=generator), torch.randn(m, n, generator=generator)
    inputs = {"bias": bias, "residual": residual}
    found = gemm_reference(a, b, epilogue(f).graph, inputs, d_dtype=torch.float32)["d"]
    exact = torch.relu(a.double() @ b.double() + bias) + residual
    assert found.shape == (m, n)
    assert found.is_contiguous()
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-5)
    oracle = gemm_reference(a, b, epilogue(f).graph, inputs, d_dtype=torch.float64, compute_dtype=torch.float64)["d"]
    torch.testing.assert_close(oracle, exact, rtol=1e-14, atol=1e-14)


# ---- What is taken of A itself -------------------------------------------------------------------------------------


def normed(acc, eps: Scalar, gate: Product):
    scale = functions.rsqrt(functions.mean_square_of_a() + eps)
    return (acc - functions.mean_of_a()) * scale * (gate * scale)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_gathered_values_and_products_are_those_of_a(dtype):
    a, b, gate = (torch.randn(shape).to(dtype) for shape in ((5, 64), (64, 7), (64, 7)))
    inputs = {"eps": 0.5, "gate": gate}
    x, scale = a.double(), (a.double().square().mean(1, keepdim=True) + 0.5).rsqrt()
    exact = (x @ b.double() - x.mean(1, keepdim=True)) * scale * (x @ gate.double() * scale)
    graph = epilogue(normed).graph
    oracle = gemm_reference(a, b, graph, inputs, d_dtype=torch.float64, compute_dtype=torch.float64)["d"]
    torch.testing.assert_close(oracle, exact, rtol=1e-12, atol=1e-12)
    found = gemm_reference(a, b, graph, inputs, d_dtype=torch.float32)["d"]
    torch.testing.assert_close(found.double(), exact, rtol=1e-4, atol=1e-5)
    direct = evaluate(graph, a.float() @ b.float(), inputs, a=a)["d"]
    assert torch.equal(direct, found)


def test_squares_beyond_fp16_are_gathered_in_fp32():
    def only_square(acc):
        return acc * 0.0 + functions.mean_square_of_a()

    a = torch.full((2, 32), 60000.0, dtype=torch.float16)
    found = gemm_reference(a, torch.zeros(32, 1).half(), epilogue(only_square).graph, {}, d_dtype=torch.float32)["d"]
    torch.testing.assert_close(found, a[:, :1].float().square())


def test_the_mean_of_a_row_without_elements_is_zero():
    inputs = {"eps": 4.0, "gate": torch.ones(0, 2)}
    graph = epilogue(normed).graph
    found = gemm_reference(torch.ones(3, 0), torch.ones(0, 2), graph, inputs, d_dtype=torch.float32)["d"]
    assert torch.equal(found, torch.zeros(3, 2))
