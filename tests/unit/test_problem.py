"""Problems and their forms: what they are as values, and that a problem of several GEMMs is predicted as such."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from signatures import A100, H100, signature

from cutlass_ops.base.errors import ConfigError
from cutlass_ops.choose import policies
from cutlass_ops.choose.pool import Pool
from cutlass_ops.choose.tables import Measured, Point, Table
from cutlass_ops.declare.chips import USUAL
from cutlass_ops.declare.config import ThreadblockShape, WarpShape
from cutlass_ops.declare.form import BATCHED, DENSE, FORMS, GROUPED, RAGGED_K, Form
from cutlass_ops.declare.problem import MOST_ELEMENTS, MOST_EXTENT, Problem
from cutlass_ops.declare.roofline import roofline
from cutlass_ops.declare.signature import OpSignature, signature_from_json, signature_to_json
from cutlass_ops.declare.spec import KernelSpec
from cutlass_ops.epilogue import builtin
from cutlass_ops.kinds import legality
from cutlass_ops.kinds.gemv.config import GemvConfig
from cutlass_ops.kinds.sm80.config import Sm80Config
from cutlass_ops.kinds.sm90.config import Sm90Config
from cutlass_ops.kinds.small.config import SmallConfig
from cutlass_ops.kinds.table import KINDS, kind_of
from tests.strategies import PATIENT

ONE, EIGHT = Problem(512, 4096, 1024), Problem(512, 4096, 1024, count=8)
SM90 = Sm90Config(ThreadblockShape(128, 128, 64))
STREAM_K = replace(SM90, schedule="cooperative", scheduler="stream_k")
SM80 = Sm80Config(ThreadblockShape(128, 128, 32), WarpShape(64, 64, 32))
GEMV = GemvConfig(rows=4)
SMALL = SmallConfig(ThreadblockShape(64, 64, 64), stages=2)
EXAMPLE = re.escape("is not a problem size: give (M, N, K), positive integers, such as (512, 4096, 4096)")
CONFIGS = (SM90, STREAM_K, SM80, GEMV, SMALL)
STACKED = Form("stacked", "the number of stacked GEMMs")  # a form that there is not


@pytest.fixture
def stacked(monkeypatch):
    """A form that the kernels of Sm90 serve: a row of the table, and an entry in the kind's."""
    kind, served = kind_of(SM90), kind_of(SM90).forms
    monkeypatch.setitem(FORMS, STACKED.name, STACKED)
    object.__setattr__(kind, "forms", (*served, STACKED))
    yield STACKED
    object.__setattr__(kind, "forms", served)


def spec(config=SM90, **changes):
    return KernelSpec(a="bf16.row", b="bf16.col", d="bf16.row", epilogue=builtin.identity, config=config, **changes)


# ---- Values ------------------------------------------------------------------------------------------------------


def test_a_problem_counts_its_work_for_each_of_its_gemms():
    assert ONE.count == 1
    assert ONE.flops == 2 * 512 * 4096 * 1024
    assert ONE.bytes(2, 1, 4) == 512 * 1024 * 2 + 1024 * 4096 * 1 + 512 * 4096 * 4
    assert EIGHT.flops == 8 * ONE.flops
    assert EIGHT.bytes(2, 1, 4) == 8 * ONE.bytes(2, 1, 4)
    assert EIGHT.extents == ONE.extents == (512, 4096, 1024)


def test_a_problem_reads_as_its_extents():
    assert (str(ONE), f"{EIGHT}") == ("512x4096x1024", "8x512x4096x1024")
    assert repr(EIGHT) == "Problem(m=512, n=4096, k=1024, count=8)"


