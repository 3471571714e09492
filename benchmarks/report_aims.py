"""The aims of this project as they can be computed from results: what was asked for, what came out, and why it is less.

report.py writes them into docs/performance.md.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from report_results import WORDS, size

Row = dict[str, Any]
Value = tuple[str, float]


class Aim(NamedTuple):
    """An aim.

    Attributes
    ----------
    what : str
        Description.
    file : str
        The result in benchmarks/results, without the ending.
    values : callable
        What counts of this result: names and numbers.
    least, most : float or None
        The limits of these numbers.
    missed : str
        Why the aim is missed, if it is.
    """

    what: str
    file: str
    values: Callable[[Row], Iterator[Value]]
    least: float | None = None
    most: float | None = None
    missed: str = ""

    def reached(self, value: float) -> bool:
        """Whether a number is within the limits."""
        return (self.least is None or value >= self.least) and (self.most is None or value <= self.most)


def over(*peers: str, where: Callable[[Row], bool] = lambda _: True) -> Callable[[Row], Iterator[Value]]:
    """Return the ratio to the fastest of these peers at each shape."""

    def values(data: Row) -> Iterator[Value]:
        for row in filter(where, data["rows"]):
            found = [row["over_ours"][peer]["median"] for peer in peers if peer in row["over_ours"]]
            if found:
                yield size(row), min(found)

    return values


def ratio(where: Callable[[Row], bool] = lambda _: True) -> Callable[[Row], Iterator[Value]]:
    """Return the ratio to the best peer at each shape."""
    return lambda data: ((size(row), row["ratio_to_best_peer"]) for row in filter(where, data["rows"]))


def mean(values: Callable[[Row], Iterator[Value]], name: str = "geometric mean") -> Callable[[Row], Iterator[Value]]:
    """Return the geometric mean of what another function returns."""
    return lambda data: iter([(name, statistics.geometric_mean(value for _, value in values(data)))])


def per(
    field: str, values: Callable[[Callable[[Row], bool]], Callable[[Row], Iterator[Value]]]
) -> Callable[[Row], Iterator[Value]]:
    """Return the geometric mean for each value of a field."""

    def found(data: Row) -> Iterator[Value]:
        for one in dict.fromkeys(row[field] for row in data["rows"]):
            yield from mean(values(lambda row, one=one: row[field] == one), str(WORDS.get(one, one)))(data)

    return found


def own_gemm(data: Row) -> Iterator[Value]:
    """Return our time over that of our GEMM without the norm, with many rows."""
    return ((size(r), 1 / r["over_ours"]["gemm"]["median"]) for r in data["rows"] if r["m"] >= 1024)


def form(key: str) -> Callable[[Row], Iterator[Value]]:
    """Return a number of every form of call."""
    return lambda data: ((each["form"], each[key]) for each in data["rows"] if each.get(key) is not None)


def summary(*path: str) -> Callable[[Row], Iterator[Value]]:
    """Return one number of a summary."""

    def values(data: Row) -> Iterator[Value]:
        found: Any = data["summary"]
        for key in path:
            found = found[key]
        yield path[-1], found

    return values


def least(key: str) -> Callable[[Row], Iterator[Value]]:
    """Return what a process takes to choose, in ms, where nothing is kept: the least of its repetitions."""

    def values(data: Row) -> Iterator[Value]:
        computed = [row for row in data["rows"] if row["which"] == "this" and not row["kept"]]
        for name in dict.fromkeys(row["epilogue"] for row in computed):
            yield name, min(row[key][0] for row in computed if row["epilogue"] == name)

    return values


def windows(data: Row) -> Iterator[Value]:
    """Return our GPU time over PyTorch's in each window of a server's calls."""
    return ((f"{r['scenario']} from {w['from_s']:.0f} s", w["gpu_ratio"]) for r in data["rows"] for w in r["windows"])


def long_calls(data: Row) -> Iterator[Value]:
    """Return how many of a server's calls took the host 5 ms more than PyTorch's."""
    return ((row["scenario"], row["extremes"]["host"]["over"]["ours"]) for row in data["rows"])


def settled(data: Row) -> Iterator[Value]:
    """Return the seconds after which a server's calls are within 3% of their best; all of them if they never were."""
    return ((row["scenario"], row["settled_s"] or row["seconds"]) for row in data["rows"])


def graphs(data: Row) -> Iterator[Value]:
    """Return a captured graph's time over that of a warm call."""
    return ((row["scenario"], row["over_warm"]) for row in data["rows"])


def tenth(data: Row) -> Iterator[Value]:
    """Return the speed of a compiled module's tenth iteration over that of PyTorch's."""
    return ((row["scenario"], row["ratio"]) for row in data["rows"] if "ratio" in row)


