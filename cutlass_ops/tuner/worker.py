"""A worker process that measures kernels. A kernel that hangs or breaks its CUDA context affects only the worker.

It is started as ``python -m cutlass_ops.tuner.worker DEVICE``. It reads jobs from standard input and writes events to
standard output, one line of JSON each. :mod:`cutlass_ops.tuner.measuring` starts it, and ends it if events stop coming.
"""

from __future__ import annotations

import datetime
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

Emit = Callable[..., None]


def main() -> None:
    """Serve jobs until standard input ends."""
    # Redirect stdout to stderr: output of other libraries must not mix with the events.
    events = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def emit(event: str, **fields: Any) -> None:
        events.write(json.dumps({"event": event, **fields}) + "\n")
        events.flush()

    import torch

    device = torch.device("cuda", int(sys.argv[1]))
    torch.cuda.set_device(device)
    torch.empty(1, device=device)
    emit("ready")
    for line in sys.stdin:
        _serve(json.loads(line), device, emit)


def _serve(job: dict[str, Any], device: Any, emit: Emit) -> None:
    import torch

    from cutlass_ops.artifacts import loader
    from cutlass_ops.artifacts.entry import open_entry
    from cutlass_ops.choose.tables import Point, Table
    from cutlass_ops.declare.config import Ordered, config_from_json
    from cutlass_ops.declare.order import TileOrder
    from cutlass_ops.declare.problem import Problem
    from cutlass_ops.declare.signature import signature_from_json
    from cutlass_ops.tuner.trial import Trial

    signature, problem = signature_from_json(job["signature"]), Problem.from_json(job["problem"])
    emit("preparing")
    try:
        trial = Trial(signature, problem, device, spreads=job["spreads"])
    except torch.OutOfMemoryError:
        emit("impossible", why="its tensors do not fit into the device's memory")
        return
    for number, kernel in enumerate(job["kernels"]):
        emit("checking", kernel=number)
        entrant = Ordered(config_from_json(kernel["config"]), TileOrder.from_json(kernel["order"]))
        wrong = trial.admit(entrant, loader.load(open_entry(Path(kernel["folder"]))))
        if wrong is None:
            trial.rehearse(entrant)
        else:
            emit("wrong", kernel=number, why=wrong)
    emit("peers")
    trial.admit_peers()
    measured, others = trial.race(job["rounds"], lambda: emit("racing"))
    here, today = torch.cuda.get_device_properties(device), datetime.datetime.now(datetime.timezone.utc)
    points = (Point(problem, f"{today:%Y-%m-%d}", measured, others),) if measured else ()
    emit("done", table=Table(here.name, here.multi_processor_count, signature, points).to_json())
    del trial
    torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
