"""Both readers of bundles, Python's and C++'s, accept the same manifests and archives.

What declarations mean is checked by Python alone, so C++ accepts more of them.

Some thousands of each, and more on request::

    CUTLASS_OPS_SEEDS=100 pytest tests/cpp/test_readers.py -k changed
"""

import contextlib
import hashlib
import itertools
import json
import os
import random
import re

import pytest
from bundles import changed
from test_hostile import VALUES, _at, _mutated, _places

from cutlass_ops.artifacts import container
from cutlass_ops.artifacts.bundle import open_bundle
from cutlass_ops.artifacts.manifest import Manifest
from cutlass_ops.base.checked_json import sealed
from cutlass_ops.base.errors import BundleError
from cutlass_ops.epilogue import names, operations
from cutlass_ops.kinds.gemv.config import GemvConfig
from tests.faults.fuzz import seeds

# To build the program takes fifteen seconds.
pytestmark = pytest.mark.slow

SEEDS = int(os.environ.get("CUTLASS_OPS_SEEDS", "1"))

# What a forger would try in place of a value of the same kind.
MORE = (
    *VALUES,
    *("sm_86", "sm_90", "f16", "bf16.col", "bf16.row.align1", "f32.row.align4", "f16.row.align8", "e4m3", "e4m3.row"),
    *("e5m2.col.align8", "e4m3.row.align12", "e4m3.row.align16", "e4m3.row.blocks1x128", "e4m3.row.promoted"),
    *("e5m2.col.align8.promoted", "f64.row", "f64.col.align1", "f64.row.align4", "tf32.row.align2", "i8.col.align8"),
    *("i32.row", "i32.col.align2", "float16.row", "tile"),
    *("e4m3.col.blocks128x128", "blocks_a", "blocks_d"),
    *("product", "sum", "max", "acc", "const", "cast", "swap_pairs", "mean_of_a", "sm80", "gemv", "along_m", "beside"),
    *("0x1.8000000000000p+1", "0x1.8p+1", "0x1.0000000000001p+0", "0x1.0000000000000p-149", "0x1.0000000000000p-150"),
    *("0x1.fffffe0000000p+127", "0x1.0000000000000p+128", "-0x0.0p+0", "0x0.0p+0", "inf", "-inf", "nan", "-nan", "1.5"),
    *(10**400, -(10**400), 1 << 40, (1 << 31) - 1, 8, 99, {"b": 1, "a": 2}, ["d", 0, "tile", None], ["acc", [], None]),
)


def _python(text):
    try:
        Manifest.from_bytes(text)
    except BundleError:
        return False
    return True


@pytest.fixture
def agree(probe, tmp_path):
    """Require that C++ accepts what Python accepts; return how many texts that is."""

    def _agree(texts):
        (tmp_path / "texts").write_bytes(b"".join(b"%d\n%b" % (len(text), text) for text in texts))
        code, out = probe("manifests", tmp_path / "texts")
        assert code == 0
        said = out.splitlines()
        assert len(said) == len(texts)
        accepted = [(text, line) for text, line in zip(texts, said, strict=True) if _python(text)]
        differ = [(text, line) for text, line in accepted if line != "ok"]
        assert not differ, (
            f"{len(differ)} of {len(texts)}: C++ says {differ[0][1]} of {differ[0][0].decode(errors='replace')}"
        )
        return len(accepted)

    return _agree


def _resealed(text):
    """A text with the digest that belongs to it, if there is one in its place."""
    found = re.search(rb',"sha256":"([^"]{64})","signatures"', text)
    if found is None:
        return text
    digest = hashlib.sha256(text[: found.start()] + text[found.end(1) + 1 :]).hexdigest()
    return text[: found.start(1)] + digest.encode() + text[found.end(1) :]


def _forged(good, rng):
    """A manifest changed as a value, with its digest put right."""
    data = json.loads(good)
    del data["sha256"]
    if rng.random() < 0.5:
        with contextlib.suppress(TypeError, ValueError):  # what was made has no JSON
            return sealed(_mutated(data, rng))
    # One value in another one's place, or one of the same kind.
    path = rng.choice([p for p in _places(data) if p])
    other = rng.choice([*MORE, _at(data, rng.choice(list(_places(data))))])
    copy = json.loads(json.dumps(data))
    _at(copy, path[:-1])[path[-1]] = other
    return sealed(copy)


def _scratched(good, rng):
    """A manifest changed in some bytes, with its digest put right."""
    data, at = bytearray(good), rng.randrange(len(good))
    words = [*(bytes([each]) for each in b'"\\\0\xff ,[{]}0-'), b"1e9", b"\\u0041", b"\xc3\xa9", b".0"]
    kind = rng.randrange(5)
    if kind == 0:
        data[at] ^= 1 << rng.randrange(8)
    elif kind == 1:
        data[at:at] = rng.choice(words)
    elif kind == 2:
        data[at : at + 1] = rng.choice(words)
    elif kind == 3:
        del data[at : at + rng.randrange(1, 30)]
    else:
        data[at:at] = data[at : at + rng.randrange(1, 200)]
    return _resealed(bytes(data))


