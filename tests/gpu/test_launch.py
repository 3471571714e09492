"""What a launch does besides computing: order of tiles, workspace, host, streams, graphs, memory, refusals."""

import threading
import time

import pytest
import torch

import cutlass_ops as co
from cutlass_ops.artifacts.loader import Reason, refusal
from cutlass_ops.run import named
from cutlass_ops.run.registry import Registry
from tests.gpu import edges, kernels, placement, tensors
from tests.gpu.placement import whole
from tests.gpu.warm import served_warm

pytestmark = pytest.mark.gpu

BF16, F32 = torch.bfloat16, torch.float32
DTYPES = {"bf16": BF16, "f16": torch.float16}
NAN = float("nan")
# Long enough for the host to notice, short enough for a test: 0.1 to 0.3 s.
LONG = 300_000_000

CONFIGURATIONS = kernels.configurations()
STREAM_K = [name for name in CONFIGURATIONS if "streamk" in name]
SPLIT = [name for name in CONFIGURATIONS if "_split" in name]
ORDERED = [name for name, spec in CONFIGURATIONS.items() if spec.sm90 and spec.sm90.schedule != "warp_specialized"]


@pytest.fixture(autouse=True, scope="module")
def _built():
    Registry.current().kernels(edges.specs().values())


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def problem(m, n, k, spec=None):
    """Draw a whole-numbered bias + ReLU with a kernel's operands, or BF16 with A row-major and B column-major."""
    dtype = DTYPES[spec.a.dtype.name] if spec else BF16
    a, b = whole(m, k).to(dtype), whole(n, k).to(dtype).t()
    if spec and spec.a.major == "col":
        a = a.t().contiguous().t()
    if spec and spec.b.major == "row":
        b = b.contiguous()
    return a, b, whole(n, largest=200).to(dtype)


def exact(a, b, bias, dtype=BF16):
    """Return the one right answer; whole numbers below 2^24 are exact in FP32, whatever the order."""
    return torch.relu(a.double() @ b.double() + bias.double()).to(dtype)


def nan_like(*shape, dtype=BF16):
    return torch.full(shape, NAN, device=placement.DEVICE, dtype=dtype)


def allocations():
    return torch.cuda.memory_stats()["allocation.all.allocated"]


def requested(which):
    """Bytes that were asked for; what PyTorch's allocator sets aside may be more."""
    return torch.cuda.memory_stats()[f"requested_bytes.all.{which}"]


# ---- Order of tiles and workspace ---------------------------------------------------------------------------------


def launch(kernel, a, b, d, bias, raster, swizzle):
    m, k, n = *a.shape, b.shape[1]
    size = kernel.loaded.workspace_size(m, n, k, 1, raster, swizzle)
    workspace = torch.full((size,), 255, dtype=torch.uint8, device=placement.DEVICE) if size else None
    return kernel.loaded.launch(a, b, d, bias, raster, swizzle, workspace)


@pytest.mark.parametrize("extents", [(1096, 1136), (712, 200), (8, 8)], ids=["waves", "part of one", "one tile"])
@pytest.mark.parametrize("name", ORDERED)
def test_every_order_of_tiles_gives_the_same(name, extents):
    kernel = co.build(CONFIGURATIONS[name])
    m, n = extents
    a, b, bias = problem(m, n, 136, CONFIGURATIONS[name])
    wanted = exact(a, b, bias, a.dtype)
    for raster in (0, 1, 2, 4, 5, 6):  # from 4 on by GPC
        for swizzle in (1, 2, 4, 8):
            d = nan_like(m, n, dtype=a.dtype)
            assert launch(kernel, a, b, d, bias, raster, swizzle) == 0
            assert torch.equal(d, wanted), f"raster {raster}, swizzle {swizzle}"


