"""The ops as they are called: dispatch, outputs, streams, threads, graphs, memory, errors."""

import threading

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

import cutlass_ops as co
from cutlass_ops.artifacts.loader import Reason, refusal
from cutlass_ops.compilation.background import Background
from cutlass_ops.run import named
from tests.gpu import kernels, oracle, tensors

pytestmark = pytest.mark.gpu


def problem(m, n, k, dtype="bf16", *, aligned=True):
    a, b = tensors.matrix(m, k, dtype, aligned=aligned), tensors.matrix(k, n, dtype, "col", aligned=aligned)
    return a, b, tensors.vector(n, dtype)


def bias_relu_exact(a, b, bias):
    return torch.relu(a.double() @ b.double() + bias.double())


@pytest.mark.parametrize("m", kernels.ROWS)
@pytest.mark.parametrize(("n", "k"), kernels.WEIGHTS)
def test_every_kernel_that_dispatch_picks(m, n, k):
    a, b = (torch.randn(s, device="cuda", dtype=torch.bfloat16) / k**0.25 for s in ((m, k), (n, k)))
    bias = tensors.vector(n, "bf16")
    framed = tensors.Framed(m, n, "bf16")
    assert co.gemm_bias_relu(a, b.t(), bias, out=framed.out) is framed.out
    framed.assert_frame_untouched()
    oracle.assert_close(framed.out, bias_relu_exact(a, b.t(), bias), F.relu(F.linear(a, b, bias)))
    fresh = co.gemm_bias_relu(a, b.t(), bias)
    assert fresh.is_contiguous()
    assert torch.equal(fresh, framed.out)


@pytest.mark.parametrize(("m", "n", "k"), [(1, 1, 1), (3, 4097, 129), (65, 1001, 4097), (511, 63, 65)])
def test_misaligned_sizes(m, n, k):
    a, b, bias = problem(m, n, k, aligned=False)
    result = co.gemm_bias_relu(a, b, bias)
    oracle.assert_close(result, bias_relu_exact(a, b, bias), F.relu(F.linear(a, b.t(), bias)))


def test_a_misaligned_address():
    buffer = torch.randn(65 * 128 + 1, device="cuda").bfloat16()
    a = buffer[1:].view(65, 128)
    _, b, bias = problem(65, 72, 128)
    b = b.t().contiguous().view(-1)
    b = torch.cat([b.new_zeros(1), b])[1:].view(72, 128).t()
    oracle.assert_close(co.gemm_bias_relu(a, b, bias), bias_relu_exact(a, b, bias), F.relu(F.linear(a, b.t(), bias)))


def test_an_odd_number_of_columns_keeps_the_bulk_loads():
    m, n, k = 65, 1001, 512
    a, w = (torch.randn(s, device="cuda").bfloat16() / k**0.25 for s in ((m, k), (n, k)))
    bias = tensors.vector(n, "bf16")
    plan = co.gemm_bias_relu.plan(a, w.t(), bias)
    assert isinstance(plan.spec.config, co.Sm90Config)
    wanted = bias_relu_exact(a, w.t(), bias)
    oracle.assert_close(co.gemm_bias_relu(a, w.t(), bias), wanted, F.relu(F.linear(a, w, bias)))
    # A window of a larger buffer: aligned rows, and neighbours that must stay.
    framed = tensors.Framed(m, n, "bf16")
    oracle.assert_close(co.gemm_bias_relu(a, w.t(), bias, out=framed.out), wanted)
    framed.assert_frame_untouched()


def test_residual_in_place():
    a, b, bias = problem(200, 256, 512)
    residual = torch.randn(200, 256, device="cuda").bfloat16()
    wanted = bias_relu_exact(a, b, bias) + residual.double()
    result = co.gemm_bias_relu_residual(a, b, bias, residual, out=residual)
    assert result is residual
    oracle.assert_close(result, wanted)


