"""The command line's commands. ``cli.py`` parses their arguments.

Each function prints its answer, as one JSON value or as lines, and returns the exit code.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import time
import zipfile
from collections.abc import Iterable, Sequence
from concurrent.futures import Executor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from cutlass_ops.artifacts import signing
from cutlass_ops.artifacts.bundle import Bundle, open_bundle
from cutlass_ops.artifacts.bundles import Bundles
from cutlass_ops.artifacts.entry import Artifact, open_entry
from cutlass_ops.artifacts.store import KernelStore
from cutlass_ops.base import env, executors, resources, writable
from cutlass_ops.base.errors import BundleError, ConfigError, LoadError
from cutlass_ops.base.units import counted
from cutlass_ops.choose import tables
from cutlass_ops.compilation.builder import build_many
from cutlass_ops.declare import chips, spelling
from cutlass_ops.declare.device import Device
from cutlass_ops.declare.form import BATCHED, DENSE, GROUPED, Form
from cutlass_ops.declare.problem import Problem
from cutlass_ops.declare.quantizing import Declaration
from cutlass_ops.declare.spec import KernelSpec, Major
from cutlass_ops.run import gated
from cutlass_ops.run.call import call_at, device_of
from cutlass_ops.run.grouped import wgrad_op
from cutlass_ops.run.ops import graph_op
from cutlass_ops.run.requests import called
from cutlass_ops.ship import catalog, distributing, packing, shipping, verifying
from cutlass_ops.tools.bench import benching, rivals
from cutlass_ops.tools.contract import predicting
from cutlass_ops.tools.doctor import diagnose
from cutlass_ops.tools.explaining import Explanation, explain_call
from cutlass_ops.tools.inspection import KernelReport
from cutlass_ops.tools.inspection import inspect as inspect_kernel
from cutlass_ops.tools.profile import plotting, profiling
from cutlass_ops.tools.workload import epilogue_named
from cutlass_ops.tuner import comparing, tuning
from cutlass_ops.tuner.tuning import Effort, Report

# The device for `explain` if there is no GPU and none was named.
USUAL = chips.USUAL.device


def doctor(as_json: bool) -> int:
    """Print what this installation can do; 1 if it can neither compile nor run a kernel."""
    found = diagnose()
    _show(as_json, found.to_json(), *found.lines())
    return 0 if found.healthy else 1


def generate(catalogue: str | None, out: Path | None, check: bool, as_json: bool) -> int:
    """Render a catalogue, or check it; 1 if the check finds stale files."""
    folder = out or resources.generated()
    if not check:
        writable.require_folder(folder)
    entries = catalog.default() if catalogue is None else _entries(catalogue)
    changed = catalog.stale(folder, entries) if check else catalog.write(folder, entries)
    verb = "stale" if check else "updated"
    summary = f"{folder}: {counted(len(entries), 'kernel')}, {counted(len(changed), 'file')} {verb}"
    _show(as_json, {"folder": str(folder), "changed": changed}, *(f"{verb}: {name}" for name in changed), summary)
    return 1 if check and changed else 0


def build(names: list[str], jobs: int | None, executor: str | None, as_json: bool) -> int:
    """Compile into the store."""
    specs = dict.fromkeys(spec for name in names for spec in _declarations(name))
    with _executor(executor) as pool:
        artifacts = build_many(specs, jobs=jobs, executor=pool)
    _show_reports(as_json, [(artifact, inspect_kernel(artifact)) for artifact in artifacts])
    return 0


def bundle(
    catalogue: str | None,
    out: Path,
    *,
    folder: bool,
    sign: Path | None,
    wheel: str | None,
    wheel_version: str | None,
    jobs: int | None,
    executor: str | None,
    as_json: bool,
) -> int:
    """Build and pack."""
    _require_writable(out, folder, sign, wheel, wheel_version)
    began = time.monotonic()
    wanted = shipping.default() if catalogue is None else shipping.load(catalogue)
    with _executor(executor) as pool:
        contents = packing.pack(wanted, jobs=jobs, executor=pool)
    made = contents.write(out, private_key=sign, folder=folder)
    packed = None if wheel is None else packing.write_wheel(out, out.absolute().parent, wheel, wheel_version)
    about = _about(made) | {"signed": sign is not None, "wheel": None if packed is None else str(packed)}
    about |= {"bytes": _bytes(out), "seconds": round(time.monotonic() - began, 1)}
    lines = [_about_line(about), *([f"wheel: {packed}"] if packed else [])]
    _show(as_json, about, *lines)
    return 0


def distribution(
    arch: str,
    out: Path,
    *,
    ops: Sequence[str] | None,
    dtypes: Sequence[str] | None,
    behind: float,
    most: int | None,
    only: int | None,
    plan: bool,
    sign: Path | None,
    version: str | None,
    jobs: int | None,
    executor: str | None,
    as_json: bool,
) -> int:
    """Build a distribution of ready kernels, a part of its kernels, or only say what it would have."""
    if not plan:
        writable.require_folder(out)
    if sign is not None:
        signing.require_private_key(sign)
    parts = distributing.parts(arch, ops or distributing.OPS, dtypes or distributing.DTYPES, behind=behind, most=most)
    missing = distributing.missing(parts) if plan or only is not None else []
    wheel = None
    if not plan:
        with _executor(executor) as pool:
            if missing[:only] and only is not None:
                build_many(missing[:only], jobs=jobs, executor=pool)
                missing = missing[only:]
            if not missing:
                wheel = distributing.build(
                    arch, parts, out, version=version, private_key=sign, jobs=jobs, executor=pool
                )
    about = _distributed(arch, parts, missing, wheel)
    _show(as_json, about, *_distribution_lines(about))
    return 0


def _distributed(
    arch: str, parts: Sequence[distributing.Part], missing: Sequence[KernelSpec], wheel: Path | None
) -> dict[str, Any]:
    present, taken, packed = distributing.compressed(parts)
    kernels = sum(len(part.specs) for part in parts)
    return {
        "arch": arch,
        "wheel": None if wheel is None else str(wheel),
        "bytes": None if wheel is None else wheel.stat().st_size,
        "kernels": kernels,
        "missing": len(missing),
        "devices": [device.name for device in distributing.devices_of(arch)],
        # By what the store has of them.
        "expected_bytes": packed * kernels // present if present else None,
        "expected_bytes_installed": taken * kernels // present if present else None,
        "signatures": [
            {
                "op": part.op,
                "dtype": part.dtype,
                "kernels": len(part.specs),
                "problems": part.pool.problems,
                "measured": part.pool.measured,
                "beyond": part.pool.beyond,
                "worst": round(part.pool.worst, 4),
                "mean": round(part.pool.mean, 4),
            }
            for part in parts
        ],
    }


def _distribution_lines(about: dict[str, Any]) -> list[str]:
    devices = ", ".join(about["devices"])
    lines = [f"{about['arch']}, for {devices}", "  kernels  problems  measured  worst  mean   beyond  signature"]
    lines += [
        f"  {s['kernels']:7}  {s['problems']:8}  {s['measured']:8}  {s['worst']:5.1%}  {s['mean']:5.1%}  "
        f"{s['beyond']:5}  {s['op']} {s['dtype']}"
        for s in about["signatures"]
    ]
    if about["wheel"] is not None:
        return [*lines, f"{about['wheel']}: {counted(about['kernels'], 'kernel')}, {about['bytes']:,} bytes"]
    size = "of unknown size: the store has none of them"
    if about["expected_bytes"] is not None:
        wheel, installed = (about[name] / 1e6 for name in ("expected_bytes", "expected_bytes_installed"))
        size = f"about {wheel:.0f} MB as a wheel and {installed:.0f} MB installed, by those in the store"
    return [*lines, f"{counted(about['kernels'], 'kernel')}, {size}; not compiled yet: {about['missing']}"]


def _require_writable(out: Path, folder: bool, sign: Path | None, wheel: str | None, version: str | None) -> None:
    """Check the outputs before compiling, so that a bad path does not fail after it."""
    (writable.require_new if folder else writable.require_file)(out)
    # A key or a catalogue that was named by mistake stays.
    if out.is_file() and not zipfile.is_zipfile(out):
        raise ValueError(f"{out} exists and is not a bundle: remove it, or name another file")
    if wheel is not None:
        writable.require_file(packing.wheel_path(out.absolute().parent, wheel, version or "0" * 64))
    if sign is not None:
        signing.require_private_key(sign)


def verify(path: Path, key: list[Path] | None, minimum_version: int | None, failing: int, as_json: bool) -> int:
    """Check a bundle; `failing` if anything is wrong."""
    if not path.exists():  # a report would be about a bundle
        raise BundleError(f"bundle {path} cannot be read: no such file or folder")
    keys, least = _asked(key, minimum_version)
    found = verifying.verify(path, keys, minimum_version=least)
    signed = f"signed by {found.signed_by}" if found.signed else "no signature was required"
    version = "" if found.version is None else f", version {found.version}"
    kernels, match = counted(found.kernels, "kernel"), "matches" if found.kernels == 1 else "match"
    good = f"{found.path}{version}: {kernels} for {', '.join(found.targets)} {match} the manifest; {signed}"
    _show(
        as_json,
        found.to_json(),
        *(f"wrong: {problem}" for problem in found.problems),
        *([] if found.problems else [good]),
    )
    return failing if found.problems else 0


def tune(
    op: str,
    problems: list[Problem],
    dtypes: list[str],
    a: Major,
    b: Major,
    *,
    batches: int | None,
    groups: int | None,
    spreads: Sequence[str],
    wgrad: bool,
    effort: dict[str, Any],
    folder: Path | None,
    again: bool,
    allow_fallback: bool,
    deterministic: bool,
    executor: str | None,
    as_json: bool,
) -> int:
    """Measure; 1 if a problem was not measured."""
    where = folder.absolute() if folder else env.tuning_dir()
    for problem in problems:
        _of_batches(problem, batches or groups)
    limits = Effort(**effort)
    report, began = Report(), time.monotonic()
    # One op is tuned for all dtypes at once. Norms have another op for each dtype.
    named = {dtype: epilogue_named(op, dtype) for dtype in dtypes}
    ops = {dtype: wgrad_op(called(each).epilogue) for dtype, each in named.items()} if wgrad else named
    with _executor(executor) as pool:
        for each in dict.fromkeys(ops.values()):
            left = limits.seconds - (time.monotonic() - began) if report.tables else limits.seconds
            found = tuning.tune(
                each, problems, dtypes=[dtype for dtype in ops if ops[dtype] == each], a=a, b=b, batches=batches,
                groups=groups, spreads=spreads, input_dtypes=spelling.INPUT_DTYPES.get(op),
                effort=replace(limits, seconds=left), folder=where if folder else None, again=again,
                allow_fallback=allow_fallback, deterministic=deterministic, executor=pool,
            )  # fmt: skip
            report.tables |= found.tables
            report.failed |= found.failed
            report.measured, report.known = report.measured + found.measured, report.known + found.known
            report.left, report.asked = report.left + found.left, report.asked + found.asked
    files = [str(tables.path_of(where, t.device, s)) for s, t in report.tables.items() if t.points]
    counts = {"measured": report.measured, "known": report.known, "left": report.left, "tables": files}
    lines = [f"failed: {name}: {why}" for name, why in report.failed.items()]
    lines += [f"table: {file}" for file in files]
    summary = f"{counted(report.measured, 'problem')} measured, {report.known} known before, {report.left} left"
    _show(as_json, counts | {"failed": report.failed}, *lines, summary)
    return 1 if report.measured + report.known < report.asked else 0


def _of_batches(problem: Problem, batches: int | None) -> Problem:
    """Return a problem of so many batches, or groups.

    Raises
    ------
    ConfigError
        If it is larger than any memory.
    """
    return Problem.from_json([*problem.extents, batches or 1])


def explain(
    op: str,
    problems: list[Problem],
    dtype: str,
    a: Major,
    b: Major,
    *,
    batches: int | None,
    groups: int | None,
    device: Device | None,
    as_json: bool,
) -> int:
    """Print why problems are served as they are; 1 if nothing serves one."""
    here = torch.cuda.is_available()
    note = []
    if device is None:
        device = device_of(torch.device("cuda", torch.cuda.current_device())) if here else USUAL
        note = [] if here else [f"\nno CUDA device here: explained for {device.name} (--device names another)"]
    form = DENSE if batches is groups is None else BATCHED if groups is None else GROUPED
    several = [_of_batches(problem, batches or groups) for problem in problems]
    found = [_explained(op, problem, dtype, a, b, form, device) for problem in several]
    _show(as_json, [each.to_json() for each in found], "\n\n".join(map(str, found)), *note)
    return 0 if all(each.is_served for each in found) else 1


def _explained(op: str, problem: Problem, dtype: str, a: Major, b: Major, form: Form, device: Device) -> Explanation:
    inputs, graph = spelling.INPUT_DTYPES.get(op), epilogue_named(op, dtype).graph
    call = call_at(graph, problem, dtype, a, b, input_dtypes=inputs, form=form)
    # Only the op knows that two GEMMs serve calls for which no kernel takes both weights, or a GEMM for each batch.
    known = gated.swiglu_op(None) if op == "gemm_swiglu" else graph_op(op, graph) if form == BATCHED else None
    return explain_call(op, call, device, known)


def contract(
    problems: Sequence[Problem],
    a: str,
    b: str,
    *,
    arch: str | None,
    program: str | None,
    precision: str | None,
    block: tuple[int, int, int] | None,
    num_warps: int,
    num_stages: int,
    as_json: bool,
) -> int:
    """Print what problems will run on; 1 if one breaks a condition."""
    tile = {} if block is None else dict(zip(("block_m", "block_n", "block_k"), block, strict=True))
    found = [
        predicting.contract(
            a, b, m=problem.m, n=problem.n, k=problem.k, arch=arch, program=program, precision=precision, **tile,
            num_warps=num_warps, num_stages=num_stages,
        )
        for problem in problems
    ]  # fmt: skip
    _show(as_json, [each.to_json() for each in found], "\n\n".join(map(str, found)))
    return 0 if all(each.kept for each in found) else 1


def profile(
    target: str | None,
    arguments: list[str],
    *,
    dtype: str,
    kernels: str | None,
    launches: int | None,
    skip: int | None,
    counters: Path | None,
    device: str | None,
    save: Path | None,
    plots: Sequence[Path],
    ncu: bool,
    traced: bool,
    timeout: float,
    as_json: bool,
) -> int:
    """Print what a program's kernels do; 4 without counters."""
    for path in plots:
        plotting.require(path)
    if counters is not None or target is None:
        report, refusal = profiling.read(counters or Path(), device), None
    else:
        asked = profiling.Asked(target, tuple(arguments), dtype, kernels, launches, skip, ncu, traced, timeout)
        report, refusal = profiling.run(asked, save)
    for path in plots:
        if report.chip is None or not report.points():
            raise ConfigError(f"{path} was not drawn: a roofline needs counters of ncu, and a known GPU (--device)")
        plotting.roofline(report.points(), report.chip, path)
    value = report.to_json() | ({"refusal": refusal.why, "command": list(refusal.command)} if refusal else {})
    _show(as_json, value, *report.lines(), *(["", str(refusal)] if refusal else []))
    return 4 if refusal else 0


