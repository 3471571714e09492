"""An explanation says what serves a call and why, and agrees with what would really be done."""

import json
from dataclasses import replace

import pytest
import torch
from signatures import A100, H100

import cutlass_ops as co
from cutlass_ops.choose import dispatch, policies, tables
from cutlass_ops.choose.tables import Table
from cutlass_ops.declare.chips import CHIPS
from cutlass_ops.declare.device import Device
from cutlass_ops.declare.problem import Problem
from cutlass_ops.epilogue import builtin, composed
from cutlass_ops.operand.call import call_at, signature_of
from cutlass_ops.run import gated, named, norms, ops
from cutlass_ops.tools.explaining import explain_call
from tests.sampling import in_turn

pytestmark = pytest.mark.usefixtures("session")


USUAL = Problem(512, 4096, 4096)


def explained(problem=USUAL, op=named.gemm_bias_relu, device=H100, dtype="bf16", majors=("row", "col")):
    return explain_call(op.name, call_at(op.graph, problem, dtype, *majors), device, op)


@pytest.mark.parametrize("extents", [(512, 4096, 4096), (500, 4096, 4096), (3, 777, 512), (64, 4097, 4097)])
def test_it_agrees_with_the_choice(extents):
    problem = Problem(*extents)
    found = explained(problem)
    signature = signature_of(call_at(named.gemm_bias_relu.graph, problem, "bf16", "row", "col"), H100)
    spec, order = dispatch.choose(signature, H100, problem)
    assert found.served_by == spec.slug
    assert (found.candidates[0].config, found.candidates[0].order) == (spec.config, order)
    times = [c.microseconds for c in found.candidates]
    assert len(set(found.candidates)) == len(times)
    assert json.loads(json.dumps(found.to_json()))["problem"] == list(found.problem) == list(extents)


def test_it_says_what_was_measured_and_what_was_not():
    here = explained()
    assert here.candidates[0].source == "measured"
    assert "for this epilogue on this kind of device" in here.why
    assert here.peers["cublaslt"] > 0
    assert "measured     cublaslt" in str(here)
    other = explained(op=named.gemm_bias_gelu)
    assert "another epilogue" in other.why
    assert other.peers == {}
    assert "run cutlass_ops.tune() to measure" in explained(Problem(64, 4097, 4097)).why


def test_where_pytorch_serves_its_time_is_the_expected_one(monkeypatch):
    class Allowed(policies.Policy):
        def fallback(self, problem):
            return "cublaslt"

    usual = policies.policy
    monkeypatch.setattr(policies, "policy", lambda *of: Allowed(**vars(replace(usual(*of)))))
    found = explained()
    assert found.served_by == "PyTorch (cublaslt)"
    assert found.microseconds == found.peers["cublaslt"] != found.candidates[0].microseconds
    assert "is served by PyTorch (cublaslt), expected to take" in str(found).splitlines()[0]
    (marked,) = [line for line in str(found).splitlines() if "->" in line]
    assert "cublaslt" in marked


def test_gates_where_no_kernel_takes_two_weights():
    found = explained(Problem(8, 64, 64), gated.swiglu_op(None), A100)
    assert found.served_by == "two GEMMs"
    assert "no kernel takes both weights" in found.why
    # The first part leaves its result to the second, as a tile.
    assert [len(part.candidates) > 0 for part in found.parts] == [True, True]
    assert found.microseconds == sum(part.microseconds for part in found.parts)
    for part in found.parts:
        assert part.verdict in str(found)
    assert json.loads(json.dumps(found.to_json()))["parts"] == [part.to_json() for part in found.parts]
    # Without the op nothing says what runs instead, as for the same epilogue of a user's own.
    alone = explained(Problem(8, 64, 64), ops.op(composed.swiglu), A100)
    assert (alone.served_by, alone.parts) == ("nothing", ())