def test_a_batch_is_folded():
    a = torch.randn(3, 5, 7, 256, device="cuda").bfloat16()
    _, b, bias = problem(1, 128, 256)
    wanted = bias_relu_exact(a.flatten(0, 2), b, bias).view(3, 5, 7, 128)
    for _ in range(2):  # cold, then warm
        result = co.gemm_bias_relu(a, b, bias)
        assert result.shape == (3, 5, 7, 128)
        oracle.assert_close(result, wanted)
    out = torch.full((3, 5, 7, 128), float("nan"), device="cuda", dtype=torch.bfloat16)
    assert co.gemm_bias_relu(a, b, bias, out=out) is out
    oracle.assert_close(out, wanted)
    sliced = torch.randn(4, 6, 512, device="cuda").bfloat16()[:, :, 128:384]
    oracle.assert_close(co.gemm_bias_relu(sliced, b, bias), bias_relu_exact(sliced, b, bias))
    row = torch.randn(256, device="cuda").bfloat16()
    assert co.gemm_bias_relu(row, b, bias).shape == (128,)
    with pytest.raises(ValueError, match="contiguous"):
        co.gemm_bias_relu(a[:, :, ::2][:, ::2], b, bias)


@pytest.mark.parametrize("alpha", [0.5, 2, "cpu", "cuda"])
def test_scalars(alpha):
    value = alpha if not isinstance(alpha, str) else torch.tensor(0.25, device=alpha)
    a, b, _ = problem(70, 128, 256)
    for _ in range(2):
        result = co.gemm(a, b, epilogue=kernels.scaled, alpha=value)
        oracle.assert_close(result, torch.relu(a.double() @ b.double() * float(value)))


def test_dtypes_of_d():
    a, b, _ = problem(65, 64, 128, "f16")
    wanted = torch.relu(a.double() @ b.double() + 1)
    bias = torch.ones(64, device="cuda", dtype=torch.float16)
    for d in ("f32", "bf16"):
        spec = kernels.configurations()[f"{kernels.SM90.slug}-d-{d}-from-f16"]
        bias_d = bias.to(tensors.DTYPES[d])
        if spec.inputs[0].dtype.name == "f16":
            bias_d = bias
        result = co.build(spec)(a, b, bias_d)
        assert result.dtype == tensors.DTYPES[d]
        oracle.assert_close(result, wanted)


@pytest.mark.parametrize("shape", [(0, 8, 8), (8, 0, 8), (8, 8, 0), (0, 0, 0)])
def test_empty_extents(shape):
    m, n, k = shape
    a, b, bias = (
        torch.randn(m, k).bfloat16().cuda(),
        torch.randn(k, n).bfloat16().cuda(),
        torch.randn(n).bfloat16().cuda(),
    )
    result = co.gemm_bias_relu(a, b, bias)
    assert result.shape == (m, n)
    assert torch.equal(result, torch.relu(bias).expand(m, n))


def test_more_than_two_to_the_31_elements():
    if torch.cuda.mem_get_info()[0] < 30e9:
        pytest.skip("needs 30 GB of free device memory")
    m, n, k = 70_000, 32_768, 64
    a, b, bias = problem(m, n, k)
    out = torch.full((m, n), float("nan"), device="cuda", dtype=torch.bfloat16)
    co.gemm_bias_relu(a, b, bias, out=out)
    rows = torch.tensor([0, 1, 32_767, 65_535, 65_536, 65_537, m - 2, m - 1], device="cuda")
    oracle.assert_close(out[rows], bias_relu_exact(a[rows], b, bias))
    assert not any(chunk.isnan().any() for chunk in out.split(4096))
    wide = torch.randn(m, n, device="cuda", dtype=torch.bfloat16)
    narrow = torch.randn(64, n, device="cuda").bfloat16()
    result = co.gemm_bias_relu(wide, narrow.t(), bias[:64])
    oracle.assert_close(result[rows], bias_relu_exact(wide[rows], narrow.t(), bias[:64]))


def test_the_current_stream_orders_the_work():
    a, b, bias = problem(256, 256, 512)
    wanted = bias_relu_exact(a, b, bias)
    side, out = torch.cuda.Stream(), torch.empty(256, 256, device="cuda", dtype=torch.bfloat16)
    staged = torch.zeros_like(a)
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        staged.copy_(a)
        co.gemm_bias_relu(staged, b, bias, out=out)
        result = out.clone()
    side.synchronize()
    oracle.assert_close(result, wanted)


def test_no_synchronisation_and_no_hidden_allocation():
    a, b, bias = problem(256, 256, 512)
    out = co.gemm_bias_relu(a, b, bias)
    torch.cuda.synchronize()
    with tensors.without_synchronisation():
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        co.gemm_bias_relu(a, b, bias, out=out)
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
        co.gemm_bias_relu(a, b, bias)
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == before + 1