def bench(
    op: str,
    problems: Sequence[Problem],
    dtype: str,
    a: Major,
    b: Major,
    *,
    against: Sequence[str] | None,
    rounds: int | None,
    out: Path | None,
    html: Path | None,
    as_json: bool,
) -> int:
    """Time an op against other ways, and print tables."""
    for path in (out, html):
        if path is not None:
            writable.require_file(path)
    found = benching.bench(
        op, [p.extents for p in problems], dtype=dtype, a=a, b=b, against=against or rivals.NAMES,
        rounds=comparing.ROUNDS if rounds is None else rounds,
    )  # fmt: skip
    value = found.to_json()
    if out is not None:
        out.write_text(json.dumps(value, indent=1) + "\n")
    if html is not None:
        html.write_text(found.html())
    _show(as_json, value, *found.lines())
    return 0


def list_kernels(
    in_bundle: Path | None, key: list[Path] | None, minimum_version: int | None, installed: bool, as_json: bool
) -> int:
    """Print the kernels in the store, in a bundle, or in installed distributions."""
    distributions = Bundles.current().distributions() if in_bundle is None else []
    where, artifacts = _installed(distributions) if installed else _kernels(in_bundle, key, minimum_version)
    rows = [_row(artifact) for artifact in artifacts]
    lines = [
        f"{row['key'][:12]}  {row['bytes']:>9,} bytes  {row['created'] or ''}  {row['slug']}  {row['origin']}"
        for row in rows
    ]
    more = [] if installed else [f"installed: {name} (--installed lists its kernels)" for name in distributions]
    _show(as_json, rows, *lines, f"{where}: {counted(len(rows), 'kernel')}", *more)
    return 0


