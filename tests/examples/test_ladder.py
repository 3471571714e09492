"""examples/ladder: what needs no GPU. The rungs compile into the instructions that they promise."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from examples.ladder import cuda, measuring, proof, report, rungs
from examples.ladder.problem import EDGES, Shape
from tests import ledger

ROOT = Path(__file__).resolve().parents[2]
BY_HAND = [rung for rung in rungs.RUNGS if rung.source.endswith(".cu")]


def mm(a, b, d):
    torch.mm(a, b.t(), out=d)


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


# The proof.


def test_another_instruction_than_promised_is_refused(monkeypatch):
    rung = dataclasses.replace(rungs.BY_NAME["6"], build=lambda *_: rungs.Built(mm, {"HMMA": 32}))
    with pytest.raises(cuda.BuildError, match="rung 6: its machine code computes with HMMA, not HGMMA"):
        rungs.build(rung)
    compiles = dataclasses.replace(rungs.BY_NAME["9c"], build=lambda *_: rungs.Built(mm, {"HMMA": 32}))
    with pytest.raises(cuda.BuildError, match="expected not to compile, and does"):
        rungs.build(compiles)


# The report.


@pytest.mark.skipif(not report.RESULT.exists(), reason="no result is committed")
def test_the_document_is_of_the_committed_result():
    text = report.DOCUMENT.read_text()
    found = report.insert(text, "numbers", report.numbers(json.loads(report.RESULT.read_text())), report.BY)
    assert found == text, "run python -m examples.ladder.report"


# Compiling.


@pytest.mark.compile
@pytest.mark.parametrize("rung", BY_HAND, ids=lambda rung: rung.source)
def test_a_rung_compiles_into_its_instruction(rung, tmp_path, request):
    helpers = [path.read_text() for path in sorted(cuda.FOLDER.glob("*.[cp]*")) if not path.name.startswith("rung0")]
    with ledger.once(request, (cuda.FOLDER / rung.source).read_text(), *helpers):
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


@pytest.mark.compile
def test_without_a_gpu_rungs_are_built_and_the_rest_says_what_it_lacks():
    command = [sys.executable, "-m", "examples.ladder", "--rungs", "1", "11"]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "rung 1    naive, FP32 on the CUDA cores: " in done.stdout
    assert "Nothing was checked or timed: that needs a Hopper GPU" in done.stdout


# Triton, which comes with PyTorch for GPUs, compiles without one.


@pytest.mark.compile
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["9a", "9b", "9c"])
def test_triton_compiles_into_its_instruction(name):
    pytest.importorskip("triton")
    built = rungs.build(rungs.BY_NAME[name])
    assert (built.product is None) == (name == "9c")
