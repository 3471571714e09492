"""Bundles and declarations as an attacker would write them: refused with a reason, never loaded, never in C++."""

import contextlib
import copy
import itertools
import json
import random
import re

import pytest
from bundles import packed
from fake_toolkit import sm80_spec
from hypothesis import settings
from signatures import signature, statistics

from cutlass_ops.artifacts import container
from cutlass_ops.artifacts.bundle import open_bundle
from cutlass_ops.artifacts.manifest import Manifest
from cutlass_ops.base.checked_json import sealed
from cutlass_ops.base.errors import BundleError, ConfigError
from cutlass_ops.declare.config import ClusterShape, ThreadblockShape, WarpShape
from cutlass_ops.declare.spec import KernelSpec
from cutlass_ops.kinds import legality, render
from cutlass_ops.kinds.sm80.config import Sm80Config
from cutlass_ops.kinds.sm90.config import Sm90Config
from cutlass_ops.ship import catalog

MARK = "PWNED"
HOSTILE = (
    *(
        f'x"; {MARK}("',
        f"*/ {MARK} /*",
        f"x\n#include <{MARK}>\n",
        f"x\\\n{MARK}",
        f"{{{{ {MARK} }}}}",
        f"{{% {MARK} %}}",
    ),
    *(
        f"x) {{}} int {MARK}(",
        f"../../{MARK}",
        f"/etc/{MARK}",
        f"x\0{MARK}",
        f"??/{MARK}",
        f"p\u0430th{MARK}",
        "",
        "\ud800",
    ),
    *(f"{MARK}<int>", f"class {MARK}", f"__{MARK}", "int", "acc", "d", "bf16.row", "bf16.row.align3", "x" * 100_000),
)
VALUES = (
    *(None, True, False, 0, -1, 1, 2, 3, 7, 1 << 31, 1 << 63, 10**300, 0.5, -0.0, 1e308),
    *([], {}, [[]], [None] * 10_000, {"a": 1}, {"": {}}, [1, 2, 3], ["bf16.row"], *HOSTILE),
)
# 1500, and fewer in the quick tests.
MANY = 15 * settings().max_examples


def _places(value, path=()):
    """Every place in a JSON value, the value itself first."""
    yield path
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in children:
        yield from _places(child, (*path, key))


def _at(value, path):
    for key in path:
        value = value[key]
    return value


def _mutated(value, rng):
    """A value with one to three places changed: replaced, removed, added, renamed, doubled or exchanged."""
    value = copy.deepcopy(value)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        *parents, last = rng.choice([p for p in _places(value) if p])
        parent = _at(value, parents)
        kind = rng.randrange(6)
        if kind <= 2:
            parent[last] = copy.deepcopy(rng.choice(VALUES))
        elif kind == 3:
            del parent[last]
        elif isinstance(parent, dict):
            parent[rng.choice([k for k in HOSTILE if k])] = parent[last] if kind == 4 else parent.pop(last)
        elif kind == 4:
            parent.insert(last, copy.deepcopy(parent[last]))
        else:
            other = rng.randrange(len(parent))
            parent[last], parent[other] = parent[other], parent[last]
    return value


def _text(value):
    """JSON as Python writes it, with whatever stands in it."""
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


@pytest.fixture(scope="module")
def contents(tmp_path_factory):
    return packed(tmp_path_factory.mktemp("hostile"), [sm80_spec(3), sm80_spec(4), *_specs()[:1]])


# ---- Manifests -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_no_changed_manifest_loads(contents, tmp_path):
    rng = random.Random(1)
    good = json.loads(contents.manifest.to_bytes())
    refused = 0
    while refused < MANY:
        text = _text(_mutated(good, rng))
        if text == contents.manifest.to_bytes():
            continue
        with pytest.raises(BundleError):
            Manifest.from_bytes(text)
        refused += 1
        if refused % 50 == 0:
            container.write(tmp_path / "a", {**contents.files, "manifest.json": text})
            with pytest.raises(BundleError, match=re.escape(str(tmp_path / "a"))):
                open_bundle(tmp_path / "a")