@pytest.mark.parametrize("norm", [None, composed.rms_norm])
def test_the_parts_are_what_then_runs(device, norm):
    device.device = A100
    x, w, up = (torch.randn(s).bfloat16() for s in ((8, 64), (128, 64), (128, 64)))
    given = {} if norm is None else {"eps": 1e-5}
    found = co.explain(co.gemm_swiglu, x, w.t(), up.t(), **given)
    assert (device.loaded, device.launches, device.needed, device.guessed) == ({}, [], [], [])
    co.gemm_swiglu(x, w.t(), up.t(), **given)
    assert [part.served_by for part in found.parts] == [launch.spec.slug for launch in device.launches]
    assert len(found.parts) == 2


EPS = 1e-5


def functions():
    """Return calls of every function that is no op, as a user makes them, and the op behind each."""
    x, w = torch.randn(8, 64).bfloat16(), torch.randn(64, 128).bfloat16()
    gamma, bias, residual = torch.ones(64), torch.zeros(128).bfloat16(), torch.randn(8, 128).bfloat16()
    rows = torch.ones(8)
    sums = co.RowStatistic(rows, 64, EPS)
    silu = builtin.bias_silu
    layer, moments = co.prepare(w, gamma, gamma, norm="layer"), norms.layernorm_op(shifted=True, given="moments")
    residual_op = norms.residual_rms_op(torch.bfloat16)
    return [
        (co.gemm, (x, w), {}, ops.op_of(None)),
        (co.gemm, (x, w), {"epilogue": silu, "bias": bias}, ops.op_of(silu)),
        (co.gemm, (), {"a": x, "b": w}, ops.op_of(None)),
        (co.gemm_bias, (x, w, bias), {"out": residual, "out_dtype": torch.bfloat16}, co.gemm_bias),
        (co.rmsnorm_gemm, (x, w), {"eps": EPS}, norms.rmsnorm_op()),
        (co.rmsnorm_gemm, (), {"a": x, "b": w, "gamma": gamma, "eps": EPS}, norms.rmsnorm_op()),
        (co.rmsnorm_gemm, (x, co.prepare(w, gamma)), {"rstd": sums}, norms.rmsnorm_op(given="sums")),
        (co.rmsnorm_gemm, (x, w), {"rstd": rows, "out_dtype": torch.float32}, norms.rmsnorm_op(given="rstd")),
        (co.rmsnorm_gemm, (x, w), {"eps": EPS, "epilogue": silu, "bias": bias}, norms.rmsnorm_op(silu)),
        (co.layernorm_gemm, (x, w, gamma), {"eps": EPS}, norms.layernorm_op()),
        (co.layernorm_gemm, (x, layer), {"mean": rows, "rstd": rows}, moments),
        (co.gemm_residual_rms, (x, w, residual), {"eps": EPS}, residual_op),
        (co.gemm_residual_rms, (x, w), {"residual": residual, "eps": EPS, "out": residual}, residual_op),
        (co.gemm_swiglu, (x, w, w), {}, gated.swiglu_op(None)),
        (co.gemm_swiglu, (x, w, w, gamma), {"eps": EPS, "out": residual}, gated.swiglu_op(composed.rms_norm)),
    ]  # fmt: skip


@pytest.mark.sample(12)
@pytest.mark.parametrize(("at", "on"), in_turn(range(len(functions())), (H100, A100)))
def test_every_function_is_explained_and_warmed_up_as_it_is_called(device, monkeypatch, at, on):
    device.device = on
    function, arguments, named, op = functions()[at]
    found = co.explain(function, *arguments, **named)
    assert (found.op, found.problem) == (op.name, (8, 128, 64))
    # Of weights with N along their lines no kernel takes two, whatever the device.
    assert found.served_by == "two GEMMs" if function is co.gemm_swiglu else found.candidates
    assert device.loaded == {}
    count = co.warm_up(function, *arguments, **named)
    assert count == len(device.loaded) > 0
    # Nothing is left to compile.
    device.closed = True
    function(*arguments, **named)
    assert device.launches


