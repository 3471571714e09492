"""Oracles without tolerance: each finds faults that are planted, and its own premises hold."""

import math
import random
from dataclasses import replace

import pytest
import torch
from signatures import H100

import cutlass_ops as co
from cutlass_ops.epilogue.nodes import Kind
from tests.gpu import exact_calls
from tests.gpu.fuzz import __main__ as fuzz
from tests.gpu.fuzz import alike, dense, grouped
from tests.gpu.fuzz.case import Kernels

pytestmark = pytest.mark.usefixtures("session")

FAMILIES = {
    f"{what}: {family.name}": family
    for what, families in fuzz.WHAT.items()
    for family in families
    if what.startswith("exact_")
}
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def drawn(family):
    """Return the first call of some size."""
    for seed in range(1000):
        torch.manual_seed(seed)
        case = family.draw(random.Random(seed), "cpu")
        a, b = case.arguments[:2]
        sizes = (a.shape[-2], a.shape[-1], b.shape[-2], b.shape[-1])
        is_usual = case.refused is None and min(sizes) >= 32 and max(sizes) <= 400 and b.numel() < 200_000
        # Rows of no group have no part in gradients of weights.
        if is_usual and (not isinstance(family, grouped.Weights) or case.arguments[2][-1] == b.shape[-2]):
            return case
    raise AssertionError("none was drawn")


def why(case):
    """Judge one call."""
    return fuzz.judge(case, None, random.Random(3), fuzz.Tally())


def changed(tensor, change):
    """Return a copy that lies in memory as the tensor does, with a change to its values."""
    values = tensor.float() if tensor.dtype.itemsize < 4 else tensor.clone()
    found = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    return found.copy_(change(values))


def with_argument(case, at, change):
    """Return a call whose kernel sees another argument than the oracle does."""
    arguments = list(case.arguments)
    arguments[at] = changed(arguments[at], change) if isinstance(arguments[at], torch.Tensor) else change(arguments[at])
    return replace(case, arguments=tuple(arguments))


def zero(index):
    def change(x):
        x[index] = 0
        return x

    return change


# ---- What a kernel may do wrong with its operands --------------------------------------------------------------------

