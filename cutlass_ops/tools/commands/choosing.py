"""Commands about which kernel or instruction serves a problem.

Each function prints its answer, as one JSON value or as lines, and returns the exit code.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from cutlass_ops.base import env
from cutlass_ops.base.units import counted
from cutlass_ops.choose import tables
from cutlass_ops.declare import chips, spelling
from cutlass_ops.declare.device import Device
from cutlass_ops.declare.form import BATCHED, DENSE, GROUPED, Form
from cutlass_ops.declare.problem import Problem
from cutlass_ops.declare.spec import Major
from cutlass_ops.run import gated
from cutlass_ops.run.call import call_at, device_of
from cutlass_ops.run.grouped import wgrad_op
from cutlass_ops.run.ops import graph_op
from cutlass_ops.run.requests import called
from cutlass_ops.tools.commands.common import compiling_on, show
from cutlass_ops.tools.contract import predicting
from cutlass_ops.tools.explaining import Explanation, explain_call
from cutlass_ops.tools.workload import epilogue_named
from cutlass_ops.tuner import tuning
from cutlass_ops.tuner.tuning import Effort, Report

# The device for `explain` if there is no GPU and none was named.
USUAL = chips.USUAL.device


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
    with compiling_on(executor) as pool:
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
    show(as_json, counts | {"failed": report.failed}, *lines, summary)
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
    show(as_json, [each.to_json() for each in found], "\n\n".join(map(str, found)), *note)
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
    num_warps: int | None,
    num_stages: int | None,
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
    show(as_json, [each.to_json() for each in found], "\n\n".join(map(str, found)))
    return 0 if all(each.kept for each in found) else 1
