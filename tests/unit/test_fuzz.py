"""Drawn calls on the CPU: what they are, that right results pass, and that wrong ones do not."""

import json
import math
import random
from dataclasses import replace

import pytest
import torch
from signatures import H100

import cutlass_ops as co
from cutlass_ops.base.errors import MissingKernelError
from cutlass_ops.declare.signature import OpSignature
from cutlass_ops.kinds import legality
from cutlass_ops.operand.call import signature_of
from tests.gpu import oracle
from tests.gpu.fuzz import __main__ as fuzz
from tests.gpu.fuzz import grouped
from tests.gpu.fuzz.case import Kernels
from tests.gpu.memory import Memory

pytestmark = pytest.mark.usefixtures("session")

FAMILIES = [(what, family) for what, families in fuzz.WHAT.items() for family in families]
# With the quick tests, every fifth one.
SOME = [
    pytest.param(what, family, id=f"{what}: {family.name}", marks=(pytest.mark.slow,) if at % 5 else ())
    for at, (what, family) in enumerate(FAMILIES)
]


def used(case):
    return int(case.used.sum()) if isinstance(case.used, torch.Tensor) else case.used


def drawn(family, *, refused=False):
    """Return the first small call that must be refused, or that writes several rows and columns of the caller's D."""
    for seed in range(200):
        torch.manual_seed(seed)
        case = family.draw(random.Random(seed), "cpu")
        is_usual = bool(case.out) and min(case.out["d"].view.shape) > 1 and used(case) != 0
        if (case.refused is not None) == refused and (refused or is_usual) and case.arguments[1].numel() < 100_000:
            return case
    raise AssertionError("none was drawn")


# ---- Calls -----------------------------------------------------------------------------------------------------------


@pytest.mark.sample(3)
@pytest.mark.parametrize(("what", "family"), SOME)
def test_right_results_pass_and_bad_calls_are_refused(what, family):
    tally = fuzz.Tally()
    for refused in (False, True):
        assert fuzz.judge(drawn(family, refused=refused), None, random.Random(0), tally) is None
    assert (tally.calls, tally.refused, tally.wrong) == (2, 1, 0)


@pytest.mark.slow
@pytest.mark.parametrize("what", fuzz.WHAT)
def test_right_results_of_many_calls_pass(what):
    _, wrong = fuzz.run(fuzz.WHAT[what], {}, range(1000, 1120), "cpu", math.inf)
    assert wrong == []


@pytest.mark.sample(2)
@pytest.mark.parametrize(("what", "family"), SOME)
def test_drawn_calls_have_the_signature_of_the_family_s_kernels(what, family):
    kernels = Kernels.of(family.usual(), H100, family.problems)
    assert 1 <= len(kernels.specs) <= len(family.problems)
    own = OpSignature.of(kernels.specs[0])
    for spec in kernels.specs:
        assert OpSignature.of(spec) == own
        assert legality.check(spec) == ()
        assert not spec.config.few_rows
    for seed in range(6):
        case = family.draw(random.Random(seed), "cpu")
        op, (a, b, *inputs), named = case.request()
        if case.refused is not None or 1 in (a.shape[-2], b.shape[-1]) or 0 in (*a.shape, *b.shape):
            continue  # one line lies in several ways
        call = op.checked(a, b, tuple(inputs), named, case.given().get("out"), case.named["out_dtype"])
        assert signature_of(call, H100) == own, case.about


def test_a_seed_gives_the_same_call():
    (_, _, first), (_, _, second) = (fuzz.one(fuzz.WHAT["fp8"], 5, "cpu") for _ in range(2))
    assert first.about == second.about
    for x, y in zip(first.arguments, second.arguments, strict=True):
        assert type(x) is float or torch.equal(x.float().nan_to_num(), y.float().nan_to_num())


def test_groups_of_every_kind_are_drawn():
    sizes = [grouped.draw_sizes(random.Random(seed)) for seed in range(200)]
    assert any(sum(each) == 0 for each in sizes)
    assert any(len(each) > 5 and max(each) == sum(each) > 0 for each in sizes)
    assert any(len(each) > 5 and min(each) == max(each) > 0 for each in sizes)
    assert any(len(each) == 1 for each in sizes)
    assert any(sum(each) > 100 > 10 > min(each) for each in sizes)


