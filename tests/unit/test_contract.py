"""Predictions of the instruction that multiplies: against the legality rules, and against what Triton compiled."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

import cutlass_ops as co
from cutlass_ops.base.mma import MMAS
from cutlass_ops.declare.config import ThreadblockShape
from cutlass_ops.epilogue import builtin
from cutlass_ops.kinds.sm90.config import Sm90Config

ROOT = Path(__file__).resolve().parents[2]
RESULT, UNSEEN = (
    json.loads((ROOT / f"benchmarks/results/{name}.json").read_text())
    for name in ("contract_triton", "contract_triton_unseen")
)
ROWS = [*RESULT["rows"], *UNSEEN["rows"]]
SIZES = {"m": 4096, "n": 4096, "k": 4096}


def _predicted(row):
    tight = "" if row["aligned"] else ".align1"
    m, n, k = row["block"]
    a, b = f"{row['dtype']}.row{tight}", f"{row['dtype']}.{row['b']}{tight}"
    return co.contract(
        a, b, **SIZES, arch=row["arch"], precision=row["precision"] if row["dtype"] == "f32" else None,
        block_m=m, block_n=n, block_k=k, num_warps=row["warps"], num_stages=row["stages"],
    )  # fmt: skip


# ---- The legality rules ---------------------------------------------------------------------------------------------


@pytest.mark.sample(2)
@pytest.mark.parametrize("mma", [mma for mma in MMAS if not mma.own], ids=lambda mma: f"{mma.a}-{mma.b}")
@pytest.mark.parametrize("majors", [("row", "col"), ("row", "row"), ("col", "row"), ("col", "col")], ids="-".join)
@pytest.mark.parametrize("alignments", [(16, 16), (8, 16), (16, 4), (2, 2)], ids=str)
def test_it_says_what_the_rules_of_our_kernels_say(mma, majors, alignments):
    a, b = (
        f"{t}.{major}.align{max(t.count_in(size), 1)}"
        for t, major, size in zip((mma.a, mma.b), majors, alignments, strict=True)
    )
    said = co.contract(a, b, **SIZES, arch="sm_90")
    unit = mma.by_tma
    if unit is None:
        assert said.family == "mma.sync"
        return
    config = Sm90Config(ThreadblockShape(128, 128, mma.a.count_in(128)))
    spec = co.KernelSpec(a=a, b=b, d="bf16.row", epilogue=builtin.identity, config=config)
    broken = {violation.rule for violation in co.check(spec)}
    # Rules of one kind of kernel with others, such as of `realign`, are no matter of the instruction.
    assert broken & {"tma_alignment", "operand_majors", "operand_dtypes"} == {each.name for each in said.violated}
    assert (said.family == "wgmma") == (not broken)
    if said.family == "wgmma":
        assert said.opcode == unit.opcode


# ---- What Triton compiled -------------------------------------------------------------------------------------------


@pytest.mark.sample(3)
@pytest.mark.parametrize("arch", sorted({row["arch"] for row in ROWS}))
def test_it_says_what_triton_compiled(arch):
    """The record is from ``benchmarks/contract_triton.py``; a change of the rules must not lose what agreed."""
    for row in (row for row in ROWS if row["arch"] == arch):
        said = _predicted(row)
        if row["agrees"]:
            assert {said.opcode} - {""} == set(row["opcodes"]), row
            assert said.instruction == row["predicted"], row
            if row["fits"]:
                assert said.family == row["compiled"], row
        if row["fits"] == row["fits_predicted"]:
            assert (said.instruction != "does not launch") == row["fits"], row


def test_tiles_that_are_said_to_spill_do():
    spilling = [row for row in ROWS if row["spills_predicted"]]
    assert len(spilling) > 10
    assert all(row["stack"] > 0 for row in spilling)


def test_the_documents_table_is_the_records():
    text = (ROOT / "docs/contract.md").read_text()
    wrong = [row for row in ROWS if not row["agrees"] or row["fits"] != row["fits_predicted"]]
    assert ("After these corrections, every prediction was right" in text) == (not wrong)
    for arch, found in (*RESULT["summary"].items(), *UNSEEN["summary"].items()):
        compiled = found["compiled"]
        counts = " | ".join(str(compiled.get(name, 0)) for name in ("tcgen05", "wgmma", "mma.sync", "none", "nothing"))
        assert f"| {arch} | {found['configurations']} | {counts} | {found['agree']} |" in text


# ---- Remedies -------------------------------------------------------------------------------------------------------

TRITON = {"block_m": 128, "block_n": 128, "block_k": 64}
BROKEN = {
    "pad K": {"a": "bf16.row", "b": "bf16.col", **SIZES, "k": 4100, "arch": "sm_90"},
    "pad N": {"a": "f16.row", "b": "f16.row", **SIZES, "n": 4098, "arch": "sm_80"},
    "majors": {"a": "e4m3.row", "b": "e4m3.row", **SIZES, "arch": "sm_90"},
    "tf32": {"a": "f32", "b": "f32", **SIZES, "arch": "sm_80"},
    "tf32 on Volta": {"a": "f32", "b": "f32", **SIZES, "arch": "sm_70"},
    "fp8 on Ampere": {"a": "e4m3", "b": "e5m2", **SIZES, "arch": "sm_86"},
    "align": {"a": "bf16.row.align2", "b": "bf16.col", **SIZES, "arch": "sm_90"},
    "warps": {"a": "f16", "b": "f16", **SIZES, "arch": "sm_90", **TRITON, "num_warps": 2},
    "warps of tensor memory": {"a": "f16", "b": "f16", **SIZES, "arch": "sm_100", **TRITON, "num_warps": 16},
    "block_m": {"a": "f16", "b": "f16", **SIZES, "arch": "sm_90", **TRITON, "block_m": 32},
    "block_n": {"a": "f16", "b": "f16", **SIZES, "arch": "sm_90", **TRITON, "block_n": 8},
    "block_k": {"a": "f16", "b": "f16", **SIZES, "arch": "sm_89", **TRITON, "block_k": 8},
    "stages": {"a": "f16", "b": "f16", **SIZES, "arch": "sm_90", **TRITON, "num_stages": 1},
    "shared memory": {"a": "f16", "b": "f16", **SIZES, "arch": "sm_86", **TRITON, "num_stages": 5},
    "tile": {"a": "f32", "b": "f32", **SIZES, "arch": "sm_120", **TRITON, "block_k": 128, "precision": "tf32"},
    "registers": {"a": "f16", "b": "f16", **SIZES, "arch": "sm_90", **TRITON, "block_n": 256, "num_stages": 2},
    "wmma": {"a": "f16", "b": "f16", "m": 1000, "n": 4096, "k": 4090, "arch": "sm_90", "program": "wmma"},
    "triton on Turing": {"a": "f16", "b": "f16", **SIZES, "arch": "sm_75", **TRITON},
    "integers on Turing": {"a": "i8", "b": "i8", **SIZES, "arch": "sm_75", **TRITON},
    "too large for the CUDA cores": {"a": "f64", "b": "f64", **SIZES, "arch": "sm_89", **TRITON, "block_k": 128},
    "two types": {"a": "f16", "b": "bf16", **SIZES, "arch": "sm_90", **TRITON},
}


@pytest.mark.parametrize("name", BROKEN)
def test_the_changes_that_it_names_mend_the_call(name):
    arguments = dict(BROKEN[name])
    said = co.contract(**arguments)
    assert said.violated
    for _ in range(3):  # a change can bring a condition that did not apply before
        given = dict(arguments)
        for each in co.contract(**given).violated:
            assert each.remedy
            assert each.change.items() - given.items()
            arguments |= each.change
        if (mended := co.contract(**arguments)).kept:
            break
    assert mended.kept
    assert mended.tensor_cores
    assert (mended.peak_fraction or 0) >= (said.peak_fraction or 0)


# ---- Numbers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "fraction"),
    [
        ({"a": "bf16", "b": "bf16", "arch": "sm_90"}, 1.0),
        ({"a": "bf16.row.align4", "b": "bf16", "arch": "sm_90"}, 0.63),
        ({"a": "f32", "b": "f32", "arch": "sm_90"}, 128 / (2048 * 0.5)),  # CUDA cores, of TF32's peak
        ({"a": "f64", "b": "f64", "arch": "sm_89"}, 2 / 512),
        ({"a": "f64", "b": "f64", "arch": "sm_90"}, 1.0),  # no other family multiplies FP64
        ({"a": "f32", "b": "f32", "arch": "sm_80", "precision": "tf32x3"}, 1 / 3),
        ({"a": "tf32x3", "b": "tf32x3", "arch": "sm_90"}, 0.63 / 3),
        ({"a": "tf32x3", "b": "tf32x3", "arch": "sm_90", **TRITON, "block_k": 32}, 1 / 3),
        # FP8 without wgmma is converted to FP16, of half FP8's rate.
        ({"a": "e4m3", "b": "e4m3", "arch": "sm_90", **TRITON, "num_warps": 2}, 0.63 / 2),
        ({"a": "f16", "b": "f16", "arch": "sm_100", **TRITON, "num_warps": 2}, None),  # nobody measured it
        ({"a": "f16", "b": "f16", "arch": "sm_90", **TRITON, "block_k": 8}, 0.0),
    ],
)
def test_how_much_of_the_peak_it_can_reach(arguments, fraction):
    said = co.contract(**arguments, **SIZES)
    assert said.peak_fraction == (None if fraction is None else pytest.approx(fraction))


def test_padding_counts_and_rows_and_columns_may_be_swapped():
    few = co.contract("bf16", "bf16", m=16, n=4096, k=4096, arch="sm_90")
    assert few.peak_fraction == 1.0  # D^T = B^T A^T has the 16 rows on the instruction's free side
    assert few.roofline.bound == "memory"
    assert "compare bandwidth instead" in str(few)
    triton = co.contract("bf16", "bf16", m=16, n=4096, k=4096, arch="sm_90", **TRITON)
    assert triton.peak_fraction == pytest.approx(16 / 128)
    assert [each.name for each in triton.violated] == ["edges"]


# ---- Tensors --------------------------------------------------------------------------------------------------------


def test_tensors_say_their_types_majors_and_alignment():
    a, weight = torch.ones(64, 104).bfloat16(), torch.ones(128, 104).bfloat16()
    said = co.contract(a, weight.t(), arch="sm_90")
    assert (said.a, said.b, said.problem, said.family) == ("bf16.row", "bf16.col", (64, 128, 104), "wgmma")
    # The lines of this view begin 2 bytes behind a multiple of 16.
    view = co.contract(a[:, 1:97], weight[:, :96].t(), arch="sm_90")
    assert (view.a, view.family) == ("bf16.row.align1", "mma.sync")
    assert "store a at an address" in view.violated[0].remedy


@pytest.mark.parametrize(("setting", "family"), [("highest", "none"), ("high", "mma.sync")])
def test_fp32_tensors_are_multiplied_as_pytorch_is_told_to(setting, family):
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(setting)
    try:
        assert co.contract(torch.ones(64, 64), torch.ones(64, 64), arch="sm_80").family == family
    finally:
        torch.set_float32_matmul_precision(before)


# ---- Errors ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"a": "f16", "b": "f16"}, "m, n and k are missing"),
        ({"a": "f16", "b": "f16", "m": 0, "n": 1, "k": 1}, "is not a problem size"),
        ({"a": "f15", "b": "f16", **SIZES}, "unknown dtype 'f15': use one of f16, "),
        ({"a": "f16-row", "b": "f16", **SIZES}, "is not of the form"),
        ({"a": "f16", "b": "f16", **SIZES, "arch": "sm_55"}, "'sm_55' is not known: use one of sm_70"),
        ({"a": "f16", "b": "f16", **SIZES, "program": "cublas"}, "use one of library, triton, wmma"),
        ({"a": "f16", "b": "f16", **SIZES, "precision": "bf16x9"}, "use one of ieee, tf32, tf32x3"),
        ({"a": "f16", "b": "f16", **SIZES, "program": "triton"}, "block_m, block_n and block_k are missing"),
        ({"a": "f16", "b": "f16", **SIZES, "block_m": 64}, "give block_m, block_n and block_k together"),
        ({"a": "f16", "b": "f16", **SIZES, **TRITON, "block_m": 96}, "block_m is 96: Triton needs a power of two"),
        ({"a": "f16", "b": "f16", **SIZES, **TRITON, "num_stages": 0}, "num_stages is 0"),
        (
            {"a": "f16", "b": "f16", **SIZES, **TRITON, "num_warps": 64},
            "num_warps is 64: a thread block has at most 32",
        ),
        ({"a": "f16", "b": "f16", **SIZES, "num_warps": 8}, "num_warps has no effect without block_m, block_n and bl"),
        (
            {"a": "f16", "b": "f16", **SIZES, "num_warps": 4, "num_stages": 3, "program": "wmma"},
            "num_warps and num_stages have no effect without block_m, block_n and block_k: they are of a Triton kernel",
        ),
        (
            {"a": "f16", "b": "f16", **SIZES, **TRITON, "program": "library"},
            "block_m, block_n and block_k and the program library exclude each other: only Triton",
        ),
        ({"a": "f32", "b": "f16", **SIZES, "precision": "tf32"}, "precision 'tf32' has no effect on 'f16': leave"),
        ({"a": "tf32", "b": "tf32", **SIZES, "precision": "ieee"}, "precision 'ieee' contradicts 'tf32'"),
        (
            {"a": torch.ones(2, 2), "b": torch.ones(2, 2).half(), "precision": "tf32"},
            "precision 'tf32' has no effect on b of torch.float16: leave it out, or make A and B f32",
        ),
        ({"a": torch.ones(2, 2), "b": "f16"}, "must both be tensors"),
        ({"a": torch.ones(2, 3), "b": torch.ones(2, 3)}, "a's columns must be b's rows"),
        ({"a": torch.ones(2, 2), "b": torch.ones(2, 2), "m": 2}, "are the tensors' own"),
        ({"a": torch.ones(2, 2, 2), "b": torch.ones(2, 2)}, "pass a matrix"),
        ({"a": torch.ones(4, 4)[::2, ::2], "b": torch.ones(2, 2)}, "Call a.contiguous() first"),
    ],
)
def test_wrong_arguments(arguments, says):
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        co.contract(**arguments)
    assert says in str(caught.value)


def test_constants_of_triton_have_its_defaults():
    given = {"a": "f16", "b": "f16", **SIZES, "arch": "sm_90", **TRITON}
    assert co.contract(**given) == co.contract(**given, num_warps=np.int64(4), num_stages=3)
    assert co.contract(**given) != co.contract(**given, num_warps=2)


@pytest.mark.parametrize("name", ["sm_90a", "9.0", "90", "H200", "sm_100f"])
def test_names_of_architectures(name):
    said = co.contract("f16", "f16", **SIZES, arch=name)
    assert said.architecture == ("sm_100" if "100" in name else "sm_90")
    assert said.chip == {"H200": "NVIDIA H200", "sm_100f": ""}.get(name, "NVIDIA H100 80GB HBM3")


# ---- The command ----------------------------------------------------------------------------------------------------
