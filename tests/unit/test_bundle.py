import hashlib
import json
import os
from dataclasses import replace

import pytest
from bundles import SPECS, changed, packed
from fake_toolkit import sm80_spec

from cutlass_ops.artifacts import bundle as bundle_module
from cutlass_ops.artifacts import container
from cutlass_ops.artifacts.bundle import open_bundle, write_bundle
from cutlass_ops.artifacts.manifest import Choice, Manifest
from cutlass_ops.base.errors import BundleError
from cutlass_ops.declare.config import Ordered
from cutlass_ops.declare.order import TileOrder


@pytest.fixture(scope="module")
def contents(tmp_path_factory):
    return packed(tmp_path_factory.mktemp("bundle"))


@pytest.fixture(params=[False, True], ids=["archive", "folder"])
def made(request, tmp_path, contents):
    contents.write(tmp_path / "made.bundle", folder=request.param)
    return tmp_path / "made.bundle"


def _rewritten(path, contents, change):
    """Write a bundle whose manifest was changed by somebody who knows the format."""
    container.write(path, {**contents.files, "manifest.json": changed(contents.manifest, change)})
    return path


# ---- Round trip ----------------------------------------------------------------------------------------------------


def test_what_was_packed_is_found(made):
    found = open_bundle(made)
    assert found.manifest.targets == ("sm_80",)
    assert len(found.kernels()) == 3
    assert "3 kernels for sm_80" in repr(found)
    for spec in SPECS:
        kernel = found.find(spec)
        assert kernel.spec == spec
        assert hashlib.sha256(kernel.read_library()).hexdigest() == kernel.sha256
        assert hashlib.sha256(kernel.read_source()).hexdigest() == kernel.manifest["files"]["kernel.cu"]["sha256"]
        assert kernel.present() is kernel
        assert kernel.manifest["identity"]["toolchain"]["nvcc"].startswith("13.0.88+")
    assert found.find(sm80_spec(5)) is None


# ---- What is not right ---------------------------------------------------------------------------------------------


def _deep(data):
    return data["signatures"][0]["kernels"][0]


