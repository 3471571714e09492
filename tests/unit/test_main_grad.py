"""Where gradients go: to the caller, into a parameter's grad, or into its main_grad."""

import pytest
import torch
from torch.overrides import TorchFunctionMode

import cutlass_ops as co
from cutlass_ops.epilogue import composed
from cutlass_ops.run import backward
from cutlass_ops.run.recorded import calls_of

F64, BF16 = torch.float64, torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize("major", ["row", "col"])
def test_a_weight_s_gradient_is_added_to_its_main_grad(dtype, major):
    torch.manual_seed(0)
    x = torch.randn(7, 16).to(BF16).requires_grad_()
    shape = (8, 16) if major == "col" else (16, 8)
    w, up = (torch.nn.Parameter(torch.randn(shape).to(BF16)) for _ in range(2))
    oriented = (lambda p: p.t()) if major == "col" else (lambda p: p)
    wanted = torch.autograd.grad(co.gemm(x, oriented(w), epilogue=composed.swiglu, up=oriented(up)).sum(), [x, w, up])
    before = torch.randn(shape).to(dtype)
    w.main_grad, up.main_grad = before.clone(), before.clone()
    for steps in (1, 2):
        x.grad = None
        co.gemm(x, oriented(w), epilogue=composed.swiglu, up=oriented(up)).sum().backward()
        assert torch.equal(x.grad, wanted[0])
        assert w.grad is None
        for parameter, grad in ((w, wanted[1]), (up, wanted[2])):
            exact = before.float() + steps * grad.float()
            assert (parameter.main_grad - exact).norm() <= 0.01 * exact.norm()
            assert parameter.main_grad.dtype == dtype


@co.epilogue
def two_tiles(acc, p: co.Tile, q: co.Tile):
    return acc + p + q


@pytest.mark.sample(2)
@pytest.mark.parametrize("backend", [None, "aot_eager"])
@pytest.mark.parametrize("batch", [(6,), (2, 3)])
def test_a_gradient_that_passes_through_is_nobody_s_to_change(batch, backend):
    """Autograd adds the next gradient in place unless somebody else has the tensor: here the caller, and both tiles."""
    a, b = torch.randn(*batch, 16).bfloat16(), torch.randn(16, 8).bfloat16()
    p, q = (torch.zeros(*batch, 8).bfloat16().requires_grad_() for _ in "pq")

    def call(p, q):
        return co.gemm(a, b, epilogue=two_tiles, p=p, q=q)

    call = call if backend is None else torch.compile(call, backend=backend)
    given = torch.ones(*batch, 8).bfloat16()
    for times in (1, 2, 3):
        call(p, q).backward(given)
        assert all(torch.equal(x.grad, torch.full_like(x, times)) for x in (p, q))
        assert torch.equal(given, torch.ones_like(given))


def test_a_bias_keeps_its_own_gradient():
    x, w = torch.ones(4, 8, dtype=BF16), torch.nn.Parameter(torch.ones(6, 8, dtype=BF16))
    bias = torch.nn.Parameter(torch.zeros(6, dtype=BF16))
    w.main_grad, bias.main_grad = torch.zeros(6, 8), torch.zeros(6)
    co.gemm_bias(x, w.t(), bias).sum().backward()
    assert (w.main_grad.sum(), bias.grad.sum(), bias.main_grad.sum()) == (192, 24, 0)


@pytest.mark.parametrize("rows", [0, 1, 128, 129, 256, 300, 1000])
@pytest.mark.parametrize("stride", ["rows", "columns", "shared"])
def test_a_sum_of_rows(rows, stride):
    tile = torch.randn(rows, 24).to(BF16)
    tile = {"rows": tile, "columns": tile.t().contiguous().t(), "shared": tile[:1].expand(rows, 24)}[stride]
    found = backward.sum_of_rows(tile, torch.float32)
    assert (found.dtype, found.shape) == (torch.float32, (24,))
    torch.testing.assert_close(found.double(), tile.double().sum(0), rtol=0, atol=2**-22 * max(rows, 1))


