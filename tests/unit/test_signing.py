"""Signatures of bundles, which openssl could make and check as well."""

import os
import shutil
import subprocess
import zipfile

import pytest
from bundles import changed, packed, write_keys
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from fake_toolkit import sm80_spec

import cutlass_ops as co
from cutlass_ops.artifacts import container
from cutlass_ops.artifacts.bundle import open_bundle
from cutlass_ops.artifacts.bundles import Bundles
from cutlass_ops.artifacts.manifest import Manifest
from cutlass_ops.artifacts.signing import require_signature, sign
from cutlass_ops.base.errors import BundleError, ConfigError
from cutlass_ops.base.session import Session
from cutlass_ops.ship import shipping, verifying


@pytest.fixture
def keys(tmp_path):
    return write_keys(tmp_path, "mine", ed25519.Ed25519PrivateKey.generate())


@pytest.fixture
def others(tmp_path):
    return write_keys(tmp_path, "others", ed25519.Ed25519PrivateKey.generate())


@pytest.fixture(scope="module")
def contents(tmp_path_factory):
    return packed(tmp_path_factory.mktemp("signed"))


@pytest.fixture(autouse=True)
def own(session):
    """Each test has a session of its own."""


def test_only_ed25519_keys(tmp_path, keys):
    wrong = write_keys(tmp_path, "ec", ec.generate_private_key(ec.SECP256R1()))
    (tmp_path / "junk").write_bytes(b"junk")
    for path, why in ((wrong[0], "Ed25519 key"), (tmp_path / "junk", "has no usable private key"), (keys[1], "")):
        with pytest.raises(ValueError, match=why or "has no usable private key"):
            sign(b"", path)
    for path, why in ((wrong[1], "Ed25519 key"), (tmp_path / "junk", "has no usable public key")):
        with pytest.raises(ValueError, match=why):
            require_signature(b"", b"", [path])


def test_without_the_package_nothing_counts_as_signed(monkeypatch, keys):
    signature = sign(b"message", keys[0])
    monkeypatch.setitem(__import__("sys").modules, "cryptography", None)
    with pytest.raises(BundleError, match=r'pip install "cutlass_ops\[sign\]"'):
        require_signature(b"message", signature, [keys[1]])


@pytest.mark.parametrize("folder", [False, True])
def test_a_signed_bundle(tmp_path, contents, keys, others, folder):
    contents.write(tmp_path / "a", private_key=keys[0], folder=folder)
    assert co.load_bundle(tmp_path / "a", public_key=keys[1]).kernels()
    assert co.load_bundle(tmp_path / "a").kernels()
    with pytest.raises(BundleError, match="the signature is not from the key"):
        co.load_bundle(tmp_path / "a", public_key=others[1])
    found = verifying.verify(tmp_path / "a", keys[1])
    assert found.signed
    assert found.problems == ()
    assert "not from the key" in verifying.verify(tmp_path / "a", others[1]).problems[0]


def test_an_unsigned_bundle_is_refused_where_a_key_is_given(tmp_path, contents, keys, monkeypatch):
    contents.write(tmp_path / "a")
    with pytest.raises(BundleError, match="it is not signed"):
        open_bundle(tmp_path / "a", keys[1])
    monkeypatch.setenv("CUTLASS_OPS_BUNDLE_KEY", str(keys[1]))
    with pytest.raises(BundleError, match="it is not signed"):
        co.load_bundle(tmp_path / "a")
    monkeypatch.setenv("CUTLASS_OPS_BUNDLES", str(tmp_path / "a"))
    with pytest.raises(BundleError, match="it is not signed"):
        Bundles.current().all()


def test_the_signature_is_checked_before_the_manifest_is_read(tmp_path, contents, keys, monkeypatch):
    contents.write(tmp_path / "a", private_key=keys[0])
    signature = open_bundle(tmp_path / "a")._container.read("manifest.sig")
    files = {**contents.files, "manifest.json": b"[" * 1000, "manifest.sig": signature}
    container.write(tmp_path / "b", files)
    with pytest.raises(BundleError, match="the signature is not from the key"):
        open_bundle(tmp_path / "b", keys[1])


@pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl")
def test_openssl_makes_keys_and_checks_signatures(tmp_path, contents):
    def run(*command):
        subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)

    run("openssl", "genpkey", "-algorithm", "ed25519", "-out", "key.pem")
    run("openssl", "pkey", "-in", "key.pem", "-pubout", "-out", "key.pub")
    contents.write(tmp_path / "a", private_key=tmp_path / "key.pem")
    open_bundle(tmp_path / "a", tmp_path / "key.pub")
    with zipfile.ZipFile(tmp_path / "a") as archive:
        archive.extractall(tmp_path / "out")
    check = ["openssl", "pkeyutl", "-verify", "-pubin", "-inkey", "key.pub", "-rawin"]
    run(*check, "-in", "out/manifest.json", "-sigfile", "out/manifest.sig")
    assert len((tmp_path / "out" / "manifest.sig").read_bytes()) == 64