@pytest.mark.parametrize("given", ["gemm_bias_relu", "product by name", "swiglu", "groups"])
@torch.no_grad()
def test_autocast_is_explained_and_warmed_up_as_it_is_called(device, given):
    """FP32 operands are multiplied in BF16 there; other inputs stay FP32."""
    x, w, bias = torch.randn(8, 64), torch.randn(128, 64), torch.randn(128)
    function, arguments, named = {
        "gemm_bias_relu": (co.gemm_bias_relu, (x, w.t()), {"bias": bias}),
        "product by name": (co.gemm, (x, w.t()), {"epilogue": composed.swiglu, "up": w.t()}),
        "swiglu": (co.gemm_swiglu, (x, w.t(), w.t()), {}),
        "groups": (co.gemm, (x, w[None].mT), {"groups": co.Groups(torch.tensor([8], dtype=torch.int32))}),
    }[given]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert "bf16row_bf16col" in str(co.explain(function, *arguments, **named))
        assert co.warm_up(function, *arguments, **named) == len(device.loaded) > 0
        device.closed = True
        function(*arguments, **named)
    assert device.launches
    with pytest.raises(TypeError, match=r"Tensor Cores cannot multiply directly|a is torch.float32"):
        co.explain(function, *arguments, **named)


def test_functions_refuse_what_a_call_refuses():
    x, w = torch.zeros(4, 8).bfloat16(), torch.zeros(8, 16).bfloat16()
    for ask in (co.explain, co.warm_up):
        with pytest.raises(TypeError, match="eps and rstd are missing"):
            ask(co.rmsnorm_gemm, x, w)
        with pytest.raises(TypeError, match="without a norm"):
            ask(co.gemm_swiglu, x, w, w, torch.ones(8))
        with pytest.raises(TypeError, match="bias is unknown"):
            ask(co.rmsnorm_gemm, x, w, eps=EPS, bias=w)
        with pytest.raises(TypeError, match="a or b is missing: pass the arguments of a call of gemm"):
            ask(co.gemm, x)
    assert co.explain(co.rmsnorm_gemm, x, w, eps=EPS).served_by == "PyTorch"
    assert co.warm_up(co.gemm_swiglu, x, w, w) == 0


@pytest.mark.parametrize(
    ("problem", "bound"),
    [(Problem(8192, 8192, 8192), "compute"), (Problem(1, 8192, 8192), "memory"), (Problem(16, 64, 64), "launch")],
)
def test_the_bound(problem, bound):
    found = explained(problem)
    assert found.roofline.bound == bound
    assert f"bound by {bound}" in str(found)
    assert 0 < found.achieved <= 1.05


def test_where_nothing_is_there_and_nothing_compiled_pytorch_serves_or_nothing_does(monkeypatch, tmp_path):
    monkeypatch.setenv("CUTLASS_OPS_CACHE_DIR", str(tmp_path))  # the user's store may have such a kernel
    served = explained()
    monkeypatch.setenv("CUTLASS_OPS_JIT", "0")
    found = explained()
    assert served.is_served
    assert (found.is_served, found.served_by, found.microseconds) == (True, "PyTorch", None)
    assert found.why == f"{served.served_by} is not here, and CUTLASS_OPS_JIT=0 forbids compiling it"
    assert "now" in {finding.name for finding in served.contract}
    assert "now" not in {finding.name for finding in found.contract}  # it will never be
    monkeypatch.setenv("CUTLASS_OPS_STAND_IN", "0")
    alone = explained()
    assert (alone.is_served, alone.served_by, alone.microseconds, alone.why) == (False, "nothing", None, found.why)


