"""One part of a scenario of bench_cold.py, which runs this script in a process of its own with a JSON of options.

PyTorch and this library are imported late: one scenario times the latter's import, and others have first calls that
import what they need.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any


def first_result(m: int, n: int, k: int, device: str = "cuda") -> dict[str, float]:
    """Return the milliseconds from the import of this library to a first result, beside a PyTorch that is warm."""
    import torch
    import torch.nn.functional as F  # noqa: N812

    x, weight, bias = (torch.randn(*shape, device=device, dtype=torch.bfloat16) for shape in ((m, k), (n, k), (n,)))
    F.relu(F.linear(x, weight, bias))
    synchronise = torch.cuda.synchronize if device == "cuda" else torch.cpu.synchronize
    synchronise()
    began = time.perf_counter()
    import cutlass_ops as co

    imported = time.perf_counter()
    co.gemm_bias_relu(x, weight.t(), bias)
    synchronise()
    ended = time.perf_counter()
    times = {"first_ms": ended - began, "import_ms": imported - began, "call_ms": ended - imported}
    return {name: round(1e3 * seconds, 1) for name, seconds in times.items()}


def part_of(options: dict[str, Any]) -> dict[str, Any]:
    """Run a part; return what it shows."""
    name, part = options["scenario"], options["part"]
    kind, _, which = name.partition("-")
    if part == "about":
        import harness

        return harness.about("cuda")
    first = first_result(*options["first"]) if part == "use" else {}
    seconds, settle = options["seconds"], options["settle"]
    import torch

    if kind == "serve" or part in ("fill", "use"):
        import cold_serving

        with torch.no_grad():
            found = cold_serving.run(
                which if kind == "serve" else "bias_relu",
                options["seed"],
                seconds,
                # Another program's requests fill the store.
                request_seed=int(part == "fill"),
                settle=settle,
                warm_up=options["warm_up"] or part == "fill",
                processors=options["processors"],
            )
        return {**first, **found}
    import cold_programs

    if kind == "graph":
        with torch.no_grad():
            modes = {"graph-relaxed": "relaxed", "graph-thread_local": "thread_local"}
            return cold_programs.graphs(options["sizes"], modes.get(name, "global"))
    if kind == "compile":
        return cold_programs.compiled(part, which, settle)
    if kind == "train":
        # Of torch.compile only the first step is wanted.
        return cold_programs.trained(part, name, seconds if part == "ours" else min(seconds, 5.0))
    return cold_programs.without_compiler()


def main() -> None:
    """Run a part, and write its JSON."""
    options = json.loads(sys.argv[1])
    found = part_of(options)
    from cutlass_ops.compilation.background import Background

    Background.current().close()
    Path(options["report"]).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
