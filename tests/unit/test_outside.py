"""Tables, manifests and catalogues with values that nobody would write: a reason, and never another error."""

import contextlib
import copy
import json
import math
import os
import sys

import pytest
import torch
from bundles import packed
from fake_toolkit import IDENTITY, sm80_spec
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from signatures import A100, signature

from cutlass_ops import bundle as bundle_module
from cutlass_ops import builtin, bundles, catalog, container, dispatch, plain, policies, shipping, tables
from cutlass_ops.bundles import BUNDLES
from cutlass_ops.call import call_at
from cutlass_ops.config import Sm80Config, ThreadblockShape, WarpShape
from cutlass_ops.errors import BundleError, ConfigError, LoadError
from cutlass_ops.explaining import explain_call
from cutlass_ops.manifest import Manifest
from cutlass_ops.store import open_entry
from cutlass_ops.tables import Measured, Point, Table
from cutlass_ops.verifying import verify
from tests.strategies import PATIENT
from tests.unit.test_hostile import _at, _places

FEW = settings(
    PATIENT,
    max_examples=60,
    suppress_health_check=[*PATIENT.suppress_health_check, HealthCheck.function_scoped_fixture],
)

# As they stand in JSON, since not all of them are values.
NUMBERS = (
    *("1" + "0" * 400, "-1" + "0" * 400, "9" * 5000, "9223372036854775808", "9223372036854775807", "-1", "0", "1"),
    *("1e400", "-1e400", "1e308", "-1e308", "5e-324", "1e-9", "-0.0", "0.5", "1e999999999", "0." + "1" * 5000),
    *("NaN", "Infinity", "-Infinity", "true", "null"),
)
OTHERS = (
    *('"1e400"', '"\\ud800"', '"\\u0000"', '"\\n"', '""', "[]", "{}", "[[]]", '"' + "x" * 100_000 + '"'),
    *("[" * 900 + "]" * 900, "[" * 100_000 + "]" * 100_000, '{"a": 1, "a": 2}', '{"\\ud800": 1}'),
)
RAW = st.sampled_from(NUMBERS + OTHERS)
MARK = "@@"


def spoilt(value, path, raw):
    """A JSON text in which something else stands in one place, which need not be JSON at all."""
    value = copy.deepcopy(value)
    if path:
        _at(value, path[:-1])[path[-1]] = MARK
    else:
        value = MARK
    return json.dumps(value, sort_keys=True, separators=(",", ":")).replace(f'"{MARK}"', raw).encode()


def places(value):
    return st.sampled_from(sorted(_places(value), key=str))


KERNELS = [Sm80Config(ThreadblockShape(128, n, 32), WarpShape(64, 32, 32), stages=4) for n in (64, 128)]
SIGNATURE = signature()


def point(m, peers=(("eager", 1.0),)):
    return Point((m, 4096, 4096), "2026-11-21", (Measured(KERNELS[0], 10.0, 0.0), Measured(KERNELS[1], 11.0, 0.1)), peers)


