"""Tables, manifests and catalogues with values that nobody would write: a reason, and never another error."""

import contextlib
import copy
import hashlib
import json
import math
import os
from dataclasses import replace

import numpy as np
import pytest
from bundles import changed, packed
from fake_toolkit import sm80_spec
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from signatures import A100, H100, signature

from cutlass_ops.artifacts import bundle as bundle_module
from cutlass_ops.artifacts import container
from cutlass_ops.artifacts.bundles import Bundles
from cutlass_ops.artifacts.manifest import Manifest
from cutlass_ops.base import checked_json
from cutlass_ops.base.errors import BundleError, ConfigError
from cutlass_ops.choose import dispatch, policies, tables
from cutlass_ops.choose.tables import Measured, Point, Table
from cutlass_ops.declare.config import ThreadblockShape, WarpShape
from cutlass_ops.declare.problem import Problem
from cutlass_ops.epilogue import builtin
from cutlass_ops.kinds import legality
from cutlass_ops.kinds.sm80.config import Sm80Config
from cutlass_ops.kinds.sm90.config import Sm90Config
from cutlass_ops.operand.call import call_at
from cutlass_ops.ship import shipping
from cutlass_ops.ship.verifying import verify
from cutlass_ops.tools.explaining import explain_call
from tests.strategies import PATIENT, at_most
from tests.unit.test_hostile import _at, _places

FEW = settings(at_most(40), suppress_health_check=[*PATIENT.suppress_health_check, HealthCheck.function_scoped_fixture])

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


def refusal(call, *arguments):
    """What a call says against its arguments; nothing if it takes them."""
    try:
        call(*arguments)
    except ConfigError as exc:
        return str(exc)
    return ""


def places(value):
    return st.sampled_from(sorted(_places(value), key=str))


KERNELS = [Sm80Config(ThreadblockShape(128, n, 32), WarpShape(64, 32, 32), stages=4) for n in (64, 128)]
SIGNATURE = signature()


def point(m, peers=(("eager", 1.0),)):
    return Point(
        Problem(m, 4096, 4096), "2026-11-21", (Measured(KERNELS[0], 10.0, 0.0), Measured(KERNELS[1], 11.0, 0.1)), peers
    )


TABLE = Table(A100.name, 108, SIGNATURE, (point(1), point(64)), fallback=True)
JSON = TABLE.to_json()


@pytest.fixture(autouse=True)
def own(session):
    """Each test has a session of its own."""


@pytest.fixture
def users(monkeypatch, tmp_path):
    """Where the user's table for the signature lies."""
    monkeypatch.setenv("CUTLASS_OPS_TUNING_DIR", str(tmp_path))
    return tables.path_of(tmp_path, A100.name, SIGNATURE)


# ---- One place that reads JSON -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (b'{"b": 1, "a": {"c": 1, "d": 2, "c": 1}}', "the key 'c' twice"),
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
        checked_json.parsed(text, "it", 50 if why.startswith("more") else 1 << 20)


def test_what_json_has_not_has_no_canonical_text():
    for value, error in ((float("nan"), ValueError), (-float("inf"), ValueError), ({1}, TypeError)):
        with pytest.raises(error):
            checked_json.canonical([value])


# ---- Tables ------------------------------------------------------------------------------------------------------


@FEW
@given(places(JSON), RAW)
def test_a_table_with_anything_in_any_place_is_one_or_has_an_error_that_says_so(path, raw):
    text = spoilt(JSON, path, raw)
    why = refusal(tables.parse, text, "it")
    if why:
        assert why.startswith("it is not a tuning table: ")
        assert why.isprintable()
        return
    table = tables.parse(text, "it")
    # All that is done with a table: it is restated, written and read again.
    again = tables.parse(json.dumps(table.to_json(), allow_nan=False).encode(), "it")
    assert again.select().kernels == table.select().kernels
    same = all(getattr(table, of) == getattr(TABLE, of) for of in ("device", "multiprocessors", "signature"))
    merged = table.merged(TABLE).merged(table) if same else table
    assert tables.parse(json.dumps(merged.select().to_json(), allow_nan=False).encode(), "it")