class _Sums(TorchFunctionMode):
    """Notes how many elements are added up, and how many make one sum."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        d = func(*args, **(kwargs or {}))
        if func.__name__ == "sum":
            self.found.append((args[0].numel(), args[0].numel() // d.numel()))
        return d


def test_a_sum_of_many_rows_takes_little_scratch_memory():
    # PyTorch's takes 16 bytes of a GPU for each element of a tile, once it adds up more than a block of rows does.
    for m, n in ((8192, 512), (2048, 1024), (1024, 1024), (300, 64)):
        with _Sums() as sums:
            backward.sum_of_rows(torch.zeros(m, n, dtype=BF16), torch.float32)
        assert all(8 * size <= 8 << 20 for size, rows in sums.found if rows > 128), (m, n, sums.found)


@pytest.mark.parametrize("chained", [False, True])
def test_a_backward_computes_and_adds_what_it_is_asked_for(chained):
    module, x = co.nn.GatedMLP(8, 8, dtype=BF16), torch.randn(7, 8).to(BF16).requires_grad_()
    w, up = weights = module.gate_proj.weight, module.up_proj.weight

    def layer():
        return module(x) if chained else co.gemm_swiglu(x, w.t(), up.t())

    wanted = torch.autograd.grad(layer().sum(), [x, w, up])
    for weight in weights:
        weight.main_grad = torch.zeros_like(weight)
    assert torch.equal(torch.autograd.grad(layer().sum(), x)[0], wanted[0])
    assert torch.equal(torch.autograd.grad(layer().sum(), w)[0], wanted[1])
    layer().sum().backward(inputs=[x])
    assert torch.equal(x.grad, wanted[0])
    assert not w.main_grad.any()
    assert not up.main_grad.any()
    layer().sum().backward(inputs=[w])
    assert torch.equal(w.main_grad, wanted[1])
    assert not up.main_grad.any()
    assert w.grad is None


def test_a_weight_s_gradient_is_computed_where_it_is_asked_for():
    x, w, up = (torch.randn(s).to(BF16).requires_grad_() for s in ((7, 8), (8, 8), (8, 8)))
    for asked, products in (([x], 2), ([w], 1), ([up], 1), ([x, w, up], 4)):
        d = co.gemm_swiglu(x, w.t(), up.t()).sum()
        assert len(calls_of(lambda of=d, wrt=asked: torch.autograd.grad(of, wrt))) == products


@pytest.mark.parametrize("shape", ["whole", "in a buffer", "of longer lines"])
def test_a_parameter_that_autocast_casts_has_its_main_grad(shape):
    data = {
        "whole": torch.randn(8, 16),
        "in a buffer": torch.randn(400)[128:256].view(8, 16),
        "of longer lines": torch.randn(8, 24)[:, :16],
    }[shape]
    x, w = torch.randn(6, 16), torch.nn.Parameter(data)
    w.main_grad = torch.zeros(8, 16)

    def product():
        with torch.autocast("cpu", dtype=BF16):
            return co.gemm(x, w.t()).float().sum()

    (wanted,) = torch.autograd.grad(product(), w)
    assert not w.main_grad.any()
    product().backward()
    assert w.grad is None
    torch.testing.assert_close(w.main_grad, wanted, rtol=0.02, atol=0.02)


def test_a_view_that_was_made_without_gradients_is_an_operand():
    w, x = torch.nn.Parameter(torch.randn(8, 16).to(BF16)), torch.randn(6, 16).to(BF16).requires_grad_()
    with torch.no_grad():
        view = w.t()
    for a, b in ((x, view), (view.t(), x.t())):
        (found,) = torch.autograd.grad(co.gemm(a, b).float().sum(), x)
        (wanted,) = torch.autograd.grad((a.float() @ b.float()).sum(), x)
        torch.testing.assert_close(found, wanted, rtol=0.02, atol=0.02)


with torch.inference_mode():
    OF_INFERENCE = torch.zeros(6, 8)
NEW = r"make it torch\.zeros\(\(6, 8\), dtype=torch\.float32\)"
CONTIGUOUS = rf"kernels add to contiguous memory: {NEW}, or a piece of a buffer, buffer\[begin:end\]\.view\(\(6, 8"
UNFIT = {
    "turned": (torch.zeros(8, 6), rf"has shape \(8, 6\), and its parameter \(6, 8\): {NEW}$"),
    "larger": (torch.zeros(6, 9), rf"has shape \(6, 9\), and its parameter \(6, 8\): {NEW}$"),
    "flat": (torch.zeros(48), r"has shape \(48,\), and its parameter \(6, 8\): make it main_grad\.view\(\(6, 8\)\)$"),
    "turned strides": (torch.zeros(8, 6).t(), rf"has shape \(6, 8\) and strides \(1, 6\), and {CONTIGUOUS}"),
    "columns": (torch.zeros(6, 16)[:, :8], rf"has shape \(6, 8\) and strides \(16, 1\), and {CONTIGUOUS}"),
    "every second row": (torch.zeros(12, 8)[::2], rf".* strides \(16, 1\), and {CONTIGUOUS}"),
    "repeated": (torch.zeros(1, 8).expand(6, 8), rf".* strides \(0, 1\), and {CONTIGUOUS}"),
    "FP64": (
        torch.zeros(6, 8, dtype=F64),
        r"is torch\.float64 on cpu: make it torch\.float32 or torch\.bfloat16 on cpu$",
    ),
    "elsewhere": (torch.zeros(6, 8, device="meta"), r"is torch\.float32 on meta: make it .* on cpu$"),
    "no tensor": ("nothing", r"must be a torch\.Tensor, not str"),
    "negated": (torch.zeros(6, 8)._neg_view(), r"is a lazy negation: make it main_grad\.resolve_neg\(\)"),
    "of inference": (OF_INFERENCE, r"comes from torch\.inference_mode\(\), .*: make it main_grad\.clone\(\)"),
    "the parameter": (
        lambda w: w.detach(),
        rf"shares memory with its parameter, which the gradient would change: {NEW}",
    ),
}


@pytest.mark.parametrize(("given", "message"), UNFIT.values(), ids=UNFIT)
def test_a_main_grad_that_nothing_is_added_to_says_why_and_what_it_could_be(given, message):
    x, w = torch.ones(4, 8, dtype=BF16), torch.nn.Parameter(torch.ones(6, 8, dtype=BF16))
    w.main_grad = given(w) if callable(given) else given
    with pytest.raises((ValueError, TypeError), match=f"^main_grad of b {message}"):
        co.gemm(x, w.t())
    with torch.no_grad():
        assert co.gemm(x, w.t()).sum() == 192
    module = co.nn.MLP(6, 8, dtype=BF16)
    with torch.no_grad():
        module.fc2.weight.copy_(w)
    module.fc2.weight.main_grad = given(module.fc2.weight) if callable(given) else given
    with pytest.raises((ValueError, TypeError), match=f"^main_grad of b2 {message}"):
        module(torch.ones(4, 6, dtype=BF16))


@pytest.mark.parametrize("view", [lambda w: w[:4].t(), lambda w: w[:, :4].t(), lambda w: w.view(3, 16).t()])
def test_another_view_of_a_parameter_with_a_main_grad_is_refused(view):
    w = torch.nn.Parameter(torch.ones(6, 8, dtype=BF16))
    b = view(w)
    x = torch.ones(4, b.shape[0], dtype=BF16)
    assert co.gemm(x, b).requires_grad
    w.main_grad = torch.zeros(6, 8)
    why = (
        r"a view of its parameter \(6, 8\) that is neither the whole nor its transpose, and the parameter has a main_gr"
    )
    with pytest.raises(ValueError, match=rf"^b has shape .* and strides .*, {why}.*pass the .*, or remove main_grad$"):
        co.gemm(x, b)


def test_a_main_grad_of_fp64_or_of_what_autocast_casts():
    w = torch.nn.Parameter(torch.ones(6, 8, dtype=F64))
    w.main_grad = torch.zeros(6, 8)
    with pytest.raises(TypeError, match=r"^main_grad of b is torch\.float32 on cpu: make it torch\.float64 on cpu$"):
        co.gemm(torch.ones(4, 8, dtype=F64), w.t())
    w = torch.nn.Parameter(torch.ones(6, 8))
    w.main_grad = w.detach()
    with (
        torch.autocast("cpu", BF16),
        pytest.raises(ValueError, match=r"^main_grad of b shares memory with its parameter"),
    ):
        co.gemm(torch.ones(4, 8), w.t())


@pytest.mark.filterwarnings("ignore:Using backward..  with create_graph")  # PyTorch's own
def test_a_main_grad_has_no_second_derivative():
    x, w = torch.ones(4, 8, dtype=BF16), torch.nn.Parameter(torch.ones(6, 8, dtype=BF16))
    w.main_grad = torch.zeros(6, 8)
    with pytest.raises(NotImplementedError, match="create_graph=True, and the parameter of b has a main_grad"):
        co.gemm(x, w.t()).sum().backward(create_graph=True)
    (gradient,) = torch.autograd.grad(co.gemm(x, w.t()).sum(), w, create_graph=True)
    assert gradient.shape == w.shape
    assert not w.main_grad.any()
