"""What a trial decides without a device; tests/gpu/test_trial.py has the rest."""

import contextlib
from types import SimpleNamespace

import pytest
import torch
from signatures import H100

import cutlass_ops as co
from cutlass_ops.base.dtypes import e4m3
from cutlass_ops.declare.chips import USUAL
from cutlass_ops.declare.config import Ordered, ThreadblockShape
from cutlass_ops.declare.problem import Problem
from cutlass_ops.epilogue import builtin, composed
from cutlass_ops.kinds.sm90.config import Sm90Config
from cutlass_ops.operand import reference
from cutlass_ops.operand.call import call_at, signature_of
from cutlass_ops.tuner import trial

FIRST, SECOND = (Sm90Config(ThreadblockShape(128, n, 64)) for n in (128, 192))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_rounding_counts_for_values_that_an_epilogue_has_rounded_itself(dtype):
    values = torch.randn(4096, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    usual = float((values.to(dtype).double() - values).norm() / values.norm())
    for found in (trial._rounding(values, dtype), trial._rounding(values.to(dtype).double(), dtype)):
        assert found == pytest.approx(usual, rel=0.2)
    assert trial._rounding(torch.zeros(4, dtype=torch.float64), dtype) == 0


@pytest.fixture
def host(monkeypatch):
    cached = SimpleNamespace(L2_cache_size=USUAL.l2_bytes)
    monkeypatch.setattr(trial.torch.cuda, "get_device_properties", lambda device: cached)


@pytest.mark.usefixtures("host")
@pytest.mark.parametrize("wrong", ["", "d", "quantized", "amax", "row_sum_square"])
def test_results_in_fp8_are_right_where_they_saturate_and_sums_have_fewer_bits(wrong):
    graph = composed.residual_rms_quantised("bf16", True, True, True, "e4m3")
    call = call_at(composed.SCALED[False, True].graph.then(graph), Problem(64, 128, 256), "e4m3", "row", "col")
    found = trial.Trial(signature_of(call, H100), call.problem, torch.device("cpu"))
    assert found._signature.a.dtype is e4m3
    x = found._sets[0]
    x.inputs[[i.name for i in call.graph.inputs].index("scale_out")][3] = 1e-3  # as one near 0 may be drawn
    wanted = found._exact(x)
    names = [o.name for o in call.graph.outputs]
    inputs = dict(zip((i.name for i in call.graph.inputs), x.inputs, strict=True))
    dtypes = {n: o.dtype for n, o in zip(names[1:], x.outputs[1:], strict=True)}
    results = reference.gemm_reference(x.a, x.b, call.graph, inputs, d_dtype=x.outputs[0].dtype, output_dtypes=dtypes)
    for name, output in zip(names, x.outputs, strict=True):
        # As if sums had 12 bits.
        off = 1.5 if name == wrong else 1.0 if output.dtype.itemsize == 1 else 1 + 2.0**-11
        output.copy_(reference.rounded(results[name].float() * off, output.dtype))
    assert (results["quantized"].float().abs() == 448).any()
    said = found._wrong(wanted)
    assert said is None if not wrong else said.startswith(f"{wrong} is wrong")


@pytest.mark.usefixtures("host")
@pytest.mark.parametrize("name", ["i8", "i32", "indices"])
@pytest.mark.parametrize("does", ["right", "off by one", "nothing"])
def test_whole_numbers_are_compared_as_they_are(name, does, monkeypatch):
    """Results of INT8 operands, and indices, which have no NaN to show what was not written."""
    monkeypatch.setattr(trial.torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(trial.torch.cuda, "synchronize", lambda device: None)
    graph = {"i8": composed.SCALED[True, True].graph, "i32": builtin.identity.graph, "indices": greatest.graph}[name]
    out = {"i8": torch.int8, "i32": torch.int32, "indices": None}[name]
    call = call_at(graph, Problem(64, 128, 256), "bf16" if name == "indices" else "i8", "row", "col", out)
    found = trial.Trial(signature_of(call, H100), call.problem, torch.device("cpu"))
    monkeypatch.setattr(found, "_watch", SimpleNamespace(add=lambda *_: None))

    def launch(a, b, d, *rest):
        inputs = dict(zip((i.name for i in graph.inputs), rest, strict=False))
        outputs = (d, *rest[len(inputs) : len(rest) - 3])
        results = reference.gemm_reference(a, b, graph, inputs, d_dtype=d.dtype)
        for output, wanted in zip(outputs, results.values(), strict=True):
            if does != "nothing":
                output.copy_(wanted + (does == "off by one"))
        return 0

    kernel = SimpleNamespace(launch=launch, workspace_size=lambda *_: 0)
    said = found.admit(Ordered(FIRST), kernel)
    assert (said is None) == (does == "right")
    if said is not None and name != "indices":
        assert said.startswith("d is wrong: ")
        assert said.endswith(" of its whole numbers are others")


@co.epilogue
def greatest(acc):
    return {"d": acc, "at": co.e.argmax(acc, dim=1)}
