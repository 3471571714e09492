"""Installed distributions of kernels: how they are found, what comes before them, and what is refused."""

import os
import zipfile
from dataclasses import replace
from types import SimpleNamespace

import pytest
from bundles import changed, packed, write_keys
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from fake_toolkit import HMMA, FakeToolkit, library, sm80_spec
from signatures import A100

import cutlass_ops as co
from cutlass_ops.artifacts import container, installed, loader
from cutlass_ops.artifacts.bundle import needs, open_bundle
from cutlass_ops.artifacts.bundles import Bundles
from cutlass_ops.artifacts.manifest import Choice
from cutlass_ops.artifacts.store import KernelStore
from cutlass_ops.base.errors import BundleError
from cutlass_ops.choose import dispatch, limits, policies
from cutlass_ops.compilation.builder import build_artifact
from cutlass_ops.declare.config import Ordered
from cutlass_ops.declare.problem import Problem
from cutlass_ops.declare.signature import OpSignature
from cutlass_ops.run.registry import Registry
from cutlass_ops.ship.packing import write_distribution

really = installed.importlib.metadata.distributions
found_by_entry_points = installed.distributions
A = OpSignature.of(sm80_spec(3))
F16 = OpSignature.of(sm80_spec(3, "f16"))


@pytest.fixture(autouse=True)
def own(session, monkeypatch, tmp_path):
    """A session of the test's own, without a compiler and without a store, that finds what the test installs."""
    monkeypatch.setattr(installed, "distributions", found_by_entry_points)
    monkeypatch.setenv("CUTLASS_OPS_NVCC", str(tmp_path / "no nvcc"))
    monkeypatch.setenv("CUTLASS_OPS_CACHE_DIR", str(tmp_path / "no store"))
    (tmp_path / "site").mkdir()
    monkeypatch.syspath_prepend(tmp_path / "site")
    return session


@pytest.fixture
def loads(monkeypatch):
    """What a registry was asked to load; the bytes are read and no library is loaded."""
    seen = []

    def load(artifact):
        seen.append(artifact)
        artifact.read_library()
        return SimpleNamespace(artifact=artifact, load_on=lambda device: None)

    monkeypatch.setattr(loader, "load", load)
    return seen


def bundles_of(root, specs, data=None, key=None):
    """One bundle for each signature, by the name of its file."""
    by_signature = {}
    for spec in specs:
        by_signature.setdefault(OpSignature.of(spec), []).append(spec)
    found = {}
    for at, (of, mine) in enumerate(by_signature.items()):
        path = root / f"bundle{len(os.listdir(root))}{at}"
        packed(root, mine, data).write(path, private_key=key)
        found[installed.file_name(of)] = path.read_bytes()
    return found


def install(root, bundles, name="ready-kernels", version="1.2"):
    """Do what pip does with a wheel, without a process; return the folder of the bundles."""
    wheel = write_distribution(bundles, root, name, version)
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(root / "site")
    folder = root / "site" / installed.NAMESPACE / name.replace("-", "_")
    for path in (root / "site").rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)
    return folder


# ---- Found ---------------------------------------------------------------------------------------------------------


def test_a_kernel_comes_from_the_bundle_of_its_signature_and_no_other_is_opened(tmp_path, monkeypatch):
    folder = install(tmp_path, bundles_of(tmp_path, [sm80_spec(3), sm80_spec(4), sm80_spec(3, "f16")]))
    opened, really = [], installed.open_bundle
    monkeypatch.setattr(installed, "open_bundle", lambda path, *a, **k: opened.append(path) or really(path, *a, **k))
    found = Bundles.current().find(sm80_spec(4))
    assert (found.spec, found.origin) == (sm80_spec(4), "installed with ready-kernels 1.2")
    assert Bundles.current().find(sm80_spec(5)) is None
    assert opened == [folder / installed.file_name(A)]
    assert Bundles.current().distributions() == ["ready-kernels 1.2"]
    assert len(Bundles.current().all()) == len(opened) == 2


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("METADATA", b""),
        ("METADATA", b"\xff\xfe\0"),
        ("entry_points.txt", b"\xff\xfe["),
        ("entry_points.txt", b"[cutlass_ops.bundles]\nno equals sign\n"),
    ],
)
def test_what_an_installer_noted_is_damaged(tmp_path, name, data):
    install(tmp_path, bundles_of(tmp_path, [sm80_spec(4)]), "b-kernels")
    install(tmp_path, bundles_of(tmp_path, [sm80_spec(3)]), "a-kernels")
    (tmp_path / "site" / "a_kernels-1.2.dist-info" / name).write_bytes(data)
    with pytest.warns(RuntimeWarning, match=r"a_kernels are not used: their metadata cannot be read"):
        assert Bundles.current().find(sm80_spec(4)).origin == "installed with b-kernels 1.2"
    assert Bundles.current().find(sm80_spec(3)) is None


# ---- Precedence ----------------------------------------------------------------------------------------------------


