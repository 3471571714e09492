"""Ed25519 signatures of a bundle's manifest. Only this module imports cryptography.

Keys are PEM files and signatures 64 plain bytes, so that openssl makes and checks them as well.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cutlass_ops.errors import BundleError

_MOST_BYTES = 1 << 16  # of a PEM file with one key
_INSTALL = 'pip install "cutlass_ops[sign]"'


def sign(message: bytes, private_key: Path) -> bytes:
    """Return the signature of a message.

    Parameters
    ----------
    message : bytes
        What is signed.
    private_key : Path
        PEM file of an Ed25519 private key without password.

    Raises
    ------
    ValueError
        If the file holds no such key.
    BundleError
        If the package cryptography is not installed.
    OSError
        If the file cannot be read.
    """
    return bytes(_private(private_key).sign(message))


def require_private_key(path: Path) -> None:
    """Refuse a file with which nothing can be signed, before much is done for what is to be signed.

    Raises
    ------
    ValueError, BundleError, OSError
        As for :func:`sign`.
    """
    _private(path)


def _private(path: Path) -> Any:
    serialization, ed25519, errors = _cryptography()
    data = _pem(path)
    try:
        key = serialization.load_pem_private_key(data, password=None)
    except (ValueError, TypeError, errors.UnsupportedAlgorithm) as exc:
        raise ValueError(f"{path} holds no private key that can be used: {exc}") from None
    if not isinstance(key, ed25519.Ed25519PrivateKey):
        raise ValueError(f"{path} holds another kind of key: make one with openssl genpkey -algorithm ed25519")
    return key


def require_signature(message: bytes, signature: bytes, public_key: Path) -> None:
    """Refuse a message that was not signed with the private key that belongs to a public one.

    Parameters
    ----------
    message, signature : bytes
        What was signed, and the signature.
    public_key : Path
        PEM file of an Ed25519 public key.

    Raises
    ------
    BundleError
        If the signature is another's, or cannot be checked.
    ValueError
        If the file holds no such key.
    OSError
        If the file cannot be read.
    """
    serialization, ed25519, errors = _cryptography()
    data = _pem(public_key)
    try:
        key = serialization.load_pem_public_key(data)
    except (ValueError, TypeError, errors.UnsupportedAlgorithm) as exc:
        raise ValueError(f"{public_key} holds no public key that can be used: {exc}") from None
    if not isinstance(key, ed25519.Ed25519PublicKey):
        raise ValueError(f"{public_key} holds another kind of key: an Ed25519 key in PEM is needed")
    try:
        key.verify(signature, message)
    except errors.InvalidSignature:
        raise BundleError(f"the signature is not by the key in {public_key}, or the manifest was changed") from None


def _pem(path: Path) -> bytes:
    # A device or a pipe would be read for ever.
    if path.exists() and not path.is_file():
        raise ValueError(f"{path} is not a file: name a PEM file with an Ed25519 key")
    with path.open("rb") as file:
        return file.read(_MOST_BYTES)


def _cryptography() -> tuple[Any, Any, Any]:
    try:
        from cryptography import exceptions
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError:
        raise BundleError(f"signatures need the package cryptography: {_INSTALL}") from None
    return serialization, ed25519, exceptions
