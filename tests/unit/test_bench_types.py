"""The benchmark of other types: its problems, its errors, its kernels and its summary."""

import json

import pytest
import torch
from signatures import H100

from cutlass_ops.base.dtypes import FP8
from cutlass_ops.base.mma import MATHS, MMAS
from cutlass_ops.declare.problem import Problem
from cutlass_ops.kinds import legality
from tests.scripts import script

BENCH, CONTRACT = script("bench_types"), script("types_contract")


@pytest.mark.parametrize("case", BENCH.CASES)
def test_errors_are_those_of_the_type(case):
    x = BENCH.draw(case, 77, 264, 1040, device="cpu")
    assert (x.a.stride(1) == 1) == case.split()[2].startswith("row")
    rows = torch.arange(5, 20)
    op, arguments, named = BENCH.request(case, x)
    wanted = BENCH.exact(case, x, rows)
    ours = BENCH.error(op(*arguments, **{**named, "out": x.out})[rows], wanted)
    with BENCH.tf32_allowed(case):
        errors = {name: BENCH.error(f(x)[rows], wanted) for name, f in BENCH.peers(case, ("eager", "cublaslt")).items()}
    assert ("cublaslt" in errors) == ("bias_relu" in case)
    for theirs in errors.values():
        if case.startswith("tf32"):
            assert 2**-13 < ours < 2**-10  # of operands in TF32
            assert theirs < 1e-5  # in FP32, on the CPU
            assert not torch.backends.cuda.matmul.allow_tf32
        elif case.startswith("3x"):
            assert max(ours, theirs) < 1e-6
        elif case.startswith("f64"):
            assert max(ours, theirs) < 1e-15
        elif "sums" in case:
            assert ours == theirs == 0
        else:
            assert ours == pytest.approx(theirs, rel=0.01)
            assert 2**-11 < ours < 2**-8  # of a result in BF16


@pytest.mark.parametrize("case", BENCH.CASES)
def test_kernels_are_known_before(case):
    for problem in BENCH.problems([256]):
        op, arguments, named = BENCH.request(case, BENCH.draw(case, *problem, device="meta"))
        signature, of = BENCH.harness.asked(op, arguments, H100, named.get("out_dtype"))
        assert (signature.d.dtype.name == "i32") == ("sums" in case)
        assert (of.m, of.n, of.k) == problem
        spec = BENCH.harness.dispatch.choose(signature, H100, of)[0]
        assert legality.check(spec) == ()
        element = case.split()[0]
        assert spec.a.dtype is MATHS.get(element, spec.a.dtype)
        assert element in MATHS or spec.a.dtype.name == element


def test_the_grid_has_each_weight_at_each_number_of_rows():
    found = BENCH.problems(None)
    assert len(found) == len(set(found)) == len(BENCH.WEIGHTS) * len(BENCH.ROWS) + len(BENCH.SQUARES)
    assert {m for m, _, _ in BENCH.problems([32, 256])} == {32, 256}


def test_the_summary_keeps_cases_apart():
    row = {"case": "a", "m": 1, "n": 2, "k": 3, "ratio_to_best_peer": 2.0, "ours_ms": 1.0, "peers": {"eager": 4.0}}
    rows = [row, {**row, "ratio_to_best_peer": 0.5, "m": 4}, {**row, "case": "b", "peers": {"compile": 2.0}}]
    both = {"worst_shape": [1, 2, 3], "losses": 0, "shapes": 1, "geomean": 2.0, "worst": 2.0, "geomean_to_eager": None}
    assert BENCH.summary(rows) == {
        "a": {
            "geomean": 1.0,
            "worst": 0.5,
            "worst_shape": [4, 2, 3],
            "losses": 1,
            "shapes": 2,
            "geomean_to_eager": 4.0,
        },
        "b": both,
    }


# ---- The contract by type --------------------------------------------------------------------------------------------


def test_the_document_has_the_contract_of_the_library():
    assert CONTRACT.DOCUMENT.read_text() == CONTRACT.written(), f"run python {CONTRACT.SCRIPT} --write"


def test_the_contract_has_every_type_that_has_no_page_of_its_own():
    others = {mma.a for mma in MMAS if mma.bits != 16 and mma.a not in FP8}
    assert {each.dtype for each in CONTRACT.TYPES} == others
    assert {case.split()[0] for case in BENCH.CASES} == {each.cases for each in CONTRACT.TYPES}


def test_what_multiplies_a_layout_is_what_calls_choose():
    tf32, int8 = (next(each for each in CONTRACT.TYPES if each.title == title) for title in ("TF32", "INT8"))
    serves, along = CONTRACT.serves, ("row", "col")
    assert serves(tf32, CONTRACT.HOPPER, along, CONTRACT.WHOLE) == "`wgmma`"
    assert serves(tf32, CONTRACT.HOPPER, along, Problem(16, 65536, 4099)) == "`mma.sync`"
    assert serves(tf32, CONTRACT.AMPERE, along, CONTRACT.WHOLE) == "`mma.sync`"
    assert serves(int8, CONTRACT.HOPPER, ("row", "row"), CONTRACT.WHOLE) == "`wgmma` of copies"
    assert serves(int8, CONTRACT.AMPERE, ("row", "row"), CONTRACT.WHOLE) == "refused"
    assert CONTRACT.instructions(tf32.mma, CONTRACT.HOPPER) == "`wgmma` m64nNk8; `mma.sync` m16n8k8"
    assert CONTRACT.instructions(tf32.mma, CONTRACT.AMPERE) == "`mma.sync` m16n8k8"


def test_of_two_results_the_first_counts_and_other_layouts_do_not(tmp_path):
    def row(case, m, tflops, ratio):
        return {"case": case, "m": m, "n": 64, "k": 64, "tflops": tflops, "ratio_to_best_peer": ratio}

    first = [row("f64 plain row,col", 64, 50.0, 1.0), row("f64 plain row,row", 64, 60.0, 0.1)]
    second = [row("f64 plain row,col", 64, 61.0, 9.0), row("f64 bias_relu row,col", 64, 31.0, 0.25)]
    paths = [tmp_path / "a.json", tmp_path / "none.json", tmp_path / "b.json"]
    for path, rows in ((paths[0], first), (paths[2], second)):
        path.write_text(json.dumps({"rows": rows}))
    lines = CONTRACT.contract(CONTRACT.read(paths)).splitlines()
    assert lines[-1].endswith("| 62 TFLOP/s | 50, 81% | 0.50 (2) | 0.25 |")
    assert lines[-2].endswith("| – | – | – |")
