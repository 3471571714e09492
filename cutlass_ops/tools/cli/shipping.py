"""Arguments of commands about what is shipped: bundles and distributions."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cutlass_ops.base.errors import BundleError, ConfigError
from cutlass_ops.tools.cli.exits import EXIT_CODES, end
from cutlass_ops.tools.cli.options import (
    CatalogueName,
    Jobs,
    Json,
    MinimumVersion,
    PublicKeyFiles,
    Where,
    dtypes_of,
    later,
    readable,
    require_version,
    require_wheel,
)


def bundle(
    catalogue: CatalogueName = None,
    out: Annotated[Path, typer.Option(help="The bundle to write.")] = Path("kernels.bundle"),
    folder: Annotated[bool, typer.Option("--folder", help="Write a folder instead of one file.")] = False,
    sign: Annotated[Path | None, typer.Option(help="PEM file of the Ed25519 private key to sign with.")] = None,
    wheel: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            callback=readable(require_wheel),
            help="Also write a wheel of this name, beside the bundle.",
        ),
    ] = None,
    wheel_version: Annotated[
        str | None, typer.Option(callback=readable(require_version), help="Version of the wheel.")
    ] = None,
    jobs: Jobs = None,
    executor: Where = None,
    as_json: Json = False,
) -> None:
    """Compile a catalogue's kernels and pack them into a bundle. No GPU is needed.

    The bundle also contains their sources, the choice of kernels for each weight, and tuning tables.
    """
    if wheel is not None and folder:
        raise typer.BadParameter("--wheel and --folder exclude each other: a wheel holds one file")
    if wheel_version is not None and wheel is None:
        raise typer.BadParameter("--wheel-version needs --wheel: name the wheel")
    from cutlass_ops.tools.commands import shipping as commands

    code = commands.bundle(
        catalogue, out, folder=folder, sign=sign, wheel=wheel, wheel_version=wheel_version, jobs=jobs,
        executor=executor, as_json=as_json,
    )  # fmt: skip
    end(code)


def distribution(
    arch: Annotated[
        str,
        typer.Argument(
            metavar="ARCH",
            callback=later("ship.distributing", "require_arch"),
            help="sm_80, sm_86, sm_89 or sm_90a.",
        ),
    ],
    out: Annotated[Path, typer.Option(help="Folder for the wheel.")] = Path("dist"),
    op: Annotated[
        list[str] | None,
        typer.Option(callback=later("ship.distributing", "require_op"), help="Only this named op. May be repeated."),
    ] = None,
    dtype: Annotated[
        list[str] | None,
        typer.Option(callback=readable(dtypes_of), help="Only this dtype of A and B. May be repeated."),
    ] = None,
    behind: Annotated[
        float,
        typer.Option(
            min=0,
            max=100,
            help="At tuned problems, the wheel's best kernel is at most this many percent slower than the fastest.",
        ),
    ] = 3.0,
    most: Annotated[
        int | None, typer.Option(min=1, help="Keep at most this many kernels for each signature, the most useful ones.")
    ] = None,
    only: Annotated[
        int | None, typer.Option(min=1, help="Compile at most this many of the missing kernels; run again to continue.")
    ] = None,
    plan: Annotated[bool, typer.Option("--plan", help="Print what would be built, and compile nothing.")] = False,
    sign: Annotated[Path | None, typer.Option(help="PEM file of the Ed25519 private key to sign with.")] = None,
    version: Annotated[
        str | None,
        typer.Option(callback=readable(require_version), help="Version of the wheel. Default: this library's."),
    ] = None,
    jobs: Jobs = None,
    executor: Where = None,
    as_json: Json = False,
) -> None:
    """Build a wheel of precompiled kernels for an architecture. No GPU is needed.

    Compiled kernels stay in the store, so an interrupted build continues where it stopped.
    """
    if plan and only is not None:
        raise typer.BadParameter("--plan and --only exclude each other: --plan compiles nothing")
    if dtype is not None:
        from cutlass_ops.ship import distributing

        try:
            distributing.require_served(arch, op or distributing.OPS, dtypes_of(dtype))
        except ConfigError as exc:
            others = "" if op else ". Name ops that do by --op"
            raise typer.BadParameter(f"{exc}{others}") from None
    from cutlass_ops.tools.commands import shipping as commands

    code = commands.distribution(
        arch, out, ops=op, dtypes=None if dtype is None else dtypes_of(dtype), behind=behind / 100, most=most,
        only=only, plan=plan, sign=sign, version=version, jobs=jobs, executor=executor, as_json=as_json,
    )  # fmt: skip
    end(code)


def verify(
    path: Annotated[Path, typer.Argument(metavar="BUNDLE", help="A bundle: a file or a folder.")],
    key: PublicKeyFiles = None,
    minimum_version: MinimumVersion = None,
    as_json: Json = False,
) -> None:
    """Check a bundle.

    Compares hashes, keys, targets, symbols, instructions and the signature. Exit code 5 if anything is wrong.
    """
    from cutlass_ops.tools.commands import shipping as commands

    end(commands.verify(path, key, minimum_version, EXIT_CODES[BundleError], as_json))