# ---- Wrong results ---------------------------------------------------------------------------------------------------


def spoiled(case, change):
    """Return a call whose results are changed after it."""

    def function(*arguments, **named):
        results = case.function(*arguments, **named)
        change(results if isinstance(results, torch.Tensor) else results[0])
        return results

    found = replace(case, function=function)
    found.request = case.request
    return found


def judged(case):
    return fuzz.judge(case, None, random.Random(3), fuzz.Tally())


@pytest.mark.parametrize(("what", "family"), SOME)
def test_one_wrong_element_is_seen(what, family):
    case = drawn(family)
    place = (0,) * case.out["d"].view.ndim

    def change(d):
        most = d.float().nan_to_num(0.0).abs().max().item()
        d[place] = 4 * most + 1

    assert judged(case) is None
    assert judged(spoiled(case, change)) is not None


@pytest.mark.parametrize("name", ["row scales, promoted", "TF32", "INT8", "FP64", "BF16, batches", "BF16, routed"])
def test_what_was_not_written_is_seen(name):
    case = drawn(next(family for _, family in FAMILIES if family.name == name))
    poison = case.out["d"].bits.new_full((), case.out["d"].poison)

    def change(d):
        case.out["d"].inside(case.out["d"].bits)[..., 1] = poison

    assert "are NaN" in judged(spoiled(case, change)) or "exact" in judged(spoiled(case, change))


@pytest.mark.parametrize("name", ["a result in FP8", "TF32, odd", "BF16, odd columns", "weights' gradients"])
def test_what_is_written_outside_is_seen(name):
    case = drawn(next(family for _, family in FAMILIES if family.name == name))
    for at in (0, -1):
        assert "outside of d" in judged(spoiled(case, lambda _, at=at: case.out["d"].bits[at].zero_()))


def test_rows_of_no_group_must_stay():
    family = next(family for _, family in FAMILIES if family.name == "BF16, odd columns")
    case = next(
        case
        for seed in range(100)
        if (case := family.draw(random.Random(seed), "cpu")).out and 0 < case.used < len(case.arguments[0])
    )
    assert judged(case) is None
    assert "outside of d" in judged(spoiled(case, lambda d: d[-1].zero_()))


def test_calls_that_are_not_refused_are_wrong():
    case = replace(drawn(FAMILIES[0][1]), refused="^a is")
    assert "not refused" in judged(case)

    def refuse(*_, **__):
        raise ValueError("something is wrong")

    assert "refused without" in judged(replace(case, function=refuse))


def test_an_exception_is_a_wrong_call_and_the_next_one_is_made(monkeypatch):
    family = FAMILIES[0][1]
    calls = []

    def fail(case, *_):
        calls.append(case)
        raise RuntimeError("a launch failed")

    monkeypatch.setattr(fuzz, "judge", fail)
    tallies, wrong = fuzz.run([family], {}, range(3), "cpu", math.inf)
    assert len(calls) == len(wrong) == tallies[family.name].wrong == 3
    assert wrong[1]["seed"] == 1
    assert wrong[1]["why"] == "RuntimeError: a launch failed"


def test_kernels_serve_what_calls_of_other_signatures_cannot(monkeypatch):
    """Here a stand-in for the exact kernels, and a call for which the bundle has none."""
    family = FAMILIES[0][1]
    kernels, case, tally = Kernels.of(family.usual(), H100, family.problems), drawn(family), fuzz.Tally()

    def missing(*_, **__):
        raise MissingKernelError("no bundle has it")

    def served(case, spec):
        assert spec in kernels.specs
        return replace(case, function=co.gemm).call()

    other = replace(case, function=missing)
    other.request = case.request
    monkeypatch.setattr(type(case), "by", served)
    for seed in range(20):
        assert fuzz.judge(other, kernels, random.Random(seed), tally) is None
    assert tally.exact == sum(tally.kernels.values()) == 20 + tally.again
    assert len(tally.kernels) == len(kernels.specs)

    def refuse(*_):
        raise ValueError("b is row-major")

    monkeypatch.setattr(type(case), "by", refuse)
    monkeypatch.setattr(fuzz, "_EXACT", 0.0)
    assert fuzz.judge(other, kernels, random.Random(0), tally) is None
    assert tally.unserved == 1