OPERANDS = {
    "the last product is missing": (0, zero((..., -1))),
    "the first 16 products are missing": (1, zero((..., slice(16), slice(None)))),
    "a row is missing": (0, zero((..., 0, slice(None)))),
    "rows of A are moved": (0, lambda x: x.roll(1, -2)),
    "columns of B are moved": (1, lambda x: x.roll(1, -1)),
    "products are moved": (0, lambda x: x.roll(1, -1)),
    "one value is another": (0, lambda x: x.index_put((*map(torch.tensor, (0,) * x.ndim),), x.flatten()[0] + 1)),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_faults_of_operands_are_found(name):
    case = drawn(FAMILIES[name])
    assert why(case) is None
    for fault, (at, change) in OPERANDS.items():
        found = with_argument(case, at, change)
        if all(torch.equal(x.float(), y.float()) for x, y in zip(case.arguments[:2], found.arguments[:2], strict=True)):
            continue
        assert why(found) is not None, fault


SCALED = [name for name, family in FAMILIES.items() if getattr(family, "scales", None)]


@pytest.mark.parametrize("name", SCALED)
def test_faults_of_scales_are_found(name):
    case = drawn(FAMILIES[name])
    first = len(case.arguments) - 2
    for at in (first, first + 1):
        scale = case.arguments[at]
        if isinstance(scale, float) or scale.numel() == 1:
            assert why(with_argument(case, at, lambda x: x * 2)) is not None
            continue
        for dim in range(scale.ndim):
            if scale.shape[dim] > 1:
                assert why(with_argument(case, at, lambda x, dim=dim: x.roll(1, dim))) is not None, (at, dim)


TAKING = [name for name, family in FAMILIES.items() if getattr(family, "epilogue", None) is not None]


@pytest.mark.parametrize("name", TAKING)
def test_faults_of_inputs_are_found(name):
    """Each input is moved by one, or is twice as large."""
    case = drawn(FAMILIES[name])
    for declared in case.named["epilogue"].graph.inputs:
        value = case.named[declared.name]
        is_one = not isinstance(value, torch.Tensor)
        others = [value * 2] if is_one else [changed(value, lambda x: x.roll(1, -1))]
        others += [changed(value, lambda x: x.roll(1, -2))] if declared.kind is Kind.TILE else []
        for other in others:
            assert why(replace(case, named={**case.named, declared.name: other})) is not None, declared.name


GROUPED = [name for name, family in FAMILIES.items() if isinstance(family, grouped.Rows | grouped.Weights)]


@pytest.mark.parametrize("name", GROUPED)
def test_faults_of_groups_are_found(name):
    """A row more or less belongs to a group."""
    for seed in range(1000):
        torch.manual_seed(seed)
        case = FAMILIES[name].draw(random.Random(seed), "cpu")
        ends = case.arguments[2]
        begins = ends[:-1] if case.grouped == "offsets" else ends
        if case.refused is None and case.arguments[1].shape[-1] >= 8 and len(begins) and begins.max() > 8:
            break
    assert why(case) is None

    def one_less(x):
        x[x[: len(begins)].argmax()] -= 1
        return x

    assert why(with_argument(case, 2, one_less)) is not None


# ---- What it may do wrong besides ------------------------------------------------------------------------------------


@co.epilogue
def rounded_twice(acc, bias: co.Row, r: co.Tile):
    return co.e.cast(acc + bias, "bf16") + r


@co.epilogue
def exchanged(acc, up: co.Product):
    return acc * co.e.silu(up)


@co.epilogue
def of_deviations(acc, eps: co.Scalar):
    mean = co.e.mean_of_a()
    return acc * co.e.rsqrt(co.e.mean_square_of_a() - mean * mean + eps)


@co.epilogue
def without_mean(acc, column_sum: co.Row, eps: co.Scalar):
    return (acc - column_sum) * co.e.rsqrt(co.e.mean_square_of_a() + eps)


@co.epilogue
def without_minus(acc, scale: co.Scalar):
    return {"d": acc * scale, "amax": co.e.max(acc, dim=1)}


@co.epilogue
def not_rounded(acc, bias: co.Row):
    z = acc + bias
    return {"d": co.e.relu(z), "pre": co.e.relu(z)}


@co.epilogue
def of_the_other(acc, before: co.Tile, alpha: co.Scalar):
    return acc + before * alpha


EPILOGUES = {
    "exact_16: BF16, B across K": rounded_twice,
    "exact_16: BF16, gated": exchanged,
    "exact_16: BF16, RMSNorm": of_deviations,
    "exact_16: FP16, LayerNorm": without_mean,
    "exact_fp8: a result in FP8": without_minus,
    "exact_groups: BF16, a further output": not_rounded,
    "exact_backward: weights' gradients, added up": of_the_other,
}


@pytest.mark.parametrize("name", EPILOGUES)
def test_another_epilogue_is_found(name):
    case = drawn(FAMILIES[name])
    assert why(replace(case, named={**case.named, "epilogue": EPILOGUES[name]})) is not None


def test_a_product_of_three_that_is_missing_is_found():
    case = drawn(FAMILIES["exact_types: 3xTF32"])
    assert why(replace(case, named={**case.named, "math": "tf32"})) is not None


def by(case, sums):
    """Return a call whose sums are added up by a function of A and B in FP64, with scales of rows and columns."""
    a, b, scale_a, scale_b = case.arguments

    def function(*_, out_dtype, out=None, **__):
        d = (sums(a.double(), b.double()) * scale_a[:, None] * scale_b).to(out_dtype)
        return d if out is None else out.copy_(d)

    found = replace(case, function=function)
    found.request = case.request
    return found


def in_bits(bits):
    """Return what adds up steps of 32 products, and keeps so many bits of each sum."""

    def sums(a, b):
        total = torch.zeros(len(a), b.shape[1], dtype=torch.float64)
        for x, y in zip(a.split(32, 1), b.split(32), strict=True):
            mantissa, exponent = torch.frexp(total + x @ y)
            total = torch.ldexp((mantissa * 2**bits).trunc(), exponent - bits)
        return total

    return sums


def test_sums_of_fewer_bits_are_found():
    """Sums of FP8 with 13 bits are right where the limit says so, and wrong where sums are promoted."""
    promoted, fast = (drawn(FAMILIES[f"exact_fp8: row scales, {name}"]) for name in ("promoted", "to FP32"))
    assert why(by(promoted, in_bits(24))) is None
    assert why(by(fast, in_bits(13))) is None
    assert why(by(fast, in_bits(7))) is not None
    long = next(
        case
        for seed in range(2000)
        if (case := FAMILIES["exact_fp8: row scales, promoted"].draw(random.Random(seed), "cpu")).refused is None
        and case.arguments[0].shape[1] > 4000
        and case.arguments[0].shape[0] > 8
    )
    assert why(by(long, in_bits(24))) is None
    assert why(by(long, in_bits(8))) is not None


@pytest.mark.parametrize("name", FAMILIES)
def test_one_bit_of_one_result_is_found(name):
    case = drawn(FAMILIES[name])

    def function(*arguments, **named):
        results = case.function(*arguments, **named)
        d = results if isinstance(results, torch.Tensor) else results[0]
        finite = d.double().nan_to_num(0.0, 0.0, 0.0).abs()
        place = tuple(int(x) for x in (finite == finite.max()).nonzero()[0])
        d.view(BITS[d.itemsize])[place] ^= 1
        return results

    found = replace(case, function=function)
    found.request = case.request
    assert why(found) is not None


# ---- Kernels and pieces ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["exact_16: BF16", "exact_groups: BF16, room", "exact_int8: INT8"])
def test_pieces_take_all_kernels_of_the_tables_one_after_the_other(name):
    case = FAMILIES[name].usual()
    first, second = (Kernels.drawn(case, H100, at, 8).specs for at in (0, 8))
    assert len({*first, *second}) == 16
    every = {spec for at in range(0, 400, 50) for spec in Kernels.drawn(case, H100, at, 50).specs}
    assert 40 <= len(every) < 400
    assert Kernels.drawn(case, H100, 0, 400).specs[:8] == first


def test_pieces_add_up_and_go_on(tmp_path, monkeypatch, capsys):
    path = tmp_path / "exact.json"
    command = ["fuzz", "--what", "exact_int8", "--calls", "5", "--kernels", "2", "--out", str(path)]
    monkeypatch.setattr(fuzz.harness, "commit", lambda: "this")
    seeds, run = [], fuzz.run
    monkeypatch.setattr(fuzz, "run", lambda *given: seeds.append(given[2]) or run(*given))
    for _ in range(2):
        monkeypatch.setattr("sys.argv", command)
        assert fuzz.main() == 0
    assert seeds == [range(5), range(5, 10)]
    assert "10 calls" in capsys.readouterr().out
    assert '"pieces": 2' in path.read_text()
    monkeypatch.setattr(fuzz.harness, "commit", lambda: "another")
    with pytest.raises(SystemExit, match="another commit"):
        fuzz.main()


def test_operands_that_are_not_exact_are_a_fault_of_the_test():
    family = dense.Family("x", "bf16", "bf16", "bf16", exact=fuzz.exact.Exact(limit=4))
    case = drawn(replace(family, exact=fuzz.exact.PLAIN))
    case.wanted = lambda: replace(family)._wanted(case, {})
    with pytest.raises(AssertionError, match="a fault of the test"):
        case.wanted()


def test_three_quarters_are_zeros():
    memory = fuzz.exact.PLAIN.memory("cpu", random.Random(0), 64)
    values = memory.values((200, 200), torch.bfloat16)
    assert 0.72 < (values == 0).float().mean() < 0.78
    assert math.isclose(values.mean(), 0.0, abs_tol=values.std() / 50)
    assert torch.equal(values, values.round())


# ---- Relations between calls -----------------------------------------------------------------------------------------

RELATED = [name for name, family in FAMILIES.items() if isinstance(family, dense.Family)]


def kernel_of(case, fault=lambda found, a, b: None):
    """Return what stands for a kernel of a case, with a fault in its first result."""
    op = case.request().op

    def kernel(a, b, **inputs):
        found = op(a, b, **inputs, out_dtype=case.named["out_dtype"])
        fault(found if isinstance(found, torch.Tensor) else found[0], a, b)
        return found

    return kernel


def spoil(*place):
    """Return a fault: the last bit at a place."""

    def fault(found, a, b):
        found.view(BITS[found.itemsize])[place] ^= 1

    return fault


@pytest.mark.parametrize("name", RELATED)
def test_relations_hold_and_a_fault_at_one_place_of_d_breaks_them(name):
    case = drawn(FAMILIES[name])
    assert alike.why_not(kernel_of(case), case.request()) is None
    if case.arguments[0].ndim == 2:
        assert " rows" in f" {alike.why_not(kernel_of(case, spoil(5)), case.request())}"
        if "blocks" not in name:
            assert "columns in another order" in alike.why_not(kernel_of(case, spoil(..., 5)), case.request())


def test_a_batch_that_depends_on_others_and_a_threshold_break_relations():
    case = next(
        case
        for seed in range(300)
        if (case := FAMILIES["exact_16: BF16, batches"].draw(random.Random(seed), "cpu")).refused is None
        and case.arguments[0].shape[0] > 1
        and case.arguments[0].numel() > 1000
    )
    assert alike.why_not(kernel_of(case), case.request()) is None
    several = lambda found, a, b: found.add_(len(a) > 1)  # noqa: E731
    assert "one batch" in alike.why_not(kernel_of(case, several), case.request())
    case = drawn(FAMILIES["exact_16: BF16"])
    few = lambda found, a, b: found.add_(len(a) < len(case.arguments[0]))  # noqa: E731
    assert "fewer rows" in alike.why_not(kernel_of(case, few), case.request())
    most = case.arguments[0].float().max()
    large = lambda found, a, b: found.clamp_(max=most)  # noqa: E731
    assert "twice A" in alike.why_not(kernel_of(case, large), case.request())


def test_relations_are_tried_with_any_values(monkeypatch):
    family = FAMILIES["exact_16: BF16"]
    kernels, case, tried = Kernels.drawn(family.usual(), H100, 0, 8), drawn(family), []
    monkeypatch.setattr(type(case), "by", lambda case, spec: case.call())
    monkeypatch.setattr(type(case), "why_not_alike", lambda case, spec: tried.append(case) or "broken")
    monkeypatch.setattr(Kernels, "key", lambda _, spec: spec.slug)
    tally = fuzz.Tally()
    found = {fuzz.judge(case, kernels, random.Random(seed), tally) for seed in range(40)}
    assert found == {None, "broken"}
    assert tally.alike == len(tried) > 1
    assert all((each.arguments[0] != each.arguments[0].round()).any() for each in tried)


# ---- Calls of several kernels ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", exact_calls.CALLS)
def test_each_result_of_several_kernels_is_looked_at(name, monkeypatch):
    exact_calls.check(name, 0, "cpu")
    call, memory = exact_calls.CALLS[name], exact_calls.Exact(2**8).memory("cpu", random.Random(0), 128)
    for at in range(len(list(call(memory, 16, 64, 32)))):

        def spoiled(*given, at=at):
            for index, (what, found, wanted) in enumerate(call(*given)):
                if index == at and found.numel():
                    found = found.detach().clone()
                    found.view(BITS[found.itemsize])[(0,) * found.ndim] ^= 1
                yield what, found, wanted

        monkeypatch.setitem(exact_calls.CALLS, name, spoiled)
        if (name, at) not in (("grouped", 3), ("grouped", 4)):  # an empty group
            with pytest.raises(AssertionError, match="not the exact ones"):
                exact_calls.check(name, 0, "cpu")


@co.epilogue
def relu_instead(acc, bias: co.Row):
    return co.e.relu(acc + bias)


def test_another_derivative_is_found(monkeypatch):
    """SiLU of such numbers is ReLU, but its slope at 0 is not 0."""
    monkeypatch.setattr(exact_calls, "bias_silu", relu_instead)
    with pytest.raises(AssertionError, match="gradient of A"):
        exact_calls.check("bias_activation", 0, "cpu")


def test_a_gate_whose_weights_are_exchanged_is_found(monkeypatch):
    monkeypatch.setattr(exact_calls.composed, "swiglu", exchanged)
    with pytest.raises(AssertionError, match="d at"):
        exact_calls.check("gated", 0, "cpu")
