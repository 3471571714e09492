"""Ed25519 signatures of a bundle's manifest. Only this module imports cryptography.

Keys are PEM files and signatures are 64 raw bytes, so openssl can make and check them too.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from cutlass_ops.base.disk import NotPrivateError, read_private
from cutlass_ops.base.errors import BundleError, LoadError

# One PEM file, or several: during a key rotation, bundles may be signed with the old or the new key.
PublicKeys: TypeAlias = "str | os.PathLike[str] | Iterable[str | os.PathLike[str]]"

SIGNATURE_BYTES = 64
_MAX_KEY = 1 << 16  # bytes
_INSTALL = 'pip install "cutlass_ops[sign]"'


def sign(message: bytes, private_key: Path) -> bytes:
    """Return the signature of a message."""
    return bytes(_private(private_key).sign(message))


def require_private_key(path: Path) -> None:
    """Check that a file can sign, before starting long work."""
    _private(path)


def require_public_keys(public_keys: Sequence[Path]) -> None:
    """Check that signatures can be checked with these keys."""
    for path in public_keys:
        _public(path)


def require_pair(private_key: Path, public_keys: Sequence[Path]) -> None:
    """Check that one of the public keys verifies what a private key signs."""
    public = _private(private_key).public_key()
    if not any(_public(path) == public for path in public_keys):
        raise ValueError(f"{private_key} signs for none of the public keys: {', '.join(map(str, public_keys))}")


def _private(path: Path) -> Any:
    serialization, ed25519, errors = _cryptography()
    data = _read(path)
    try:
        key = serialization.load_pem_private_key(data, password=None)
    except (ValueError, TypeError, errors.UnsupportedAlgorithm) as exc:
        raise ValueError(f"{path} has no usable private key: {exc}") from None
    if not isinstance(key, ed25519.Ed25519PrivateKey):
        raise ValueError(f"{path} is not an Ed25519 key: make one with openssl genpkey -algorithm ed25519")
    return key


def public_key_paths(given: PublicKeys) -> tuple[Path, ...]:
    """Return a ``public_key`` argument as a tuple of paths."""
    paths = [given] if isinstance(given, str | os.PathLike) else given
    if isinstance(paths, bytes) or not isinstance(paths, Iterable):
        raise TypeError(f"public_key must be the path of a PEM file, or several, not {type(given).__name__}")
    found = tuple(map(_path, paths))
    if not found:
        raise ValueError("public_key names no file: name a PEM file, or leave it out")
    return found


def _path(given: object) -> Path:
    if not isinstance(given, str | os.PathLike):
        raise TypeError(f"public_key must be paths of PEM files, not {type(given).__name__}")
    if given == "":
        raise ValueError("public_key has an empty path: name a PEM file, or leave it out")
    return Path(given)


def require_signature(message: bytes, signature: bytes, public_keys: Sequence[Path]) -> Path:
    """Check that a message is signed with one of some keys."""
    _, _, errors = _cryptography()
    # Read all keys first: a missing key is a mistake that must not go unnoticed.
    for path, key in [(path, _public(path)) for path in public_keys]:
        try:
            key.verify(signature, message)
        except errors.InvalidSignature:
            continue
        return path
    names = ", ".join(map(str, public_keys))
    raise BundleError(f"the signature is not from the key in {names}, or the manifest was changed")


def _public(path: Path) -> Any:
    serialization, ed25519, errors = _cryptography()
    try:
        key = serialization.load_pem_public_key(_read(path))
    except (ValueError, TypeError, errors.UnsupportedAlgorithm) as exc:
        raise ValueError(f"{path} has no usable public key: {exc}") from None
    if not isinstance(key, ed25519.Ed25519PublicKey):
        raise ValueError(f"{path} must be an Ed25519 key in PEM, but has another kind of key")
    return key


def _read(path: Path) -> bytes:
    """Read a key file. It must be as well protected as a bundle: it decides which code is loaded."""
    try:
        # The user may link to the file.
        data = read_private(path.resolve(strict=True), _MAX_KEY)
    except NotPrivateError as exc:
        raise BundleError(f"the key in {path} is not safe: {exc}. Fix it with chown and chmod go-w") from None
    except (LoadError, RuntimeError) as exc:  # not a regular file; a link loop, before Python 3.13
        raise ValueError(f"{path} cannot be read: {exc}") from None
    if len(data) > _MAX_KEY:
        raise ValueError(f"{path} is not a key: it has more than {_MAX_KEY} bytes")
    return data


def _cryptography() -> tuple[Any, Any, Any]:
    try:
        from cryptography import exceptions
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError:
        raise BundleError(f"signatures need the package cryptography: {_INSTALL}") from None
    return serialization, ed25519, exceptions