@pytest.mark.parametrize("extents", [(1096, 1136), (131, 264), (8, 8)], ids=["many", "few", "one"])
@pytest.mark.parametrize("k", [8, 64, 72, 520, 1000, 4104])  # some blocks have nothing, or a part of a tile
@pytest.mark.parametrize("name", SPLIT)
def test_blocks_that_split_k_add_up_to_the_whole(name, k, extents):
    kernel = co.build(CONFIGURATIONS[name])
    a, b, bias = problem(*extents, k, CONFIGURATIONS[name])
    wanted = exact(a, b, bias, a.dtype)
    for _ in range(3):
        d = nan_like(*extents, dtype=a.dtype)
        assert launch(kernel, a, b, d, bias, 0, 1) == 0
        assert torch.equal(d, wanted)


@pytest.mark.parametrize("name", SPLIT)
def test_blocks_that_split_k_round_the_same_every_time(name):
    kernel = co.build(CONFIGURATIONS[name])
    a, b = (torch.randn(e, 4096, device=placement.DEVICE, dtype=BF16) for e in (200, 264))
    bias = torch.randn(264, device=placement.DEVICE, dtype=BF16)
    first, again = nan_like(200, 264), nan_like(200, 264)
    assert launch(kernel, a, b.t(), first, bias, 0, 1) == 0
    for _ in range(20):
        assert launch(kernel, a, b.t(), again.fill_(NAN), bias, 0, 1) == 0
        assert torch.equal(first, again)


@pytest.mark.parametrize("swizzle", [1, 2, 4, 8])
def test_every_swizzle_of_an_sm80_kernel_gives_the_same(swizzle):
    kernel = co.build(kernels.matrix()["gemm_bias_relu-bf16-row-col-unaligned"])
    a, b, bias = problem(129, 1137, 35)
    d = nan_like(129, 1137)
    assert launch(kernel, a, b, d, bias, 0, swizzle) == 0
    assert torch.equal(d, exact(a, b, bias))


@pytest.mark.parametrize("name", STREAM_K)
@pytest.mark.parametrize("shape", [(128, 128, 8192), (256, 384, 4096), (1093, 1136, 136), (8, 8, 16)])
def test_stream_k_needs_nothing_of_its_workspace(name, shape):
    kernel = co.build(CONFIGURATIONS[name])
    m, n, k = shape
    a, b, bias = problem(m, n, k)
    for _ in range(3):
        placement.dirty_the_allocator()
        assert torch.equal(kernel(a, b, bias, out=nan_like(m, n)), exact(a, b, bias))


def test_some_kernel_does_need_a_workspace():
    assert any(co.build(CONFIGURATIONS[n]).loaded.workspace_size(128, 128, 8192, 1, 0, 1) for n in STREAM_K)


@pytest.mark.parametrize("name", [*STREAM_K, ORDERED[0]])
def test_memory_is_that_of_d_and_of_the_declared_workspace(name):
    kernel = co.build(CONFIGURATIONS[name])
    a, b, bias = problem(128, 128, 8192)
    out = kernel(a, b, bias)
    declared = kernel.loaded.workspace_size(128, 128, 8192, 1, 0, 1)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before, held = allocations(), requested("current")
    kernel(a, b, bias, out=out)
    assert allocations() - before == (1 if declared else 0)
    assert requested("peak") - held == declared
    assert requested("current") == held


def test_a_warm_call_neither_allocates_nor_synchronises():
    a, b, bias = problem(72, 256, 128)
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


# ---- Host and streams ---------------------------------------------------------------------------------------------


def test_a_call_returns_while_the_device_is_still_busy():
    a, b, bias = problem(256, 256, 512)
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
    a, b, bias = problem(256, 256, 512)
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


def test_the_workspace_lives_on_the_stream_that_uses_it():
    kernel = co.build(CONFIGURATIONS[STREAM_K[0]])
    a, b, bias = problem(128, 128, 8192)
    wanted, streams = exact(a, b, bias), [torch.cuda.Stream() for _ in range(4)]
    outs = [nan_like(128, 128) for _ in streams]
    torch.cuda.synchronize()
    for _ in range(10):
        for stream, out in zip(streams, outs, strict=True):
            with torch.cuda.stream(stream):
                kernel(a, b, bias, out=out)
    torch.cuda.synchronize()
    assert all(torch.equal(out, wanted) for out in outs)


