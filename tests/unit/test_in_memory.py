"""What a kernel reads is memory: numbers, zeros, quantisations, and memory that changes after a preparation.

``test_op_contract.py`` has the same of every tensor in every kind of call.
"""

import pytest
import torch
from grouping import normal
from op_table import ROWS

import cutlass_ops as co
from cutlass_ops.run import norms

M, N, K = 48, 64, 128


def normed():
    return norms.rmsnorm_op(given="rstd"), {"a": normal(M, K), "b": normal(N, K).t(), "rstd": torch.rand(M)}


def test_lazy_zeros_are_zeros():
    row = ROWS["everything"]
    given = row.given()
    plain = given | {name: torch.zeros_like(given[name]) for name in ("bias", "residual")}
    lazy = given | {name: torch._efficientzerotensor(x.shape, dtype=x.dtype) for name, x in plain.items()
                    if name in ("bias", "residual")}  # fmt: skip
    assert all(map(torch.equal, row.call(lazy), row.call(plain)))


@pytest.mark.parametrize("kind", ["nested", "jagged", "quantised", "sparse", "oneDNN"])
@pytest.mark.usefixtures("device")
@pytest.mark.filterwarnings("ignore")
def test_a_number_has_memory_as_well(kind):
    from test_op_contract import NO_MEMORY

    row = ROWS["everything"]
    with pytest.raises((TypeError, ValueError), match=r"\bscale\b"):
        row.call(row.given() | {"scale": NO_MEMORY[kind](torch.ones(1))})


def test_memory_that_became_a_lazy_negation_is_refused_by_a_prepared_launch(device):
    op, given = normed()
    launch = co.prepare_launch(op, **given)
    launch()
    device.launches.clear()
    given["rstd"].data = torch._neg_view(torch.rand(M))
    with pytest.raises(ValueError, match="rstd is a lazy negation"):
        launch()
    assert device.launches == []


@pytest.mark.parametrize("name", ["values", "scale"])
def test_a_quantisation_writes_no_lazy_negation(name):
    x = normal(M, K)
    out = co.Scaled(*map(torch.empty_like, co.Scaled.quantize(x, "e4m3")))
    out = out._replace(**{name: torch._neg_view(getattr(out, name))})
    with pytest.raises(ValueError, match="is a lazy negation"):
        co.Scaled.quantize(x, "e4m3", out=out)


@pytest.mark.usefixtures("device")
def test_a_lazy_negation_that_a_program_makes_keeps_its_sign():
    row = ROWS["gemm_bias_silu"]
    given = row.given()
    wanted = row.call(given)
    torch._dynamo.reset()

    def call(given):
        return row.call(given | {"bias": torch._neg_view(-given["bias"])})

    assert torch.equal(torch.compile(call, backend="aot_eager", fullgraph=True)(given), wanted)
