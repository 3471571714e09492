"""What people type is read where it can mean one thing only, and refused with an example to copy elsewhere."""

import pytest
import torch
from signatures import H100

from cutlass_ops.base import dtypes
from cutlass_ops.base.errors import ConfigError
from cutlass_ops.declare import spelling
from cutlass_ops.declare.problem import Problem
from cutlass_ops.epilogue import builtin
from cutlass_ops.run import gated, norms
from cutlass_ops.tuner import tuning

ONE = [Problem(512, 4096, 1024)]


@pytest.mark.parametrize(
    "text",
    [
        "512x4096x1024", "512X4096X1024", "512*4096*1024", "512×4096×1024", " 512x4096x1024 ", "512 x 4096 x 1024",
        "M=512,N=4096,K=1024", "m=512 n=4096 k=1024", "M = 512, N = 4096, K = 1024", "M=512xN=4096xK=1024",
        "K=1024 M=512 N=4096", "(512, 4096, 1024)", "0512x4096x1024",
        ["512x4096x1024"], ["512", "x", "4096", "x", "1024"], ["M=512", "N=4096", "K=1024"],
        ["M=512,", "N=4096,K=1024"],
    ],
)  # fmt: skip
def test_one_problem_in_many_spellings(text):
    assert spelling.problems_of(text) == ONE


@pytest.mark.parametrize(
    ("text", "problems"),
    [
        ("1,16x2x3", [(1, 2, 3), (16, 2, 3)]),
        ("1, 16 x 2, 3 x 4", [(1, 2, 4), (1, 3, 4), (16, 2, 4), (16, 3, 4)]),
        (["1,", "16x2x3", "4x5x6"], [(1, 2, 3), (16, 2, 3), (4, 5, 6)]),
        ("M=1,16 N=2 K=3", [(1, 2, 3), (16, 2, 3)]),
        ("M=1 N=2 K=3 M=4 N=5 K=6", [(1, 2, 3), (4, 5, 6)]),
        ("1x2x3; 4x5x6", [(1, 2, 3), (4, 5, 6)]),
        ("1x2x3,4x5x6", [(1, 2, 3), (4, 5, 6)]),
        ("1x2x3, 4,7x5x6", [(1, 2, 3), (4, 5, 6), (7, 5, 6)]),
        ("1x2,9x3,4x5x6", [(1, 2, 3), (1, 9, 3), (4, 5, 6)]),
        ("1x2x3,4", [(1, 2, 3), (1, 2, 4)]),
    ],
)
def test_lists_and_several_problems(text, problems):
    assert spelling.problems_of(text) == [Problem(*extents) for extents in problems]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "it is empty"),
        ("  ", "it is empty"),
        ([], "it is empty"),
        ("512x4096", "it has 2 extents, not 3"),
        ("512,4096,4096", "it has 1 extent, not 3"),
        ("1x2x3x4", "it has 4 extents"),
        ("1x2x3,4x5x6,7", "it has 1 extent, not 3"),
        ("1x2x3,4x5", "it has 2 extents, not 3"),
        ("0x2x3", "an extent of 0"),
        ("-1x2x3", "'-1' is not a positive integer"),
        ("1.5x2x3", "'1.5' is not a positive integer"),
        ("4kx2x3", "'4k' is not"),
        ("1xx3", "'' is not"),
        ("1,x2x3", "'' is not"),
        ("1x2x3,", "'' is not"),
        ("nanx2x3", "'nan' is not"),
        ("١x2x3", "is not a positive integer"),
        ("9" * 5000 + "x1x1", "is too large"),
        ("9999999999x9999999999x1", "a matrix of more than"),
        ("M=1,N=2", "M, N, K must each be named once"),
        ("M=1 N=2 M=3", "M, N, K must each be named once"),
        ("M=1x2x3", "must each be named once"),
        (
            ",".join(map(str, range(1, 500))) + "x" + ",".join(map(str, range(1, 500))) + "x1",
            "more than 65,536 problems",
        ),
    ],
)
def test_what_is_not_a_problem_says_why_and_what_to_write(text, why):
    with pytest.raises(ConfigError) as error:
        spelling.problems_of(text)
    assert "is not a problem size: " in str(error.value)
    assert why in str(error.value)
    assert "Give MxNxK, such as 512x4096x4096" in str(error.value) or "Give fewer" in str(error.value)
    assert len(str(error.value)) < 300


