"""examples/ladder: what needs no GPU. The rungs compile into the instructions that they promise."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from cutlass_ops.tools.profile import ncu
from examples.ladder import __main__ as ladder
from examples.ladder import counting, cuda, measuring, problem, proof, report, rungs
from examples.ladder.problem import EDGES, Shape, padded

ROOT = Path(__file__).resolve().parents[2]
BY_HAND = [rung for rung in rungs.RUNGS if rung.source.endswith(".cu")]
CUBE = Shape(4096, 4096, 4096)


def mm(a, b, d):
    torch.mm(a, b.t(), out=d)


# Shapes, operands that need padding, and the choice of rungs.


def test_shapes_are_read():
    assert problem.parse_shape("1x20x300") == problem.parse_shape("1×20×300") == Shape(1, 20, 300)


@pytest.mark.parametrize("text", ["", "12", "1x2", "0x1x1", "1x2x3x4", "1x-2x3", "1x2x3 "])
def test_other_shapes_are_refused(text):
    with pytest.raises(ValueError, match="4096x4096x1024"):
        problem.parse_shape(text)


@pytest.mark.parametrize("pads_d", [False, True])
@pytest.mark.parametrize("shape", [Shape(16, 16, 16), Shape(17, 33, 7), Shape(1, 1, 1), Shape(32, 15, 16)], ids=str)
def test_a_product_sees_padded_operands(shape, pads_d):
    seen = []

    def picky(a, b, d):
        seen.append((a.shape, b.shape, d.shape))
        d.copy_((a @ b.t())[: d.shape[0], : d.shape[1]])

    a, b = measuring.operands(shape, "whole", 0, "cpu")
    d = torch.full((shape.m, shape.n), torch.nan, dtype=torch.float16)
    padded(picky, Shape(16, 16, 16), pads_d)(a, b, d)
    m, n, k = (problem.up(side, 16) for side in shape)
    assert seen == [((m, k), (n, k), (m, n) if pads_d else (shape.m, shape.n))]
    assert torch.equal(d.double(), a.double() @ b.double().t())


def test_operands_that_fit_are_not_copied():
    seen = []
    a, b, d = (torch.zeros(16, 16, dtype=torch.float16) for _ in range(3))
    padded(lambda *given: seen.extend(given), Shape(16, 8, 1), pads_d=True)(a, b, d)
    assert [each.data_ptr() for each in seen] == [each.data_ptr() for each in (a, b, d)]


def test_rungs_are_selected_by_number_or_name():
    assert rungs.select(None) == rungs.RUNGS
    assert [rung.name for rung in rungs.select(["11", "9", "10a", "1"])] == ["1", "9a", "9b", "9c", "10a", "11"]
    with pytest.raises(ValueError, match="'12' is no rung: there are 1, 2"):
        rungs.select(["12"])


# Checks of results.


def test_a_right_product_passes_every_small_edge():
    small = tuple(shape for shape in EDGES if shape.flops < 1e8)
    assert len(small) > 8
    assert [measuring.check(mm, shape, 0, "cpu") for shape in small] == [1.0] * len(small)


def _not_written(a, b, d):
    mm(a, b, d)
    d[-1, -1] = torch.nan


def _one_wrong(a, b, d):
    mm(a, b, d)
    d[3, 2] += 1


def _beside(a, b, d):
    mm(a, b, d)
    d.as_strided((1,), (1,), d.storage_offset() + d.numel()).zero_()


def _coarse(a, b, d):
    mm(a, b, d)
    if (a != a.round()).any():  # whole numbers come out right
        d.copy_(d.to(torch.float8_e5m2))


@pytest.mark.parametrize(
    ("product", "says"),
    [
        (_not_written, "1 elements of D were not written"),
        (_one_wrong, "1 of 680 sums of whole numbers are wrong, the first at 3, 2"),
        (_beside, "writes outside of D"),
        (_coarse, "times PyTorch's"),
    ],
)
def test_a_wrong_product_is_found(product, says):
    with pytest.raises(measuring.WrongResult, match=says):
        measuring.check(product, Shape(17, 40, 50), 0, "cpu")


def test_whole_numbers_have_exact_sums_in_fp16_at_every_timed_shape():
    # The largest sum of six standard deviations: below 2048, FP16 has all whole numbers.
    assert max(6 * (4 / 9 * shape.k) ** 0.5 for shape in (*problem.SHAPES, *EDGES)) < 2048


# The proof.

LISTING = """
	code for sm_90a
        /*0000*/                   LDC R1, c[0x0][0x28] ;                /* 0x00000a00ff017b82 */
                                                                         /* 0x000fe20000000800 */
        /*0010*/                   LDSM.16.M88.4 R8, [R22] ;             /* 0x00000a00ff017b82 */
        /*0020*/                   HMMA.16816.F32 R4, R8, R12, R4 ;      /* 0x00000a00ff017b82 */
        /*0030*/                   HMMA.16816.F32 R8, R8, R14, R8 ;      /* 0x00000a00ff017b82 */
        /*0040*/                   IADD3 R3, R3, 0x1, RZ ;               /* 0x00000a00ff017b82 */
        /*0050*/              @!P0 BRA 0x10 ;                            /* 0x00000a00ff017b82 */
        /*0060*/                   FFMA R4, R8, R12, R4 ;                /* 0x00000a00ff017b82 */
        /*0070*/               @P1 BRA 0x60 ;                            /* 0x00000a00ff017b82 */
        /*0080*/               @P2 BRA.U.ANY 0x0 ;                       /* 0x00000a00ff017b82 */
        /*0090*/                   BRA 0x90;                             /* 0x00000a00ff017b82 */