def _chosen(*rows):
    choice = {"capability": [8, 0], "n": 64, "k": 64, "rows": list(rows)}
    return lambda data: data["signatures"][0].update(choices=[choice])


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda d: d.update(format="cutlass_ops.artifacts.bundle/2"), "this version reads 'cutlass_ops.bundle/2'"),
        (lambda d: d.update(abi=1), "build it again"),
        (lambda d: d.update(templates=99), "templates 99"),
        (lambda d: d.update(abi=True), "abi must be an integer .*, not True"),
        (lambda d: d.update(extra=1), "it must have the fields"),
        (lambda d: d.pop("tables"), "it must have the fields"),
        (lambda d: d.update(signatures={}), "signatures must be a list, not dict"),
        (lambda d: d.update(signatures=[[]] * 9000), "at most 4000"),
        (lambda d: d["signatures"].append(d["signatures"][0]), "a signature stands twice"),
        (lambda d: d["signatures"][0]["kernels"].append(_deep(d)), "a kernel stands twice"),
        (lambda d: d["signatures"][0].update(kernels=[]), "has no kernels"),
        (lambda d: d["signatures"][0]["signature"].update(a='bf16.row"; #include "x'), "operand"),
        (lambda d: d["signatures"][0]["signature"].update(config={}), "must not have config"),
        (lambda d: _deep(d).update(target="sm_80\n"), "target must be"),
        (lambda d: _deep(d).update(target="sm_999"), "target is 'sm_999'"),
        (lambda d: _deep(d).update(target="sm_86"), "flags must name the targets"),
        (lambda d: _deep(d).update(key="../../../../etc/passwd"), "key is not a SHA-256"),
        (lambda d: _deep(d).update(key="A" * 64), "key is not a SHA-256"),
        (lambda d: _deep(d).update(key="a" * 64), "missing: kernels/aaaa"),
        (lambda d: _deep(d)["library"].update(size=-1), "library must be .*, not -1"),
        (lambda d: _deep(d)["library"].update(size=1 << 40), "library must be an integer"),
        (lambda d: _deep(d)["library"].update(size=3), "of another size"),
        (lambda d: _deep(d)["config"].update(swizzle=4), "unknown field 'swizzle'"),
        (lambda d: _deep(d)["config"].update(stages="3"), "stages must be an integer"),
        (lambda d: _deep(d)["config"].update(stages=10**400), "is not a 64-bit integer"),
        (lambda d: _deep(d)["config"].update(stages=-(1 << 31)), "stages of a configuration is a number"),
        (lambda d: _deep(d)["config"].update(stages=None), "stages must be an integer, not None"),
        (lambda d: _deep(d)["config"]["threadblock"].update(m=0), "takes positive integers"),
        (lambda d: _deep(d)["config"]["warp"].update(n=1 << 31), "warp of a configuration is a number"),
        (lambda d: d["signatures"][0]["signature"].update(a="bf16.row.align0"), "alignment must be a positive number"),
        (lambda d: d.update(library_version="0.1\u00e9"), "library_version must be ASCII"),
        (lambda d: _deep(d)["sass"].update(EVIL=1), "unknown instruction"),
        (lambda d: _deep(d)["resources"][0].update(function="f\n"), "function must be"),
        (lambda d: d["toolchain"].update(nvcc=13), "nvcc must be a printable"),
        (lambda d: d["tables"].append({"sha256": "0" * 64, "size": 1}), "missing: tables/000"),
        (lambda d: d["flags"]["sm_80"].update(link=["-x\0"]), "a flag must be"),
        # Other spellings of what this library writes.
        (lambda d: _deep(d)["config"].update(stream_k=False), "a configuration is not written as"),
        (lambda d: d["signatures"][0]["signature"].update(d="bf16.row.align8"), "a signature is not written as"),
        (_chosen([16, 0, {"swizzle": 1}]), "an order of tiles is not written as"),
        (_chosen([16, 0, {}], [True, 0, {}]), "rows must be an integer .* not True"),
        (_chosen([16, 0, {}], [32, False, {}]), "rows must be an integer .* not False"),
        (_chosen([16, 0, {}], [16, 0, {}]), "in increasing order"),
        (_chosen([16, 0]), "a row of a choice has"),
    ],
)
def test_a_wrong_manifest_is_refused_with_a_reason(tmp_path, contents, change, why):
    path = _rewritten(tmp_path / "a", contents, change)
    with pytest.raises(BundleError, match=why) as error:
        open_bundle(path)
    assert str(path) in str(error.value)


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"[]",
        b"null",
        b"{",
        b"[" * 100_000,
        b'{"format":"cutlass_ops.bundle/2"}',
        b"\xff\xfe",
        b'{"format":NaN}',
        b"1" * 5000,
    ],
)
def test_what_is_no_manifest_is_refused(tmp_path, contents, raw):
    container.write(tmp_path / "a", {**contents.files, "manifest.json": raw})
    with pytest.raises(BundleError, match="the manifest is wrong"):
        open_bundle(tmp_path / "a")


def test_another_spelling_and_any_change_without_a_new_digest_are_refused(tmp_path, contents):
    text = contents.manifest.to_bytes()
    twice = text.replace(b'{"abi":', b'{"abi":1,"abi":')
    spaced = json.dumps(json.loads(text), indent=1, sort_keys=True).encode()
    container.write(tmp_path / "a", {**contents.files, "manifest.json": twice})
    with pytest.raises(BundleError, match="an object has the key 'abi' twice"):
        open_bundle(tmp_path / "a")
    for raw in (spaced, text + b"\n", text.replace(b'"13.0.88+', b'"13.0.89+')):
        container.write(tmp_path / "a", {**contents.files, "manifest.json": raw})
        with pytest.raises(BundleError, match="not the canonical one of what it says, or was changed"):
            open_bundle(tmp_path / "a")


def test_files_that_are_not_in_the_manifest_are_refused(tmp_path, contents):
    more = {**contents.files, f"kernels/{'0' * 64}.so": b"", "manifest.json": contents.manifest.to_bytes()}
    container.write(tmp_path / "a", more)
    with pytest.raises(BundleError, match="not in the manifest: kernels/000"):
        open_bundle(tmp_path / "a")
    container.write(tmp_path / "b", dict(contents.files))
    with pytest.raises(BundleError, match=r"it has no manifest\.json"):
        open_bundle(tmp_path / "b")


def test_a_manifest_that_is_too_long_is_not_read(tmp_path, contents, monkeypatch):
    contents.write(tmp_path / "a")
    monkeypatch.setattr(bundle_module, "MAX_BYTES", 100)
    with pytest.raises(BundleError, match="at most 100 are allowed"):
        open_bundle(tmp_path / "a")


