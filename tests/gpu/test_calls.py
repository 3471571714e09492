"""The ops as they are called: dispatch, outputs, streams, threads, memory, errors."""

import threading
import time

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

import cutlass_ops as co
from cutlass_ops.compilation.background import Background
from cutlass_ops.declare.spec import Operand
from cutlass_ops.run import named
from cutlass_ops.run.registry import Registry
from tests.gpu import kernels, oracle, tensors
from tests.gpu.cases import captured
from tests.gpu.memory import placed, whole

pytestmark = pytest.mark.gpu

BF16, F32 = torch.bfloat16, torch.float32
NAN = float("nan")
LONG = 300_000_000  # cycles: long enough for the host to notice, short enough for a test
# Rows of A, and weights (N, K), each of the one with each of the other.
ROWS = (1, 2, 16, 17, 33, 64, 65, 128, 129, 255, 256, 257, 511, 640, 1030, 2050)
WEIGHTS = ((256, 512), (1024, 1024), (4096, 4096), (6144, 264), (520, 8200))


def problem(m, n, k, *, aligned=True):
    a, b = tensors.matrix(m, k, "bf16", aligned=aligned), tensors.matrix(k, n, "bf16", "col", aligned=aligned)
    return a, b, tensors.vector(n, "bf16")


def whole_problem(m, n, k):
    """Draw whole numbers, of which one result is right."""
    return whole(m, k).to(BF16), whole(n, k).to(BF16).t(), whole(n, largest=200).to(BF16)


def bias_relu_exact(a, b, bias):
    return torch.relu(a.double() @ b.double() + bias.double())


def exact(a, b, bias):
    return bias_relu_exact(a, b, bias).to(BF16)


def eager(a, b, bias):
    return F.relu(F.linear(a, b.t(), bias))


def nan_like(*shape, dtype=BF16):
    return torch.full(shape, NAN, device="cuda", dtype=dtype)


def allocations():
    return torch.cuda.memory_stats()["allocation.all.allocated"]


# ---- Dispatch --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("m", ROWS)
@pytest.mark.parametrize(("n", "k"), WEIGHTS)
def test_every_kernel_that_dispatch_picks(m, n, k):
    a, b = (torch.randn(s, device="cuda", dtype=BF16) / k**0.25 for s in ((m, k), (n, k)))
    bias, here = tensors.vector(n, "bf16"), placed((m, n), Operand.of("bf16.row"))
    assert co.gemm_bias_relu(a, b.t(), bias, out=here.view) is here.view
    here.assert_only()
    oracle.assert_close(here.view, bias_relu_exact(a, b.t(), bias), eager(a, b.t(), bias))
    fresh = co.gemm_bias_relu(a, b.t(), bias)
    assert fresh.is_contiguous()
    assert torch.equal(fresh, here.view)


def shifted(x):
    """Place a matrix one element after an aligned address."""
    return torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)


@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 4097, 129), (65, 1001, 4097), (511, 63, 65), (65, 72, 128)], ids=str)
def test_misaligned_sizes_and_addresses(shape):
    a, b, bias = problem(*shape, aligned=False)
    if shape == (65, 72, 128):
        a, b = shifted(a), shifted(b.t()).t()
    oracle.assert_close(co.gemm_bias_relu(a, b, bias), bias_relu_exact(a, b, bias), eager(a, b, bias))


def test_an_odd_number_of_columns_keeps_the_bulk_loads():
    a, b, bias = problem(65, 1001, 512)
    assert isinstance(co.gemm_bias_relu.plan(a, b, bias).spec.config, co.Sm90Config)
    wanted = bias_relu_exact(a, b, bias)
    oracle.assert_close(co.gemm_bias_relu(a, b, bias), wanted, eager(a, b, bias))
    # A window of a larger buffer: neighbours must stay.
    here = placed((65, 1001), Operand.of("bf16.row"))
    oracle.assert_close(co.gemm_bias_relu(a, b, bias, out=here.view), wanted)
    here.assert_only()


