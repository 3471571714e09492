"""Ed25519 signatures of a bundle's manifest. Only this module imports cryptography.

Keys are PEM files and signatures 64 plain bytes, so that openssl makes and checks them as well.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from cutlass_ops.base.errors import BundleError, LoadError
from cutlass_ops.base.private import NotPrivateError, read_private

# One PEM file, or several: while keys are exchanged, bundles by the old and by the new one are about.
PublicKeys: TypeAlias = "str | os.PathLike[str] | Iterable[str | os.PathLike[str]]"

SIGNATURE_BYTES = 64
_MAX_KEY = 1 << 16  # bytes
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
        If the package cryptography is not installed, or others may write the file.
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
    data = _read(path)
    try:
        key = serialization.load_pem_private_key(data, password=None)
    except (ValueError, TypeError, errors.UnsupportedAlgorithm) as exc:
        raise ValueError(f"{path} holds no private key that can be used: {exc}") from None
    if not isinstance(key, ed25519.Ed25519PrivateKey):
        raise ValueError(f"{path} holds another kind of key: make one with openssl genpkey -algorithm ed25519")
    return key


def public_key_paths(given: PublicKeys) -> tuple[Path, ...]:
    """Return the files that a caller named as public keys.

    Raises
    ------
    TypeError
        If it is neither a path nor some paths.
    ValueError
        If there is none, or one is empty: nothing that was to name a key may mean that none is asked for.
    """
    paths = [given] if isinstance(given, str | os.PathLike) else given
    if isinstance(paths, bytes) or not isinstance(paths, Iterable):
        raise TypeError(f"public_key is of type {type(given).__name__}: the path of a PEM file, or several, are needed")
    found = tuple(map(_path, paths))
    if not found:
        raise ValueError("public_key names no file: name one, or leave it out")
    return found


def _path(given: object) -> Path:
    if not isinstance(given, str | os.PathLike):
        raise TypeError(f"public_key has a {type(given).__name__}: paths of PEM files are needed")
    if given == "":
        raise ValueError("public_key has an empty path: name a PEM file, or leave it out")
    return Path(given)


def require_signature(message: bytes, signature: bytes, public_keys: Sequence[Path]) -> Path:
    """Refuse a message that was not signed with the private key that belongs to one of some public ones.

    Parameters
    ----------
    message, signature : bytes
        What was signed, and the signature.
    public_keys : sequence of Path
        PEM files of Ed25519 public keys, at least one.

    Returns
    -------
    Path
        The file of the key that signed it.

    Raises
    ------
    BundleError
        If the signature is another's, or cannot be checked, or others may write a key's file.
    ValueError
        If a file holds no such key.
    OSError
        If a file cannot be read.
    """
    _, _, errors = _cryptography()
    # All of them, before any is believed: a key that is not there is a mistake that must be seen.
    for path, key in [(path, _public(path)) for path in public_keys]:
        try:
            key.verify(signature, message)
        except errors.InvalidSignature:
            continue
        return path
    names = ", ".join(map(str, public_keys))
    raise BundleError(f"the signature is not by the key in {names}, or the manifest was changed")


def _public(path: Path) -> Any:
    serialization, ed25519, errors = _cryptography()
    try:
        key = serialization.load_pem_public_key(_read(path))
    except (ValueError, TypeError, errors.UnsupportedAlgorithm) as exc:
        raise ValueError(f"{path} holds no public key that can be used: {exc}") from None
    if not isinstance(key, ed25519.Ed25519PublicKey):
        raise ValueError(f"{path} holds another kind of key: an Ed25519 key in PEM is needed")
    return key


def _read(path: Path) -> bytes:
    """Return the contents of a key's file, which decide what is loaded as much as those of a bundle do."""
    try:
        # A link to the file is the user's own.
        data = read_private(path.resolve(strict=True), _MAX_KEY)
    except NotPrivateError as exc:
        raise BundleError(f"the key in {path} is not safe: {exc}. Correct it with chown and chmod go-w") from None
    except (LoadError, RuntimeError) as exc:  # no regular file; links in a circle, before Python 3.13
        raise ValueError(f"{path} cannot be read: {exc}") from None
    if len(data) > _MAX_KEY:
        raise ValueError(f"{path} has more than {_MAX_KEY} bytes, which no key has")
    return data


def _cryptography() -> tuple[Any, Any, Any]:
    try:
        from cryptography import exceptions
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError:
        raise BundleError(f"signatures need the package cryptography: {_INSTALL}") from None
    return serialization, ed25519, exceptions