@pytest.mark.parametrize("kind", ["kernels", "sources"])
def test_changed_contents_are_refused_when_they_are_read(tmp_path, contents, kind):
    files = dict(contents.files)
    name = next(n for n in files if n.startswith(kind))
    files[name] = bytes([files[name][0] ^ 1]) + files[name][1:]
    container.write(tmp_path / "a", {**files, "manifest.json": contents.manifest.to_bytes()})
    found = open_bundle(tmp_path / "a")
    (record,) = (r for r in found.manifest.kernels if r.key in name)
    with pytest.raises(BundleError, match=f"{name} does not match the manifest"):
        found.kernel(record).read_library() if kind == "kernels" else found.kernel(record).read_source()


def test_only_what_belongs_together_is_written(tmp_path, contents):
    files = dict(contents.files)
    name = next(iter(files))
    for wrong in ({k: v for k, v in files.items() if k != name}, {**files, name: b"other"}):
        with pytest.raises(BundleError):
            write_bundle(tmp_path / "a", contents.manifest, wrong)
    assert not os.path.lexists(tmp_path / "a")


def test_kernels_of_two_toolchains_are_not_mixed(tmp_path):
    one, two = (packed(tmp_path, [spec]) for spec in SPECS[:2])
    for contents, version in ((one, "a"), (two, "b")):
        contents.write(tmp_path / version)
    a, b = (open_bundle(tmp_path / name).kernels()[0] for name in "ab")
    b.manifest["identity"]["toolchain"]["nvcc"] = "12.9"
    with pytest.raises(BundleError, match="come from one toolchain"):
        bundle_module.manifest_of([a, b], {}, [])
    with pytest.raises(BundleError, match="there are none"):
        bundle_module.manifest_of([], {}, [])


# ---- Choices -------------------------------------------------------------------------------------------------------


def _with_choice(path, contents, choice):
    def change(data):
        data["signatures"][0]["choices"] = [choice]

    return _rewritten(path, contents, change)


GOOD = {"capability": [8, 0], "n": 64, "k": 32, "rows": [[16, 0, {}], [4096, 0, {"swizzle": 4}]]}


def test_a_choice_says_which_kernel_serves_which_rows(tmp_path, contents):
    found = open_bundle(_with_choice(tmp_path / "a", contents, GOOD))
    group = found.manifest.groups[0]
    choice = found.choice(group.signature, (8, 0), 64, 32)
    assert [choice.at(m).order.swizzle for m in (1, 16, 17, 4096, 10**9)] == [1, 1, 4, 4, 4]
    assert found.choice(group.signature, (9, 0), 64, 32) is None
    assert found.choice(group.signature, (8, 0), 64, 33) is None
    assert found.configs(group.signature, (8, 0)) == tuple(r.spec.config for r in group.kernels)
    assert found.configs(group.signature, (8, 6)) == ()


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"rows": []}, "at least one"),
        ({"rows": [[5, 0, {}], [5, 0, {}]]}, "increasing order"),
        ({"rows": [[5, 99, {}]]}, "rows must be an integer .*, not 99"),
        ({"rows": [[5, 0, {"stages": 9}]]}, "an order of tiles has no 'stages'"),
        ({"rows": [[5, 0, {"swizzle": 3}]]}, "swizzle must be one of 1, 2, 4, 8, not 3"),
        ({"rows": [[5, 0, {"by_gpc": True}]]}, "only swizzle can be chosen"),
        ({"rows": [[5, 0, {"swizzle": True}]]}, "swizzle must be"),
        ({"rows": [[5, 0]]}, "a row of a choice has"),
        ({"rows": [[5, 0, {}]] * 2000}, "at most 1024"),
        ({"capability": [9, 0]}, "names a kernel for sm_80"),
        ({"capability": [8]}, "a major and a minor"),
        ({"n": 0}, "n must be an integer .*, not 0"),
    ],
)
def test_a_wrong_choice_is_refused(tmp_path, contents, wrong, why):
    with pytest.raises(BundleError, match=why):
        open_bundle(_with_choice(tmp_path / "a", contents, {**GOOD, **wrong}))


def test_choices_come_back_as_they_were(contents):
    group = contents.manifest.groups[0]
    config = group.kernels[0].spec.config
    choices = (Choice((8, 0), 64, 32, ((16, Ordered(config)), (4096, Ordered(config, TileOrder(swizzle=4))))),)
    manifest = replace(contents.manifest, groups=(replace(group, choices=choices), *contents.manifest.groups[1:]))
    assert Manifest.from_bytes(manifest.to_bytes()) == manifest
