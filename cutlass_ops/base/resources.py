"""Paths of the files that ship with the library: templates, their headers, and the generated catalogue."""

from __future__ import annotations

from pathlib import Path

from cutlass_ops._version import __version__

# The namespace package in which each distribution of kernels has a folder: no module of the user's has this name.
BUNDLES = "cutlass_ops_bundles"

_PACKAGE = Path(__file__).resolve().parents[1]


def library_version() -> str:
    """Return this library's version."""
    return __version__


def package() -> Path:
    """Return the folder of the package."""
    return _PACKAGE


def templates() -> Path:
    """Return the folder of the Jinja templates. Raises FileNotFoundError if the installation is incomplete."""
    return _find("templates")


def include() -> Path:
    """Return the folder of the C++ headers, ``"cutlass_ops/…"``. Raises FileNotFoundError if it is missing."""
    return templates() / "include"


def cmake() -> Path:
    """Return the folder of the CMake package of C++ programs. Raises FileNotFoundError if it is missing."""
    return _find("cpp")


def generated() -> Path:
    """Return the folder of the rendered default catalogue. Raises FileNotFoundError if it is missing."""
    return _find("generated")


def tuned() -> Path:
    """Return the folder of the tuning tables in the package."""
    return _PACKAGE / "tuned"


def _find(name: str) -> Path:
    installed = _PACKAGE / "_data" / name
    if installed.is_dir():
        return installed
    checkout = _PACKAGE.parent
    # Next to an installed package are other packages' folders. Only a checkout has the project file.
    if (checkout / "pyproject.toml").is_file() and (checkout / name).is_dir():
        return checkout / name
    raise FileNotFoundError(
        f"cutlass_ops is incomplete: neither {installed} nor {checkout / name} exists; reinstall the package"
    )