def test_a_batch_is_folded():
    a, (_, b, bias) = torch.randn(3, 5, 7, 256, device="cuda").to(BF16), problem(1, 128, 256)
    wanted, out = bias_relu_exact(a, b, bias), nan_like(3, 5, 7, 128)
    for _ in range(2):  # cold, then warm
        oracle.assert_close(co.gemm_bias_relu(a, b, bias), wanted)
    assert co.gemm_bias_relu(a, b, bias, out=out) is out
    oracle.assert_close(out, wanted)
    sliced = torch.randn(4, 6, 512, device="cuda").to(BF16)[:, :, 128:384]
    oracle.assert_close(co.gemm_bias_relu(sliced, b, bias), bias_relu_exact(sliced, b, bias))
    assert co.gemm_bias_relu(a[0, 0, 0], b, bias).shape == (128,)
    with pytest.raises(ValueError, match="contiguous"):
        co.gemm_bias_relu(a[:, :, ::2][:, ::2], b, bias)


SCALARS = [
    2,
    0.5,
    0,
    torch.tensor(0.25),
    torch.tensor(4.0, dtype=BF16),
    torch.tensor([0.5]),
    torch.tensor(0.5).double(),
]


def test_a_scalar_may_differ_at_every_call_and_be_on_the_device():
    a, b, _ = whole_problem(70, 128, 256)
    for value in SCALARS:
        wanted = torch.relu(a.double() @ b.double() * float(value)).to(BF16)
        for scalar in (value, value.cuda()) if isinstance(value, torch.Tensor) else (value,):
            assert torch.equal(co.gemm(a, b, epilogue=kernels.scaled, alpha=scalar), wanted)


@pytest.mark.parametrize("shape", [(0, 256, 128), (72, 0, 128), (72, 256, 0), (0, 0, 0)])
def test_empty_extents_with_out_and_residual(shape):
    m, n, k = shape
    a, b, bias = whole_problem(m, n, k)
    residual, out = whole(m, n).to(BF16), nan_like(m, n)
    assert torch.equal(co.gemm_bias_relu(a, b, bias), torch.relu(bias).expand(m, n))
    assert co.gemm_bias_relu_residual(a, b, bias, residual, out=out) is out
    assert torch.equal(out, (torch.relu(bias).expand(m, n).double() + residual.double()).to(BF16))
    if m and n:
        assert torch.equal(co.gemm_bias_relu_residual(a, b, bias, residual, out=residual), out)


def test_one_shape_with_several_kernels_stays_warm():
    m, n, k = 48, 256, 512
    a, b, bias = problem(m, n, k)
    odd = torch.randn(m * k + 1, device="cuda").bfloat16()[1:].view(m, k)
    for _ in range(3):
        for x in (a.contiguous(), odd):
            oracle.assert_close(co.gemm_bias_relu(x, b, bias), bias_relu_exact(x, b, bias))
    weights = [weight for key, weight in named.gemm_bias_relu._plans.items() if key[0] == (k, n)]
    assert [len(weight.plans[m, k]) for weight in weights if (m, k) in weight.plans] == [2]


def test_m_does_not_grow_the_registry():
    _, b, bias = whole_problem(1, 256, 128)
    co.gemm_bias_relu.warm_up(whole(1, 128).to(BF16), b, bias)
    loaded, used = len(Registry.current().entries()), set()
    for m in [*range(1, 300), 511, 777, 1024, 4097, 8192]:
        a = whole(m, 128).to(BF16)
        assert torch.equal(co.gemm_bias_relu(a, b, bias), exact(a, b, bias)), m
        used.add(co.gemm_bias_relu.plan(a, b, bias).spec)
    assert len(Registry.current().entries()) == loaded
    assert len(used) >= 2


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


# ---- Outputs ---------------------------------------------------------------------------------------------------------