def _installed(names: Sequence[str]) -> tuple[str, Iterable[Artifact]]:
    """Return the names of installed distributions, and their kernels."""
    bundles = (bundle for bundle in Bundles.current().all() if bundle.installed_with is not None)
    where = f"installed with {', '.join(names)}" if names else "no distribution of kernels is installed"
    return where, [kernel for bundle in bundles for kernel in bundle.kernels()]


def inspect(
    kernels: list[str], in_bundle: Path | None, key: list[Path] | None, minimum_version: int | None, as_json: bool
) -> int:
    """Print reports on kernels."""
    artifacts = [_find(text, in_bundle, key, minimum_version) for text in kernels]
    _show_reports(as_json, [(artifact, inspect_kernel(artifact)) for artifact in artifacts])
    return 0


def clean(unused_for: float | None, keep: int | None, as_json: bool) -> int:
    """Remove kernels from the store: all, those unused for so many seconds, or those beyond so many bytes."""
    store = KernelStore.default()
    removed = store.clean(unused_for=unused_for, keep=keep)
    _show(
        as_json, {"store": str(store.root), "removed": removed}, f"{store.root}: {counted(removed, 'kernel')} removed"
    )
    return 0


def cmakedir(as_json: bool) -> int:
    """Print the folder of the CMake package."""
    folder = resources.cmake()
    _show(as_json, {"folder": str(folder)}, str(folder))
    return 0