def opcodes():
    return Bundles.current().find(sm80_spec(3)).manifest["sass"]["HMMA"]


def test_what_the_user_asked_for_comes_before_what_is_installed_by_name(tmp_path, monkeypatch):
    for name, count in (("b-kernels", 2), ("a-kernels", 1)):
        install(tmp_path, bundles_of(tmp_path, [sm80_spec(3)], library(*[HMMA] * count)), name)
    assert opcodes() == 1
    packed(tmp_path, [sm80_spec(3)], library(*[HMMA] * 3)).write(tmp_path / "mine")
    monkeypatch.setenv("CUTLASS_OPS_BUNDLES", str(tmp_path / "mine"))
    assert opcodes() == 3
    packed(tmp_path, [sm80_spec(3)], library(*[HMMA] * 4)).write(tmp_path / "loaded")
    co.load_bundle(tmp_path / "loaded")
    assert opcodes() == 4
    with Bundles.aside():
        assert Bundles.current().find(sm80_spec(3)) is None


def test_without_a_compiler_only_what_is_installed_is_chosen_among(tmp_path, monkeypatch):
    install(tmp_path, bundles_of(tmp_path, [sm80_spec(3), sm80_spec(4)]))
    both = Bundles.current().configs(A, (8, 0), installed=True)
    assert set(both) == {sm80_spec(3).config, sm80_spec(4).config}
    assert limits.limit(A, (8, 0))[:2] == (both, True)
    assert set(policies.policy(A, A100).kernels) == set(both)
    packed(tmp_path, [sm80_spec(5)]).write(tmp_path / "mine")
    monkeypatch.setenv("CUTLASS_OPS_JIT", "0")
    assert limits.limit(A, (8, 0))[:2] == (both, True)
    assert limits.limit(F16, (8, 0))[:2] == ((), False)
    co.load_bundle(tmp_path / "mine")
    assert limits.limit(A, (8, 0))[:2] == ((sm80_spec(5).config,), False)


def test_with_a_store_the_choice_is_free_even_where_nothing_is_compiled(tmp_path, monkeypatch):
    """What was tuned and compiled elsewhere must not lose to what is installed."""
    install(tmp_path, bundles_of(tmp_path, [sm80_spec(3)]))
    kit = FakeToolkit(tmp_path / "kit")
    build_artifact(sm80_spec(4), store=KernelStore(tmp_path / "store"), toolchain=kit.find())
    monkeypatch.setenv("CUTLASS_OPS_JIT", "0")
    monkeypatch.setenv("CUTLASS_OPS_CACHE_DIR", str(tmp_path / "store"))
    assert limits.limit(A, (8, 0))[:2] == ((), False)


def test_a_choice_of_an_installed_bundle_needs_no_table(tmp_path, monkeypatch):
    specs = [sm80_spec(3), sm80_spec(4)]
    made = packed(tmp_path, specs)
    choice = Choice((8, 0), 256, 512, ((16, Ordered(specs[1].config)), (1 << 20, Ordered(specs[0].config))))
    (group,) = made.manifest.groups
    manifest = replace(made.manifest, groups=(replace(group, choices=(choice,)),))
    made = replace(made, manifest=manifest)
    made.write(tmp_path / "with.bundle")
    install(tmp_path, {installed.file_name(A): (tmp_path / "with.bundle").read_bytes()})
    monkeypatch.setattr(dispatch, "_weight", None)
    for m, spec in ((9, specs[1]), (17, specs[0])):
        assert dispatch.choose(A, A100, Problem(m, 256, 512))[0] == spec


# ---- Refused -------------------------------------------------------------------------------------------------------


def refused(match):
    return pytest.warns(RuntimeWarning, match=match)


def test_a_distribution_for_another_version_is_refused_with_one_warning(tmp_path, monkeypatch, recwarn):
    folder = install(tmp_path, bundles_of(tmp_path, [sm80_spec(3)]))
    entry = tmp_path / "site" / "ready_kernels-1.2.dist-info" / "entry_points.txt"
    entry.write_text(entry.read_text().replace(needs(), "cutlass_ops.bundle.2-abi2-templates3"))
    monkeypatch.setattr(installed, "open_bundle", None)  # it is not even opened
    with refused(
        r"ready-kernels 1.2 are not used.*templates3.*Install one that is made for it.*pip uninstall ready-ker"
    ):
        assert Bundles.current().find(sm80_spec(3)) is None
    recwarn.clear()
    assert Bundles.current().find(sm80_spec(4)) is None
    assert limits.limit(A, (8, 0))[:2] == ((), False)
    assert not recwarn
    assert folder.exists()


def rewritten(path, change):
    """Change the manifest of an archive as somebody does who knows the format."""
    found = open_bundle(path)
    read = container.open_container(path)
    files = {name: read.read(name) for name in read.sizes} | {container.MANIFEST: changed(found.manifest, change)}
    container.write(path, files)