def test_eight_threads_with_kernels_and_shapes_of_their_own():
    names = [*CONFIGURATIONS][:8]
    problems = [problem(40 * i + 8, 64 * i + 72, 128 * i + 64) for i in range(8)]
    wanted = [exact(*p) for p in problems]
    start, wrong = threading.Barrier(8), []

    def work(index):
        try:
            kernel = co.build(CONFIGURATIONS[names[index]])
            stream = torch.cuda.Stream()
            start.wait(timeout=60)
            with torch.cuda.stream(stream):
                for turn in range(30):
                    at = (index + turn) % 8
                    found = kernel(*problems[at], out=nan_like(*wanted[at].shape))
                    if not torch.equal(found, wanted[at]):
                        wrong.append(f"{names[index]} at {tuple(found.shape)}")
        except Exception as exc:
            wrong.append(repr(exc))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    torch.cuda.synchronize()
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong, wrong


def test_a_thread_that_has_done_nothing_else_with_cuda():
    """The driver encodes descriptors for threads with a context only, and every thread begins without."""
    kernel, operands = co.build(CONFIGURATIONS[next(iter(CONFIGURATIONS))]), problem(300, 264, 520)
    wanted, results = kernel(*operands), [nan_like(300, 264) for _ in range(4)]
    torch.cuda.synchronize()
    for d in results:
        thread = threading.Thread(target=lambda d=d: kernel(*operands, out=d))
        thread.start()
        thread.join()
    torch.cuda.synchronize()
    assert all(torch.equal(d, wanted) for d in results)


# ---- Graphs -------------------------------------------------------------------------------------------------------


def capture(call):
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call()
    return graph, result


@pytest.mark.parametrize("name", [*STREAM_K, ORDERED[0]])
def test_a_graph_follows_its_inputs(name):
    kernel = co.build(CONFIGURATIONS[name])
    a, b, bias = problem(136, 264, 2048)
    kernel(a, b, bias)
    graph, d = capture(lambda: kernel(a, b, bias))
    for _ in range(3):
        fresh = problem(136, 264, 2048)
        for x, y in zip((a, b, bias), fresh, strict=True):
            x.copy_(y)
        d.fill_(NAN)
        placement.dirty_the_allocator()
        graph.replay()
        assert torch.equal(d, exact(a, b, bias))


def test_a_shape_seen_first_during_capture():
    known, (a, b, bias) = problem(72, 256, 128), problem(74, 256, 128)
    co.gemm_bias_relu(*known)
    used = co.gemm_bias_relu.plan(*known).spec
    assert co.gemm_bias_relu.plan(a, b, bias).spec == used, "pick another shape: this one has a kernel of its own"
    graph, d = capture(lambda: co.gemm_bias_relu(a, b, bias))
    d.fill_(NAN)
    graph.replay()
    assert torch.equal(d, exact(a, b, bias))


# ---- Calls --------------------------------------------------------------------------------------------------------


def test_stale_results_do_not_survive():
    a, b, bias = problem(72, 256, 128)
    for _ in range(3):
        out = nan_like(72, 256)
        for x in (a, -a, a * 0):
            co.gemm_bias_relu(x, b, bias, out=out)
            assert torch.equal(out, exact(x, b, bias))


def test_a_mapping_of_outputs_serves_an_op_with_one():
    a, b, bias = problem(72, 256, 128)
    co.gemm_bias_relu(a, b, bias, out={"d": nan_like(72, 256)})
    for _ in range(3):
        out = nan_like(72, 256)
        assert served_warm(co.gemm_bias_relu, lambda out=out: co.gemm_bias_relu(a, b, bias, out={"d": out})) is out
        assert torch.equal(out, exact(a, b, bias))