def _executor(name: str | None) -> contextlib.AbstractContextManager[Executor | None]:
    return contextlib.nullcontext() if name is None else executors.named(name)


def _finite(value: Any) -> Any:
    """Return a JSON value with null for what JSON has no number, such as the time of a kernel that cannot run."""
    if isinstance(value, dict):
        return {name: _finite(x) for name, x in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(x) for x in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _show(as_json: bool, value: Any, *lines: str) -> None:
    for line in [json.dumps(_finite(value), indent=1)] if as_json else lines:
        print(line, flush=True)


def _declarations(name: str) -> Sequence[Declaration]:
    """Return the kernels of one argument of ``build``, which may be those of no GEMM."""
    return [shipping.read_declaration(Path(name))] if name.endswith(".json") else _specs(name)


def _specs(name: str) -> list[KernelSpec]:
    """Return the kernels of one argument: a declaration, or a catalogue."""
    if name.endswith(".json"):
        return [shipping.read_spec(Path(name))]
    return list(shipping.shipment(shipping.load(name)).specs)


def _entries(catalogue: str) -> list[catalog.Entry]:
    return [catalog.Entry(spec.slug, spec) for spec in _specs(catalogue)]


def _about(bundle: Bundle) -> dict[str, Any]:
    manifest, kernels = bundle.manifest, bundle.manifest.kernels
    return {
        "path": str(bundle.path),
        "kernels": len(kernels),
        "targets": list(manifest.targets),
        "library_bytes": sum(record.library.size for record in kernels),
        "largest_library": max(record.library.size for record in kernels),
        "tables": len(manifest.tables),
        "version": manifest.version,
        "manifest_sha256": hashlib.sha256(manifest.to_bytes()).hexdigest(),
        "toolchain": dict(manifest.toolchain),
    }


def _bytes(bundle: Path) -> int:
    files = [bundle] if bundle.is_file() else bundle.rglob("*")
    return sum(file.stat().st_size for file in files if file.is_file())


def _about_line(about: dict[str, Any]) -> str:
    signed = "signed" if about["signed"] else "not signed"
    return (
        f"{about['path']}: {counted(about['kernels'], 'kernel')} for {', '.join(about['targets'])}, "
        f"{about['library_bytes']:,} bytes of libraries, the largest {about['largest_library']:,}, "
        f"{about['bytes']:,} in all; {signed}; {about['seconds']} s"
    )


def _asked(key: list[Path] | None, minimum_version: int | None) -> tuple[Sequence[Path] | None, int | None]:
    """Return the required keys and version of a bundle: from the command line, else from the environment."""
    least = env.bundle_version() if minimum_version is None else minimum_version
    return key or env.bundle_keys(), least


def _kernels(
    in_bundle: Path | None, key: list[Path] | None, minimum_version: int | None
) -> tuple[str, Iterable[Artifact]]:
    """Return the store or bundle, and its kernels."""
    if in_bundle is not None:
        keys, least = _asked(key, minimum_version)
        return str(in_bundle), open_bundle(in_bundle, keys, minimum_version=least).kernels()
    store = KernelStore.default()
    return str(store.root), store.entries()


def _row(artifact: Artifact) -> dict[str, Any]:
    return {
        "key": artifact.key,
        "slug": _slug(artifact),
        "target": artifact.target,
        "bytes": artifact.size,
        "created": artifact.manifest.get("created"),
        "origin": artifact.origin,
        "folder": str(artifact.folder),
    }


def _slug(artifact: Artifact) -> str:
    try:
        return artifact.spec.slug
    except ConfigError:
        return "(declared by another version of this library)"


def _find(text: str, in_bundle: Path | None, key: list[Path] | None, minimum_version: int | None) -> Artifact:
    """Find a kernel by its folder, or in the store or a bundle by the beginning of its key or slug."""
    path = Path(text).absolute()
    if in_bundle is None and not key and minimum_version is None and path.exists():
        return open_entry(path if path.is_dir() else path.parent)
    where, artifacts = _kernels(in_bundle, key, minimum_version)
    found = [a for a in artifacts if a.key.startswith(text) or _slug(a).startswith(text)]
    if len(found) == 1:
        return found[0]
    if found:
        keys = ", ".join(a.key[:12] for a in found)
        raise ValueError(f"{text} matches {len(found)} kernels: {keys}. Give more of the key")
    raise LoadError(
        f"{text!r} is not a kernel's folder, and no key or slug in {where} starts with it: `list` shows the kernels"
    )


def _show_reports(as_json: bool, reports: list[tuple[Artifact, KernelReport]]) -> None:
    values = [report.to_json() | {"folder": str(artifact.folder)} for artifact, report in reports]
    _show(as_json, values, *(line for artifact, report in reports for line in _report_lines(artifact, report)))


def _report_lines(artifact: Artifact, report: KernelReport) -> list[str]:
    sass = ", ".join(f"{count} {opcode}" for opcode, count in report.sass.items())
    block = {
        ("stage", "stages"): report.stages,
        ("thread", "threads"): report.threads,
        ("byte of dynamic shared memory", "bytes of dynamic shared memory"): report.dynamic_shared_memory,
        ("block an SM", "blocks an SM"): report.blocks_per_sm,
    }
    known = ", ".join(counted(number, *names) for names, number in block.items() if number is not None)
    return [
        report.slug,
        f"  {artifact.where}",
        f"  library   {report.library_bytes:,} bytes for {report.target}",
        f"  SASS      {sass}",
        f"  thread    {report.registers} registers, {report.stack} bytes of stack, "
        f"spills: {report.spill_stores} bytes stored, {report.spill_loads} loaded",
        f"  block     {known or 'unknown: the kernel cannot be loaded here'}",
    ]
