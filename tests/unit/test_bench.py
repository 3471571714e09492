"""``co.bench``: what is timed against what, ratios, tables, the page. No GPU: a clock of its own takes the times."""

import html.parser
import json

import numpy as np
import pytest
import torch

import cutlass_ops as co
from cutlass_ops.base import env
from cutlass_ops.base.errors import MeasuringError, NoDeviceError
from cutlass_ops.declare.chips import CHIPS
from cutlass_ops.declare.problem import Problem
from cutlass_ops.tools.bench import benching, rivals
from cutlass_ops.tools.workload import workload
from cutlass_ops.tuner.comparing import Timing

H100 = CHIPS["NVIDIA H100 80GB HBM3"]
# Microseconds of each way in three rounds. Medians of ratios: 1.25 and 0.9.
TIMES = {"ours": (10.0, 20.0, 40.0), "eager": (12.5, 26.0, 48.0), "cublaslt": (9.0, 17.0, 38.0)}


class Clock:
    """Run every way once on the CPU, and say how long it took."""

    device = "cpu"

    def __init__(self):
        self.asked = []

    def environment(self):
        return {"chip": H100.name, "date": "2026-11-26", "torch": torch.__version__, "driver": None}

    def timed(self, method, variants, expected_us, rounds):
        for run in variants.values():
            run(0), run(1)
        self.asked.append((method, tuple(variants), rounds))
        assert not env.stand_in()
        slower = 2 if method == "between" else 1
        return {name: Timing(tuple(slower * us / 1e3 for us in TIMES[name])) for name in variants}


@pytest.fixture(scope="module")
def found():
    clock = Clock()
    result = co.bench("gemm_bias_relu", "16,64x48x32", against=["eager", "cublaslt"], rounds=np.int64(3), clock=clock)
    assert clock.asked == 2 * [(method, ("ours", "eager", "cublaslt"), 3) for method in ("graph", "between")]
    return result


def test_ratios_are_formed_within_rounds(found):
    row = found.rows[0]
    assert row.problem == (16, 48, 32)
    eager = row.times["graph"]["eager"]
    assert (eager.ratio, eager.least, eager.most) == (1.25, 1.2, 1.3)
    assert (row.times["graph"]["cublaslt"].ratio, row.best("graph")) == (0.9, "cublaslt")
    assert row.times["between"]["ours"].microseconds == pytest.approx(40.0)
    assert found.geomean("eager") == pytest.approx(1.25)
    assert row.error_over_eager <= 2
    assert (row.flops, row.bytes) == (2 * 16 * 48 * 32, 2 * (16 * 32 + 32 * 48 + 48 + 16 * 48))


def test_json_has_everything(found):
    data = json.loads(json.dumps(found.to_json()))
    assert data["geomean"]["graph"] == {"eager": 1.25, "cublaslt": 0.9}
    assert data["rows"][1]["times"]["between"]["eager"] == {"us": 52.0, "ratio": 1.25, "range": [1.2, 1.3]}
    assert (data["chip"], data["rows"][0]["bound"]) == (H100.name, "launch")


def test_ways_that_do_not_compute_the_op_or_fail_are_named(monkeypatch):
    def fails(work):
        def run(a, b, inputs):
            raise RuntimeError("no kernel image\nand more")

        return run

    monkeypatch.setitem(rivals._MAKERS, "quack", fails)
    result = co.bench("gemm_bias_silu", (16, 48, 32), against=["eager", "cublaslt", "triton", "quack"], clock=Clock())
    missing = result.rows[0].missing
    assert set(missing) == {"cublaslt", "triton", "quack"}
    assert missing["quack"] == "failed: no kernel image"
    assert "not timed: triton: written for plain GEMM, bias, and bias with ReLU only" in str(result)
    assert "cuBLASLt has no such epilogue" in result.html()


@pytest.mark.parametrize("name", ["triton", "quack"])
def test_a_way_that_is_not_installed_says_how_to_get_it(name, monkeypatch):
    monkeypatch.setattr(rivals, "find_spec", lambda _: None)
    with pytest.raises(rivals.Missing, match="pip install"):
        rivals.rival(name, workload("gemm", Problem(16, 48, 32), "bf16"))


@pytest.mark.parametrize("name", ["gemm", "gemm_bias_gelu", "rmsnorm_gemm", "layernorm_gemm", "gemm_residual_rms"])
def test_every_op_has_tensors_and_a_right_result(name):
    result = co.bench(name, (16, 48, 32), dtype="f16", against=["eager"], clock=Clock())
    assert result.rows[0].error_over_eager <= 2


@co.epilogue
def swished(acc, bias: co.Row):
    return co.e.silu(acc + bias)


@pytest.mark.parametrize(
    ("op", "name"),
    [
        (co.gemm_bias_relu, "gemm_bias_relu"),
        (co.gemm, "gemm"),
        (co.rmsnorm_gemm, "rmsnorm_gemm"),
        (swished, "swished"),
        (f"{__name__}:swished", f"{__name__}:swished"),
    ],
)
def test_what_other_functions_take_is_timed(op, name):
    result = co.bench(op, (16, 48, 32), against=["eager"], clock=Clock())
    assert result.op == name
    assert result.rows[0].times


@pytest.mark.parametrize("dtype", ["i8", "e4m3", "f64"])
def test_other_types_are_drawn_multiplied_and_compared(dtype):
    result = co.bench("gemm", (16, 48, 32), dtype=dtype, against=["eager"], clock=Clock())
    assert set(result.rows[0].times["graph"]) == {"ours", "eager"}
    assert result.rows[0].error_over_eager <= 2
    a, _, _ = workload("gemm", Problem(16, 48, 32), dtype).draw("cpu")
    assert len(a.float().unique()) > 10