@pytest.mark.parametrize(("problem", "text"), [(ONE, "[512, 4096, 1024]"), (EIGHT, "[512, 4096, 1024, 8]")])
def test_a_problems_json_has_a_count_only_where_there_are_several(problem, text):
    assert json.dumps(problem.to_json()) == text
    assert Problem.from_json(json.loads(text)) == problem


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"m": 1}, "problem must be a list, not dict"),
        ([1, 2], "problem has 2 extents: it has M, N and K, and may have a count"),
        ([1, 2, 3, 4, 5], "problem has 5 extents: it has M, N and K, and may have a count"),
        ([1, 2, 0], f"problem must be an integer from 1 to {MOST_EXTENT}, not 0"),
        ([1, 2, 3, 0], f"problem must be an integer from 1 to {MOST_EXTENT}, not 0"),
        ([1, 2, True], f"problem must be an integer from 1 to {MOST_EXTENT}, not True"),
        ([1, 2, 3.0], f"problem must be an integer from 1 to {MOST_EXTENT}, not 3.0"),
        ([MOST_EXTENT + 1, 1, 1], f"problem must be an integer from 1 to {MOST_EXTENT}, not {MOST_EXTENT + 1}"),
        ([1 << 25, 1 << 24, 1], f"problem 33554432x16777216x1 has a matrix of more than {MOST_ELEMENTS:,} elements"),
        (
            [1 << 24, 1, 1 << 24, 2],
            f"problem 2x16777216x1x16777216 has matrices of more than {MOST_ELEMENTS:,} elements",
        ),
    ],
)
def test_json_that_is_no_problem_is_refused(data, message):
    with pytest.raises(ConfigError) as error:
        Problem.from_json(data)
    assert str(error.value) == message


@PATIENT
@given(st.tuples(*[st.integers(1, 1 << 20)] * 3), st.integers(1, 1 << 8))
def test_every_problem_survives_its_json(extents, count):
    problem = Problem(*extents, count)
    assert Problem.from_json(json.loads(json.dumps(problem.to_json()))) == problem


@pytest.mark.parametrize("given", [(512, 4096, 1024), [512, 4096, 1024], ONE])
def test_users_may_give_a_plain_tuple(given):
    assert Problem.of(given) == ONE


@pytest.mark.parametrize(
    "given", [(1, 2), (1, 2, 3, 4), (1, 2, 0), (1, 2, -3), (1, 2, True), (1, 2, 3.0), "123", 7, None, Problem(1, 2, 0)]
)
def test_what_is_no_problem_is_refused_with_an_example(given):
    with pytest.raises(ValueError, match=EXAMPLE):
        Problem.of(given)


# ---- Forms -------------------------------------------------------------------------------------------------------


def test_the_forms_that_kinds_serve():
    assert FORMS == {"dense": DENSE, "batched": BATCHED, "grouped": GROUPED, "ragged_k": RAGGED_K}
    assert [kind.noun for kind in KINDS if DENSE not in kind.forms] == ["a SmallConfig"]
    assert [kind.noun for kind in KINDS if BATCHED not in kind.forms] == [
        "a GemvConfig",
        "a PackedRowsConfig",
        "a PointwiseConfig",
    ]
    for form in (GROUPED, RAGGED_K):
        assert [kind.noun for kind in KINDS if form in kind.forms] == ["an Sm90Config"]
    assert all(form.name == name and form.count for name, form in FORMS.items())


def test_a_dense_problem_has_one_gemm():
    assert DENSE.refuses(ONE) is None
    assert DENSE.refuses(EIGHT) == "problem 8x512x4096x1024 has 8 GEMMs, and the form dense has one: the count is 1"
    assert BATCHED.refuses(EIGHT) is None


def test_a_dense_declaration_is_written_without_its_form():
    assert "form" not in spec().canonical()
    assert "form" not in signature_to_json(signature())
    assert spec(form="dense") == spec(form=DENSE) == spec()
    assert KernelSpec.from_json({**spec().to_json(), "form": "dense"}) == spec()
    assert "form" not in repr(spec())


def test_another_form_is_another_kernel_and_another_signature(stacked):
    one = spec(form="stacked")
    assert one.form == stacked
    assert one != spec()
    assert one.to_json() == {**spec().to_json(), "form": "stacked"}
    assert KernelSpec.from_json(one.to_json()) == one
    assert one.slug.startswith("gemm_stacked_bf16row_")
    assert "form='stacked'" in repr(one)
    of = OpSignature.of(one)
    assert of.spec(SM90) == one
    assert of != OpSignature.of(spec())
    assert signature_from_json(signature_to_json(of)) == of


@pytest.mark.parametrize(
    ("form", "error", "message"),
    [
        ("ragged", ConfigError, "form is 'ragged', which is not a form: use dense or batched or grouped"),
        (STACKED, ConfigError, "form is 'stacked', which is not a form: use dense or batched or grouped"),
        (replace(DENSE, several=True), ConfigError, "form is 'dense', which is not a form: use dense or batched"),
        (None, TypeError, "form must be the name of a form, not None: use dense or batched or grouped"),
    ],
)
def test_a_form_that_there_is_not_is_refused(form, error, message):
    with pytest.raises(error) as found:
        spec(form=form)
    assert str(found.value).startswith(message)


