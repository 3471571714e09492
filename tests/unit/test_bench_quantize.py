"""The benchmark of dynamic scales: what its variants compute, its cases and its summary."""

import pytest
import torch

import cutlass_ops as co
from cutlass_ops.declare.chips import CHIPS
from tests.scripts import script

BENCH = script("bench_quantize")


def test_all_variants_of_a_gate_compute_the_same():
    case = BENCH.Gate("fast", 70, 256, 144, device="cpu")
    rows = torch.arange(5, 60)
    exact = case.exact(rows)
    found = case.ours()
    assert BENCH.error(found.d[rows], found.d_scale[rows], exact) <= 1.01
    d, scale = BENCH.gated(case.gemm())
    back = d[rows].double() * scale[rows].double().repeat_interleave(128, 1)
    assert (back - exact).norm() <= 0.04 * exact.norm()
    again = case.separate()
    assert (again.d[rows].double() * scale[rows].repeat_interleave(128, 1) - exact).norm() <= 0.04 * exact.norm()


@pytest.mark.parametrize("math", ["fast", "promoted"])
@pytest.mark.parametrize("m", [256, 4096])
def test_other_kernels_are_of_each_schedule(m, math, monkeypatch):
    monkeypatch.setattr(BENCH, "device_of", lambda _: CHIPS["NVIDIA H200"].device)
    monkeypatch.setattr(BENCH.torch.cuda, "current_device", lambda: 0)
    x = BENCH.Gate(math, m, 14336, 4096, "meta")
    found = BENCH.further(x, 3)
    assert len(set(found)) == 3
    device = CHIPS["NVIDIA H200"].device
    signature, problem = BENCH.harness.asked(
        BENCH.ops.op(BENCH.quantized_swiglu).in_math(math), (x.x, x.w[: x.n].t(), *x.inputs().values()), device
    )
    best = BENCH.policies.policy(signature, device).every(problem)[0].config
    assert found[0].config.schedule != best.schedule
    assert best not in {spec.config for spec in found}


def test_a_wrong_scale_shows():
    case = BENCH.Gate("promoted", 8, 256, 144, device="cpu")
    found, rows = case.ours(), torch.arange(8)
    with pytest.raises(AssertionError, match="times that of quantising"):
        BENCH.error(found.d, found.d_scale.flip(1), case.exact(rows))


@pytest.mark.parametrize(("compiled", "block"), [("quantised", 128), ("quantised_rows", None)])
def test_the_compiled_function_does_what_the_kernel_does(compiled, block):
    x = torch.randn(9, 384)
    d, scale = getattr(BENCH, compiled)(x)
    wanted = co.quantize(x, "e4m3", block)
    torch.testing.assert_close(scale, wanted.d_scale, rtol=1e-6, atol=0)
    assert (d.float() != wanted.d.float()).double().mean() < 0.01  # PyTorch divides a number by a tensor in two steps


def test_each_case_is_known_by_its_row():
    found = BENCH.cases(list(BENCH.PARTS), None)
    assert len(found) == len(set(found)) == 2 * 14 + 14
    assert {each[2] for each in BENCH.cases(["gate"], [16, 64])} == {16, 64}
    assert {each[1] for each in BENCH.cases(["gate"], None, ["fast"])} == {"fast"}
    row = {"part": "tensor", "m": 16, "n": 4096, "dtype": "bf16", "block": 128}
    assert BENCH.key(row) in found
    assert BENCH.key({"part": "gate", "math": "fast", "m": 16, "n": 14336, "k": 4096}) in found


def test_the_summary_has_each_peer_of_each_part():
    def row(part, ratio, m):
        return {"part": part, "m": m, "n": 2, "over_ours": {"gemm": {"median": ratio}}}

    assert BENCH.summary([row("gate", 2.0, 1), row("gate", 0.5, 4), row("gate", 3.0, 4) | {"math": "fast"}]) == {
        "gate gemm": {"geomean": 1.0, "worst": 0.5, "worst_shape": [4, 2], "shapes": 2},
        "gate fast gemm": {"geomean": 3.0, "worst": 3.0, "worst_shape": [4, 2], "shapes": 1},
    }
