"""Nsight Compute's CSV, what counters say of a kernel, the report, and machines where ncu cannot count."""

import sys
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

from cutlass_ops.base.errors import MeasuringError
from cutlass_ops.declare.chips import CHIPS
from cutlass_ops.tools.profile import counters, ncu, plotting, profiling, report, tracing
from cutlass_ops.tools.profile.counters import Kernel
from cutlass_ops.tools.profile.diagnosis import diagnose
from cutlass_ops.tools.profile.ncu import Refusal, Request

H100 = CHIPS["NVIDIA H100 80GB HBM3"]
PERCENT = "avg.pct_of_peak_sustained"
COLUMNS = {
    "gpu__time_duration.sum": "ns",
    "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed": "%",
    f"sm__inst_executed_pipe_tensor_op_gmma.{PERCENT}_active": "%",
    f"sm__inst_executed_pipe_tensor_op_hmma.{PERCENT}_active": "%",
    f"sm__inst_executed_pipe_fma.{PERCENT}_active": "%",
    f"sm__inst_executed_pipe_fmaheavy.{PERCENT}_active": "%",
    f"gpu__dram_throughput.{PERCENT}_elapsed": "%",
    f"lts__throughput.{PERCENT}_elapsed": "%",
    "lts__t_sector_hit_rate.pct": "%",
    f"sm__warps_active.{PERCENT}_active": "%",
    "launch__waves_per_multiprocessor": "",
    "launch__registers_per_thread": "register/thread",
    "dram__bytes.sum": "byte",
    "smsp__average_warps_issue_stalled_long_scoreboard_per_issue_active.ratio": "inst",
    "smsp__average_warps_issue_stalled_barrier_per_issue_active.ratio": "inst",
}
GEMM = "void cutlass::device_kernel<Kernel<(int)1, f(int)>>(Kernel<(int)1>::Params)"


def raw(*launches, columns=COLUMNS):
    """Return a CSV as `ncu --csv --page raw` writes it: progress, names, units, a line for each launch."""

    def row(*cells):
        return ",".join(f'"{cell}"' for cell in cells)

    fixed = ("ID", "Process ID", "Process Name", "Host Name", "Kernel Name", "Context", "Stream", "Block Size",
             "Grid Size", "Device", "CC")  # fmt: skip
    lines = ["==PROF== Connected to process 4711", '==PROF== Profiling "kernel" - 0: 0%....100% - 9 passes']
    lines += [row(*fixed, *columns), row(*[""] * len(fixed), *columns.values())]
    for i, (name, *values) in enumerate(launches):
        start = (i, 4711, "python3.11", "127.0.0.1", name, 1, 7, "(384, 1, 1)", "(132, 1, 1)", 0, "9.0")
        lines.append(row(*start, *values))
    return "\n".join([*lines, "==PROF== Disconnected from process 4711", ""])


HEALTHY = (GEMM, "150,000.00", "81.25", "70", "0", "1.5", "2.5", "20", "35", "85.5", "18.7", "1.94", "168",
           "100,000,000", "3.25", "0.75")  # fmt: skip


def test_a_raw_page_is_read():
    (kernel,) = counters.kernels(raw(HEALTHY))
    assert kernel == Kernel(
        "cutlass::device_kernel<Kernel<(int)1, f(int)>>", 1, 150.0, (9, 0), tensor=81.25, fma=2.5, dram=20.0, l2=35.0,
        l2_hits=85.5, occupancy=18.7, waves=1.94, wgmma=True, bytes=1e8, registers=168,
        stalls={"barrier": 0.75, "long_scoreboard": 3.25},
    )  # fmt: skip


def test_launches_of_a_kernel_are_averaged_by_time_and_the_longest_kernel_is_first():
    long = (GEMM, "300000", "40", *HEALTHY[3:])
    other = ("void at::native::add(int)", "900000", "0", *["n/a"] * 13)
    found = counters.kernels(raw(HEALTHY, other, long))
    assert [(k.calls, k.microseconds) for k in found] == [(1, 900.0), (2, 450.0)]
    assert found[1].tensor == pytest.approx((81.25 * 150 + 40 * 300) / 450)
    assert (found[0].name, found[0].fma, found[0].wgmma) == ("at::native::add", None, None)


def test_a_page_of_lines_is_read_with_its_units():
    start = '"0","4711","python3","host","gemv(float *)","1","7","(256, 1, 1)","(58, 1, 1)","0","8.6"'
    header = (
        '"ID","Process ID","Process Name","Host Name","Kernel Name","Context","Stream","Block Size","Grid Size",'
        '"Device","CC","Section Name","Metric Name","Metric Unit","Metric Value"'
    )
    lines = [
        f'{start},"Command line profiler metrics","gpu__time_duration.sum","usecond","1,041.28"',
        f'{start},"Command line profiler metrics","dram__bytes.sum","Mbyte","2.5"',
        f'{start},"Command line profiler metrics","dram__throughput.{PERCENT}_elapsed","%","71.4"',
        f'{start},"Command line profiler metrics","sm__pipe_tensor_cycles_active.{PERCENT}_elapsed","","n/a"',
    ]
    (kernel,) = counters.kernels("\n".join([header, *lines]))
    assert (kernel.name, kernel.capability, kernel.tensor) == ("gemv", (8, 6), None)
    assert (kernel.microseconds, kernel.bytes, kernel.dram) == (pytest.approx(1041.28), 2.5e6, 71.4)