def _compare(agree, contents, seed, count):
    good, rng = contents[0].to_bytes(), random.Random(seed)
    texts = [rng.choice((_forged, _scratched))(good, rng) for _ in range(count)]
    assert 0 < agree([good, *texts]) < count


@pytest.mark.parametrize("seed", range(1, 1 + SEEDS))
def test_they_agree_on_changed_manifests(agree, contents, seed):
    _compare(agree, contents, seed, 1500 if seed == 1 else 5000)


def _renamed(text, old, new):
    """A name of an input or output in another's place, wherever it stands."""
    data = json.loads(text)
    del data["sha256"]
    group = data["signatures"][0]["signature"]
    written = json.dumps(group).replace(json.dumps(old), json.dumps(new))
    data["signatures"][0]["signature"] = json.loads(written)
    return sealed(data)


def test_they_agree_on_names(agree, contents):
    good = contents[0].to_bytes()
    wrong = [*names.CPP_KEYWORDS, *names.RESERVED, *names.IN_KERNELS, "None", "lambda", "a__b", "a_", "_a", "1a"]
    wrong += ["A", "AB", "A1", "Ab", "a-b", "ä"]
    wrong += ["x" * 64, "x" * 65, "top", "scale", "é", "a\0", "../x", "a/b", "", "a b", "ops", "bias2"]
    texts = [_renamed(good, "bias", name) for name in wrong] + [_renamed(good, "top", name) for name in wrong]
    assert agree([good, *texts]) > 8


@pytest.mark.parametrize(
    ("form", "known"), [("dense", 0), ("batched", 1), ("grouped", 1), ("ragged_k", 1), ("stacked", 0), (None, 0)]
)
def test_they_agree_on_the_form_of_a_signature(agree, contents, form, known):
    """The dense form is left out."""
    good = contents[0].to_bytes()
    data = json.loads(good)
    del data["sha256"]
    data["signatures"][0]["signature"]["form"] = form
    assert agree([good, sealed(data)]) == 1 + known


def test_they_agree_on_small_kernels(agree, contents):
    def small(**fields):
        def change(data):
            data["signatures"][0]["kernels"][3]["config"] = {"arch": "small", **fields}

        return changed(contents[0], change)

    tile = {"threadblock": {"k": 64, "m": 64, "n": 32}}
    assert agree([small(**tile), small(**tile, stages=2), small(**tile, stages=2, warps=4)]) == 3
    wrong = [{}, {**tile, "stages": 3}, {**tile, "warps": 2}, {**tile, "rows": 1}, {**tile, "stages": "2"}]
    assert agree([small(**fields) for fields in wrong]) == 0


@pytest.mark.parametrize(
    ("arch", "good", "wrong"),
    [
        ("pointwise", [{}, {"rows": 2}], [{"rows": 16}, {"rows": "2"}, {"warps": 8}]),
        ("sm90", [{"resident": 2}], [{"resident": 1}, {"resident": True}]),
    ],
)
def test_they_agree_on_further_fields(agree, contents, arch, good, wrong):
    def of(fields):
        def change(data):
            kernels = [kernel for each in data["signatures"] for kernel in each["kernels"]]
            if arch == "sm90":
                next(k["config"] for k in kernels if k["config"]["arch"] == arch).update(fields)
            else:
                kernels[3]["config"] = {"arch": arch, **fields}

        return changed(contents[0], change)

    assert agree([of(fields) for fields in good]) == len(good)
    assert agree([of(fields) for fields in wrong]) == 0


def test_they_agree_on_constants(agree, contents):
    good = contents[0].to_bytes()
    exponents = [-151, -150, -149, -148, -127, -126, -1, 0, 1, 127, 128, 1023]
    mantissas = ["0000000000000", "8000000000000", "fffffe0000000", "ffffff0000000", "0000001000000"]
    mantissas += ["0000020000000", "0000000000001"]
    texts = [f"{sign}0x1.{m}p{e:+d}" for sign in ("", "-") for m in mantissas for e in exponents]
    texts += ["0x0.0p+0", "-0x0.0p+0", "0x0.0p-0", "0x0.0000000000001p-1022", "inf", "-inf", "nan", "-nan", "0x1p+0"]
    texts += ["1.0", "0X1.0p+0", "0x1.0000000000000p+00", "0x1.0000000000000p-0", "0x1.0000000000000p1"]
    texts += ["0x1.000000000000p+0", "0x1.0000000000000P+0"]
    old = b'"0x1.0000000000000p-2"'
    assert old in good
    assert agree([_resealed(good.replace(old, b'"%b"' % text.encode())) for text in texts]) > 20