@pytest.mark.parametrize(("field", "value"), [("templates", 3), ("abi", 1), ("format", "cutlass_ops.bundle/1")])
def test_a_bundle_for_another_version_is_refused_whatever_its_entry_point_says(tmp_path, field, value):
    folder = install(tmp_path, bundles_of(tmp_path, [sm80_spec(3)]))
    rewritten(folder / installed.file_name(A), lambda manifest: manifest.update({field: value}))
    with refused("ready-kernels 1.2 are not used.*this (is|version)"):
        assert Bundles.current().find(sm80_spec(3)) is None


@pytest.mark.sample(3)
@pytest.mark.parametrize("damage", [b"", b"not a bundle", None])
def test_a_damaged_archive_is_left_out(tmp_path, damage):
    folder = install(tmp_path, bundles_of(tmp_path, [sm80_spec(3), sm80_spec(3, "f16")]))
    path = folder / installed.file_name(A)
    path.write_bytes(path.read_bytes()[:-100] if damage is None else damage)
    with refused("ready-kernels 1.2 are not used"):
        assert Bundles.current().find(sm80_spec(3)) is None
    assert Bundles.current().find(sm80_spec(3, "f16")) is not None


def test_a_damaged_kernel_is_looked_for_elsewhere(tmp_path, loads):
    """Its bundle is left out from then on, and the choice is made anew."""
    folder = install(tmp_path, bundles_of(tmp_path, [sm80_spec(3)]), "a-kernels")
    install(tmp_path, bundles_of(tmp_path, [sm80_spec(3)]), "b-kernels")
    _flip(folder / installed.file_name(A))
    before = Bundles.current().generation
    with refused("a-kernels 1.2 are not used.*SHA-256 differs"):
        kernel = Registry.current().kernel(sm80_spec(3))
    assert [artifact.installed_with for artifact in loads] == ["a-kernels 1.2", "b-kernels 1.2"]
    assert kernel.artifact.installed_with == "b-kernels 1.2"
    assert Bundles.current().generation > before


def _flip(path):
    """Change a byte of a kernel's library."""
    data = bytearray(path.read_bytes())
    data[data.index(b"\x7fELF") + 100] ^= 1
    path.write_bytes(data)


@pytest.mark.slow
def test_with_a_key_what_is_installed_must_be_signed(tmp_path, monkeypatch):
    keys = [write_keys(tmp_path, name, Ed25519PrivateKey.generate()) for name in ("mine", "other")]
    (private, public), _ = keys
    monkeypatch.setenv("CUTLASS_OPS_BUNDLE_KEY", str(public))
    install(tmp_path, bundles_of(tmp_path, [sm80_spec(3)]), "a-unsigned")
    install(tmp_path, bundles_of(tmp_path, [sm80_spec(3)], key=keys[1][0]), "b-of-others")
    install(tmp_path, bundles_of(tmp_path, [sm80_spec(3)], key=private), "c-signed")
    with pytest.warns(RuntimeWarning) as warned:
        assert Bundles.current().find(sm80_spec(3)).installed_with == "c-signed 1.2"
    assert ["a-unsigned" in str(w.message) or "b-of-others" in str(w.message) for w in warned] == [True, True]


@pytest.mark.slow
@pytest.mark.parametrize(
    "value",
    [
        "cutlass_ops_bundles." + "x" * 300,
        "cutlass_ops_bundles." + "x" * 100_000,
        "x" * 100_000,
        "cutlass_ops_bundles.gone",
        "cutlass_ops_bundles.file",
        "cutlass_ops_bundles.loop",
        "cutlass_ops_bundles.\u00e9",
        "cutlass_ops_bundles.ready_kernels [extra]",
        "cutlass_ops_bundles.ready_kernels:object",
        "",
    ],
    ids=lambda value: value[:40],
)
def test_an_entry_point_that_names_no_folder_is_ignored(tmp_path, value):
    install(tmp_path, bundles_of(tmp_path, [sm80_spec(3), sm80_spec(3, "f16")]))
    install(tmp_path, bundles_of(tmp_path, [sm80_spec(4)]), "other-kernels")
    (tmp_path / "site" / installed.NAMESPACE / "file").touch()
    (tmp_path / "site" / installed.NAMESPACE / "loop").symlink_to("loop")
    entry = tmp_path / "site" / "ready_kernels-1.2.dist-info" / "entry_points.txt"
    entry.write_text(entry.read_text().replace("cutlass_ops_bundles.ready_kernels", value))
    with pytest.warns(RuntimeWarning, match="is ignored|are not used") as said:
        found = [Bundles.current().find(spec) for spec in (sm80_spec(3), sm80_spec(3, "f16"))]
    assert found == [None, None]
    assert len(said) == 1
    assert len(str(said[0].message)) < 600
    other = Bundles.current().find(sm80_spec(4))
    assert other.origin == "installed with other-kernels 1.2"
    with pytest.warns(RuntimeWarning, match="damaged"):
        assert Bundles.current().refuse(other, BundleError("damaged"))  # its folder is found among all


# ---- What is said --------------------------------------------------------------------------------------------------
