"""Signed bundles."""

import json
from pathlib import Path

import pytest
from bundles import write_keys
from cryptography.hazmat.primitives.asymmetric import ed448, ed25519

from cutlass_ops.artifacts.bundle import open_bundle
from cutlass_ops.base.checked_json import sealed
from cutlass_ops.base.errors import BundleError
from tests import cmake
from tests.cpp.made import write_one

# To build the program takes fifteen seconds.
pytestmark = pytest.mark.slow
HERE = Path(__file__).resolve().parent


@pytest.fixture(scope="module")
def keys_of(tmp_path_factory):
    """Private and public PEM files of two Ed25519 keys and of one of another kind."""
    folder = tmp_path_factory.mktemp("keys")
    kinds = {"own": ed25519.Ed25519PrivateKey, "other": ed25519.Ed25519PrivateKey, "ed448": ed448.Ed448PrivateKey}
    return {name: write_keys(folder, name, kind.generate()) for name, kind in kinds.items()}


@pytest.fixture
def checks(probe, single):
    """Skip where the program was built without OpenSSL: AUTO takes it where it is."""
    if "built without signatures" in probe("signed", single, "x")[1]:
        pytest.skip("no OpenSSL with headers (libssl-dev) here: signatures are not checked in C++")


@pytest.fixture(params=[False, True], ids=["archive", "folder"])
def signed(request, contents, tmp_path, keys_of):
    return write_one(tmp_path / "signed", contents, folder=request.param, private_key=keys_of["own"][0])


def test_a_signature_is_checked_as_python_does(checks, probe, signed, keys_of):
    own, other = keys_of["own"][1], keys_of["other"][1]
    open_bundle(signed, own)
    for given in ([own], [own, other], [other, own]):
        assert probe("signed", signed, *given) == (0, "signed\n")
    with pytest.raises(BundleError, match="the signature is not from the key in"):
        open_bundle(signed, other)
    code, out = probe("signed", signed, other)
    assert code == 1
    assert out.startswith(
        f"BundleError: bundle {signed}: the signature is not from the key in {other}, or the manifest was"
    )


def test_an_unsigned_bundle_and_a_changed_one_are_refused(checks, probe, contents, tmp_path, keys_of, single):
    private, public = keys_of["own"]
    assert "it is not signed: it has no manifest.sig" in probe("signed", single, public)[1]
    path = write_one(tmp_path / "a", contents, folder=True, private_key=private)
    text = (path / "manifest.json").read_bytes()
    # A change of the manifest whose own digest is right again, of which only the signature knows.
    data = json.loads(text)
    del data["sha256"]
    data["toolchain"]["nvcc"] = "13.0.89"
    (path / "manifest.json").write_bytes(sealed(data))
    assert probe("list", path)[0] == 0
    assert "the signature is not from the key in" in probe("signed", path, public)[1]
    (path / "manifest.json").write_bytes(text)
    for signature in (b"", bytes(63), bytes(64), bytes(65), bytes(1 << 20)):
        (path / "manifest.sig").write_bytes(signature)
        code, out = probe("signed", path, public)
        assert code == 1
        assert "BundleError: " in out


def test_what_is_no_key_is_an_error_whichever_signed(checks, probe, signed, keys_of, tmp_path):
    private, public = keys_of["own"]
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "text").write_bytes(b"-----BEGIN PUBLIC KEY-----\nnonsense\n-----END PUBLIC KEY-----\n")
    (tmp_path / "large").write_bytes(public.read_bytes() + bytes(1 << 17))
    (tmp_path / "loose").write_bytes(public.read_bytes())
    (tmp_path / "loose").chmod(0o666)
    for wrong, said in {
        "": "ArgumentError: a path of a public key is empty: name a PEM file",
        private: "has no usable public key",
        keys_of["ed448"][1]: "must be an Ed25519 key in PEM",
        tmp_path / "empty": "has no usable public key",
        tmp_path / "text": "has no usable public key",
        tmp_path / "large": "at most 65536 are allowed",
        tmp_path / "loose": "can be written by others",
        tmp_path / "none": "cannot be read: No such file",
        "/dev/zero": "is not a regular file",
    }.items():
        for given in ([wrong], [public, wrong], [wrong, public]):
            code, out = probe("signed", signed, *given)
            assert code == 1, wrong
            assert said in out


def test_a_key_with_a_password_is_not_asked_for(checks, probe, signed, tmp_path):
    text = (
        "-----BEGIN PUBLIC KEY-----\nProc-Type: 4,ENCRYPTED\nDEK-Info: AES-128-CBC,00112233445566778899AABBCCDDEEFF\n\n"
    )
    (tmp_path / "key").write_text(text + "AAAAAAAAAAAAAAAAAAAAAA==\n-----END PUBLIC KEY-----\n")
    code, out = probe("signed", signed, tmp_path / "key")
    assert code == 1
    assert "has no usable public key" in out


def test_without_openssl_a_key_that_is_given_opens_nothing(probe, signed, keys_of):
    assert probe("list", signed, program="probe_bare")[0] == 0
    for given in ([keys_of["own"][1]], [""]):
        code, out = probe("signed", signed, *given, program="probe_bare")
        assert code == 1
        assert "Error: " in out
        assert "this program was built without signatures: install OpenSSL's headers (libssl-dev)" in out


@pytest.mark.parametrize(
    ("option", "said"),
    [("ON", "CUTLASS_OPS_SIGNATURES is ON, and there is no OpenSSL"), ("maybe", "is maybe: use AUTO, ON or OFF")],
)
def test_what_cannot_be_built_is_said(tmp_path, option, said):
    with pytest.raises(AssertionError, match="CUTLASS_OPS_SIGNATURES") as raised:
        cmake.build(HERE, tmp_path, f"-DCUTLASS_OPS_SIGNATURES={option}", "-DCMAKE_DISABLE_FIND_PACKAGE_OpenSSL=ON")
    assert said in " ".join(str(raised.value).split())