def steps(data: Row) -> Iterator[Value]:
    """Return our steps' time over eager PyTorch's in each window."""
    return (
        (f"{row['scenario']} from {w['from_s']:.0f} s", w["over_eager"])
        for row in data["rows"]
        for w in row["parts"]["ours"]["windows"]
    )


_PEERS = ("eager", "eager_one_linear", "compile", "liger")
_ADDING = "Threads add up sums while the Tensor Cores wait, and only a part of that is hidden."

# By result: its forms of calls, and how it ended.
_COLD = {
    "cold_serving_h200": (
        "plain and RMSNorm",
        "Before the host's half of a kernel was compiled without CUTLASS. At the end, kernels served all calls.",
    ),
    "cold_serving_fp8_h200": ("FP8 rows", "At the end, kernels served all calls."),
    "cold_serving_first_h200": (
        "bias + ReLU, SwiGLU and groups",
        "Before weights needed fewer kernels, and each less time. At the end, kernels served all calls.",
    ),
}
AIMS: Sequence[Aim] = (
    Aim("bias + ReLU, BF16, grid: no shape below 1", "gemm_bf16_h100", ratio(), least=1.0),
    Aim("plain GEMM, BF16, grid: no shape below 0.98", "gemm_plain_h100", ratio(), least=0.98),
    Aim(
        "bias + SiLU, BF16, grid: mean ≥ 1.15", "gemm_silu_h100", mean(ratio()), least=1.15,
        missed="torch.compile also computes SiLU in its kernels' epilogue. With up to 128 rows all kernels are near "
        "the memory's bandwidth. With K = 14336 the epilogue is a small part of the time.",
    ),
    Aim(
        "`rmsnorm_gemm`, N = 6144, M ≥ 1024: ≥ 1.10", "rmsnorm_h100",
        over(*_PEERS, where=lambda r: r["n"] == 6144 and r["m"] >= 1024), least=1.10,
        missed="PyTorch's norm is one pass over x, at most a tenth of the time of so narrow a GEMM. Both GEMMs run at "
        "the chip's power limit.",
    ),
    Aim(
        "`rmsnorm_gemm`, N = 28672, M ≥ 1024: ≥ 1.02", "rmsnorm_h100",
        over(*_PEERS, where=lambda r: r["n"] == 28672 and r["m"] >= 1024), least=1.02,
    ),
    Aim(
        "`rmsnorm_gemm`, M < 1024: ≥ 1.05", "rmsnorm_h100", over(*_PEERS, where=lambda r: r["m"] < 1024), least=1.05,
        missed="For one row, torch.compile's kernel does what ours does, and both are near the memory's bandwidth.",
    ),
    Aim("`rmsnorm_gemm`: no shape below 1", "rmsnorm_h100", over(*_PEERS), least=1.0),
    Aim(
        "`rmsnorm_gemm`, M ≥ 1024: time over our GEMM without the norm ≤ 1.02", "rmsnorm_h100", own_gemm, most=1.02,
        missed="Idle warps that compute the means share issue slots and the L2 cache with the main loop, and the last "
        "epilogues wait for them. Reading x is a third of the cost.",
    ),
    Aim("`gemm_swiglu`, M ≥ 1024: ≥ 1.10", "swiglu_h100", over(*_PEERS, where=lambda r: r["m"] >= 1024), least=1.10),
    Aim("`gemm_swiglu`: no shape below 1", "swiglu_h100", over(*_PEERS), least=1.0),
    Aim("decoder layer, BF16: ≥ 1.10", "layer_h100", over(*_PEERS), least=1.10),
    Aim(
        "norms: error ≤ 2 times PyTorch's", "accuracy_rmsnorm_h100",
        lambda data: ((f"{r['op']}, {r['case']}, {r['dtype']}, {r['way']}", r["ratio"]) for r in data["rows"]),
        most=2.0, missed="LayerNorm in one pass loses digits where a row's mean is far above its deviation "
        "([limits](rmsnorm.md#accuracy)).",
    ),
    Aim(
        "FP8, fast sums, scales of tensors: mean ≥ 1.05", "fp8_fast_h200",
        mean(ratio(lambda r: r["scales"] == "tensor")), least=1.05,
    ),
    Aim(
        "FP8, fast sums, scales of rows: mean ≥ 1.15", "fp8_fast_h200",
        mean(ratio(lambda r: r["scales"] == "rows")), least=1.15,
    ),
    Aim(
        "FP8, fast sums, scales of rows: no shape below 0.99", "fp8_fast_h200",
        ratio(lambda r: r["scales"] == "rows"), least=0.99,
    ),
    Aim(
        "SwiGLU quantised, fast sums, M ≥ 1024: ≥ 0.97 of the plain GEMM's speed", "gates_fast_h200",
        over("gemm", where=lambda r: r["m"] >= 1024), least=0.97,
        missed="At N = 28672 cooperative tiles are the fastest, and their epilogue is not hidden.",
    ),
    Aim(
        "SwiGLU quantised, promoted sums, M ≥ 1024: the same", "gates_h200",
        over("gemm", where=lambda r: r["m"] >= 1024 and r["math"] == "promoted"), least=0.97, missed=_ADDING,
    ),
    Aim(
        "SwiGLU quantised, fast sums: ≥ 1.25 over `_scaled_mm` and torch.compile", "gates_fast_h200", over("scaled_mm"),
        least=1.25, missed="Fusion saves only the second kernel, a small part of the time.",
    ),
    Aim(
        "FP8 decoder layer, 16 rows: ≥ 1.3 over BF16", "fp8_layer_h200",
        over("bf16", where=lambda r: r["m"] == 16), least=1.3,
    ),
    Aim(
        "FP8 decoder layer, ≥ 1024 rows: ≥ 1.5 over BF16", "fp8_layer_h200",
        over("bf16", where=lambda r: r["m"] >= 1024), least=1.5,
    ),
    Aim(
        "FP8 decoder layer: ≥ 1.15 over the compiled one", "fp8_layer_h200", over("rowwise"), least=1.15,
        missed="With many rows GEMMs take nearly all of the time, and both layers multiply in FP8.",
    ),
    Aim(
        "groups in FP8: mean ≥ 1.15", "grouped_fp8_h200", per("groups", ratio), least=1.15,
    ),
    Aim("groups in FP8: no case below 0.98", "grouped_fp8_h200", ratio(), least=0.98),
    Aim(
        "gradient of groups' weights: mean ≥ 1.3", "wgrad_h200", per("groups", ratio), least=1.3,
        missed="It loses where one group has all rows, 8192 or more. No cause is known.",
    ),
    Aim(
        "mixture of experts: ≥ 1.2 over transformers' default, compiled", "moe_h200", over("compile"), least=1.2,
        missed="Prefill of Mixtral is two large GEMMs, equally fast. Its decoding reads up to 2.8 GB of weights, which "
        "PyTorch's kernels do faster.",
    ),
    Aim(
        "training, Linear + GELU: mean ≥ 1.07", "training_h200",
        mean(over(*_PEERS, where=lambda r: r["layer"] == "linear_gelu")), least=1.07,
    ),
    Aim(
        "training, GatedMLP: mean ≥ 1.08", "training_h200",
        mean(over(*_PEERS, where=lambda r: r["layer"] == "swiglu")), least=1.08, missed="No cause is known.",
    ),
    Aim(
        "training, MLP 4096×14336×4096: ≥ 1.087", "training_h200",
        over(*_PEERS, where=lambda r: r["layer"] == "mlp" and (r["m"], r["n"], r["k"]) == (4096, 14336, 4096)),
        least=1.087, missed="No cause is known.",
    ),
    Aim(
        "training: peak memory over torch.compile's ≤ 1", "training_h200",
        lambda data: ((size(r), r["peak_mib"]["ours"] / r["peak_mib"]["compile"]) for r in data["rows"]), most=1.0,
    ),
    Aim(
        "every form of call: host time ≤ PyTorch's", "host_calls_h200", form("over_pytorch"), most=1.03,
        missed="A backward in Python; a layer's own Python before PyTorch serves it; casts and norms, which PyTorch's "
        "C++ does without Python; a view of each scale of one element.",
    ),
    Aim(
        "a prepared launch: host time ≤ 0.5 of a call with `out`", "host_calls_h200", form("launch_over_out"), most=0.5,
        missed="CUDA's own launch is most of what is left.",
    ),
    Aim(
        "a new number of rows: ≤ 50 µs beyond a warm call", "host_h200",
        lambda data: iter([("median", data["new_rows"]["first_us"][0] - data["new_rows"]["second_us"][0])]), most=50,
    ),
    Aim(
        "a new weight: ≤ 10 ms to choose", "choose_16_processors", least("weight"), most=10,
        missed="Times of some 190 kernels at 253 numbers of rows are predicted. From the second process on they are "
        "read from a file.",
    ),
    Aim(
        "first choice of a process: ≤ 100 ms", "choose_16_processors", least("first"), most=100,
        missed="RMSNorm has more tables to read and 170 checks of borrowed kernels.",
    ),
    Aim("first call, unsigned bundle: ≤ 100 ms", "first_call_h100", summary("collected", "first"), most=100),
    Aim(
        "first call, signed bundle: ≤ 100 ms", "first_call_signed_h100", summary("collected", "first"), most=100,
        missed="Checking the signature takes 16 to 20 ms, nearly all of it to import cryptography.",
    ),
    Aim(
        "first call, installed kernels: ≤ 100 ms", "first_call_installed_h200", summary("collected", "first"), most=100,
        missed="The call finds distributions and reads a manifest of all kernels. Imports take half.",
    ),
    Aim(
        "a cold server: ≤ 1 wait over 5 ms a signature, beside the first", "serving_cold_h200", summary("long_waits"),
        most=1, missed="The first call of each weight waits while threads look for kernels. Measured before PyTorch "
        "served such calls.",
    ),
    Aim(
        "a server with installed kernels: no wait over 5 ms, beside the first", "serving_installed_h200",
        summary("long_waits"), most=0, missed="The first call of each weight decides without a file, 27 to 60 ms.",
    ),
    Aim(
        "a warm server: 99.9% of calls ≤ 100 µs", "serving_warm_h200", summary("p999_us"), most=100,
        missed="PyTorch's median alone is higher on this machine. After `warm_up` and `gc.freeze()` no call waits.",
    ),
    *(
        Aim(f"a cold server, {forms}: GPU time ≤ 1.05 of PyTorch's in each 5 s", file, windows, most=1.05)
        for file, (forms, _) in _COLD.items()
    ),
    *(
        Aim(
            f"a cold server, {forms}: no call takes the host 5 ms more than PyTorch's", file, long_calls, most=0,
            missed="The first calls wait while another thread decides, and a garbage collection takes 0.1 s. Later "
            "ones are interrupted by compilers, as 5 to 102 of PyTorch's calls are.",
        )
        for file, (forms, _) in _COLD.items()
    ),
    *(
        Aim(
            f"a cold server, {forms}: calls within 3% of their best after 30 s", file, settled, most=30,
            missed="Four weights needed 50 to 75 kernels, which 16 processors compile at one to two a second. PyTorch "
            f"serves until then. {ended}",
        )
        for file, (forms, ended) in _COLD.items()
    ),
    Aim(
        "a cold training step: ≤ 1.10 of eager PyTorch's in each 5 s", "cold_training_h200", steps, most=1.10,
    ),
    Aim(
        "a graph captured at the third call: ≤ 1.02 of a warm call", "cold_graph_h200", graphs, most=1.02,
    ),
    Aim(
        "torch.compile's reduce-overhead at once: the tenth iteration ≥ PyTorch's", "cold_programs_h200", tenth,
        least=1.0,
    ),
    Aim(
        "torch.compile's default mode at once: the tenth iteration ≥ PyTorch's", "cold_compile_h200", tenth,
        least=1.0, missed="PyTorch serves two operators of the module, which cost the host 0.17 ms more than its own "
        "do beside compilers. With kernels, the module has 0.97 of PyTorch's speed.",
    ),
    Aim(
        "a wheel of all kernels for sm_90a, at 3%: ≤ 60 MB", "pool_sizes",
        lambda data: (
            ("MB", row["compressed_mb"]) for row in data["architectures"]["sm_90a"]["rows"] if row["behind"] == 0.03
        ),
        most=60,
    ),
    Aim(
        "compiling one kernel: ≤ 0.6 of one nvcc's time", "compile_2_processors",
        lambda data: ((row["kernel"], row["ratio"]) for row in data["rows"]), most=0.6,
    ),
    Aim(
        "compiling in files of four: ≤ 0.55 of the processor time before", "together_2_processors",
        lambda data: iter([("in a file of four", data["ratios"]["4"])]), most=0.55,
    ),
    Aim(
        "compiling alone: ≤ 0.85 of the processor time before", "together_2_processors",
        lambda data: iter([("alone", data["ratios"]["1"])]), most=0.85,
    ),
)  # fmt: skip


def measured(aim: Aim, results: Path) -> list[Value]:
    """Return what counts of an aim's result."""
    return list(aim.values(json.loads((results / f"{aim.file}.json").read_text())))


def cells(aim: Aim, results: Path) -> tuple[bool, tuple[str, str, str, str]]:
    """Return whether an aim is reached, and its line: the aim, what is reached, the cause of a miss, and the file."""
    values = measured(aim, results)
    missed = [value for value in values if not aim.reached(value[1])]
    of = f"{len(values) - len(missed)} of {len(values)}"
    name, furthest = (min if aim.most is None else max)(missed or values, key=lambda value: value[1])
    worst = number(furthest) if len(values) == 1 else f"{of}; {number(furthest)} ({name})"
    return not missed, (aim.what, worst, aim.missed if missed else "", aim.file)


def number(value: float) -> str:
    """Return a number as text, with as many digits as tell it from a limit."""
    return f"{value:.4g}" if value >= 10 else f"{value:.3f}"
