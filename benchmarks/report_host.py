"""What a call, a server and a compiler cost the host, for report.py."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

Table = Callable[..., str]
Raw = Callable[..., str]

_CALLS = {"ours": "ours", "PyTorch": "PyTorch", "with `out`": "ours(out=)", "prepared": "launch()"}

_SERVERS = {
    "serving_cold_h200": "no kernels",
    "serving_installed_h200": "installed kernels",
    "serving_warm_h200": "kernels in the store",
    "serving_warm_busy_h200": "the same, without pauses",
    "serving_ready_h200": "the same, after `warm_up` and `gc.freeze()`",
}
_FIRST = {
    "first_call_h100": "unsigned bundle",
    "first_call_signed_h100": "signed bundle",
    "first_call_installed_h200": "installed kernels",
}
_WAYS = ("statistic", "gathered", "beside", "ahead")


def _read(results: Path, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((results / f"{name}.json").read_text())
    return found


def norms(results: Path, table: Table, raw: Raw) -> list[str]:
    """Return what each way to a row's statistic costs, over our GEMM without a norm."""
    rows = _read(results, "rmsnorm_h100")["rows"]
    found: dict[str, dict[str, list[float]]] = {"M ≤ 64": {}, "M > 64": {}}
    for row in rows:
        taken = next((way for way in ("beside", "ahead") if way in row["kernel"]), "gathered")
        gemm = row["over_ours"]["gemm"]["median"]
        over = {name: value["median"] / gemm for name, value in row["over_ours"].items()} | {taken: 1 / gemm}
        for way in _WAYS:
            if way in over:
                found["M ≤ 64" if row["m"] <= 64 else "M > 64"].setdefault(way, []).append(over[way])
    lines = [
        (rows, *(f"{min(of[way]):.3f} to {max(of[way]):.3f}" if way in of else "–" for way in _WAYS))
        for rows, of in found.items()
    ]
    return [
        "## Ways to a row's statistic",
        f"RMSNorm + GEMM on the grid ({raw('rmsnorm_h100')}): the time over that of our GEMM without a norm, above 1 "
        "is slower. *statistic* gets the sums of squares from the previous GEMM. – means: not legal.",
        table(("rows", *_WAYS), lines, text=("rows",)),
    ]


def host(results: Path, table: Table, raw: Raw) -> list[str]:
    """Return the host time of each form of call."""
    data = _read(results, "host_calls_h200")
    forms = [row for row in data["rows"] if "us" in row]

    def cells(form: dict[str, Any]) -> list[str]:
        times = [form["us"].get(call) for call in _CALLS.values()]
        ratios = [form.get(key) for key in ("over_pytorch", "launch_over_out")]
        shown = ["–" if x is None else f"**{x:.3f}**" if x > 1 else f"{x:.3f}" for x in ratios]
        return [*("–" if x is None else f"{x[0]:.2f}" for x in times), *shown]

    header = ("form", *_CALLS, "ours / PyTorch", "prepared / with `out`")
    return [
        "## Host time",
        f"The time to enqueue one warm call, in µs, the median over the rounds ({raw('host_calls_h200')}, "
        f"{data['date']}, {data['processors']} cores of {data['processor']}; {raw('host_h100')} has an H100). Problems "
        "are too small to fill the queue. Rows are of three runs on such machines, between which the code changed; "
        "those of layers with gradients are of the last one, where calls were small up to 2³⁴ multiplications. "
        "Below 1, ours costs less. *Prepared* is a launch of `co.prepare_launch`. In rows of layers, *both* is a "
        "forward and a backward, and *by kernels* what larger layers run.",
        table(header, [(form["form"], *cells(form)) for form in forms], text=("form",)),
    ]