@pytest.mark.slow
@FEW
@given(places(JSON), RAW)
def test_a_users_table_never_fails_a_call(users, path, raw):
    users.write_bytes(spoilt(JSON, path, raw))
    policies.forget()
    with pytest.warns() if not _good(users) else contextlib.nullcontext():
        spec, _ = dispatch.choose(SIGNATURE, A100, Problem(3, 4096, 4096))
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
    return call_at(builtin.bias_relu.graph, Problem(1, 4096, 4096), "bf16", "row", "col")


def test_a_kernel_that_cannot_have_been_launched_spoils_no_other(monkeypatch, tmp_path):
    """Its grid would be too large: by the model it takes for ever, and its error would be infinite."""
    monkeypatch.setenv("CUTLASS_OPS_TUNING_DIR", str(tmp_path))
    of = signature(builtin.bias_gelu)
    kernel = Sm90Config(ThreadblockShape(64, 128, 64), schedule="warp_specialized")
    lie = Point(Problem(1, 1 << 30, 64), "2026-11-21", (Measured(kernel, 10.0, 0.0),))
    path = tables.path_of(tmp_path, H100.name, of)
    path.write_text(json.dumps(Table(H100.name, 132, of, (lie,), (kernel,)).to_json()))
    times = policies.policy(of, H100).expected([Problem(1, 4096, 4096), Problem(64, 1 << 29, 64)]).times
    assert not np.isnan(times).any()


@pytest.mark.parametrize("change", [{"device": "another"}, {"signature": signature(dtype="f16")}])
def test_a_users_table_about_something_else_is_left_out(users, change, capsys):
    users.write_text(json.dumps(replace(TABLE, **change).to_json()))
    with pytest.warns(RuntimeWarning, match="ignored: .* is for other calls or another device"):
        dispatch.choose(SIGNATURE, A100, Problem(1, 4096, 4096))
    dispatch.choose(SIGNATURE, A100, Problem(2, 4096, 4096))
    assert capsys.readouterr().err == ""  # where warnings are errors, as here, a second one would stand there


# ---- Bundles -----------------------------------------------------------------------------------------------------


def bundle_with(path, contents, table):
    """A bundle with a tuning table, whatever it holds."""
    size = {"sha256": hashlib.sha256(table).hexdigest(), "size": len(table)}
    text = changed(contents.manifest, lambda data: data.update(tables=[size]))
    container.write(path, {**contents.files, f"tables/{size['sha256']}.json": table, "manifest.json": text})
    return path


@pytest.fixture(scope="module")
def contents(tmp_path_factory):
    return packed(tmp_path_factory.mktemp("outside"), [sm80_spec()])


SPOILT = [
    *(spoilt(JSON, ("points", 0, "peers", "eager"), raw) for raw in ("5e-324", "1" + "0" * 400, "1e400", "9" * 5000)),
    *(spoilt(JSON, ("points", 0, "problem", 1), raw) for raw in ("1" + "0" * 400, "true", "-1")),
    *(spoilt(JSON, (), raw) for raw in ("[" * 100_000, "NaN", "")),
]


@pytest.mark.parametrize("table", SPOILT, ids=range(len(SPOILT)))
def test_a_wrong_table_in_a_bundle_is_the_bundles_error_and_a_problem(tmp_path, contents, table):
    path = bundle_with(tmp_path / "a", contents, table)
    (problem,) = verify(path).problems
    assert problem.startswith("tables/")
    assert "it is not a tuning table" in problem
    Bundles.current().load(path)
    with pytest.raises(BundleError, match=r"a table in .*/a is not a tuning table"):
        dispatch.choose(SIGNATURE, A100, Problem(1, 4096, 4096))