def test_cuda_graph():
    a, b, bias = problem(300, 256, 512)
    alpha = torch.tensor(2.0, device="cuda")
    co.gemm_bias_relu(a, b, bias), co.gemm(a, b, epilogue=kernels.scaled, alpha=alpha)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        first = co.gemm_bias_relu(a, b, bias)
        second = co.gemm(a, b, epilogue=kernels.scaled, alpha=alpha)
    for seed in range(3):
        torch.manual_seed(seed)
        a.copy_(torch.randn_like(a))
        bias.copy_(torch.randn_like(bias))
        alpha.fill_(seed + 0.5)
        graph.replay()
        oracle.assert_close(first, bias_relu_exact(a, b, bias))
        oracle.assert_close(second, torch.relu(a.double() @ b.double() * (seed + 0.5)))


def test_threads():
    shapes = [(1, 256, 512), (33, 1024, 256), (200, 520, 264), (700, 512, 512), (64, 4096, 512), (129, 136, 8)]
    failures = []

    def work(seed):
        try:
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                for turn in range(20):
                    m, n, k = shapes[(seed + turn) % len(shapes)]
                    generator = torch.Generator("cuda").manual_seed(seed * 100 + turn)
                    a, w = (
                        torch.randn(*s, device="cuda", generator=generator).bfloat16() / k**0.25
                        for s in ((m, k), (n, k))
                    )
                    bias = torch.randn(n, device="cuda", generator=generator).bfloat16()
                    result = co.gemm_bias_relu(a, w.t(), bias)
                    oracle.assert_close(result, bias_relu_exact(a, w.t(), bias))
        except Exception as exc:
            failures.append(exc)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures[0]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two devices")
def test_another_device_than_the_current_one():
    a, b, bias = (x.to("cuda:1") for x in problem(65, 256, 512))
    result = co.gemm_bias_relu(a, b, bias)
    assert result.device == torch.device("cuda:1")
    assert torch.cuda.current_device() == 0
    oracle.assert_close(result, bias_relu_exact(a, b, bias))


def rows_without_a_compiler(op, b, bias, exact):
    for m in range(1, 1200, 7):
        x = torch.randn(m, b.shape[0], device="cuda", dtype=torch.bfloat16)
        oracle.assert_close(op(x, b, bias), exact(x, b, bias))


def test_nothing_is_compiled_after_warming_up(monkeypatch):
    a, b, bias = problem(8, 256, 512)
    assert co.warm_up(co.gemm_bias_relu, a, b, bias) > 1
    monkeypatch.setenv("CUTLASS_OPS_JIT", "0")
    monkeypatch.setenv("CUTLASS_OPS_CACHE_DIR", "/nonexistent")
    rows_without_a_compiler(co.gemm_bias_relu, b, bias, bias_relu_exact)


@pytest.mark.background
def test_the_first_call_leaves_other_rows_to_the_background(monkeypatch):
    a, b, bias = problem(8, 256, 512)
    co.gemm_bias_silu(a, b, bias)
    Background.current().wait()
    monkeypatch.setenv("CUTLASS_OPS_JIT", "0")
    rows_without_a_compiler(co.gemm_bias_silu, b, bias, lambda x, w, v: F.silu(x.double() @ w.double() + v.double()))