@pytest.mark.slow
def test_a_forger_who_seals_what_he_changed_gets_no_further(contents, tmp_path):
    """What is then accepted is a manifest in every field, names nothing outside the bundle, and loads no kernel as one
    that it was not compiled to be."""
    true = {record.key: contents.manifest.identity(record) for record in contents.manifest.kernels}
    rng = random.Random(2)
    good = json.loads(contents.manifest.to_bytes())
    del good["sha256"]
    accepted = refused = loaded = 0
    for _ in range(MANY):
        try:
            text = sealed(_mutated(good, rng))
        except (TypeError, ValueError):
            continue  # what he made has no JSON
        try:
            found = Manifest.from_bytes(text)
        except BundleError:
            refused += 1
            continue
        accepted += 1
        assert found.to_bytes() == text
        assert all(re.fullmatch(r"(kernels|sources|tables)/[0-9a-f]{64}\.(so|cu|json)", name) for name in found.files)
        container.write(tmp_path / "a", {**contents.files, "manifest.json": text})
        with contextlib.suppress(BundleError):
            for kernel in open_bundle(tmp_path / "a").kernels():
                with contextlib.suppress(BundleError):
                    assert kernel.read_library() == contents.files[f"kernels/{kernel.key}.so"]
                    assert kernel.manifest["identity"] == true[kernel.key]
                    loaded += 1
    assert loaded > 0  # of kernels that were left as they were
    assert refused > 0.8 * MANY
    assert accepted > 0


def test_no_changed_archive_gives_other_bytes(contents, tmp_path):
    """Whatever happens to an archive, what is read of it is what was packed, or an error."""
    rng = random.Random(4)
    contents.write(tmp_path / "a")
    good = (tmp_path / "a").read_bytes()
    libraries = {r.spec: contents.files[r.library_name] for r in contents.manifest.kernels}
    refused = 0
    for _ in range(400):
        data, at = bytearray(good), rng.randrange(len(good))
        if rng.random() < 0.5:
            data[at : at + rng.randrange(1, 9)] = rng.randbytes(rng.randrange(9))
        else:
            data[at] ^= 0xFF
        (tmp_path / "b").write_bytes(data)
        try:
            found = open_bundle(tmp_path / "b")
            read = {kernel.spec: kernel.read_library() for kernel in found.kernels()}
        except BundleError:
            refused += 1
        else:
            assert read == libraries
    assert refused > 200


# ---- Declarations --------------------------------------------------------------------------------------------------


def _specs():
    configs = (
        Sm80Config(ThreadblockShape(128, 128, 32), WarpShape(64, 64, 32), stages=4),
        Sm90Config(ThreadblockShape(128, 128, 64), ClusterShape(2, 1), "pingpong"),
    )
    own = [signature(statistics).spec(config) for config in configs]
    return [*own, *(entry.spec for entry in catalog.default())]


@pytest.mark.slow
def test_no_declaration_puts_text_into_cpp():
    rng = random.Random(5)
    rendered = refused = 0
    specs = [spec.to_json() for spec in _specs()]
    for spec in itertools.cycle(specs):
        if rendered + refused >= 2 * MANY or (refused >= MANY and rendered >= 200):
            break
        data = _mutated(spec, rng)
        try:
            found = KernelSpec.from_json(data)
            legality.require_legal(found)
        except ConfigError:
            refused += 1
            continue
        text = render.render(found)
        rendered += 1
        assert text.isascii()
        # A name that is an identifier may stand in C++; all else may not.
        for mark in re.finditer(rf".{{0,20}}{MARK}.{{0,20}}", text):
            assert re.fullmatch(
                r"\w*", re.search(rf"[^\s,.()\[\]&*<>;:\"'{{}}]*{MARK}[^\s,.()\[\]&*<>;:\"'{{}}]*", mark[0])[0]
            )
        assert render.render(KernelSpec.from_json(json.loads(found.canonical()))) == text
    assert refused >= MANY
    assert rendered >= MANY // 30


@pytest.mark.parametrize("text", [h for h in HOSTILE if MARK in h])
def test_no_hostile_text_gets_into_a_declaration(text):
    """In every place where a declaration has text, one after the other."""
    for spec in (s.to_json() for s in _specs()[:2]):
        for path in _places(spec):
            if not path or not isinstance(_at(spec, path), str):
                continue
            data = copy.deepcopy(spec)
            _at(data, path[:-1])[path[-1]] = text
            with pytest.raises(ConfigError):
                legality.require_legal(KernelSpec.from_json(data))
