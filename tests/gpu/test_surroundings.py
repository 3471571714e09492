"""What surrounds a call on a device: arguments without memory at a warm kernel, fake tensors, copies, packages."""

import contextlib
import copy

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


def test_a_module_that_has_run_is_copied(warm):
    x, w, bias = warm
    module = torch.nn.Module()
    module.op, module.kernel = co.gemm_bias_relu, co.build(co.gemm_bias_relu.plan(x, w, bias).spec).loaded
    again = copy.deepcopy(module)
    assert torch.equal(again.op(x, w, bias), module.op(x, w, bias))
    assert again.kernel is module.kernel


def test_lazy_negations_at_a_warm_kernel(warm):
    x, w, bias = warm
    assert torch.equal(co.gemm_bias_relu(x, w, torch._neg_view(bias)), co.gemm_bias_relu(x, w, -bias))
    assert torch.equal(co.gemm_bias_relu(torch._neg_view(x), w, bias), co.gemm_bias_relu(-x, w, bias))


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


def test_scalars_are_one_rule_on_the_device(warm):
    x, w, bias = warm

    @co.epilogue
    def scaled(acc, bias: co.Row, s: co.Scalar):
        return (acc + bias) * s

    wanted = co.gemm(x, w, epilogue=scaled, bias=bias, s=0.5)
    for s in (torch.tensor(0.5), torch.tensor([0.5]), torch.tensor(0.5, dtype=torch.float64)):
        for place in ("cpu", "cuda"):
            for _ in range(2):
                assert torch.equal(co.gemm(x, w, epilogue=scaled, bias=bias, s=s.to(place)), wanted)


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
