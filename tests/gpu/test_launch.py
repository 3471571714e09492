"""What a launch of a kernel does besides computing: order of tiles, workspace, memory, refusals."""

import pytest
import torch

import cutlass_ops as co
from cutlass_ops.artifacts.loader import Reason, refusal
from tests.gpu import kernels
from tests.gpu.memory import dirty_the_allocator, whole

pytestmark = pytest.mark.gpu

BF16 = torch.bfloat16
NAN = float("nan")

CONFIGURATIONS = kernels.configurations()
STREAM_K = [name for name in CONFIGURATIONS if "streamk" in name]
SPLIT = [name for name in CONFIGURATIONS if "_split" in name]
ORDERED = [
    name
    for name, spec in CONFIGURATIONS.items()
    if spec.config.arch == "sm90" and spec.config.schedule != "warp_specialized"
]


def problem(m, n, k, spec=None):
    """Draw a whole-numbered bias + ReLU with a kernel's operands, or BF16 with A row-major and B column-major."""
    dtype = {"bf16": BF16, "f16": torch.float16}[spec.a.dtype.name] if spec else BF16
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
    return torch.full(shape, NAN, device="cuda", dtype=dtype)


def allocations():
    return torch.cuda.memory_stats()["allocation.all.allocated"]


def requested(which):
    """Bytes that were asked for; what PyTorch's allocator sets aside may be more."""
    return torch.cuda.memory_stats()[f"requested_bytes.all.{which}"]


# ---- Order of tiles and workspace ---------------------------------------------------------------------------------


def launch(kernel, a, b, d, bias, raster, swizzle):
    m, k, n = *a.shape, b.shape[1]
    size = kernel.loaded.workspace_size(m, n, k, 1, raster, swizzle)
    workspace = torch.full((size,), 255, dtype=torch.uint8, device="cuda") if size else None
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
    a, b = (torch.randn(e, 4096, device="cuda", dtype=BF16) for e in (200, 264))
    bias = torch.randn(264, device="cuda", dtype=BF16)
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
        dirty_the_allocator()
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


# ---- Refusals -----------------------------------------------------------------------------------------------------


def refusals():
    """Arguments of one kernel, each wrong in one way, and what the kernel says."""
    a, b, bias = problem(16, 64, 128)
    d = nan_like(16, 64)
    memory = whole(16 * 136 + 1).to(BF16)
    both = torch.zeros(16, 200, device="cuda", dtype=BF16)
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
        "d: a number": ({"d": 3}, 2, Reason.KIND),
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
    enough = torch.empty(size + 256, dtype=torch.uint8, device="cuda")
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
    with pytest.raises(co.errors.NoDeviceError, match="a is on cpu"):
        kernel(a.cpu(), b.cpu(), bias.cpu())
    with pytest.raises(ValueError, match=r"^out must be aligned to 16 bytes"):
        kernel(a, b[:, :63], bias[:63])
