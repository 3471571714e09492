"""NumPy's whole numbers are taken wherever Python's are, and become these: declarations turn into JSON and keys."""

import json

import numpy as np
import pytest
import torch

import cutlass_ops as co
from cutlass_ops.base.dtypes import bf16
from cutlass_ops.base.errors import NoDeviceError
from cutlass_ops.declare.problem import Problem
from cutlass_ops.declare.spec import Operand

X = torch.randn(8, 256).bfloat16()
TILE = co.ThreadblockShape(128, 128, 64)


def config(number):
    return co.Sm90Config(co.ThreadblockShape(number(128), 128, 64), co.ClusterShape(number(2), 1), stages=number(4))


def masked(number):
    x, w = torch.ones(2, 4, 64).bfloat16(), torch.ones(2, 8, 64).bfloat16().mT
    counts = torch.tensor([4, 4], dtype=torch.int32)
    return co.gemm(x, w, groups=co.Groups(counts=counts, expected=number(3))).tolist()


MADE = {
    "a configuration": config,
    "a problem": lambda number: Problem.of((number(16), 48, 64)),
    "an order": lambda number: co.TileOrder(swizzle=number(2)),
    "an operand": lambda number: Operand(bf16, "row", number(8)),
    "a history": lambda number: co.nn.Fp8State(history=number(4)).history.tolist(),
    "a block": lambda number: co.Scaled.quantize(X, "e4m3", block=number(128)).scale.tolist(),
    "expected rows": masked,
    "constants of Triton": lambda number: co.contract(
        "f16", "f16", m=64, n=64, k=64, arch="sm_90", block_m=number(64), block_n=64, block_k=64, num_warps=number(4)
    ),
}


@pytest.mark.parametrize("number", [np.int64, np.uint8, np.int16], ids=["int64", "uint8", "int16"])
@pytest.mark.parametrize("name", MADE)
def test_numpys_whole_numbers_are_pythons(name, number):
    found, wanted = MADE[name](number), MADE[name](int)
    assert found == wanted
    assert repr(found) == repr(wanted)


def test_a_declaration_of_numpys_numbers_is_json_and_legal():
    def spec(number):
        return co.KernelSpec(
            a="bf16.row", b="bf16.col", d="bf16.row", epilogue=co.gemm_bias_relu, config=config(number)
        )

    assert not co.check(spec(np.int32))
    assert json.loads(spec(np.int32).canonical()) == json.loads(spec(int).canonical())


@pytest.mark.skipif(torch.cuda.is_available(), reason="would tune")
@pytest.mark.parametrize("name", ["batches", "groups"])
def test_tuning_counts_by_numpys_numbers(name):
    with pytest.raises(NoDeviceError):  # which comes after the counts
        co.tune(co.gemm, [(np.int64(16), 48, 64)], **{name: np.int64(2)})


@pytest.mark.parametrize("wrong", [True, 2.0, np.float64(2.0), "2", np.bool_(True)])
def test_others_are_refused_as_before(wrong):
    for make in (
        lambda: co.ThreadblockShape(wrong, 128, 64),
        lambda: co.Sm90Config(TILE, stages=wrong),
        lambda: co.TileOrder(swizzle=wrong),
        lambda: co.nn.Fp8State(history=wrong),
        lambda: Problem.of((wrong, 48, 64)),
    ):
        with pytest.raises(ValueError, match=r"must be|takes positive integers|is not a problem|history is"):
            make()
