"""What surrounds a call on a device: arguments without memory at a warm kernel, fake tensors, copies, packages."""

import contextlib

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import cutlass_ops as co
from cutlass_ops.run import ops
from tests.gpu import tensors

# What PyTorch warns of in its own modules is its own matter.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

M, N, K = 64, 512, 256


@pytest.fixture
def warm():
    """Return operands, of which a call has been served."""
    x, w, bias = tensors.matrix(M, K, "bf16"), tensors.matrix(N, K, "bf16").t(), tensors.vector(N, "bf16")
    co.gemm_bias_relu(x, w, bias)
    torch.cuda.synchronize()
    return x, w, bias


@pytest.mark.parametrize("argument", range(3))
def test_a_warm_kernel_is_never_given_null_pointers(warm, argument):
    wanted = co.gemm_bias_relu(*warm)
    arguments = list(warm)
    arguments[argument] = torch._to_functional_tensor(arguments[argument])
    assert torch.equal(torch._from_functional_tensor(co.gemm_bias_relu(*arguments)), wanted)
    freed = list(warm)
    freed[argument] = freed[argument].clone(memory_format=torch.preserve_format)
    freed[argument].untyped_storage().resize_(0)
    with pytest.raises(ValueError, match="has no memory"):
        co.gemm_bias_relu(*freed)
    torch.cuda.synchronize()
    assert torch.equal(co.gemm_bias_relu(*warm), wanted)


def test_fake_tensors_at_a_warm_kernel(warm):
    with FakeTensorMode() as mode:
        found = co.gemm_bias_relu(*map(mode.from_tensor, warm))
    assert (tuple(found.shape), found.device) == ((M, N), warm[0].device)
    with pytest.raises(TypeError, match="FakeTensor"):
        co.gemm_bias_relu.plan(*map(mode.from_tensor, warm))
    torch.cuda.synchronize()


@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_program_runs_the_kernel(warm, strict):
    x, w, bias = warm

    class Relu(torch.nn.Module):
        def forward(self, x, w, bias):
            return co.gemm_bias_relu(x, w, bias)

    program = torch.export.export(Relu(), warm, strict=strict)
    assert any("fused_gemm" in str(n.target) for n in program.graph.nodes)
    assert torch.equal(program.module()(x + x, w, bias), co.gemm_bias_relu(x + x, w, bias))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_package_of_aotinductors_runs_the_kernel(warm):
    class Plain(torch.nn.Module):
        def forward(self, x, w, bias):
            return co.gemm(x, w) + co.gemm_bias_relu(x, w, bias)

    program = torch.export.export(Plain(), warm)
    package = torch._inductor.aoti_load_package(torch._inductor.aoti_compile_and_package(program))
    torch.testing.assert_close(package(*warm), Plain()(*warm))


def test_launches_are_ranges_of_a_profiler_on_request(warm, monkeypatch):
    seen = []

    @contextlib.contextmanager
    def named(name):
        seen.append(name)
        yield

    monkeypatch.setenv("CUTLASS_OPS_NVTX", "1")
    monkeypatch.setattr(torch.cuda.nvtx, "range", named)
    op = ops.Op("mine", co.gemm_bias_relu.epilogue)
    for _ in range(2):
        assert torch.equal(op(*warm), co.gemm_bias_relu(*warm))
    assert seen == ["mine"] * 2


# ---- Arguments that are no plain tensors -----------------------------------------------------------------------------


@co.epilogue
def drawn(acc, bias: co.Row, weight: co.Col, residual: co.Tile, s: co.Scalar, seed: co.Integer):
    return (acc * weight + bias + residual) * s + co.uniform(seed, 1)


def dense():
    """Return an op and its arguments by name, numbers as tensors too."""
    given = {"a": tensors.matrix(M, K, "bf16"), "b": tensors.matrix(K, N, "bf16", "col")}
    given |= {"bias": torch.randn(N, device="cuda"), "weight": torch.randn(M, device="cuda")}
    given |= {"residual": tensors.matrix(M, N, "bf16"), "s": torch.tensor(1.5, device="cuda")}
    return ops.Op("drawn", drawn), given | {"seed": torch.tensor(3, device="cuda")}


@pytest.mark.parametrize("z", [3.0 + 2.0j, 1.0 - 0.5j])
def test_the_imaginary_part_of_a_conjugate_is_a_number(z):
    op, given = dense()
    z = torch.tensor(z, device="cuda")
    for s in (0.5, z.imag, z.conj().imag, -z.real, z.conj().imag):
        assert torch.equal(op(**(given | {"s": s})), op(**(given | {"s": float(s)})))