def test_misaligned_operands_get_the_reason_and_the_remedy():
    says = {f.name: f.says for f in explained(Problem(64, 4096, 4097)).contract}
    assert "mma.sync" in says["unit"]
    assert "a and b not aligned to 16 bytes" in says["unit"]
    assert "pad the leading dimension" in says["unit"]
    copied = {f.name: f.says for f in explained(Problem(4096, 4096, 4097)).contract}["unit"]
    assert copied.startswith("wgmma")
    assert "copied to aligned workspace first" in copied
    assert "pad the leading dimension" in copied
    assert "wgmma" in {f.name: f.says for f in explained().contract}["unit"]
    assert "mma.sync" in {f.name: f.says for f in explained(device=A100).contract}["unit"]


def test_a_device_that_no_kernel_serves():
    found = explained(device=Device((7, 5), 40, "Tesla T4"))
    assert found.served_by == "nothing"
    assert "7.5" in found.why
    assert found.achieved is None
    assert str(found)


def test_tensors_on_the_cpu_and_every_way_to_name_an_op():
    a, b, bias = torch.zeros(4, 8), torch.zeros(8, 16), torch.zeros(16)
    a, b, bias = (x.bfloat16() for x in (a, b, bias))
    for found in (co.explain(co.gemm_bias_relu, a, b, bias), co.explain(co.gemm_bias_relu, a, b, bias=bias)):
        assert (found.served_by, found.problem) == ("PyTorch", (4, 16, 8))
        assert "on the CPU" in found.why
    assert co.explain(co.gemm, a, b).op == "gemm"
    assert "extent is 0" in co.explain(co.gemm, a[:0], b).why

    @co.epilogue
    def doubled(acc):
        """D = 2 A @ B."""
        return acc * 1.0625 * 2  # that no other test has: equal epilogues are one op

    assert co.explain(co.gemm, a, b, epilogue=doubled, out_dtype=torch.float32).op == "doubled"
    assert co.explain(doubled, a, b).op == "doubled"
    with pytest.raises(TypeError, match=r"pass cutlass_ops\.gemm, a named op"):
        co.explain(torch.mm, a, b)
    with pytest.raises(TypeError, match=r"gemm_bias_relu already has an epilogue: pass cutlass_ops.gemm"):
        co.explain(co.gemm_bias_relu, a, b, bias, epilogue=doubled)
    with pytest.raises(TypeError, match="bias is missing"):
        co.explain(co.gemm_bias_relu, a, b)


def test_it_says_that_tuning_was_deterministic():
    assert "deterministic" not in explained().why
    of = signature_of(call_at(named.gemm_bias_relu.graph, Problem(512, 4096, 4096), "bf16", "row", "col"), H100)
    table = Table(H100.name, 132, of, deterministic=True)
    tables.update(tables.path_of(policies.env.tuning_dir(), H100.name, of), table)
    policies.forget()
    found = explained()
    assert "all with bit-identical results (deterministic tuning)" in found.why
    assert all(c.config.whole_k for c in found.candidates)
    assert "deterministic" not in explained(dtype="f16").why


@pytest.mark.sample(3)
@pytest.mark.parametrize("chip", CHIPS.values(), ids=lambda chip: chip.name)
@pytest.mark.parametrize("problem", [(1, 16384, 16384), (16, 4096, 14336), (4096, 4096, 4096)], ids=str)
def test_no_chip_is_expected_to_exceed_its_roofline(chip, problem):
    call = call_at(builtin.bias.graph, Problem(*problem), "bf16", "row", "col")
    assert 0.2 < explain_call("gemm_bias", call, chip.device).achieved <= 1.05


def test_a_compiler_is_told_that_explain_belongs_outside():
    a, b = torch.ones(2, 8).bfloat16(), torch.ones(8, 3).bfloat16()
    torch.compiler.reset()
    with pytest.raises(Exception, match=r"explain looks for a kernel now: call it outside of the function"):
        torch.compile(lambda a: co.explain(co.gemm, a, b).served_by, backend="eager", fullgraph=True)(a)