# ---- What asks for a signature ------------------------------------------------------------------------------------


EMPTY = ["", ":", "/a:", ":/a", "/a::/b"]


@pytest.mark.sample(2)
@pytest.mark.parametrize("text", EMPTY)
def test_a_variable_that_names_no_key_loads_nothing(tmp_path, contents, monkeypatch, text):
    """To be set and empty is a mistake, and not the wish to load what nobody signed."""
    contents.write(tmp_path / "a")
    monkeypatch.setenv("CUTLASS_OPS_BUNDLES", str(tmp_path / "a"))
    assert len(Bundles.current().all()) == 1
    monkeypatch.setenv("CUTLASS_OPS_BUNDLE_KEY", text)
    for load in (Bundles.current().all, lambda: co.load_bundle(tmp_path / "a")):
        with pytest.raises(ValueError, match=r"CUTLASS_OPS_BUNDLE_KEY is '.*', which has an empty path"):
            load()


@pytest.mark.parametrize(
    ("given", "kind", "why"),
    [
        ("", ValueError, "public_key has an empty path"),
        ([""], ValueError, "public_key has an empty path"),
        (["none", ""], ValueError, "public_key has an empty path"),
        ([], ValueError, "public_key names no file"),
        ((), ValueError, "public_key names no file"),
        (iter([]), ValueError, "public_key names no file"),
        (b"", TypeError, "public_key must be the path of a PEM file, or several, not bytes"),
        (0, TypeError, "public_key must be the path of a PEM file, or several, not int"),
        (False, TypeError, "public_key must be the path of a PEM file, or several, not bool"),
        ([None], TypeError, "public_key must be paths of PEM files, not NoneType"),
        ([b"key"], TypeError, "public_key must be paths of PEM files, not bytes"),
        (".", ValueError, "is not a regular file"),
    ],
)
def test_a_key_that_is_none_is_a_mistake_and_opens_nothing(tmp_path, contents, keys, given, kind, why):
    contents.write(tmp_path / "a", private_key=keys[0])
    given = list(given) if hasattr(given, "__next__") else given
    for load in (lambda: co.load_bundle(tmp_path / "a", public_key=given), lambda: open_bundle(tmp_path / "a", given),
                 lambda: verifying.verify(tmp_path / "a", given)):  # fmt: skip
        with pytest.raises(kind, match=why):
            load()


def test_one_of_several_keys_must_have_signed(tmp_path, contents, keys, others, monkeypatch):
    """While keys are exchanged, bundles by the old and by the new one are about."""
    contents.write(tmp_path / "a", private_key=keys[0])
    for both in ([keys[1], others[1]], (others[1], keys[1]), [str(others[1]), str(keys[1])]):
        assert co.load_bundle(tmp_path / "a", public_key=both).signed_by == keys[1]
    found = verifying.verify(tmp_path / "a", [others[1], keys[1]])
    assert (found.signed, found.signed_by, found.problems) == (True, str(keys[1]), ())
    with pytest.raises(BundleError, match=f"not from the key in {others[1]}, {others[1]}"):
        co.load_bundle(tmp_path / "a", public_key=[others[1], others[1]])
    monkeypatch.setenv("CUTLASS_OPS_BUNDLE_KEY", f"{others[1]}:{keys[1]}")
    monkeypatch.setenv("CUTLASS_OPS_BUNDLES", str(tmp_path / "a"))
    with Session().active():
        assert [b.signed_by for b in Bundles.current().all()] == [keys[1]]
    assert co.load_bundle(tmp_path / "a", public_key=keys[1]).signed_by == keys[1]
    monkeypatch.setenv("CUTLASS_OPS_BUNDLE_KEY", str(others[1]))
    with pytest.raises(BundleError, match="not from the key"):
        Bundles.current().all()


@pytest.mark.parametrize("mode", [0o664, 0o646, 0o666])
def test_a_key_that_others_may_write_is_none(tmp_path, contents, keys, monkeypatch, mode):
    """Who can exchange it says what is loaded, as who can exchange the bundle does."""
    contents.write(tmp_path / "a", private_key=keys[0])
    keys[1].chmod(mode)
    (tmp_path / "link").symlink_to(keys[1])
    monkeypatch.setenv("CUTLASS_OPS_BUNDLE_KEY", str(keys[1]))
    for load in (lambda: co.load_bundle(tmp_path / "a"), lambda: open_bundle(tmp_path / "a", tmp_path / "link")):
        with pytest.raises(BundleError, match=r"the key in .* is not safe: .* can be written by others"):
            load()
    assert "can be written by others" in verifying.verify(tmp_path / "a", keys[1]).problems[0]
    keys[0].chmod(mode)
    with pytest.raises(BundleError, match="is not safe"):
        contents.write(tmp_path / "b", private_key=keys[0])


