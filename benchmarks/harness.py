"""What the benchmarks share. They time with :mod:`cutlass_ops.tuner.comparing`, as ``co.bench`` does."""

from __future__ import annotations

import ctypes
import datetime
import gc
import itertools
import json
import os
import platform
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import cutlass_ops as co
from cutlass_ops.artifacts.bundle import manifest_of
from cutlass_ops.base import env, programs
from cutlass_ops.base.session import Session
from cutlass_ops.choose import dispatch
from cutlass_ops.compilation.background import Background
from cutlass_ops.compilation.builder import build_many
from cutlass_ops.declare.device import Device
from cutlass_ops.declare.problem import Problem
from cutlass_ops.declare.spec import KernelSpec
from cutlass_ops.operand.call import device_of, signature_of
from cutlass_ops.run.ops import Op
from cutlass_ops.run.registry import OpSignature
from cutlass_ops.ship.packing import packed
from cutlass_ops.tuner.comparing import (  # noqa: F401 - for the benchmarks
    ROUNDS,
    Timing,
    compare,
    compiled,
    environment,
    error_ratio,
    geomean,
    ratios,
    time_interleaved,
)


def side_by_side(calls: Iterable[Callable[[], object]]) -> None:
    """Make calls in parallel, so that their kernels are compiled in parallel."""
    waiting = list(calls)
    with ThreadPoolExecutor(max(1, len(waiting))) as pool:
        for future in [pool.submit(call) for call in waiting]:
            future.result()


def asked(
    op: Op, arguments: Sequence[Any], device: Device, out_dtype: torch.dtype | None = None
) -> tuple[OpSignature, Problem]:
    """Return the signature, device and problem of an op's call, whose tensors need no data."""
    a, b, *inputs = arguments
    call = op.checked_call(a, b, inputs, None, out_dtype)
    return signature_of(call, device), call.problem


def build_ahead(calls: Iterable[tuple[Op, Sequence[Any]]], out_dtypes: Iterable[torch.dtype | None] = ()) -> None:
    """Compile the kernels of calls in parallel. Each is an op and its arguments, with tensors on "meta".

    They give D in `out_dtypes`, if there are any.
    """
    device = device_of(torch.device("cuda", 0))
    specs = {}
    for (op, arguments), out_dtype in zip(calls, itertools.chain(out_dtypes, itertools.repeat(None)), strict=False):
        signature, problem = asked(op, arguments, device, out_dtype)
        specs[dispatch.choose(signature, device, problem)[0]] = None
    build_many(list(specs))


@contextmanager
def serve_only(specs: Iterable[KernelSpec]) -> Iterator[None]:
    """Compile kernels in parallel, and have calls served by these alone, as those of a bundle.

    For scripts that call at many problems, each of which would have a kernel of its own chosen and compiled. A call
    that none of the kernels can serve is a MissingKernelError.
    """
    artifacts = build_many(dict.fromkeys(specs))
    before = os.environ.get(env.JIT.name)
    with tempfile.TemporaryDirectory() as folder, Session().active():
        path = Path(folder, "kernels.zip")
        packed(manifest_of(artifacts, {}, []), artifacts, []).write(path)
        co.load_bundle(path)
        os.environ[env.JIT.name] = "0"
        try:
            yield
        finally:
            os.environ.pop(env.JIT.name)
            if before is not None:
                os.environ[env.JIT.name] = before


def memory_at_rest() -> int:
    """Return the bytes of PyTorch's memory on the GPU that are in use when no step of training runs.

    The thread that computes gradients may let those of its last task go late, or when it has another one: it gets a
    small one and a moment.
    """
    one = torch.ones((), device="cuda", requires_grad=True)
    torch.autograd.grad(one * 1.0, one)
    del one
    torch.cuda.synchronize()
    gc.collect()
    time.sleep(0.02)
    return torch.cuda.memory_allocated()