"""


def test_the_inner_loop_is_the_smallest_with_the_most_products():
    instructions = list(proof.parse(LISTING))
    assert [i.opcode for i in instructions[:3]] == ["LDC", "LDSM", "HMMA"]
    assert [i.address for i in proof.inner_loop(instructions)] == [0x10, 0x20, 0x30, 0x40, 0x50]
    assert proof.outline(proof.inner_loop(instructions)) == [
        "LDSM.16.M88.4 R8, [R22] ;",
        "HMMA.16816.F32 R4, R8, R12, R4 ;    ... 2 HMMA",
        "@!P0 BRA 0x10 ;",
        "(1 other instructions)",
    ]


def test_without_a_loop_there_is_none():
    assert proof.inner_loop(list(proof.parse(LISTING))[:4]) == []


@pytest.mark.parametrize(
    ("counts", "found"),
    [({"FFMA": 9}, "FFMA"), ({"FFMA": 9, "HMMA": 1}, "HMMA"), ({"HMMA": 9, "HGMMA": 1}, "HGMMA"), ({}, "none")],
)
def test_a_kernel_is_of_the_best_class_it_has(counts, found):
    assert proof.class_of(counts) == found


def test_no_machine_code_is_said():
    with pytest.raises(ValueError, match="cannot be read"):
        proof.count(b"not an ELF")


def test_another_instruction_than_promised_is_refused(monkeypatch):
    rung = dataclasses.replace(rungs.BY_NAME["6"], build=lambda *_: rungs.Built(mm, {"HMMA": 32}))
    with pytest.raises(cuda.BuildError, match="rung 6: its machine code computes with HMMA, not HGMMA"):
        rungs.build(rung)
    compiles = dataclasses.replace(rungs.BY_NAME["9c"], build=lambda *_: rungs.Built(mm, {"HMMA": 32}))
    with pytest.raises(cuda.BuildError, match="expected not to compile, and does"):
        rungs.build(compiles)


# The report.


def _result():
    rows = [
        measuring.row(name, shape, {"8": [200.0, 220.0, 210.0], "11": [190.0, 200.0, 195.0]}, 1.0)
        for shape in (CUBE, Shape(512, 256, 64))
        for name in ("8", "11")
    ]
    built = {
        "8": {"title": "", "class": "HGMMA", "instructions": {"HGMMA": 4}, "says": ""},
        "9c": {"title": "", "class": "refused", "instructions": {}, "says": "K >= 16"},
        "11": {"title": "", "class": "", "instructions": {}, "says": "a name"},
    }
    head = {"chip": "A GPU", "date": "2026-01-01", "driver": "1", "torch": "2", "cuda": "3"}
    return {**head, "built": built, "rows": rows}


def test_a_row_has_medians_and_the_ratio_within_rounds():
    row = _result()["rows"][0]
    assert (row["us"], row["us_range"]) == (210.0, [200.0, 220.0])
    assert row["tflops"] == pytest.approx(2 * 4096**3 / 210e-6 / 1e12, abs=0.01)
    assert row["cublas_over_it"] == pytest.approx(195 / 210, abs=1e-4)  # the middle of 190/200, 200/220 and 195/210


def test_a_slow_rung_is_compared_in_its_own_rounds():
    assert measuring.row("1", CUBE, {"1": [1000.0], "11": [100.0, 1.0, 1.0]}, 1.0)["cublas_over_it"] == 0.1
    assert measuring.row("1", CUBE, {"1": [1000.0]}, 1.0)["cublas_over_it"] is None


def test_the_table_has_every_rung_that_was_built():
    lines = report.table(_result(), CUBE)
    assert len(lines) == 5
    assert lines[2].endswith("| HGMMA | 210.0 | 654.5 | 92.9% | 504, 618 |")
    assert lines[3].endswith("| refused | | | | K >= 16 |")
    assert report.table(_result(), Shape(512, 256, 64))[2].endswith("| 92.9% |  |")
    assert report.compared(_result())[0][2:] == (654.47, 504)


def test_numbers_say_what_is_beaten():
    text = report.numbers(_result())
    assert "A GPU, 2026-01-01; driver 1, torch 2, cuda 3." in text
    assert "| 8 | WGMMA with a producer, and its last step | 618 | 654 | beaten |" in text
    assert "| 11 | cuBLAS | 713 | 705 | not beaten |" in text


def test_the_document_has_both_parts():
    text = report.DOCUMENT.read_text()
    for part in ("numbers", "loops"):
        assert report.insert(text, part, "found", report.BY) != text


@pytest.mark.skipif(not report.RESULT.exists(), reason="no result is committed")
def test_the_document_is_of_the_committed_result():
    text = report.DOCUMENT.read_text()
    found = report.insert(text, "numbers", report.numbers(json.loads(report.RESULT.read_text())), report.BY)
    assert found == text, "run python -m examples.ladder.report"


RECORDED = (ROOT / "tests" / "golden" / "ncu_h100.csv").read_text()
NAMES = ["1", "2", "4", "5", "6", "7", "8", "10a", "11"]  # as many as the recording has launches


def test_counters_are_given_to_rungs_in_their_order(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(ncu, "count", lambda request, *_: asked.append(request) or RECORDED)
    found = counting.count(NAMES, CUBE, tmp_path)
    assert asked[0].marked
    assert asked[0].program[-len(NAMES) :] == tuple(NAMES)
    assert list(found) == NAMES
    assert [name for name in NAMES if (found[name]["tensor"] or 0) > 50] == ["5", "8"]
    table = report.counted({"counters": found, "counted_at": list(CUBE)})
    assert len(table) == 4 + len(NAMES) + 1
    (line,) = [line for line in table if line.startswith("| 5 ")]
    assert line.startswith(f"| 5 | {rungs.BY_NAME['5'].title} | 90% | 0%")


@pytest.mark.parametrize("found", [RECORDED, ncu.Refusal("hardware counters are for administrators", ("ncu", "x"))])
def test_without_a_launch_for_each_rung_there_are_no_counters(tmp_path, monkeypatch, found):
    monkeypatch.setattr(ncu, "count", lambda *_: found)
    with pytest.raises(counting.NotCounted, match=r"2 rungs launched 9 kernels|for administrators"):
        counting.count(["1", "2"], CUBE, tmp_path)


@pytest.mark.slow
def test_the_plot_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    report.draw(_result(), tmp_path / "ladder.svg")
    assert (tmp_path / "ladder.svg").read_text().startswith("<?xml")


# Compiling.


@pytest.mark.compile
@pytest.mark.parametrize("rung", BY_HAND, ids=lambda rung: rung.source)
def test_a_rung_compiles_into_its_instruction(rung, tmp_path):
    built = rungs.build(rung, tmp_path)
    assert proof.class_of(built.counts) == rung.expected
    # Whatever TMA rungs promise beside it.
    assert ("UTMALDG" in built.counts) == (rung.name in ("7", "8"))
    assert ("LDGSTS" in built.counts) == (rung.name in ("5", "6"))


@pytest.mark.compile
def test_a_rung_that_does_not_compile_says_why(tmp_path, monkeypatch):
    from cutlass_ops.compilation.toolchain import find_toolchain

    (tmp_path / "broken.cu").write_text("this is no C++\n")
    monkeypatch.setattr(cuda, "FOLDER", tmp_path)
    with pytest.raises(cuda.BuildError, match=r"broken\.cu does not compile:\n.*error"):
        cuda.compile_rung("broken.cu", find_toolchain(), tmp_path)


TILES = """
#include "common.cuh"
#include <cstdio>
int main() {
  for (int m = 1; m < 20; ++m) for (int n = 1; n < 12; ++n) for (int band = 1; band < 9; band += 3) {
    bool seen[20][12] = {};
    for (int i = 0; i < m * n; ++i) {
      Tile tile = tile_at(i, m, n, band);
      if (tile.m < 0 || tile.m >= m || tile.n < 0 || tile.n >= n || seen[tile.m][tile.n]) {
        return std::printf("%d of %d x %d by %d\\n", i, m, n, band), 1;
      }
      seen[tile.m][tile.n] = true;
    }
  }
}
"""


@pytest.mark.compile
def test_blocks_visit_every_tile_once(tmp_path):
    from cutlass_ops.compilation.toolchain import find_toolchain

    toolchain = find_toolchain()
    (tmp_path / "tiles.cu").write_text(TILES)
    command = [str(toolchain.nvcc), f"-ccbin={toolchain.host_compiler}", *(f"-L{d}" for d in toolchain.lib_dirs)]
    command += [f"-I{cuda.FOLDER}", "-std=c++17", "-o", str(tmp_path / "tiles"), str(tmp_path / "tiles.cu")]
    subprocess.run(command, check=True, env=os.environ | {"PATH": toolchain.path})
    done = subprocess.run([str(tmp_path / "tiles")], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.compile
def test_without_a_gpu_rungs_are_built_and_the_rest_says_what_it_lacks():
    command = [sys.executable, "-m", "examples.ladder", "--rungs", "1", "11"]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "rung 1    naive, FP32 on the CUDA cores: " in done.stdout
    assert "Nothing was checked or timed: that needs a Hopper GPU" in done.stdout


def test_a_rung_that_needs_something_else_is_left_out(capsys):
    def missing(*_):
        raise rungs.Missing("a thing: pip install thing")

    def wrong(*_):
        raise cuda.BuildError("it does not compile")

    chosen = tuple(dataclasses.replace(rungs.BY_NAME["1"], name=n, build=f) for n, f in (("1", missing), ("2", wrong)))
    assert ladder.build_all(chosen, (CUBE,)) == ({}, ["2"])
    assert "not built: it needs a thing: pip install thing" in capsys.readouterr().out


# Triton, which comes with PyTorch for GPUs, compiles without one.


@pytest.mark.compile
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["9a", "9b", "9c"])
def test_triton_compiles_into_its_instruction(name):
    pytest.importorskip("triton")
    built = rungs.build(rungs.BY_NAME[name])
    assert (built.product is None) == (name == "9c")