def servers(results: Path, table: Table, raw: Raw) -> list[str]:
    """Return what a server's calls wait for, and a process's first call."""
    lines = []
    for name, title in _SERVERS.items():
        found = _read(results, name)["summary"]
        ms = [f"{found[key] / 1e3:.2f}" for key in ("first_us", "median_us", "pytorch_median_us", "p999_us")]
        lines.append((raw(name, title), *ms, f"{found['pytorch_p999_us'] / 1e3:.2f}", found["long_waits"]))
    header = ("kernels", "first call", "median", "PyTorch's", "99.9% below", "PyTorch's, 99.9%", "others over 5 ms")
    first = []
    for name, title in _FIRST.items():
        for key, collected in (("collected", "before"), ("not_collected", "left to chance")):
            found = _read(results, name)["summary"][key]
            spans = f"{found['least']} to {found['most']}"
            ms = [f"{found[part]:.0f}" for part in ("import", "bundle", "call")]
            first.append((raw(name, title), collected, f"{found['first']:.0f}", spans, *ms))
    kinds = ("kernels", "garbage collection", "first result", "range", "import", "bundle", "call")
    return [
        "## Servers and first calls",
        "2,000 random requests at four weights, one after the other, host time in ms. All but the last were measured "
        "before PyTorch served calls whose kernel is not there. "
        f"{raw('cold_serving_h200', 'Since then')} a cold server's GPU time is PyTorch's until kernels come.",
        table(header, lines, text=("kernels",)),
        "A process's first result, in ms, after PyTorch's import and CUDA's start:",
        table(kinds, first, text=("kernels", "garbage collection")),
    ]


def compiling(results: Path, table: Table, raw: Raw) -> list[str]:
    """Return what compiling takes."""
    data = _read(results, "compile_2_processors")
    lines = [
        (f"`{row['kernel']}`", f"{row['ours_s']:.1f}", f"{row['nvcc_s']:.1f}", f"{row['ratio']:.2f}")
        for row in data["rows"]
    ]
    return [
        "## Compile time",
        f"One kernel on {data['processors']} idle processors, seconds ({raw('compile_2_processors')}, {data['date']}). "
        f"*nvcc* makes a shared library of the same source by one nvcc {data['nvcc']}.",
        table(("kernel", "ours", "nvcc", "ratio"), lines, text=("kernel",)),
    ]


def shipping(results: Path, table: Table, raw: Raw) -> list[str]:
    """Return what kernels to ship take: wheels, bundles, and machines that share them."""
    sizes = _read(results, "pool_sizes")
    wheels = [
        (arch, f"{row['behind']:.0%}", row["kernels"], row["compressed_mb"], row["installed_mb"], f"{row['mean']:.2%}")
        for arch, found in sizes["architectures"].items()
        for row in found["rows"]
        if arch == "sm_90a" or row["behind"] == 0.03
    ]
    bundles = [_read(results, f"bundle_{processors}_processors") for processors in (2, 16)]
    seconds = [(each["processors"], *(f"{row['seconds']:.0f}" for row in each["rows"])) for each in bundles]
    fleet = _read(results, "fleet")
    waits = [
        (r["scenario"], r["compilations"], r["fetched"], r["wrong_or_missing"], r["longest_wait_seconds"])
        for r in fleet["rows"]
    ]
    clients, kernels = fleet["rows"][0]["clients"], fleet["rows"][0]["kernels"]
    return [
        "## Kernels to ship",
        f"Wheels by how far a kernel may be behind the fastest, in MB: the mean size of {sizes['sample']} kernels "
        f"times their number ({raw('pool_sizes')}, {sizes['date']}).",
        table(("for", "behind", "kernels", "wheel", "installed", "mean behind"), wheels, text=("for", "behind")),
        f"Two runs of `cutlass-ops bundle` with {bundles[0]['kernels']} kernels, {bundles[0]['bytes'] / 1e6:.2f} MB, "
        f"in seconds ({raw('bundle_2_processors')}, {raw('bundle_16_processors')}):",
        table(("processors", "first", "second"), seconds, text=()),
        f"{clients} cold clients that share {kernels} kernels through a server, with a compiler of "
        f"{fleet['compile_seconds']:.0f} s; the longest wait in seconds ({raw('fleet')}, {fleet['date']}):",
        table(("scenario", "compilations", "fetched", "wrong or missing", "longest wait"), waits, text=("scenario",)),
    ]


def sections(results: Path, table: Table, raw: Raw) -> list[str]:
    """Return all paragraphs."""
    return [part for section in (norms, host, servers, compiling, shipping) for part in section(results, table, raw)]
