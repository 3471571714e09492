"""Arguments of commands about kernels: rendered, compiled, and those in the store."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cutlass_ops.base import units
from cutlass_ops.tools.cli.exits import end
from cutlass_ops.tools.cli.options import (
    CatalogueName,
    FromBundle,
    Jobs,
    Json,
    MinimumVersion,
    PublicKeyFiles,
    Where,
    readable,
)


def doctor(as_json: Json = False) -> None:
    """Show which compiler, CUTLASS, GPU and store are used, and why.

    Exit code 0 if a kernel can be compiled or run.
    """
    from cutlass_ops.tools.commands import kernels as commands

    end(commands.doctor(as_json))


def generate(
    catalogue: CatalogueName = None,
    out: Annotated[Path | None, typer.Option(help="Folder to write. Default, without CATALOGUE: generated/.")] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Write nothing; print stale files. Exit code 1 if there are any.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Render the C++ sources of a catalogue or a declaration, and a manifest. No compiler is needed."""
    if catalogue is not None and out is None:
        raise typer.BadParameter("--out is missing: name a folder for the sources of this catalogue")
    from cutlass_ops.tools.commands import kernels as commands

    end(commands.generate(catalogue, out, check, as_json))


def build(
    names: Annotated[
        list[str], typer.Argument(metavar="SPEC.json|CATALOGUE...", help="Kernel declarations or catalogues.")
    ],
    jobs: Jobs = None,
    executor: Where = None,
    as_json: Json = False,
) -> None:
    """Compile kernels into the store. Kernels that are already there are not compiled again."""
    from cutlass_ops.tools.commands import kernels as commands

    end(commands.build(names, jobs, executor, as_json))


def list_kernels(
    in_bundle: FromBundle = None,
    key: PublicKeyFiles = None,
    minimum_version: MinimumVersion = None,
    installed: Annotated[bool, typer.Option("--installed", help="List installed distributions of kernels.")] = False,
    as_json: Json = False,
) -> None:
    """List the kernels in the store, in a bundle, or in installed distributions."""
    if installed and in_bundle is not None:
        raise typer.BadParameter("--installed and --bundle exclude each other")
    _require_bundle(in_bundle, key, minimum_version)
    from cutlass_ops.tools.commands import kernels as commands

    end(commands.list_kernels(in_bundle, key, minimum_version, installed, as_json))


def inspect(
    kernels: Annotated[
        list[str], typer.Argument(metavar="KERNEL...", help="A kernel's folder, or the beginning of its key or slug.")
    ],
    in_bundle: FromBundle = None,
    key: PublicKeyFiles = None,
    minimum_version: MinimumVersion = None,
    as_json: Json = False,
) -> None:
    """Show the properties of compiled kernels.

    Shows Tensor Core instructions, registers, shared memory, spills, stages and occupancy.
    """
    _require_bundle(in_bundle, key, minimum_version)
    from cutlass_ops.tools.commands import kernels as commands

    end(commands.inspect(kernels, in_bundle, key, minimum_version, as_json))


def _require_bundle(in_bundle: Path | None, key: list[Path] | None, minimum_version: int | None) -> None:
    if in_bundle is not None:
        return
    if key:
        raise typer.BadParameter("--key needs --bundle: kernels in the store are not signed")
    if minimum_version is not None:
        raise typer.BadParameter("--minimum-version needs --bundle: kernels in the store have no version")


def clean(
    older_than: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            callback=readable(lambda text: units.duration(text, "--older-than")),
            help="Remove only kernels unused for this long, such as 30d or 12h.",
        ),
    ] = None,
    keep_size: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            callback=readable(lambda text: units.size(text, "--keep-size")),
            help="Remove the least recently used kernels beyond this size, such as 1GB.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Remove kernels from the store: all of them, unless an option selects some."""
    from cutlass_ops.tools.commands import kernels as commands

    unused_for = None if older_than is None else units.duration(older_than, "--older-than")
    keep = None if keep_size is None else units.size(keep_size, "--keep-size")
    end(commands.clean(unused_for, keep, as_json))


def cmakedir(as_json: Json = False) -> None:
    """Print the folder of the CMake package.

    C++ programs use it to open bundles.
    """
    from cutlass_ops.tools.commands import kernels as commands

    end(commands.cmakedir(as_json))