@pytest.mark.parametrize("form", ["ragged", None, 1, ["dense"]])
def test_json_with_an_unknown_form_is_refused(form):
    with pytest.raises(ConfigError, match="not a kernel spec: form "):
        KernelSpec.from_json({**spec().to_json(), "form": form})
    with pytest.raises(ConfigError, match="not a kernel spec: form "):
        signature_from_json({**signature_to_json(signature()), "form": form})


def test_a_kind_that_does_not_serve_a_form_says_which_does(stacked):
    assert legality.check(spec(form=stacked)) == ()
    (violation,) = legality.check(spec(SM80, form=stacked))
    assert str(violation) == "form: form is stacked, and an Sm80Config serves dense, batched: use an Sm90Config"
    (violation,) = legality.check(spec(GEMV, form="batched"))
    assert (
        violation.message
        == "form is batched, and a GemvConfig serves dense: use an Sm90Config or an Sm80Config or a SmallConfig"
    )


# ---- Tables and choices ------------------------------------------------------------------------------------------


def table(of, *problems):
    points = tuple(Point(p, "2026-11-26", (Measured(SM90, 10.0, 0.0),)) for p in problems)
    return Table(H100.name, H100.multiprocessors, of, points)


def test_a_table_has_no_problem_that_its_form_cannot_have():
    with pytest.raises(ConfigError, match="has 8 GEMMs, and the form dense has one"):
        table(signature(), ONE, EIGHT)
    written = table(signature(), ONE).to_json()
    written["points"][0]["problem"] = EIGHT.to_json()
    with pytest.raises(ConfigError, match="has 8 GEMMs, and the form dense has one"):
        Table.from_json(written)


@pytest.mark.usefixtures("session")
def test_a_form_that_a_kind_serves_is_chosen_for():
    of = replace(signature(), form=BATCHED)
    policy = policies.policy(of, H100)
    assert policy.kernels
    assert all(isinstance(c, Sm90Config | SmallConfig) and c.whole_k for c in policy.kernels)
    one, eight = policy.choose(ONE), policy.choose(EIGHT)
    # What was measured of one GEMM says nothing exact of several.
    assert eight.source != "measured"
    assert 4 < eight.microseconds / one.microseconds < 9
    assert eight.config in policies.kept(policy, EIGHT.n, EIGHT.k, EIGHT.count)
    on_ampere = policies.policy(of, A100).kernels
    assert on_ampere
    assert all(isinstance(c, Sm80Config | SmallConfig) and c.whole_k for c in on_ampere)


# ---- Predictions -------------------------------------------------------------------------------------------------


def times(config, *problems, of=None, device=H100):
    return Pool.of([config], of or signature()).times(problems, device)[:, 0]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: c.slug)
@pytest.mark.parametrize(
    "problem", [Problem(4, 4096, 4096), Problem(512, 4096, 1024), Problem(100, 1000, 512)], ids=str
)
def test_many_gemms_take_in_proportion_to_their_number(config, problem):
    found = times(config, *(problem._replace(count=count) for count in (1, 2, 64, 128, 256)))
    # Few tiles that stream-K splits take longer than more of them, as many parts of a tile wait for each other.
    assert (np.diff(found[0 if config is not STREAM_K else 2 :]) > 0).all()
    assert found[4] / found[3] == pytest.approx(2, rel=0.05)
    # To launch them together costs less than one after the other.
    assert found[2] < 64 * found[0]


@pytest.mark.slow
@PATIENT
@given(m=st.integers(1, 1 << 12), n=st.integers(1, 1 << 12), k=st.integers(1, 1 << 12), count=st.integers(1, 1 << 10))
@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: c.slug)
def test_no_time_is_below_what_memory_and_tensor_cores_allow(config, m, n, k, count):
    problem = Problem(m, n, k, count)
    (found,) = times(config, problem)
    at_least = roofline(problem, problem.bytes(2, 2, 2), USUAL)
    assert found >= 0.99 * max(at_least.compute, at_least.memory)