def test_errors_name_the_argument():
    a, b, bias = problem(16, 64, 128)
    cases = [
        (TypeError, "^a is torch.float32", lambda: co.gemm_bias_relu(a.float(), b, bias)),
        (TypeError, "^b is torch.float16", lambda: co.gemm_bias_relu(a, b.half(), bias)),
        (TypeError, "^bias is torch.float64", lambda: co.gemm_bias_relu(a, b, bias.double())),
        (TypeError, "bias is missing", lambda: co.gemm_bias_relu(a, b)),
        (TypeError, "^bias must be a torch.Tensor", lambda: co.gemm_bias_relu(a, b, 1.0)),
        (ValueError, "pass b.t()", lambda: co.gemm_bias_relu(a, b.t().contiguous(), bias)),
        (ValueError, "^bias has shape", lambda: co.gemm_bias_relu(a, b, bias[:-1])),
        (ValueError, "^bias has shape", lambda: co.gemm_bias_relu(a, b, bias[:, None])),
        (ValueError, "^bias is on cpu", lambda: co.gemm_bias_relu(a, b, bias.cpu())),
        (ValueError, "^out has shape", lambda: co.gemm_bias_relu(a, b, bias, out=a)),
        (ValueError, "^out is on cpu", lambda: co.gemm_bias_relu(a, b, bias, out=torch.empty(16, 64).bfloat16())),
        (
            ValueError,
            "^a requires grad",
            lambda: co.gemm_bias_relu(a.clone().requires_grad_(), b, bias, out=torch.empty_like(a[:, :64])),
        ),
        (ValueError, "^a has shape .* stride 1", lambda: co.gemm_bias_relu(wide[:, ::2], b, bias)),
        (ValueError, "^bias has stride 2", lambda: co.gemm_bias_relu(a, b, long[::2])),
    ]
    wide, long = torch.randn(16, 256, device="cuda").bfloat16(), torch.randn(128, device="cuda").bfloat16()
    for kind, pattern, run in cases:
        for _ in range(2):
            with pytest.raises(kind, match=pattern.replace("b.t()", r"b\.t\(\)")):
                run()
    co.gemm_bias_relu(a, b, bias)
    for kind, pattern, run in cases:  # a warm plan must not change the answers
        with pytest.raises(kind, match=pattern.replace("b.t()", r"b\.t\(\)")):
            run()


def test_overlapping_outputs():
    buffer = torch.randn(64, 256, device="cuda").bfloat16()
    _, b, bias = problem(64, 128, 128)
    a = buffer[:, :128]
    warm = co.gemm_bias_relu(a, b, bias)
    with pytest.raises(ValueError, match=r"^out shares memory with a"):
        co.gemm_bias_relu(a, b, bias, out=buffer[:, 64:192])
    result = co.gemm_bias_relu(a, b, bias, out=buffer[:, 128:])  # interleaved, not shared
    assert torch.equal(result, warm)
    residual = torch.randn(65, 128, device="cuda").bfloat16()
    with pytest.raises(ValueError, match=r"^out shares memory with residual"):
        co.gemm_residual(a, b, residual[:64], out=residual[1:])


def test_gradients_are_recorded_only_where_they_are_wanted():
    a, b, bias = problem(16, 64, 128)
    weight = b.t().contiguous().requires_grad_()
    with torch.no_grad():
        first = co.gemm_bias_relu(a, weight.t(), bias)
        assert co.gemm_bias_relu(a, weight.t(), bias).grad_fn is None
    recorded = co.gemm_bias_relu(a, weight.t(), bias)
    assert recorded.grad_fn is not None
    assert torch.equal(recorded, first)


def test_the_kernel_itself_refuses():
    a, b, bias = problem(16, 64, 128)
    d = torch.empty(16, 64, device="cuda", dtype=torch.bfloat16)
    launch = co.build(kernels.matrix()["gemm_bias_relu-bf16-row-col-tma"]).loaded.launch
    assert launch(a, b, d, bias, 0, 1, None) == 0
    odd = torch.randn(16 * 128 + 1, device="cuda").bfloat16()[1:].view(16, 128)
    refused = [
        ((a.half(), b, d, bias), 0, Reason.DTYPE),
        ((a, b.contiguous(), d, bias), 1, Reason.MAJOR),
        ((a, b, d[:, :32], bias), 2, Reason.SHAPE),
        ((a, b, d, bias.cpu()), 3, Reason.DEVICE),
        ((odd, b, d, bias), 0, Reason.ALIGNMENT),
        ((a, b, a[:, :64], bias), 2, Reason.OVERLAP),
        ((a, b, 3, bias), 2, Reason.KIND),
        ((a, b, d, bias[1:]), 3, Reason.SHAPE),
    ]
    for arguments, position, reason in refused:
        assert refusal(launch(*arguments, 0, 1, None)) == (position, reason)


def test_one_shape_with_several_kernels_stays_warm():
    m, n, k = 48, 256, 512
    a, b, bias = problem(m, n, k)
    odd = torch.randn(m * k + 1, device="cuda").bfloat16()[1:].view(m, k)
    for _ in range(3):
        for x in (a.contiguous(), odd):
            oracle.assert_close(co.gemm_bias_relu(x, b, bias), bias_relu_exact(x, b, bias))
    weights = [weight for key, weight in named.gemm_bias_relu._plans.items() if key[0] == (k, n)]
    assert [len(weight.plans[m, k]) for weight in weights if (m, k) in weight.plans] == [2]