@pytest.mark.parametrize("kind", ["pipe", "long", "circle"])
def test_what_is_no_file_of_a_key_ends_in_an_error(tmp_path, kind):
    path = tmp_path / "key"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "circle":
        path.symlink_to(path)
    else:
        path.write_bytes(b"-" * (1 << 16) + b"-")
    with pytest.raises(
        (ValueError, OSError), match=r"not a regular file|more than 65536 bytes|symbolic link|[Ss]ymlink"
    ):
        require_signature(b"", b"", [path])


# ---- Versions -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def versions(tmp_path_factory):
    root = tmp_path_factory.mktemp("versions")
    return {version: packed(root, [sm80_spec()], version=version) for version in (None, 1, 2, 20261126)}


@pytest.mark.slow
def test_an_older_bundle_is_refused_though_it_is_signed(tmp_path, versions, keys, monkeypatch):
    for version, contents in versions.items():
        contents.write(tmp_path / str(version), private_key=keys[0])
    new = co.load_bundle(tmp_path / "2", public_key=keys[1], minimum_version=2)
    assert new.manifest.version == 2
    assert co.load_bundle(tmp_path / "20261126", minimum_version=2).manifest.version == 20261126
    for name, why in (("1", "its version is 1, but 2 or later is required"), ("None", "it has no version")):
        assert co.load_bundle(tmp_path / name, public_key=keys[1])
        with pytest.raises(BundleError, match=why):
            co.load_bundle(tmp_path / name, public_key=keys[1], minimum_version=2)
        (problem,) = verifying.verify(tmp_path / name, keys[1], minimum_version=2).problems
        assert why in problem
        monkeypatch.setenv("CUTLASS_OPS_BUNDLES", str(tmp_path / name))
        assert Bundles.current().all()
        monkeypatch.setenv("CUTLASS_OPS_BUNDLE_VERSION", "2")
        for load in (Bundles.current().all, lambda name=name: co.load_bundle(tmp_path / name)):
            with pytest.raises(BundleError, match=why):
                load()
        monkeypatch.delenv("CUTLASS_OPS_BUNDLE_VERSION")
    assert verifying.verify(tmp_path / "2", minimum_version=2).version == 2


@pytest.mark.parametrize("version", [0, -1, True, 1.0, "1", None, 10**15, 10**400, [], {}])
def test_what_is_no_version_is_refused_everywhere(tmp_path, versions, version):
    try:
        text = changed(versions[1].manifest, lambda data: data.update(version=version))
    except ValueError:
        text = b""
    with pytest.raises(BundleError, match="the manifest is wrong: "):
        Manifest.from_bytes(text)
    if version is not None:
        with pytest.raises(ConfigError, match="version must be an integer"):
            shipping.Catalogue(specs=(sm80_spec(),), version=version)
        with pytest.raises((TypeError, ValueError), match="minimum_version must be"):
            open_bundle(tmp_path / "none", minimum_version=version)


@pytest.mark.parametrize("text", ["", "0", "-1", "1.0", "1e3", " 1", "\u0661", "1" * 16, "9" * 5000, "v1"])
def test_a_variable_that_names_no_version_loads_nothing(tmp_path, versions, monkeypatch, text):
    versions[1].write(tmp_path / "a")
    monkeypatch.setenv("CUTLASS_OPS_BUNDLE_VERSION", text)
    with pytest.raises(ValueError, match="CUTLASS_OPS_BUNDLE_VERSION must be a positive integer"):
        co.load_bundle(tmp_path / "a")


def test_a_key_that_is_not_there_is_an_error_that_names_the_variable(tmp_path, contents, keys, monkeypatch):
    contents.write(tmp_path / "a", private_key=keys[0])
    missing = tmp_path / "none.pub"
    monkeypatch.setenv("CUTLASS_OPS_BUNDLE_KEY", str(missing))
    with pytest.raises(ValueError, match=f"CUTLASS_OPS_BUNDLE_KEY names {missing}, which cannot be read"):
        co.load_bundle(tmp_path / "a")
    monkeypatch.setenv("CUTLASS_OPS_BUNDLES", str(tmp_path / "a"))
    with Session().active(), pytest.raises(ValueError, match="CUTLASS_OPS_BUNDLE_KEY names"):
        Bundles.current().all()
    # What the caller names has no variable.
    with pytest.raises(FileNotFoundError):
        co.load_bundle(tmp_path / "a", public_key=missing)