@FEW
@given(st.data())
def test_a_manifest_with_anything_in_any_place_is_refused(contents, data):
    good = json.loads(contents.manifest.to_bytes())
    text = spoilt(good, data.draw(places(good)), data.draw(RAW))
    if text != contents.manifest.to_bytes():
        with pytest.raises(BundleError) as error:
            Manifest.from_bytes(text)
        assert len(str(error.value)) < 1200
        assert str(error.value).isprintable()


@pytest.mark.parametrize("folder", [False, True])
def test_a_manifest_of_nine_mebibytes_is_refused_unread(tmp_path, contents, monkeypatch, folder):
    """Nobody vouches for it without a key, and to parse it takes seconds."""
    files = {**contents.files, "manifest.json": b"[" + b"0," * (9 << 19) + b"0]"}
    container.write(tmp_path / "a", files, folder=folder)
    monkeypatch.setattr(json, "loads", lambda *_, **__: pytest.fail("it was parsed"))
    for kind in (container._Archive, container._Folder):
        monkeypatch.setattr(kind, "read", lambda *_: pytest.fail("it was read"))
    with pytest.raises(BundleError, match=r"manifest\.json has 9437187 bytes: at most 4194304 are allowed"):
        bundle_module.open_bundle(tmp_path / "a")
    assert "at most 4194304" in verify(tmp_path / "a").problems[0]


def test_a_manifest_that_would_be_refused_is_not_written(tmp_path, contents, monkeypatch):
    monkeypatch.setattr("cutlass_ops.artifacts.manifest.MAX_BYTES", 100)
    with pytest.raises(BundleError, match="more than 100 bytes"):
        contents.write(tmp_path / "a")
    assert not os.path.lexists(tmp_path / "a")


# ---- The store, declarations and catalogues ------------------------------------------------------------------------


SPEC = sm80_spec().to_json()


@FEW
@given(places(SPEC), RAW)
def test_a_declaration_with_anything_in_any_place_is_one_or_has_an_error(tmp_path, path, raw):
    file = tmp_path / "spec.json"
    file.write_bytes(spoilt(SPEC, path, raw))
    why = refusal(lambda: legality.require_legal(shipping.read_spec(file)))
    assert len(why) < 2500  # of several rules, each with a number of nineteen digits


CATALOGUE = {
    "format": "1",
    "version": "3",
    "specs": '["spec.json"]',
    "kernels": '[{ops = ["gemm"], archs = ["sm_80"], shapes = ["1x64x64"], input_dtypes = {}}]',
    "tables": '[{path = "table.json", arch = "sm_80", kernels = 2}]',
}
HEX = "0x" + "f" * 5000
TOML = st.sampled_from(
    [
        *("1" + "0" * 400, "9" * 5000, "-1", "0", "1.0", "true", "1e400", "nan", "-inf", HEX, "1979-05-27"),
        *('""', '"\\u0000"', '"\\n"', "[]", "{}", "[1]", '["\\u0000"]', "[[]]", "[" * 100_000, f'["{"x" * 9000}"]'),
        *('[{path = "a", arch = 1}]', '[{path = 1, arch = ""}]', '[{path = "\\u0000", arch = "sm_80"}]'),
        *(f'[{{path = "table.json", arch = "sm_80", kernels = {n}}}]' for n in (HEX, "true", "1e400")),
        *(f'[{{ops = ["gemm"], archs = ["sm_80"], shapes = ["{s}"]}}]' for s in ("9" * 5000, "1x1x0", "\u0661x1x1")),
    ]
)


@FEW
@given(st.sampled_from(sorted(CATALOGUE)), TOML)
def test_a_catalogue_with_anything_in_any_place_is_one_or_has_an_error(tmp_path, name, raw):
    (tmp_path / "spec.json").write_text(json.dumps(SPEC))
    (tmp_path / "table.json").write_text(json.dumps(JSON))
    file = tmp_path / "catalogue.toml"
    file.write_text("\n".join(f"{n} = {v}" for n, v in {**CATALOGUE, name: raw}.items()))
    why = refusal(shipping.load, str(file))
    assert not why or why.startswith(str(file))
    assert len(why) < 1500
    assert "set_int_max_str_digits" not in why