@pytest.mark.parametrize("text", ["", "==ERROR== ERR_NVGPUCTRPERM", '"Kernel","Time"\n"a","1"'])
def test_a_text_without_a_table_is_refused(text):
    with pytest.raises(ValueError, match="ncu --csv --page raw"):
        counters.kernels(text)


# ---- Diagnoses ------------------------------------------------------------------------------------------------------

BUSY = Kernel("k", 1, 150.0, (9, 0), tensor=81.0, fma=2.0, dram=20.0, l2=35.0, wgmma=True, waves=3.9)


@pytest.mark.parametrize(
    ("kernel", "name", "says", "advice"),
    [
        (BUSY, "healthy", "81% busy", "nothing"),
        (replace(BUSY, tensor=5.0, dram=88.0), "memory-bound", "the wrong metric", "move fewer bytes"),
        (replace(BUSY, tensor=70.0, dram=65.0), "healthy", "70% busy", "nothing"),
        (replace(BUSY, tensor=0.0, fma=80.0), "cuda-cores", "FP32 pipe is 80% busy", "ask co.contract"),
        (replace(BUSY, tensor=62.0, wgmma=False), "mma.sync", "62% busy by mma.sync", "what wgmma needs"),
        (replace(BUSY, tensor=62.0, wgmma=False, capability=(8, 0)), "healthy", "62% busy", "nothing"),
        (replace(BUSY, tensor=30.0, waves=1.05), "edges", "1.05 waves of blocks: on average 52%", "stream-K"),
        (replace(BUSY, tensor=30.0, waves=0.5), "edges", "on average 50%", "split K"),
        (replace(BUSY, tensor=3.0, microseconds=9.0, calls=3), "short", "3.0 us a launch", "CUDA graph"),
        (replace(BUSY, tensor=30.0, stalls={"gmma": 6.0, "wait": 2.0}), "waiting", "Tensor Cores 30%", "75% of their"),
        (replace(BUSY, tensor=30.0), "waiting", "nothing is busy", "source page"),
        (replace(BUSY, tensor=1.0, stalls={"tex_throttle": 1.0}), "waiting", "nothing is busy", "for tex throttle"),
        (Kernel("k", 2, 30.0, (9, 0)), "time only", "15.0 us a launch", "ncu"),
    ],
)
def test_what_counters_say(kernel, name, says, advice):
    found = diagnose(kernel)
    assert (found.name, says in found.says, advice in found.advice) == (name, True, True), found


# ---- The report -----------------------------------------------------------------------------------------------------


def _report(*kernels, traced=None):
    return report.Report(kernels or (BUSY,), "ncu", traced or {}, H100)


@pytest.mark.slow
@pytest.mark.parametrize("suffix", [".svg", ".png"])
def test_the_roofline_is_drawn(tmp_path, suffix):
    pytest.importorskip("matplotlib")
    found = _report(*(replace(BUSY, name=f"kernel{i}", bytes=1e7 * (i + 1)) for i in range(14)))
    path = tmp_path / f"roofline{suffix}"
    plotting.require(path)
    plotting.roofline(found.points(), H100, path)
    if suffix == ".png":
        assert path.read_bytes().startswith(b"\x89PNG")
    else:
        ElementTree.parse(path)
        text = path.read_text()
        assert all(f"<!-- {i} kernel{i - 1} -->" in text for i in range(1, 13))
        assert "<!-- Tensor Cores, 16 bits: 989 TFLOP/s -->" in text


RECORDED = Path(__file__).parents[1] / "golden" / "ncu_h100.csv"


def test_a_recording_of_an_h100_is_read_and_judged():
    by_name = {kernel.name.partition("<")[0]: kernel for kernel in profiling.read(RECORDED).kernels}
    fp32, half = (next(k for name, k in by_name.items() if name.startswith(x)) for x in ("sm80_xmma", "nvjet"))
    add = by_name["at::vectorized_elementwise_kernel"]
    assert [round(k.tensor) for k in (half, fp32)] == [90, 0]
    assert round(fp32.fma) == 80
    assert (half.wgmma, fp32.wgmma, half.calls, half.registers) == (True, False, 2, 168)
    assert "gmma" in half.stalls
    assert [diagnose(k).name for k in (half, fp32, add)] == ["healthy", "cuda-cores", "memory-bound"]


# ---- ncu ------------------------------------------------------------------------------------------------------------

REQUEST = Request(("python", "train.py", "--steps", "3"), launches=5, skip=2, kernels="gemm|mma")