@pytest.mark.parametrize("digits", ["0", "00", "1" * 10, "2147483648", "9" * 19, "9" * 60, "99", "9x", "-1"])
def test_they_agree_on_long_numbers(agree, contents, digits):
    """Where a text has a number, it may have any."""
    good = json.loads(contents[0].to_bytes())
    del good["sha256"]
    texts = []
    for path in [p for p in _places(good) if p]:
        value = _at(good, path)
        if not isinstance(value, str | int) or isinstance(value, bool) or path[-1] in ("sha256", "key", "source"):
            continue
        longer = f"{value}{digits}"
        if isinstance(value, int) and not longer.isdigit():
            continue
        data = json.loads(json.dumps(good))
        _at(data, path[:-1])[path[-1]] = type(value)(longer)
        texts.append(sealed(data))
    operands = [f"{start}{digits}" for start in ("bf16.row.align", "e4m3.col.align", "f32.row.align")]
    for name, text in itertools.product("abd", operands):
        data = json.loads(json.dumps(good))
        data["signatures"][0]["signature"][name] = text
        texts.append(sealed(data))
    agree(texts[:: max(1, len(texts) // 200)] + texts[-9:])


def test_they_agree_on_operations_and_targets(agree, contents):
    good, manifest = contents[0].to_bytes(), contents[0]
    texts = [
        _resealed(good.replace(b'["rsqrt",', b'["%b",' % op.encode()))
        for op in [*operations.OPS, *operations.GATHERED, "acc", "erf"]
    ]
    assert agree(texts) > 10
    kernel = ["signatures", 0, "kernels", 3]
    assert isinstance(manifest.groups[0].kernels[3].spec.config, GemvConfig)

    def at(data, name, value):
        _at(data, kernel)[name] = value
        data["flags"]["sm_86"] = data["flags"]["sm_80"]

    targets = [
        changed(manifest, lambda d, t=t: at(d, "target", t)) for t in ("sm_80", "sm_86", "sm_90", "sm_90a", "sm_999")
    ]
    assert agree(targets) == 0  # a choice names it for another device
    orders = itertools.product(
        (None, "by_gpc", "raster", "swizzle"), (True, False, "along_m", "heuristic", 1, 2, 3, 4, 8, 16), range(2)
    )
    texts = []
    for name, value, choice in orders:
        row = {} if name is None else {name: value}
        texts.append(
            changed(
                manifest, lambda d, r=row, c=choice: d["signatures"][0]["choices"][2 * c]["rows"][0].__setitem__(2, r)
            )
        )
    assert agree(texts) > 5


# ---- Archives ------------------------------------------------------------------------------------------------------


def _opens(path):
    try:
        found = open_bundle(path)
    except BundleError:
        return None
    good = 0
    for kernel in found.kernels():
        try:
            kernel.read_library()
        except BundleError:
            continue
        good += 1
    return good


def _compare_archives(probe, contents, folder, seed, count):
    """The same archives open, and of those the same kernels can be read."""
    rng = random.Random(seed)
    manifest, files = contents
    container.write(folder / "good", {**files, "manifest.json": manifest.to_bytes()})
    good = (folder / "good").read_bytes()
    directory = int.from_bytes(good[-6:-2], "little")
    for number in range(count):
        data = bytearray(good)
        at = rng.choice(
            (rng.randrange(len(good)), rng.randrange(directory, len(good)), len(good) - rng.randrange(1, 23))
        )
        kind = rng.randrange(5)
        if kind == 0:
            data[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            data[at : at + 4] = rng.choice([b"\xff\xff\xff\xff", bytes(4), rng.randbytes(4), b"PK\1\2", b"../x"])
        elif kind == 2:
            del data[at : at + rng.randrange(1, 60)]
        elif kind == 3:
            data[at:at] = rng.randbytes(rng.randrange(1, 60))
        else:
            text = _forged(manifest.to_bytes(), rng)
            container.write(folder / str(number), {**files, "manifest.json": text})
            continue
        (folder / str(number)).write_bytes(data)
    paths = [folder / "good", *(folder / str(number) for number in range(count))]
    code, out = probe("each", "--load", *paths)
    assert code == 0
    said = [line for line in out.splitlines() if line != "mapped"]
    found = {path.name: line for path, line in zip(paths, said, strict=True)}
    wanted = {path.name: _opens(path) for path in paths}
    differ = {n: (found[n], w) for n, w in wanted.items() if w is not None and found[n] != f"ok {w}"}
    assert not differ
    assert found["good"] == f"ok {len(manifest.kernels)}"
    assert 0 < sum(w is None for w in wanted.values()) < count


@pytest.fixture(scope="module")
def contents(built):
    """As everywhere, but each kernel has a library of its own."""
    library = (built / "fake_kernel.so").read_bytes()
    return seeds.made(lambda spec: library + spec.slug.encode())


@pytest.mark.parametrize("seed", range(1, 1 + SEEDS))
def test_they_agree_on_changed_archives(probe, contents, tmp_path, seed):
    _compare_archives(probe, contents, tmp_path, seed, 150 if seed == 1 else 1000)


# ---- The fuzzer's harness ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["manifest", "archive", "library", "key"])
def test_the_harness_reads_its_seeds(probe, tmp_path, monkeypatch, target):
    seeds.main(str(tmp_path))
    files = sorted((tmp_path / target).iterdir())
    monkeypatch.setenv("FUZZ_TARGET", target)
    monkeypatch.setenv("FUZZ_SCRATCH", str(tmp_path))
    assert probe(20, *files, program="fuzz_once") == (0, f"{len(files)} files\n")