def test_a_warm_plan_does_not_hide_what_is_wrong():
    a, b, bias = whole_problem(72, 256, 128)
    out, wide, long = co.gemm_bias_relu(a, b, bias), whole(72, 256).to(BF16), whole(512).to(BF16)
    wrong = [
        (TypeError, r"^out is torch\.bfloat16, and out_dtype asks for torch\.float32", {"out": out, "out_dtype": F32}),
        (TypeError, r"^out_dtype is torch\.float64", {"out_dtype": torch.float64}),
        (TypeError, r"^out must be", {"out": [out]}),
        (TypeError, "^a is torch.float32", {"a": a.float()}),
        (TypeError, "^b is torch.float16", {"b": b.half()}),
        (TypeError, "^bias is torch.float64", {"bias": bias.double()}),
        (ValueError, r"pass b\.t\(\)", {"b": b.t().contiguous()}),
        (ValueError, "^bias has shape", {"bias": bias[:-1]}),
        (ValueError, "^bias is on cpu", {"bias": bias.cpu()}),
        (ValueError, "^bias has stride 2", {"bias": long[::2]}),
        (ValueError, "^out has shape", {"out": a}),
        (ValueError, "^out is on cpu", {"out": out.cpu()}),
        (ValueError, "^a requires grad", {"a": a.clone().requires_grad_(), "out": out}),
        (ValueError, "^a has shape .* stride 1", {"a": wide[:, ::2]}),
    ]
    for _ in range(2):
        for kind, pattern, changed in wrong:
            with pytest.raises(kind, match=pattern):
                co.gemm_bias_relu(**({"a": a, "b": b, "bias": bias} | changed))
        assert torch.equal(co.gemm_bias_relu(a, b, bias, out=out), exact(a, b, bias))


def test_a_residual_in_place_with_leading_dimensions():
    x, b, bias = whole_problem(6 * 8, 256, 128)
    a = x.view(2, 3, 8, 128)
    for _ in range(3):
        residual = whole(2, 3, 8, 256).to(BF16)
        wanted = (torch.relu(a.double() @ b.double() + bias.double()) + residual.double()).to(BF16)
        assert torch.equal(co.gemm_bias_relu_residual(a, b, bias, residual), wanted)
        assert co.gemm_bias_relu_residual(a, b, bias, residual, out=residual) is residual
        assert torch.equal(residual, wanted)


# ---- Host, streams, threads ------------------------------------------------------------------------------------------


def test_a_warm_call_neither_allocates_nor_synchronises():
    a, b, bias = whole_problem(72, 256, 128)
    residual, out = whole(72, 256).to(BF16), nan_like(72, 256)
    calls = {
        "bias and ReLU": (lambda **o: co.gemm_bias_relu(a, b, bias, **o)),
        "residual": (lambda **o: co.gemm_bias_relu_residual(a, b, bias, residual, **o)),
    }
    for call in calls.values():
        call(), call(out=out)
    torch.cuda.synchronize()
    with tensors.without_synchronisation():
        for name, call in calls.items():
            before = allocations()
            for _ in range(5):
                call(out=out)
            assert allocations() == before, name
            call()
            assert allocations() == before + 1, name
    # The same memory holds for a shape that the op sees for the first time.
    a, out = whole(73, 128).to(BF16), nan_like(73, 256)
    with tensors.without_synchronisation():
        before = allocations()
        co.gemm_bias_relu(a, b, bias, out=out)
        assert allocations() == before


def test_a_call_returns_while_the_device_is_still_busy():
    a, b, bias = whole_problem(256, 256, 512)
    out = co.gemm_bias_relu(a, b, bias)
    torch.cuda.synchronize()
    ready = torch.cuda.Event()
    torch.cuda._sleep(LONG)
    began = time.perf_counter()
    co.gemm_bias_relu(a, b, bias, out=out)
    took = time.perf_counter() - began
    ready.record()
    assert not ready.query(), f"the call took {took:.3f} s: as long as what was queued before it"
    ready.synchronize()


def test_work_goes_to_the_current_stream_and_to_no_other():
    a, b, bias = whole_problem(256, 256, 512)
    out, wanted = nan_like(256, 256), exact(a, b, bias)
    co.gemm_bias_relu(a, b, bias)
    torch.cuda.synchronize()
    busy, side, done = torch.cuda.Event(), torch.cuda.Stream(), torch.cuda.Event()
    torch.cuda._sleep(LONG)
    busy.record()
    with torch.cuda.stream(side):
        co.gemm_bias_relu(a, b, bias, out=out)
        done.record()
    done.synchronize()
    assert not busy.query(), "the kernel waited for the default stream"
    assert torch.equal(out, wanted)
    busy.synchronize()
    # On the other side, later work of the same stream waits for the kernel.
    late = torch.zeros_like(out)
    with torch.cuda.stream(side):
        torch.cuda._sleep(LONG)
        co.gemm_bias_relu(a, b, bias, out=out)
        late.copy_(out)
    side.synchronize()
    assert torch.equal(late, wanted)