def test_weights():
    assert spelling.weights_of("4096,8192 X 4096") == [(4096, 4096), (8192, 4096)]
    assert spelling.weights_of("N=2,K=3") == [(2, 3)]
    for text in ("", "1", "1x2x3", "1x2 3x4", "0x1", "9999999999x9999999999"):
        with pytest.raises(ConfigError, match="is not the size of a weight"):
            spelling.weights_of(text)


@pytest.mark.parametrize("text", ["f16", "fp16", "FP16", "float16", "half", "torch.float16", "torch.half", " f16 "])
def test_half_in_many_spellings(text):
    assert spelling.dtype_of(text) == "f16"
    assert dtypes.dtype(text) is dtypes.f16


@pytest.mark.parametrize("dtype", ["f32", "float32", torch.float32])
def test_tuning_does_not_advise_what_it_refuses(monkeypatch, dtype):
    monkeypatch.setattr(tuning, "_place", lambda *_: tuning.Place(H100.name, H100, None))
    with pytest.raises(
        ValueError, match=r"is not supported here: use one of bf16, f16, tf32, tf32x3, f64, i8, e4m3, e5m2$"
    ):
        tuning.tune(builtin.identity, [(1, 64, 64)], dtypes=dtype)
    with pytest.raises(
        ValueError, match=r"unknown dtype 'f128': use one of bf16, f16, tf32, tf32x3, f64, i8, e4m3, e5m2$"
    ):
        tuning.tune(builtin.identity, [(1, 64, 64)], dtypes="f128")


@pytest.mark.parametrize("text", ["f32", "float32", "f128", "int4", "", "e4m4", "16"])
def test_other_types_are_not_advised(text):
    with pytest.raises(ConfigError, match="use bf16, f16, tf32, tf32x3, f64, i8, e4m3 or e5m2") as error:
        spelling.dtype_of(text)
    assert "use one of" not in str(error.value)


def test_majors():
    assert [spelling.major_of(text) for text in ("row", "ROW", "row-major", "col", "Column")] == [
        *3 * ["row"],
        *2 * ["col"],
    ]
    for text in ("", "diagonal", "t"):
        with pytest.raises(ConfigError, match="is not a major: use row or col"):
            spelling.major_of(text)


def test_ops_by_name():
    for text in (
        "gemm_bias_relu",
        "co.gemm_bias_relu",
        "cutlass_ops:gemm_bias_relu",
        "gemm-bias-relu",
        "GEMM_BIAS_RELU",
    ):
        assert spelling.op_of(text) == "gemm_bias_relu"
    assert spelling.op_of("package.module:name") == "package.module:name"
    assert spelling.op_of("./package/module.py:name") == "package.module:name"
    for text in ("", ":", "module:", ":name", "gemm_bias_rule"):
        with pytest.raises(ConfigError, match=r"is not the name of an op[:.].* The ops are gemm, .*gemm_swiglu"):
            spelling.op_of(text)


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_norms_by_name_are_what_their_functions_run(dtype):
    element = getattr(torch, dtypes.dtype(dtype).torch_name)
    found = {name: spelling.epilogue_of(name, dtype).graph for name in spelling.NORMS}
    assert found == {
        "rmsnorm_gemm": norms.rmsnorm_op().graph,
        "layernorm_gemm": norms.layernorm_op().graph,
        "gemm_residual_rms": norms.residual_rms_op(element).graph,
        "gemm_swiglu": gated.swiglu_op(None).graph,
    }
    assert spelling.epilogue_of("gemm", dtype) is builtin.identity
    assert spelling.epilogue_of("another", dtype) is None