def test_fp32_is_tf32_for_both_sides_if_the_op_says_so(monkeypatch):
    monkeypatch.setattr(benching, "_WORST_ERROR", float("inf"))  # PyTorch has no TF32 on the CPU
    seen = []

    class Watching(Clock):
        def timed(self, *arguments):
            seen.append(torch.backends.cuda.matmul.allow_tf32)
            return super().timed(*arguments)

    result = co.bench("gemm", (16, 48, 32), dtype="tf32", against=["eager"], clock=Watching())
    assert seen == [True, True]
    assert not torch.backends.cuda.matmul.allow_tf32
    assert result.rows[0].roofline.compute == pytest.approx(2 * 16 * 48 * 32 / (0.5 * 989.4e6))


def test_a_wrong_result_is_not_timed(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(benching, "_WORST_ERROR", -1.0)
    with pytest.raises(MeasuringError, match="gemm at 16x48x32 is wrong"):
        co.bench("gemm", (16, 48, 32), against=[], clock=clock)
    assert clock.asked == []


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        ({"op": "gem", "problems": (8, 8, 8)}, ValueError, "is not the name of an op"),
        ({"op": "gemm", "problems": "8x8"}, ValueError, "is not a problem size"),
        ({"op": "gemm", "problems": (8, 8, 8), "against": ["cudnn"]}, ValueError, "use some of eager, cublaslt"),
        ({"op": "gemm", "problems": (8, 8, 8), "rounds": 0}, ValueError, "use at least 1"),
        ({"op": "gemm", "problems": (8, 8, 8), "dtype": "f33"}, ValueError, "is not an element type"),
        (
            {"op": torch.relu, "problems": (8, 8, 8)},
            TypeError,
            "^op is <built-in .*>: pass cutlass_ops.gemm, a named op such as cutlass_ops.gemm_bias_relu or its name",
        ),
        ({"op": "gemm", "problems": None}, TypeError, "^a problem is a text .*, not NoneType"),
        ({"op": "gemm", "problems": [None]}, TypeError, "^a problem is a text .*, not NoneType"),
        (
            {"op": "gemm", "problems": (8, 8, 8), "against": None},
            TypeError,
            "^against must be a list of .*, not NoneType",
        ),
        ({"op": "gemm", "problems": (8, 8, 8), "against": "cudnn"}, ValueError, "'cudnn' is not .*use some of eager"),
        ({"op": "gemm", "problems": (8, 8, 8), "rounds": "3"}, TypeError, "rounds must be an integer, not str"),
        ({"op": "gemm", "problems": (8, 8, 8), "rounds": True}, TypeError, "rounds must be an integer, not bool"),
        ({"op": "gemm", "problems": (8, 8, 8), "a": None}, TypeError, "^a must be 'row' or 'col', not NoneType"),
        ({"op": "gemm", "problems": (8, 8, 8)}, NoDeviceError, "run it on a machine with a GPU"),
    ],
)
def test_wrong_arguments(arguments, error, says, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(error, match=says):
        co.bench(**arguments)


# ---- The page -------------------------------------------------------------------------------------------------------

_VOID = {"meta"}


class Reader(html.parser.HTMLParser):
    """Check that tags are balanced, and collect texts, attributes and numbers of elements."""

    def __init__(self):
        super().__init__()
        self.open, self.texts, self.attributes, self.count = [], [], [], {}

    def handle_starttag(self, tag, attributes):
        self.count[tag] = self.count.get(tag, 0) + 1
        self.attributes += attributes
        if tag not in _VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.count[tag] = self.count.get(tag, 0) + 1
        self.attributes += attributes

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)


def _read(text):
    reader = Reader()
    reader.feed(text)
    reader.close()
    assert reader.open == []
    return reader


def test_the_page_stands_alone_and_has_every_number(found):
    reader = _read(found.html())
    assert {tag for tag in reader.count if tag in ("script", "link", "img", "iframe")} == set()
    assert not [value for name, value in reader.attributes if name in ("src", "href", "onload")]
    assert "url(" not in found.html()
    assert "@import" not in found.html()
    assert (reader.count["table"], reader.count["svg"]) == (2, 3)  # a plot for each method, and the roofline
    for method in ("graph", "between"):
        columns, rows = found.table(method)
        for cell in (*columns, *(cell for row in rows for cell in row)):
            assert cell in reader.texts or not cell
    # Two problems, two other ways and two methods; and three ways on the roofline; and legends.
    assert reader.count["circle"] == 2 * 2 * 2 + 2 * 3 + (2 + 2 + 3)
    assert "eager at 16x48x32: 1.250 (1.200 to 1.300)" in reader.texts


def test_names_are_escaped_and_an_unknown_chip_has_no_roofline():
    class Elsewhere(Clock):
        def environment(self):
            return {"chip": "<b>GPU</b>"}

    result = co.bench("gemm_bias_relu", (16, 48, 32), against=["cublaslt", "eager"], clock=Elsewhere())
    reader = _read(result.html())
    assert (reader.count["svg"], "b" in reader.count) == (2, False)
    assert reader.attributes.count(("class", "slower")) == 2  # the column of cuBLASLt in each method's table
    assert result.rows[0].roofline is None


# ---- Methods --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
def test_the_triton_kernel_has_configurations_that_use_the_fastest_instruction(arch):
    pytest.importorskip("triton")
    from cutlass_ops.tools.bench.triton_gemm import CONFIGS

    for m, n, k, warps, stages in CONFIGS:
        said = co.contract(
            "bf16", "bf16", m=4096, n=4096, k=4096, arch=arch, block_m=m, block_n=n, block_k=k, num_warps=warps,
            num_stages=stages,
        )  # fmt: skip
        assert said.kept, said