def test_a_scalar_on_the_device_is_read_when_the_kernel_runs():
    a, b, _ = whole_problem(70, 128, 256)
    alpha = torch.tensor(2.0, device="cuda")
    for value in (2.0, -0.5, 0.0, 4.0):
        torch.cuda._sleep(LONG // 10)
        alpha.fill_(value)
        d = co.gemm(a, b, epilogue=kernels.scaled, alpha=alpha)
        alpha.fill_(NAN)
        assert torch.equal(d, torch.relu(a.double() @ b.double() * value).to(BF16))


def test_a_shape_seen_first_during_captured():
    known, (a, b, bias) = whole_problem(72, 256, 128), whole_problem(74, 256, 128)
    co.gemm_bias_relu(*known)
    used = co.gemm_bias_relu.plan(*known).spec
    assert co.gemm_bias_relu.plan(a, b, bias).spec == used, "pick another shape: this one has a kernel of its own"
    graph, d = captured(lambda: co.gemm_bias_relu(a, b, bias))
    d.fill_(NAN)
    graph.replay()
    assert torch.equal(d, exact(a, b, bias))


def in_threads(work, count=8):
    """Run `work(index)` in threads at once; return what they raised."""
    start, failures = threading.Barrier(count), []

    def run(index):
        try:
            start.wait(timeout=60)
            with torch.cuda.stream(torch.cuda.Stream()):
                work(index)
        except Exception as exc:
            failures.append(exc)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(count)]
    torch.cuda.synchronize()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return failures


def test_eight_threads_with_ops_kernels_and_shapes_of_their_own():
    configurations = list(kernels.configurations().values())[:8]
    problems = [whole_problem(40 * i + 8, 64 * i + 72, 128 * i + 64) for i in range(8)]
    wanted = [exact(*each) for each in problems]

    def work(index):
        kernel = co.build(configurations[index])
        for turn in range(30):
            at = (index + turn) % 8
            for run in (kernel, co.gemm_bias_relu):
                found = run(*problems[at], out=nan_like(*wanted[at].shape))
                assert torch.equal(found, wanted[at]), f"{configurations[index].slug} at {tuple(found.shape)}"

    assert in_threads(work) == []


def test_a_thread_that_has_done_nothing_else_with_cuda():
    """The driver encodes descriptors for threads with a context only, and every thread begins without."""
    kernel, operands = co.build(next(iter(kernels.configurations().values()))), whole_problem(300, 264, 520)
    wanted, results = kernel(*operands), [nan_like(300, 264) for _ in range(4)]
    torch.cuda.synchronize()
    for d in results:
        thread = threading.Thread(target=lambda d=d: kernel(*operands, out=d))
        thread.start()
        thread.join()
    torch.cuda.synchronize()
    assert all(torch.equal(d, wanted) for d in results)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two devices")
def test_another_device_than_the_current_one_serves_and_two_are_refused():
    a, b, bias = whole_problem(72, 256, 128)
    there = [x.to("cuda:1") for x in (a, b, bias)]
    co.gemm_bias_relu(a, b, bias)
    assert torch.equal(co.gemm_bias_relu(*there).cpu(), exact(a, b, bias).cpu())
    for at, name in enumerate(("a", "b", "bias")):
        mixed = [a, b, bias]
        mixed[at] = there[at]
        named = "b" if name == "a" else name  # a decides where the others must be
        with pytest.raises(ValueError, match=rf"^{named} is on cuda:\d and a is on cuda:\d"):
            co.gemm_bias_relu(*mixed)
    with pytest.raises(ValueError, match=r"^out is on cuda:1 and a is on cuda:0"):
        co.gemm_bias_relu(a, b, bias, out=nan_like(72, 256).to("cuda:1"))
    assert torch.cuda.current_device() == 0
