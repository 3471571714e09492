"""Signatures of bundles, which openssl could make and check as well."""

import shutil
import subprocess
import zipfile

import pytest
from bundles import packed, write_keys
from cryptography.hazmat.primitives.asymmetric import ec, ed25519

import cutlass_ops as co
from cutlass_ops import container, verifying
from cutlass_ops.bundle import open_bundle
from cutlass_ops.bundles import BUNDLES
from cutlass_ops.errors import BundleError
from cutlass_ops.signing import require_signature, sign


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
def no_bundles():
    yield
    BUNDLES.forget()


def test_a_message_is_the_signers(keys, others):
    signature = sign(b"message", keys[0])
    require_signature(b"message", signature, keys[1])
    for message, by, key in ((b"messagf", signature, keys[1]), (b"message", signature, others[1]),
                             (b"message", signature[:-1], keys[1]), (b"message", b"", keys[1])):  # fmt: skip
        with pytest.raises(BundleError, match="the signature is not by the key"):
            require_signature(message, by, key)


def test_only_ed25519_keys(tmp_path, keys):
    wrong = write_keys(tmp_path, "ec", ec.generate_private_key(ec.SECP256R1()))
    (tmp_path / "junk").write_bytes(b"junk")
    for path, why in ((wrong[0], "another kind of key"), (tmp_path / "junk", "holds no private key"), (keys[1], "")):
        with pytest.raises(ValueError, match=why or "holds no private key"):
            sign(b"", path)
    for path, why in ((wrong[1], "another kind of key"), (tmp_path / "junk", "holds no public key")):
        with pytest.raises(ValueError, match=why):
            require_signature(b"", b"", path)


def test_without_the_package_nothing_counts_as_signed(monkeypatch, keys):
    signature = sign(b"message", keys[0])
    monkeypatch.setitem(__import__("sys").modules, "cryptography", None)
    with pytest.raises(BundleError, match=r'pip install "cutlass_ops\[sign\]"'):
        require_signature(b"message", signature, keys[1])


@pytest.mark.parametrize("folder", [False, True])
def test_a_signed_bundle(tmp_path, contents, keys, others, folder):
    contents.write(tmp_path / "a", private_key=keys[0], folder=folder)
    assert co.load_bundle(tmp_path / "a", public_key=keys[1]).kernels()
    assert co.load_bundle(tmp_path / "a").kernels()
    with pytest.raises(BundleError, match="the signature is not by the key"):
        co.load_bundle(tmp_path / "a", public_key=others[1])
    found = verifying.verify(tmp_path / "a", keys[1])
    assert found.signed
    assert found.problems == ()
    assert "not by the key" in verifying.verify(tmp_path / "a", others[1]).problems[0]


def test_an_unsigned_bundle_is_refused_where_a_key_is_given(tmp_path, contents, keys, monkeypatch):
    contents.write(tmp_path / "a")
    with pytest.raises(BundleError, match="it is not signed"):
        open_bundle(tmp_path / "a", keys[1])
    monkeypatch.setenv("CUTLASS_OPS_BUNDLE_KEY", str(keys[1]))
    with pytest.raises(BundleError, match="it is not signed"):
        co.load_bundle(tmp_path / "a")
    monkeypatch.setenv("CUTLASS_OPS_BUNDLES", str(tmp_path / "a"))
    with pytest.raises(BundleError, match="it is not signed"):
        BUNDLES.all()


def test_the_signature_is_checked_before_the_manifest_is_read(tmp_path, contents, keys, monkeypatch):
    contents.write(tmp_path / "a", private_key=keys[0])
    signature = open_bundle(tmp_path / "a")._container.read("manifest.sig")
    files = {**contents.files, "manifest.json": b"[" * 1000, "manifest.sig": signature}
    container.write(tmp_path / "b", files)
    with pytest.raises(BundleError, match="the signature is not by the key"):
        open_bundle(tmp_path / "b", keys[1])


def test_signing_is_reproducible(tmp_path, contents, keys):
    for name in "ab":
        contents.write(tmp_path / name, private_key=keys[0])
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


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
