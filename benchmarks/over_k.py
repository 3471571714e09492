"""What the scripts that measure errors over K share: problems, kernels, errors, and the parts of documents they write.

A problem is D (M, N) of A (M, K) and B (K, N), with M = N. M and N are so large on a GPU that no library has a reason
to split K, which would shorten the sums. One kernel of each signature serves at every K. It is the fastest one of which
a block takes all of K, so that its sums are in one order.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import harness
import torch
from torch import Tensor

from cutlass_ops.choose import dispatch, policies
from cutlass_ops.declare.device import Device
from cutlass_ops.declare.problem import Problem
from cutlass_ops.declare.spec import KernelSpec
from cutlass_ops.operand.call import device_of
from cutlass_ops.run.requests import Request

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from examples.documents import insert

ROOT = Path(__file__).resolve().parents[1]
KS = tuple(2**power for power in range(6, 18))  # 64 to 131072
SIDE = {"cpu": 64, "cuda": 4096}  # M and N
SAMPLED = 256  # rows of D that are compared
_CHOSEN_AT = 4096  # K

Row = dict[str, Any]
Result = dict[str, Any]


def error(difference: Tensor, exact: Tensor) -> float:
    """Return the relative error in the Frobenius norm, of which three digits count."""
    return float(f"{float(difference.norm() / exact.norm()):.3g}")


def kernel(asked: Request, device: Device) -> KernelSpec:
    """Return the kernel that serves a call at every K. The call's tensors need no data."""
    a, b, *inputs = asked.arguments
    out, out_dtype = asked.named.pop("out", None), asked.named.pop("out_dtype", None)
    call = asked.op.checked(a, b, tuple(inputs), asked.named, out, out_dtype)
    signature = harness.signature_of(call, device)
    decision = dispatch.decide(signature, device, Problem(call.problem.m, call.problem.n, _CHOSEN_AT))
    if decision is None:
        raise SystemExit(dispatch.unserved(asked.op.name, signature, device))
    others = policies.policy(signature, device).every(decision.problem)
    every = (decision.config, *(each.config for each in others))
    return device.spec(signature, next(config for config in every if config.whole_k))


def where(holds: Mapping[int, bool]) -> str:
    """Say for which K something holds."""
    found = [k for k, is_so in holds.items() if is_so]
    if not found:
        return "none"
    if len(found) == len(holds):
        return f"all, up to {max(found)}"
    if found == sorted(holds)[: len(found)]:
        return f"up to {max(found)}"
    return ", ".join(map(str, found))


def table(header: Sequence[object], rows: Iterable[Sequence[object]]) -> str:
    """Return a Markdown table of numbers, but for its first column."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def shown(value: float | None, digits: int = 2) -> str:
    """Return an error as text."""
    return "–" if value is None else "0" if value == 0 else f"{value:.{digits - 1}e}"


@dataclass(frozen=True)
class Report:
    """The part of a document that a script writes.

    Attributes
    ----------
    script, result, document : str
        Paths in the repository: of the script, of its committed result, and of the document.
    part : str
        The part's name, which its marks have.
    text : callable
        From a result to the part.
    draw : callable, optional
        Draws a result's plot.
    """

    script: str
    result: str
    document: str
    part: str
    text: Callable[[Result], str]
    draw: Callable[[Result], None] | None = None

    def written(self) -> str:
        """Return the document as it should be."""
        path = ROOT / self.result
        text = (
            self.text(json.loads(path.read_text()))
            if path.exists()
            else f"No result is committed yet: `python {self.script} --out {self.result}` on an H100\nwrites it, and "
            f"`python {self.script} --write` then fills this part."
        )
        return insert((ROOT / self.document).read_text(), self.part, text, self.script)

    def write(self) -> None:
        """Write the document, and the plot if there is a result."""
        (ROOT / self.document).write_text(self.written())
        path = ROOT / self.result
        if self.draw is not None and path.exists():
            self.draw(json.loads(path.read_text()))


def head(result: Result) -> str:
    """Say where a result is from."""
    side = result["rows"][0]["m"]
    return f"{result['chip']}, {result['date']}, PyTorch {result['torch']}; M = N = {side}, {SAMPLED} rows of D."


def main(
    description: str | None,
    report: Report,
    kernels: Callable[[Device, int], Iterable[KernelSpec]],
    measure: Callable[[Sequence[int], int, str], Iterator[Row]],
) -> None:
    """Measure and print; write the JSON, or the document.

    Parameters
    ----------
    description : str
        For the help.
    report : Report
        What the document has.
    kernels : callable
        From a device and M to the kernels that serve all calls.
    measure : callable
        Yields a row for each problem, from K, M and the device's type.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ks", nargs="+", type=int, default=KS, help="multiples of 16; default 64 to 131072")
    parser.add_argument("--side", type=int, default=None, help="M and N; default 4096, and 64 on the CPU")
    parser.add_argument("--out", type=Path, default=None, help="write the result as JSON; without it, only print")
    parser.add_argument("--write", action="store_true", help=f"write {report.document} from {report.result}, and end")
    args = parser.parse_args()
    if args.write:
        report.write()
        return
    device = "cuda" if torch.cuda.is_available() else "cpu"
    side = args.side or SIDE[device]
    about, rows = harness.about(device), []
    served: AbstractContextManager[None] = nullcontext()
    if device == "cuda":
        served = harness.serve_only(kernels(device_of(torch.device("cuda", 0)), side))
    with torch.no_grad(), served:
        for row in measure(sorted(args.ks), side, device):
            rows.append(row)
            print(json.dumps(row), flush=True)
    result = {**about, "rows": rows}
    if args.out is not None:
        harness.save(args.out, result)
    print(report.text(result))