TABLE = Table(A100.name, 108, SIGNATURE, (point(1), point(64)), fallback=True)
JSON = TABLE.to_json()


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    for name in ("CUTLASS_OPS_BUNDLES", "CUTLASS_OPS_BUNDLE_KEY", "CUTLASS_OPS_BUNDLE_VERSION"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(bundles, "_installed", list)
    BUNDLES.forget()
    policies.forget()
    yield
    BUNDLES.forget()
    policies.forget()


@pytest.fixture
def users(monkeypatch, tmp_path):
    """Where the user's table for the signature lies."""
    monkeypatch.setenv("CUTLASS_OPS_TUNING_DIR", str(tmp_path))
    return tables.path_of(tmp_path, A100.name, SIGNATURE)


# ---- One place that reads JSON -----------------------------------------------------------------------------------


@pytest.mark.parametrize("raw", [*NUMBERS[:4], "1e400", "-1e400", "1e999999999", "0." + "1" * 5000, *NUMBERS[-5:-2]])
def test_a_number_that_none_is_is_no_json(raw):
    with pytest.raises(ConfigError, match="it is no JSON that is read here: ") as error:
        plain.parsed(b'{"a": [%s]}' % raw.encode(), "it", 1 << 20)
    assert len(str(error.value)) < 200
    assert "set_int_max_str_digits" not in str(error.value)


def test_integers_have_64_bits():
    assert plain.parsed(b"[9223372036854775807, -9223372036854775808, -0]", "it", 100) == [2**63 - 1, -(2**63), 0]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (b'{"b": 1, "a": {"c": 1, "d": 2, "c": 1}}', "'c' stands twice"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"a":' * 100_000, "nested too deeply"),
        (b"\xff\xfe1\x00", "can't decode"),
        ("[1]".encode("utf-16"), "can't decode"),
        (b"\xef\xbb\xbf1", "BOM"),
        (b"", "Expecting value"),
        (b"[1, 2, 3]" + b" " * 100, "more than 50 bytes"),
    ],
)
def test_what_is_no_json_says_why(text, why):
    with pytest.raises(ConfigError, match=why):
        plain.parsed(text, "it", 50 if why.startswith("more") else 1 << 20)


def test_nothing_of_too_many_bytes_is_parsed(monkeypatch):
    monkeypatch.setattr(json, "loads", lambda *_, **__: pytest.fail("it was parsed"))
    with pytest.raises(ConfigError, match="more than 10 bytes"):
        plain.parsed(b"1" * 11, "it", 10)


VALUES = st.one_of(
    st.integers(), st.floats(), st.just(10**5000), st.just([10**5000]), st.booleans(), st.none(), st.text(), st.binary()
)


@FEW
@given(VALUES)
def test_a_value_of_any_kind_is_checked_or_named(value):
    for check in (
        lambda: plain.integer(value, "it", 0, 10),
        lambda: plain.number(value, "it", 0.0, 1e9),
        lambda: plain.text(value, "it"),
        lambda: plain.sequence(value, "it", 3),
        lambda: plain.mapping(value, "it", "a b"),
    ):
        try:
            check()
        except ConfigError as exc:
            assert len(str(exc)) < 300


def test_a_message_can_be_printed_whatever_stands_in_it():
    text = plain.said(ValueError("a\ud800\n\x00" + "x" * 10_000))
    assert text.startswith("a\\ud800\\n\\x00x")
    assert text.isprintable()
    assert len(text) < 1100


# ---- Tables ------------------------------------------------------------------------------------------------------


@FEW
@given(places(JSON), RAW)
def test_a_table_with_anything_in_any_place_is_one_or_has_an_error_that_says_so(path, raw):
    try:
        table = tables.parse(spoilt(JSON, path, raw), "it")
    except ConfigError as exc:
        assert str(exc).startswith("it is no tuning table: ")
        assert str(exc).isprintable()
        return
    # All that is done with a table: it is restated, written and read again.
    again = tables.parse(json.dumps(table.to_json(), allow_nan=False).encode(), "it")
    assert again.select().kernels == table.select().kernels
    merged = table.merged(TABLE).merged(table) if table.signature == SIGNATURE and table.device == A100.name else table
    assert tables.parse(json.dumps(merged.select().to_json(), allow_nan=False).encode(), "it")


@FEW
@given(places(JSON), RAW)
def test_a_users_table_never_fails_a_call(users, path, raw):
    users.write_bytes(spoilt(JSON, path, raw))
    policies.forget()
    with pytest.warns() if not _good(users) else contextlib.nullcontext():
        spec, _ = dispatch.choose(SIGNATURE, A100, (3, 4096, 4096))
    assert spec.target == "sm_80"
    found = explain_call("gemm_bias_relu", _call(), A100)
    assert found.candidates
    assert all(0 < c.microseconds < math.inf for c in found.candidates)
    assert str(found).replace("\n", "").isprintable()


def _good(path):
    try:
        return tables.load(path).is_about(SIGNATURE, A100.name)
    except ConfigError:
        return False


def _call():
    return call_at(builtin.bias_relu.graph, (1, 4096, 4096), "bf16", "row", "col")
