"""Where the files that travel with the library lie: templates, their headers, and the generated catalogue."""

from __future__ import annotations

from pathlib import Path

from cutlass_ops._version import __version__

_PACKAGE = Path(__file__).resolve().parents[1]


def library_version() -> str:
    """Return this library's version."""
    return __version__


def templates() -> Path:
    """Return the folder of the Jinja templates.

    Raises
    ------
    FileNotFoundError
        If the installation is incomplete.
    """
    return _find("templates")


def include() -> Path:
    """Return the folder of the C++ headers that rendered kernels include as ``"cutlass_ops/…"``.

    Raises
    ------
    FileNotFoundError
        If the installation is incomplete.
    """
    return templates() / "include"


def cmake() -> Path:
    """Return the folder of the CMake package with which C++ programs open bundles.

    Raises
    ------
    FileNotFoundError
        If the installation is incomplete.
    """
    return _find("cpp")


def generated() -> Path:
    """Return the folder of the default catalogue, rendered.

    Raises
    ------
    FileNotFoundError
        If the installation is incomplete.
    """
    return _find("generated")


def tuned() -> Path:
    """Return the folder of the tuning tables that ship with the library, a part of the package itself."""
    return _PACKAGE / "tuned"


def _find(name: str) -> Path:
    installed = _PACKAGE / "_data" / name
    if installed.is_dir():
        return installed
    checkout = _PACKAGE.parent
    # Beside an installed package lie other packages' folders: only a checkout has the project file.
    if (checkout / "pyproject.toml").is_file() and (checkout / name).is_dir():
        return checkout / name
    raise FileNotFoundError(
        f"cutlass_ops is incomplete: neither {installed} nor {checkout / name} is there; reinstall the package"
    )