def launches(run: Callable[[], object]) -> int:
    """Return how many kernels, copies and fills the GPU runs in a call: the nodes of its CUDA graph.

    The call must have run before, so that nothing is compiled while it is captured.
    """
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph):
        run()
    count = ctypes.c_size_t()
    captured = ctypes.c_void_p(graph.raw_cuda_graph())
    status = ctypes.CDLL("libcuda.so.1").cuGraphGetNodes(captured, None, ctypes.byref(count))
    if status != 0:
        raise RuntimeError(f"the driver does not tell a graph's nodes: error {status}")
    return count.value


def check(found: Tensor, exact: Tensor, eager: Tensor) -> float:
    """Return a result's error over PyTorch's own.

    Raises
    ------
    AssertionError
        If the error is more than twice eager PyTorch's, or an element was not written.
    """
    assert not found.isnan().any(), "output left unwritten"
    ratio = error_ratio(found, exact, eager)
    assert ratio <= 2, f"error is {ratio:.2f} times eager's"
    return ratio


def begin() -> dict[str, Any]:
    """Have calls wait for the kernels that they choose, so that PyTorch serves none; return :func:`environment`.

    Nothing is compiled in the background: that would take processors from the kernels that are waited for.
    """
    os.environ[env.STAND_IN.name] = "0"
    Background.current().close()
    return environment()


def about(device: str) -> dict[str, Any]:
    """Return :func:`environment`, or what there is to say of the CPU."""
    if device == "cuda":
        return environment()
    return {
        "chip": f"CPU ({platform.machine()})",
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cutlass_ops": co.__version__,
    }


def commit() -> str | None:
    """Return this repository's commit, with "+" if files differ from it; None where git does not say."""
    git = ["git", "-C", str(Path(__file__).parent)]
    try:
        (status, head), (_, changes) = (
            programs.ask([*git, *what], 30.0) for what in (("rev-parse", "HEAD"), ("status", "--porcelain", "-uno"))
        )
    except OSError:
        return None
    return head.strip() + "+" * bool(changes.strip()) if status == 0 else None


def measured(paths: list[Path], environment: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the rows of earlier results.

    Raises
    ------
    SystemExit
        If a result has another chip, date or version, since one table never mixes them.
    """
    rows: list[dict[str, Any]] = []
    for path in paths:
        result = json.loads(path.read_text())
        differs = {key: (result.get(key), value) for key, value in environment.items() if result.get(key) != value}
        if differs:
            raise SystemExit(f"{path} was measured elsewhere: {differs}; measure it again")
        rows += result["rows"]
    return rows


# What nvidia-smi says of the card when a result is written: MHz, watts, degrees Celsius.
_STATE = ("clocks.sm", "clocks.mem", "power.draw", "temperature.gpu")


def state() -> dict[str, float] | None:
    """Return the clocks, power and temperature of this process's GPU now; None without nvidia-smi or a GPU."""
    if not torch.cuda.is_available():
        return None
    uuid = f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"
    query = ["nvidia-smi", f"--id={uuid}", f"--query-gpu={','.join(_STATE)}", "--format=csv,noheader,nounits"]
    try:
        status, said = programs.ask(query, 30.0)
        return dict(zip(_STATE, map(float, said.split(",")), strict=True)) if status == 0 else None
    except (OSError, ValueError):
        return None


def save(path: Path, result: Mapping[str, Any]) -> None:
    """Write a result, one row per line, for readable diffs, with the commit and the card's state."""
    path.parent.mkdir(parents=True, exist_ok=True)
    head = {key: value for key, value in result.items() if key != "rows"}
    head |= {"commit": head.get("commit") or commit(), "state": head.get("state") or state()}
    rows = ",\n  ".join(json.dumps(row) for row in result["rows"])
    path.write_text(json.dumps(head, indent=1)[:-2] + f',\n "rows": [\n  {rows}\n ]\n}}\n')
