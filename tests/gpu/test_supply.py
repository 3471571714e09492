"""With an empty store: a call runs on a stand-in, and on its best kernel once that is compiled."""

import pytest
import torch

import cutlass_ops as co
from cutlass_ops.base.errors import MissingKernelError
from cutlass_ops.base.session import Session
from cutlass_ops.compilation.background import Background
from cutlass_ops.declare.config import GemvConfig
from cutlass_ops.run import ops
from cutlass_ops.run.registry import Registry
from tests.gpu import tensors

pytestmark = [pytest.mark.gpu, pytest.mark.background]

M, N, K = 512, 1024, 512


@pytest.fixture
def cold(tmp_path, monkeypatch):
    """Have nothing compiled, nothing loaded, and calls take stand-ins."""
    monkeypatch.setenv("CUTLASS_OPS_CACHE_DIR", str(tmp_path / "store"))
    monkeypatch.setenv("CUTLASS_OPS_STAND_IN", "1")
    with Session().active():
        yield
        Background.current().close()


@pytest.fixture
def operands():
    return tensors.matrix(M, K, "bf16"), tensors.matrix(N, K, "bf16").t(), tensors.vector(N, "bf16")


def near(d, a, b, bias):
    wanted = torch.relu(a.double() @ b.double() + bias.double())
    theirs = torch.relu(torch.addmm(bias, a, b)).double()
    return float((d.double() - wanted).norm()) <= 2 * float((theirs - wanted).norm())


@pytest.mark.usefixtures("cold")
def test_a_cold_call_is_right_on_the_kernel_that_compiles_fastest_and_then_on_the_best(operands):
    op = ops.Op("relu", co.gemm_bias_relu.epilogue)
    best = op.plan(*operands).spec
    out = torch.full((M, N), float("nan"), device="cuda", dtype=torch.bfloat16)
    assert near(op(*operands, out=out), *operands)
    loaded = [entry.spec for entry in Registry.current().entries()]
    assert [type(spec.config) for spec in loaded] == [GemvConfig]
    assert best not in loaded
    Background.current().wait()
    out.fill_(float("nan"))
    assert near(op(*operands, out=out), *operands)
    assert best in [entry.spec for entry in Registry.current().entries()]
    served = op.served_warm
    assert near(op(*operands, out=out), *operands)
    assert op.served_warm == served + 1


@pytest.mark.usefixtures("cold")
def test_a_captured_call_raises_where_nothing_is_loaded_and_takes_a_stand_in_where_something_is(operands):
    op, graph = ops.Op("relu", co.gemm_bias_relu.epilogue), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        with pytest.raises(MissingKernelError, match="warm_up before"):
            op(*operands)
        operands[0].clone()  # PyTorch warns of a graph with nothing in it
    torch.cuda.synchronize()
    few = operands[0][:1]
    op(few, *operands[1:])  # some kernel of the signature
    torch.cuda.synchronize()
    graph, out = torch.cuda.CUDAGraph(), torch.full((M, N), float("nan"), device="cuda", dtype=torch.bfloat16)
    with torch.cuda.graph(graph):
        op(*operands, out=out)
    graph.replay()
    torch.cuda.synchronize()
    assert near(out, *operands)