def test_the_command_asks_for_what_the_reader_reads():
    command = REQUEST.command("ncu", "out.csv")
    assert command[-4:] == REQUEST.program
    text = " ".join(command)
    for part in (
        "--csv --page raw --print-units base",
        "--clock-control none",
        "--launch-skip 2 --launch-count 5 --kernel-name regex:gemm|mma --log-file out.csv python",
        "gpu__time_duration.sum,sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed,dram__bytes.sum",
    ):
        assert part in text
    assert "--profile-from-start off" in " ".join(Request(("x",), marked=True).command("ncu", None))


@pytest.mark.parametrize(
    ("status", "text", "said", "why"),
    [
        (
            *(1, "==ERROR== ERR_NVGPUCTRPERM - The user does not have permission to access NVIDIA GPU Performance", ""),
            "NVreg_RestrictProfilingToAdminUsers=0",
        ),
        (9, "==ERROR== Failed to initialize the profiler: LibraryNotLoaded", "", "ncu does not work on this machine"),
        (0, "==WARNING== No kernels were profiled.", "", "check --kernels"),
        (1, "==PROF== Connected", "Traceback\nValueError: no such layer", "ValueError: no such layer"),
    ],
)
def test_where_there_are_no_counters_it_says_why_and_the_command(status, text, said, why):
    found = ncu.judged(REQUEST, "/usr/bin/ncu", status, text, said)
    assert isinstance(found, Refusal)
    assert why in found.why
    assert str(found).splitlines()[-1].startswith("  /usr/bin/ncu --csv ")
    assert "'regex:gemm|mma'" in str(found)  # as a shell takes it
    assert str(found).endswith("--log-file counters.csv python train.py --steps 3")


FAKE = """#!{python}
import sys
log = sys.argv[sys.argv.index("--log-file") + 1]
open(log, "w").write(open({csv!r}).read())
"""


@pytest.fixture
def gpu(monkeypatch):
    """A machine that says it has an H100."""

    class Properties:
        name = H100.name

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: Properties)


@pytest.fixture
def fake_ncu(tmp_path, monkeypatch):
    def install(text):
        (tmp_path / "recorded.csv").write_text(text)
        program = tmp_path / "ncu"
        program.write_text(FAKE.format(python=sys.executable, csv=str(tmp_path / "recorded.csv")))
        program.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path))

    return install


def test_a_script_is_counted_and_its_csv_kept(tmp_path, gpu, fake_ncu):
    fake_ncu(raw(HEALTHY))
    script = tmp_path / "train.py"
    script.write_text("")
    asked = profiling.Asked(str(script), (), traced=False)
    found, refusal = profiling.run(asked, tmp_path / "kept.csv")
    assert (found.source, found.chip, refusal) == ("ncu", H100, None)
    assert [k.microseconds for k in found.kernels] == [150.0]
    assert profiling.read(tmp_path / "kept.csv").kernels == found.kernels


def test_without_permission_times_are_taken_by_pytorch(tmp_path, gpu, fake_ncu, monkeypatch):
    fake_ncu("==ERROR== ERR_NVGPUCTRPERM")
    monkeypatch.setattr(profiling, "trace", lambda *_: [Kernel("k", 2, 30.0, (9, 0))])
    script = tmp_path / "train.py"
    script.write_text("")
    found, refusal = profiling.run(profiling.Asked(str(script), ()))
    assert (found.source, [d.name for d in found.diagnoses]) == ("torch.profiler", ["time only"])
    assert "--cap-add=SYS_ADMIN" in refusal.why


def test_what_a_program_needs_is_compiled_before_it_runs_under_ncu(tmp_path, gpu, monkeypatch):
    ran, script = [], tmp_path / "train.py"

    def counted(request, timeout, env):
        ran.append(("ncu", env["CUTLASS_OPS_JIT"], env["CUTLASS_OPS_STAND_IN"]))
        return raw(HEALTHY)

    monkeypatch.delenv("CUTLASS_OPS_JIT", raising=False)
    monkeypatch.setattr(ncu, "count", counted)
    script.write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    with monkeypatch.context() as patched:
        patched.setattr(profiling, "trace", lambda program, timeout, env: ran.append(("traced",)) or [])
        profiling.run(profiling.Asked(str(script), ()))
    profiling.run(profiling.Asked(str(script), (), traced=False))
    assert ran == [("traced",), ("ncu", "0", "0"), ("ncu", "0", "0")]
    assert (tmp_path / "ran").exists()  # without the profiler it runs by itself


# ---- torch.profiler -------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_script_is_traced_as_python_would_run_it(tmp_path):
    (tmp_path / "beside.py").write_text("steps = 3")
    script = tmp_path / "train.py"
    script.write_text(
        "import sys, torch, beside\n"
        "assert __name__ == '__main__' and sys.argv[1:] == ['--steps', '3'] and beside.steps == 3\n"
        "torch.ones(8, 8) @ torch.ones(8, 8)\n"
        "sys.exit(0)\n"
    )
    assert tracing.trace([str(script), "--steps", "3"], 120) == []  # no GPU, so no kernels
    script.write_text("raise ValueError('no such layer')")
    with pytest.raises(MeasuringError, match="no such layer"):
        tracing.trace([str(script)], 120)
