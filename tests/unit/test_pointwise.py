"""Epilogues that read no product: which kernels serve them, and what a backward makes of them."""

from dataclasses import replace

import pytest
import torch
from fake_device import fake_device
from signatures import H100

import cutlass_ops as co
from cutlass_ops.choose import dispatch, policies
from cutlass_ops.declare.problem import Problem
from cutlass_ops.declare.spec import KernelSpec
from cutlass_ops.epilogue.graph import canonical
from cutlass_ops.epilogue.nodes import Input, Kind, Node, Output
from cutlass_ops.kinds.pointwise.config import PointwiseConfig
from cutlass_ops.kinds.pointwise.kind import shared_memory
from cutlass_ops.kinds.render import render
from cutlass_ops.run import backward
from cutlass_ops.tuner.tuning import signature_at

BF16 = torch.bfloat16
DOUBLED = canonical([Input("x", Kind.TILE)], [Node("input", (), "x"), Node("add", (0, 0))], [Output("d", 1)])
SUMMED = canonical(
    [Input("x", Kind.TILE)],
    [Node("input", (), "x"), Node("add", (0, 0))],
    [Output("d", 1), Output("total", 1, Kind.ROW, "sum"), Output("at", 1, Kind.ROW, "argmax")],
)


def signature(graph, device=H100):
    return signature_at(graph, Problem(64, 4096, 8), "bf16", "row", "col", None, device)


@pytest.mark.parametrize("device", [H100, replace(H100, capability=(8, 0), name="NVIDIA A100-SXM4-80GB")], ids=str)
def test_only_pointwise_kernels_serve_it(device):
    kernels = policies.policy(signature(DOUBLED, device), device).kernels
    assert {type(config) for config in kernels} == {PointwiseConfig}
    # Few rows are spread over more thread blocks.
    rows = [dispatch.decide(signature(DOUBLED, device), device, Problem(m, 4096, 8)).config.rows for m in (64, 65536)]
    assert rows[0] < rows[1]


@pytest.mark.parametrize(("graph", "state_bytes"), [(DOUBLED, 0), (SUMMED, 8)])
def test_shared_memory_is_that_of_one_reduction_of_columns(graph, state_bytes):
    of = signature(graph)
    spec = H100.spec(of, PointwiseConfig(4))
    assert shared_memory(spec, spec.config) == 8 * 256 * state_bytes
    text = render(spec)
    assert f"kStateBytes = {state_bytes};" in text
    assert KernelSpec.from_json(spec.to_json()) == spec


def test_the_elementwise_part_of_a_backward_is_one_launch_that_allocates_no_operand_in_vain(monkeypatch):
    monkeypatch.setattr(backward, "has_kernels", lambda a: True)
    x, w = (torch.randn(s).to(BF16).requires_grad_() for s in ((48, 64), (40, 64)))
    bias = torch.randn(40).to(BF16).requires_grad_()
    with fake_device(monkeypatch) as fake:
        d = co.gemm_bias_gelu(x, w.t(), bias)
        found = torch.autograd.grad(d, [x, w, bias], torch.ones_like(d))
    pointwise = [launch for launch in fake.launches if isinstance(launch.spec.config, PointwiseConfig)]
    assert len(pointwise) == 1
    assert len(fake.launches) == 4  # forward, this, and two GEMMs
    given = [v.detach().double().requires_grad_() for v in (x, w, bias)]
    plain = torch.nn.functional.gelu(given[0] @ given[1].t() + given[2])
    exact = torch.autograd.grad(plain, given, torch.ones_like(plain))
    for a, b in zip(found, exact, strict=True):
        assert (a.double() - b).norm() <= 0.02 * b.norm()