def test_the_result_is_written(tmp_path, monkeypatch, capsys):
    path = tmp_path / "new" / "fuzz.json"
    monkeypatch.setattr("sys.argv", ["fuzz", "--what", "dense", "--calls", "6", "--seed", "40", "--out", str(path)])
    assert fuzz.main() == 0
    found = json.loads(path.read_text())
    assert (found["what"], found["seed"], found["wrong"]) == ("dense", 40, [])
    assert sum(row["calls"] for row in found["rows"]) == 6
    assert {"chip", "date", "torch", "seconds"} <= found.keys()
    assert "6 calls" in capsys.readouterr().out
    monkeypatch.setattr("sys.argv", ["fuzz", "--what", "dense", "--again", "41"])
    assert fuzz.main() == 0
    assert "1 calls" in capsys.readouterr().out


# ---- Memory and the bound --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("aligned", [True, False])
@pytest.mark.parametrize("dtype", [torch.float8_e5m2, torch.bfloat16, torch.float64, torch.int8])
@pytest.mark.parametrize("major", ["row", "col"])
def test_views_are_as_aligned_as_they_say(dtype, aligned, major):
    for seed in range(10):
        memory = Memory("cpu", random.Random(seed))
        placed = memory.placed((3, 5, 7), dtype, major, aligned=aligned)
        assert placed.view.shape == (3, 5, 7)
        lines = placed.view if major == "row" else placed.view.mT
        assert lines.stride(2) == 1
        offset = placed.view.storage_offset() * dtype.itemsize
        assert ((offset | lines.stride(1) * dtype.itemsize) % 16 == 0) == aligned
        assert placed.stray() == 0
        placed.view.zero_()
        assert placed.stray() == 0
        assert placed.stray(1) == 2 * 5 * 7
        placed.refill()
        assert placed.stray(0) == 0


def test_the_bound():
    torch.manual_seed(0)
    exact = torch.randn(40, 50, dtype=torch.float64)
    assert oracle.why_not(exact.bfloat16(), exact) is None
    assert oracle.why_not(exact.float(), exact) is None
    assert "error" in oracle.why_not((exact * (1 + 1e-4)).float(), exact)
    assert oracle.why_not((exact * (1 + 1e-4)).float(), exact, 2e-4) is None
    one = exact.float()
    one[3, 4] += 2e-3
    assert "error" in oracle.why_not(one, exact)
    one[3, 4] -= 1.3e-3  # less than the norm allows
    assert "an element is off" in oracle.why_not(one, exact)
    assert "shape" in oracle.why_not(one[:3], exact)
    assert "not the exact ones" in oracle.why_not(one, exact, 0.0)


def test_small_results_of_large_sums_have_the_bound_of_the_sums():
    exact = torch.full((4, 4), 1e-6, dtype=torch.float64)
    off = (exact + 1e-5).float()
    assert "error" in oracle.why_not(off, exact)
    assert oracle.why_not(off, exact, moved=torch.full_like(exact, 2e-5)) is None


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float16, torch.bfloat16, torch.float32])
def test_what_is_not_finite_must_be_at_its_place(dtype):
    exact = torch.randn(4, 5, dtype=torch.float64)
    exact[0, 0], exact[1, 1], exact[2, 2] = math.nan, math.inf, -math.inf
    right = oracle.reference.rounded(exact, dtype)
    assert oracle.why_not(right, exact, 2.0**-9) is None
    for place, value in (((0, 0), 1.0), ((1, 1), -448.0), ((3, 3), math.nan)):
        wrong = right.float()
        wrong[place] = value
        assert oracle.why_not(wrong.to(dtype), exact, 2.0**-9) is not None


def test_what_is_beyond_the_type_is_infinite_or_saturates():
    exact = torch.tensor([[65504.0, 65519.0, 65521.0, 1e9]], dtype=torch.float64)
    assert oracle.why_not(exact.half(), exact) is None
    assert oracle.why_not(torch.full((1, 4), 65504.0).half(), exact) is not None
    assert oracle.why_not(torch.tensor([[65504.0, math.inf, 65504.0, math.inf]]).half(), exact) is None
    most = torch.tensor([[448.0]])
    assert oracle.why_not(most.to(torch.float8_e4m3fn), most.double() * 5) is None