def test_a_warm_plan_does_not_hide_a_wrong_dtype():
    a, b, bias = problem(72, 256, 128)
    out = co.gemm_bias_relu(a, b, bias)
    for _ in range(2):
        with pytest.raises(TypeError, match=r"^out is torch\.bfloat16, and out_dtype asks for torch\.float32"):
            co.gemm_bias_relu(a, b, bias, out=out, out_dtype=F32)
        with pytest.raises(TypeError, match=r"^out_dtype is torch\.float64"):
            co.gemm_bias_relu(a, b, bias, out_dtype=torch.float64)
        with pytest.raises(TypeError, match=r"^out must be"):
            co.gemm_bias_relu(a, b, bias, out=[out])
        co.gemm_bias_relu(a, b, bias, out=out)


def test_a_scalar_on_the_device_is_read_when_the_kernel_runs():
    a, b, _ = problem(70, 128, 256)
    alpha = torch.tensor(2.0, device=placement.DEVICE)
    for value in (2.0, -0.5, 0.0, 4.0):
        torch.cuda._sleep(LONG // 10)
        alpha.fill_(value)
        d = co.gemm(a, b, epilogue=kernels.scaled, alpha=alpha)
        alpha.fill_(NAN)
        assert torch.equal(d, torch.relu(a.double() @ b.double() * value).to(BF16))


def test_a_scalar_on_the_host_may_differ_at_every_call():
    a, b, _ = problem(70, 128, 256)
    for value in (2, 0.5, torch.tensor(0.25), torch.tensor(4.0, dtype=BF16), 0):
        d = co.gemm(a, b, epilogue=kernels.scaled, alpha=value)
        assert torch.equal(d, torch.relu(a.double() @ b.double() * float(value)).to(BF16))


def test_a_residual_in_place_with_leading_dimensions():
    x, b, bias = problem(6 * 8, 256, 128)
    a = x.view(2, 3, 8, 128)
    for _ in range(3):
        residual = whole(2, 3, 8, 256).to(BF16)
        wanted = (torch.relu(a.double() @ b.double() + bias.double()) + residual.double()).to(BF16)
        assert torch.equal(co.gemm_bias_relu_residual(a, b, bias, residual), wanted)
        assert co.gemm_bias_relu_residual(a, b, bias, residual, out=residual) is residual
        assert torch.equal(residual, wanted)


def test_parameters_and_inference_tensors():
    a, b, bias = problem(72, 256, 128)
    weight, offset = torch.nn.Parameter(b.t().contiguous()), torch.nn.Parameter(bias)
    wanted = exact(a, b, bias)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            for _ in range(2):
                assert torch.equal(co.gemm_bias_relu(a, weight.t(), offset), wanted)
                again = co.gemm_bias_relu(wanted[:, :128].contiguous(), weight.t(), offset)
    assert again.is_inference()
    for _ in range(2):
        out = torch.empty_like(wanted)
        with pytest.raises(ValueError, match=r"^b requires grad"):
            co.gemm_bias_relu(a, weight.t(), bias, out=out)
        with pytest.raises(ValueError, match=r"^bias requires grad"):
            co.gemm_bias_relu(a, b, offset, out=out)
        assert co.gemm_bias_relu(a, b, offset).requires_grad


@pytest.mark.parametrize("shape", [(0, 256, 128), (72, 0, 128), (72, 256, 0), (0, 0, 0)])
def test_empty_extents_with_out_and_residual(shape):
    m, n, k = shape
    a, b, bias = problem(m, n, k)
    residual = whole(m, n).to(BF16)
    out = nan_like(m, n)
    assert co.gemm_bias_relu_residual(a, b, bias, residual, out=out) is out
    assert torch.equal(out, (torch.relu(bias).expand(m, n).double() + residual.double()).to(BF16))
    if m and n:
        assert torch.equal(co.gemm_bias_relu_residual(a, b, bias, residual, out=residual), out)


def test_m_does_not_grow_the_registry():
    _, b, bias = problem(1, 256, 128)
    co.gemm_bias_relu.warm_up(whole(1, 128).to(BF16), b, bias)
    loaded = len(Registry.current().entries())
    kernels_used = set()
    for m in [*range(1, 300), 511, 777, 1024, 4097, 8192]:
        a = whole(m, 128).to(BF16)
        assert torch.equal(co.gemm_bias_relu(a, b, bias), exact(a, b, bias)), m
        kernels_used.add(co.gemm_bias_relu.plan(a, b, bias).spec)
    assert len(Registry.current().entries()) == loaded
    assert len(kernels_used) >= 2


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two devices")
def test_operands_on_two_devices_are_refused():
    a, b, bias = problem(72, 256, 128)
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


# ---- Refusals -----------------------------------------------------------------------------------------------------


def refusals():
    """Arguments of one kernel, each wrong in one way, and what the kernel says."""
    a, b, bias = problem(16, 64, 128)
    d = nan_like(16, 64)
    memory = whole(16 * 136 + 1).to(BF16)
    both = torch.zeros(16, 200, device=placement.DEVICE, dtype=BF16)
    good = {"a": a, "b": b, "d": d, "bias": bias, "raster": 0, "swizzle": 1, "workspace": None}
    wrong = {
        "a: dtype": ({"a": a.half()}, 0, Reason.DTYPE),
        "a: three dimensions that do not fold": ({"a": a.view(2, 8, 128).transpose(0, 1)}, 0, Reason.MAJOR),
        "a: column-major": ({"a": a.t().contiguous().t()}, 0, Reason.MAJOR),
        "a: address": ({"a": memory[1:].as_strided((16, 128), (136, 1), 1)}, 0, Reason.ALIGNMENT),
        "a: leading dimension": ({"a": memory.as_strided((16, 128), (132, 1))}, 0, Reason.ALIGNMENT),
        "a: expanded": ({"a": a[:1].expand(16, 128)}, 0, Reason.MAJOR),
        "a: on the host": ({"a": a.cpu()}, 0, Reason.DEVICE),
        "a: a number": ({"a": 1.0}, 0, Reason.KIND),
        "a: empty": ({"a": a[:0]}, 0, Reason.SHAPE),
        "b: dtype": ({"b": b.float()}, 1, Reason.DTYPE),
        "b: row-major": ({"b": b.contiguous()}, 1, Reason.MAJOR),
        "b: another K": ({"b": b[:120]}, 1, Reason.SHAPE),
        "b: on the host": ({"b": b.cpu()}, 1, Reason.DEVICE),
        "d: dtype": ({"d": d.float()}, 2, Reason.DTYPE),
        "d: transposed shape": ({"d": nan_like(64, 16)}, 2, Reason.SHAPE),
        "d: column-major": ({"d": nan_like(64, 16).t()}, 2, Reason.MAJOR),
        "d: leading dimension": ({"d": nan_like(16, 68)[:, :64]}, 2, Reason.ALIGNMENT),
        "d: extent": ({"b": b[:, :60], "d": d[:, :60], "bias": bias[:60]}, 2, Reason.ALIGNMENT),
        "d: is a": ({"d": a[:, :64]}, 2, Reason.OVERLAP),
        "d: runs into a": ({"a": both[:, :128], "d": both[:, 120:184]}, 2, Reason.OVERLAP),
        "bias: dtype": ({"bias": bias.float()}, 3, Reason.DTYPE),
        "bias: short": ({"bias": bias[:-1]}, 3, Reason.SHAPE),
        "bias: strided": ({"bias": memory[:128:2]}, 3, Reason.MAJOR),
        "bias: on the host": ({"bias": bias.cpu()}, 3, Reason.DEVICE),
        "bias: None": ({"bias": None}, 3, Reason.KIND),
        "bias: in d": ({"bias": d[3]}, 2, Reason.OVERLAP),
        "raster: no number": ({"raster": None}, 4, Reason.KIND),
        "swizzle: no number": ({"swizzle": 1.5}, 5, Reason.KIND),
    }
    return good, wrong


def test_the_kernel_refuses_what_it_was_not_built_for_and_launches_nothing():
    kernel = co.build(kernels.matrix()["gemm_bias_relu-bf16-row-col-tma"]).loaded
    good, wrong = refusals()
    assert kernel.launch(*good.values()) == 0
    assert torch.equal(good["d"], exact(good["a"], good["b"], good["bias"]))
    for name, (changed, position, reason) in wrong.items():
        arguments = good | changed
        for x in (good["d"], arguments["d"]):
            if isinstance(x, torch.Tensor):
                x.fill_(7.0)
        status = kernel.launch(*arguments.values())
        assert status != 0, f"{name}: accepted"
        assert refusal(status) == (position, reason), name
        torch.cuda.synchronize()
        assert (arguments["d"] == 7).all(), f"{name}: refused, and written all the same"


def test_the_kernel_refuses_too_few_arguments():
    kernel = co.build(kernels.matrix()["gemm_bias_relu-bf16-row-col-tma"]).loaded
    good, _ = refusals()
    arguments = list(good.values())
    for count in range(6):
        position, reason = refusal(kernel.launch(*arguments[:count]))
        assert reason is Reason.COUNT
        assert position == count


@pytest.mark.parametrize("name", STREAM_K)
def test_the_kernel_refuses_a_workspace_that_does_not_do(name):
    kernel = co.build(CONFIGURATIONS[name]).loaded
    a, b, bias = problem(128, 128, 8192)
    d = nan_like(128, 128)
    size = kernel.workspace_size(128, 128, 8192, 1, 0, 1)
    if not size:
        pytest.skip("this shape needs no workspace here")
    enough = torch.empty(size + 256, dtype=torch.uint8, device=placement.DEVICE)
    wrong = {
        "none": (None, Reason.WORKSPACE),
        "short": (enough[: size - 1], Reason.WORKSPACE),
        "misaligned": (enough[128:], Reason.WORKSPACE),
        "on the host": (enough.cpu(), Reason.DEVICE),
    }
    for case, (workspace, reason) in wrong.items():
        assert refusal(kernel.launch(a, b, d, bias, 0, 1, workspace)) == (6, reason), case
    assert d.isnan().all()
    assert kernel.launch(a, b, d, bias, 0, 1, enough) == 0
    assert torch.equal(d, exact(a, b, bias))


def test_refusals_of_an_exact_kernel_are_put_into_words():
    kernel = co.build(kernels.matrix()["gemm_bias_relu-bf16-row-col-tma"])
    a, b, bias = problem(16, 64, 128)
    cases = {
        r"^b must be col-major: contiguous along the first dimension": ((a, b.contiguous(), bias), ValueError),
        r"^a must have dtype bf16; it is torch\.float16": ((a.half(), b.half(), bias), TypeError),
        r"^bias must have dtype bf16; it is torch\.float32": ((a, b, bias.float()), TypeError),
        r"^a must be aligned to 16 bytes": ((a[:, 1:121], b[1:121], bias), ValueError),
    }
    for message, (arguments, kind) in cases.items():
        with pytest.raises(kind, match=message):
            kernel(*arguments)
    with pytest.raises(co.NoDeviceError, match="a is on cpu"):
        kernel(a.cpu(), b.cpu(), bias.cpu())
    with pytest.raises(ValueError, match=r"^out must be aligned to 16 bytes"):
        kernel(a, b[:, :63], bias[:63])


def test_all_kernels_use_the_tensor_cores():
    for name, spec in edges.specs().items():
        counts = co.build(spec).loaded.artifact.manifest["sass"]
        expected = ("HGMMA", "UTMALDG") if spec.sm90 else ("HMMA",)
        assert all(counts.get(opcode, 0) > 0 for opcode in expected), f"{name}: {counts}"
    assert {op.name for op in named.NAMED} == {name.split("-")[0] for name in kernels.matrix()}
