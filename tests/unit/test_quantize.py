"""Dynamic scales: of an epilogue's D and of a tensor; what is served, and what is refused."""

import itertools
import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from signatures import H100

import cutlass_ops as co
from cutlass_ops.base.dtypes import bf16, e4m3, e5m2, f32
from cutlass_ops.base.errors import ConfigError, EpilogueError, MissingKernelError, UnsupportedError
from cutlass_ops.base.session import Session
from cutlass_ops.choose import dispatch
from cutlass_ops.compilation.background import Background, Wanted
from cutlass_ops.declare.problem import Problem
from cutlass_ops.declare.quantizing import QuantizeSpec, declaration_from_json
from cutlass_ops.kinds import legality, render
from cutlass_ops.operand import reference
from cutlass_ops.operand.call import call_at, signature_of
from cutlass_ops.operand.results import scale_strides
from cutlass_ops.run import quantizing
from cutlass_ops.run.registry import Registry

E4M3, E5M2, BF16 = torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16
TYPES = {"e4m3": (E4M3, 448.0), "e5m2": (E5M2, 57344.0)}
INF, NAN = math.inf, math.nan

pytestmark = pytest.mark.usefixtures("session")


@co.epilogue
def kept(acc, x: co.Tile):
    """x itself where the accumulator is 0."""
    return co.e.quantize(x - acc, "e4m3")


@co.epilogue
def kept_e5m2(acc, x: co.Tile):
    return co.e.quantize(x - acc, "e5m2", block=128)


@co.epilogue
def swiglu(acc, up: co.Product):
    return co.e.quantize(co.e.silu(acc) * up, "e4m3")


@co.epilogue
def biased(acc, bias: co.Row):
    y = co.e.relu(acc + bias)
    return {"d": co.e.quantize(y, "e4m3"), "amax": co.e.amax(y, dim=1)}


KEPT = {"e4m3": kept, "e5m2": kept_e5m2}


def direct(x, name, block=128):
    """D and its scales of a matrix in FP32, block by block."""
    dtype, largest = TYPES[name]
    d, scales = torch.empty(x.shape, dtype=dtype), []
    for begin in range(0, x.shape[1], block):
        part = x[:, begin : begin + block]
        m = torch.maximum(part.abs().amax(1), torch.tensor(2.0**-110))
        scales.append(m / largest)
        scaled = part * (torch.tensor(largest) / m)[:, None]
        whole = torch.where(scaled > largest, largest, torch.where(scaled < -largest, -largest, scaled))
        d[:, begin : begin + block] = whole.to(dtype)
    return d, torch.stack(scales, 1)


def drawn(m, n, seed=0):
    """Values of very different sizes, so that a wrong scale shows."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(m, n, generator=generator) * torch.exp2(torch.randint(-40, 40, (m, n), generator=generator))


def of_zeros(x, name, **given):
    """A call of whose sums each is 0."""
    zeros = torch.zeros(x.shape[0], 16).to(BF16), torch.zeros(16, x.shape[1]).to(BF16)
    return co.gemm(*zeros, epilogue=KEPT[name], x=x, **given)


def of_tensor(x, name, out=None):
    """The same outputs of a tensor."""
    found = co.Scaled.quantize(x, name, out=None if out is None else co.Scaled(out.get("d"), out.get("d_scale")))
    return SimpleNamespace(d=found.values, d_scale=found.scale)


def assert_same(found, wanted):
    """Require the same bits, and NaN in the same places."""
    assert found.dtype is wanted.dtype
    assert found.shape == wanted.shape
    found, wanted = found.float(), wanted.float()
    assert torch.equal(found.isnan(), wanted.isnan())
    assert torch.equal(found.nan_to_num(0.0, INF, -INF), wanted.nan_to_num(0.0, INF, -INF))
    assert torch.equal(found.signbit()[~found.isnan()], wanted.signbit()[~wanted.isnan()])


# ---- What is computed -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("n", [16, 112, 128, 144, 256, 400])
def test_results_are_those_of_each_block_alone(name, n):
    x = drawn(5, n)
    d, scale = direct(x, name)
    found = of_zeros(x, name)
    assert found._fields == ("d", "d_scale")
    assert_same(found.d, d)
    assert_same(found.d_scale, scale)
    tensor = co.Scaled.quantize(x, name)
    assert_same(tensor.values, d)
    assert_same(tensor.scale, scale)


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("n", [1, 3, 127, 129, 1000])
def test_a_tensor_may_have_any_length(name, n):
    x = drawn(7, n).to(BF16)
    found = co.Scaled.quantize(x, name)
    d, scale = direct(x.float(), name)
    assert_same(found.values, d)
    assert_same(found.scale, scale)
    rows = co.Scaled.quantize(x, TYPES[name][0], block=None)
    d, scale = direct(x.float(), name, block=n)
    assert_same(rows.values, d)
    assert_same(rows.scale, scale[:, 0])


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("quantize", [of_zeros, of_tensor], ids=["epilogue", "tensor"])
def test_special_values_as_the_table_says(name, quantize):
    largest = TYPES[name][1]
    x = torch.zeros(6, 256)
    x[:, 128:] = 3.0  # the block beside knows nothing of it
    x[1, 5], x[2, 7], x[2, 8] = -(2.0**-115), INF, 5.0
    x[3, 0], x[3, 1], x[4, 0], x[4, 1], x[4, 2] = NAN, INF, 1e38, -(2.0**-126), -0.0
    x[5, 0] = 2.0**-140
    found = quantize(x, name)
    assert found.d_scale[:, 1].tolist() == [float(torch.tensor(3.0) / largest)] * 6
    assert (found.d[:, 128:].float() == largest).all()
    least = float(torch.tensor(2.0**-110) / largest)
    scales = found.d_scale[:, 0]
    assert scales[0] == scales[1] == scales[5] == least
    assert least >= torch.finfo(torch.float32).tiny
    assert scales[2] == INF
    assert scales[3].isnan()
    assert scales[4] == torch.tensor(1e38) / largest
    assert (found.d[0, :128].float() == 0).all()
    back = found.d[:, :128].float() * scales[:, None]
    assert back[1, 5] == pytest.approx(-(2.0**-115), rel=0.1)
    assert found.d[2, 7].float().isnan()
    assert found.d[2, 8].float() == 0
    assert back[2].isnan().all()
    assert found.d[3, :128].float().isnan().all()
    assert found.d[4, 0].float() == largest
    assert found.d[4, 2].float().signbit()
    wanted = direct(x, name)
    assert_same(found.d, wanted[0])
    assert_same(found.d_scale, wanted[1])


def test_an_epilogue_of_real_sums_and_a_chain_of_two_gemms():
    generator = torch.Generator().manual_seed(5)
    x, gate, up = (torch.randn(rows, 64, generator=generator).to(BF16) for rows in (9, 208, 208))
    h = co.gemm(x.view(3, 3, 64), gate.t(), epilogue=swiglu, up=up.t())
    exact = F.silu(x.float() @ gate.float().t()) * (x.float() @ up.float().t())
    d, scale = direct(exact, "e4m3")
    assert (h.d.shape, h.d_scale.shape) == ((3, 3, 208), (3, 3, 2))
    assert_same(h.d.view(9, 208), d)
    assert_same(h.d_scale.view(9, 2), scale)
    down = co.Scaled.quantize(torch.randn(48, 208, generator=generator), "e4m3")
    y = co.gemm(co.Scaled(h.d, h.d_scale), co.Scaled(down.values.t(), down.scale), out_dtype=torch.float32)
    first, second = reference.dequantised(d, down.values.t(), scale.double(), down.scale.double())
    torch.testing.assert_close(y.view(9, 48).double(), first @ second, rtol=1e-4, atol=1e-3)


def test_a_reduction_beside_it_is_of_values_that_are_not_rounded():
    a, b = torch.randn(5, 32).to(BF16), torch.randn(32, 144).to(BF16)
    found = co.gemm(a, b, epilogue=biased, bias=torch.zeros(144).to(BF16))
    assert found._fields == ("d", "d_scale", "amax")
    assert torch.equal(found.amax, (a.float() @ b.float()).relu().amax(1))
    assert torch.equal(found.d_scale.amax(1), (found.amax / 448))


@pytest.mark.parametrize("shape", [(0, 256), (3, 0), (0, 0), (2, 0, 128)])
def test_nothing_is_quantised_to_nothing(shape):
    x = torch.empty(shape)
    found = co.Scaled.quantize(x, "e4m3")
    assert (found.values.shape, found.scale.shape) == (shape, (*shape[:-1], -(-shape[-1] // 128)))
    rows = co.Scaled.quantize(x, "e4m3", block=None)
    assert rows.scale.shape == shape[:-1]
    assert (rows.scale == torch.tensor(2.0**-110) / 448).all()
    found = co.gemm(torch.zeros(0, 16).to(BF16), torch.zeros(16, 256).to(BF16), epilogue=kept, x=torch.empty(0, 256))
    assert (found.d.shape, found.d_scale.shape) == ((0, 256), (0, 2))


# ---- Where results lie ----------------------------------------------------------------------------------------------


def test_new_scales_are_m_major_with_padded_lines():
    assert scale_strides((7, 3)) == (1, 8)
    assert scale_strides((2, 3, 5)) == (3, 1, 8)
    assert co.Scaled.quantize(torch.ones(7, 300), "e4m3").scale.stride() == (1, 8)
    assert co.Scaled.quantize(torch.ones(2, 3, 300), "e4m3").scale.stride() == (3, 1, 8)
    assert of_zeros(torch.ones(7, 304), "e4m3").d_scale.stride() == (1, 8)
    call = call_at(biased.graph, Problem(7, 304, 64), "bf16", "row", "col")
    assert [x.stride() for x in call.outputs] == [(304, 1), (1, 8), (1,)]
    assert call.outputs[0].dtype is E4M3


@pytest.mark.parametrize("quantize", [of_zeros, of_tensor], ids=["epilogue", "tensor"])
def test_results_go_where_out_says(quantize):
    x = drawn(5, 304)
    wanted = direct(x, "e4m3")
    for scale in (torch.empty(5, 3), torch.empty(3, 9).t()[:5], torch.empty(5, 8)[:, ::2][:, :3]):
        out = {"d": torch.empty(5, 320, dtype=E4M3)[:, :304], "d_scale": scale.fill_(NAN)}
        found = quantize(x, "e4m3", out=out)
        assert found.d is out["d"]
        assert found.d_scale is scale
        assert_same(found.d, wanted[0])
        assert_same(found.d_scale, wanted[1])
    found = quantize(x, "e4m3", out={"d_scale": torch.empty(5, 3)})
    assert_same(found.d, wanted[0])


# ---- Traces ---------------------------------------------------------------------------------------------------------


BAD = {
    "another type": (lambda acc: co.e.quantize(acc, "bf16"), "dtype 'bf16' is not supported here: use one of e4m3"),
    "another block": (lambda acc: co.e.quantize(acc, "e4m3", 64), "block is 64: use block=128"),
    "rows": (lambda acc: co.e.quantize(acc, "e4m3", None), "block is None: use block=128"),
    "arithmetic": (lambda acc: co.e.quantize(acc, "e4m3") * 2, "can only be D"),
    "on the right": (lambda acc: 2 - co.e.quantize(acc, "e4m3"), "can only be D"),
    "a comparison": (lambda acc: co.e.quantize(acc, "e4m3") > 0, "can only be D"),
    "a function": (lambda acc: co.e.relu(co.e.quantize(acc, "e4m3")), "can only be D"),
    "a reduction": (lambda acc: {"d": acc, "s": co.e.sum(co.e.quantize(acc, "e4m3"), 1)}, "can only be D"),
    "twice": (lambda acc: co.e.quantize(co.e.quantize(acc, "e4m3"), "e4m3"), "can only be D"),
    "another output": (lambda acc: {"d": acc, "q": co.e.quantize(acc, "e4m3")}, "output 'q' is quantised .* only D"),
    "the name": (lambda acc: {"d": co.e.quantize(acc, "e4m3"), "d_scale": acc}, "'d_scale' is reserved for scales"),
    "out": (lambda acc: co.e.quantize(acc, "e4m3", out={}), None),
}


@pytest.mark.parametrize(("body", "message"), BAD.values(), ids=BAD)
def test_what_cannot_be_traced_is_refused(body, message):
    def quantised(acc):
        return body(acc)

    if message is None:
        with pytest.raises(TypeError, match="unexpected keyword argument 'out'"):
            co.epilogue(quantised)
        return
    with pytest.raises(EpilogueError, match=message):
        co.epilogue(quantised)


@pytest.mark.slow
def test_a_compiled_function_writes_where_out_says():
    x = drawn(6, 256)

    def write(x, d, scale):
        co.Scaled.quantize(x, "e4m3", out=co.Scaled(d, None))
        of_zeros(x, "e5m2", out={"d_scale": scale})

    d, scale = torch.empty(6, 256, dtype=E4M3), torch.empty(6, 2)
    torch.compile(write, backend="aot_eager", fullgraph=True)(x, d, scale)
    assert_same(d, direct(x, "e4m3")[0])
    assert_same(scale, direct(x, "e5m2")[1])


@pytest.mark.parametrize("block", [128, None])
def test_a_compiled_function_quantises_other_numbers_of_rows(block):
    quantize = torch.compile(lambda x: co.Scaled.quantize(x * 2, "e4m3", block), backend="aot_eager", fullgraph=True)
    for rows in (5, 7, 12, 1):
        x = drawn(rows, 300)
        found, wanted = quantize(x), co.Scaled.quantize(x * 2, "e4m3", block)
        for one, other in zip(found, wanted, strict=True):
            assert_same(one, other)
            assert one.stride() == other.stride()


# ---- Refusals -------------------------------------------------------------------------------------------------------


def test_calls_that_are_refused():
    x = torch.zeros(5, 208)
    with pytest.raises(
        TypeError, match=r"^out_dtype is torch.bfloat16, and the epilogue quantises D to .*e4m3fn: omit"
    ):
        of_zeros(x, "e4m3", out_dtype=BF16)
    assert of_zeros(x, "e4m3", out_dtype=E4M3).d.dtype is E4M3
    with pytest.raises(TypeError, match=r"^out is torch.float8_e5m2, and the epilogue quantises D to .*e4m3fn$"):
        of_zeros(x, "e4m3", out=torch.empty(5, 208, dtype=E5M2))
    with pytest.raises(ValueError, match=r"^b has 200 columns, .* pad b by columns of zeros to 208$"):
        of_zeros(torch.zeros(5, 200), "e4m3")
    with pytest.raises(ValueError, match=r"^out has strides \(1, 5\)"):
        of_zeros(x, "e4m3", out=torch.empty(208, 5, dtype=E4M3).t())
    with pytest.raises(ValueError, match=r"^out has strides \(209, 1\)"):
        of_zeros(x, "e4m3", out=torch.empty(5, 209, dtype=E4M3)[:, :208])
    with pytest.raises(TypeError, match=r"^out\['d_scale'\] is torch.bfloat16: scales of blocks are torch.float32"):
        of_zeros(x, "e4m3", out={"d_scale": torch.empty(5, 2, dtype=BF16)})
    with pytest.raises(ValueError, match=r"^out\['d_scale'\] has shape .* with which scales share memory"):
        of_zeros(x, "e4m3", out={"d_scale": torch.empty(6).as_strided((5, 2), (1, 1))})
    with pytest.raises(ValueError, match=r"^the epilogue quantises D, and no gradient passes .*torch.no_grad\(\)"):
        of_zeros(x.requires_grad_(), "e4m3")


def test_tensors_that_are_refused():
    x = torch.zeros(5, 208)
    for wrong, error, message in (
        ((x, "bf16"), ValueError, "use one of e4m3, e5m2"),
        ((x, "e4m3", 64), ValueError, r"^block is 64: use 128, or None"),
        ((x, "e4m3", True), ValueError, r"^block is True"),
        ((x.double(), "e4m3"), TypeError, r"^x is torch.float64: use one of"),
        ((x.to(E4M3), "e4m3"), TypeError, r"^x is torch.float8_e4m3fn"),
        ((x.t(), "e4m3"), ValueError, r"^x has shape \(208, 5\) .* call x.contiguous\(\)"),
        ((torch.zeros(4, 6, 208)[:, :3], "e4m3"), ValueError, r"cannot be viewed as \(12, 208\)"),
        ((torch.tensor(1.0), "e4m3"), ValueError, "no dimensions"),
        ((3.0, "e4m3"), TypeError, r"^x must be a torch.Tensor, not float"),
        ((x.clone().requires_grad_(), "e4m3"), ValueError, r"^x requires grad, .*x.detach\(\)"),
        ((x.to_sparse(), "e4m3"), TypeError, r"^x has layout"),
    ):
        with pytest.raises(error, match=message):
            co.Scaled.quantize(*wrong)
    for out, error, message in (
        (torch.empty(5, 208, dtype=E4M3), TypeError, r"^out must be a cutlass_ops.Scaled of values and scale"),
        (
            co.Scaled(torch.empty(5, 208), None),
            TypeError,
            r"^out\.values is torch.float32: it must be torch.float8_e4m3fn",
        ),
        (co.Scaled(torch.empty(5, 200, dtype=E4M3), None), ValueError, r"^out\.values has shape \(5, 200\)"),
        (co.Scaled(torch.empty(208, 5, dtype=E4M3).t(), None), ValueError, r"^out\.values has strides"),
        (co.Scaled(None, torch.empty(1).expand(5, 2)), ValueError, r"share memory"),
        (
            co.Scaled(x.view(torch.uint8).view(E4M3)[:, :208], None),
            ValueError,
            r"^out\.values shares memory with another",
        ),
        (co.Scaled(None, x[:, :2]), ValueError, r"^out\.scale shares memory with another"),
    ):
        with pytest.raises(error, match=message):
            co.Scaled.quantize(x, "e4m3", out=out)
    with torch.no_grad():
        assert co.Scaled.quantize(x.clone().requires_grad_(), "e4m3").values.dtype is E4M3


# ---- Kernels --------------------------------------------------------------------------------------------------------


def spec(epilogue=biased, d="e4m3.row", a="bf16", tile=(128, 128, 64), inputs=None, **config):
    made = co.Sm90Config(co.ThreadblockShape(*tile), **config)
    return co.KernelSpec(a=f"{a}.row", b=f"{a}.col", d=d, epilogue=epilogue, inputs=inputs or {}, config=made)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bf16", "e4m3"])
@pytest.mark.parametrize("epilogue", [biased, swiglu, kept], ids=lambda e: e.name)
def test_every_number_of_rows_is_served_on_hopper(epilogue, dtype):
    for m, (n, k) in itertools.product((1, 2, 8, 16, 17, 64, 300, 4096), ((4096, 4096), (14336, 4096), (16, 128))):
        problem = Problem(m, n, k)
        call = call_at(epilogue.graph, problem, dtype, "row", "col")
        decision = dispatch.decide(signature_of(call, H100), H100, problem)
        for kernel in (decision.spec, *decision.specs):
            assert legality.check(kernel) == ()
            assert kernel.config.family.tma
            assert not kernel.config.swap_ab


# ---- The kernel of a tensor -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("declared", [QuantizeSpec(bf16, e4m3, 128, "sm_90"), QuantizeSpec(f32, e5m2, None, "sm_90")])
def test_a_declaration_survives_json(declared):
    assert declaration_from_json(declared.to_json()) == declared
    assert QuantizeSpec.from_json(declared.to_json()) == declared
    assert declaration_from_json(spec().to_json()) == spec()
    assert declared.slug.startswith(f"quantize_{declared.x}_{declared.d}_")
    source = render.render(declared)
    assert f"CUTLASS_OPS_KERNEL({declared.slug}, Kernel)" in source
    assert ("QuantizeRows" in source) == (declared.block is None)


def test_declarations_that_are_refused():
    for wrong in (
        {"x": e4m3, "d": e4m3},
        {"x": bf16, "d": bf16},
        {"block": 64},
        {"block": True},
        {"target": "sm_80"},
        {"target": "sm_1"},
    ):
        with pytest.raises(ConfigError):
            QuantizeSpec(**{"x": bf16, "d": e5m2, "block": 128, "target": "sm_90", **wrong})
    good = QuantizeSpec(bf16, e4m3, 128, "sm_90").to_json()
    for data in (
        {**good, "more": 1},
        {"quantize": good["quantize"]},
        {**good, "quantize": {"x": "bf16"}},
        {**good, "quantize": {**good["quantize"], "x": "f64"}},
        {**good, "quantize": {**good["quantize"], "block": "128"}},
        {**good, "target": 90},
        {**good, "target": ["sm_90"]},
    ):
        with pytest.raises(ConfigError):
            declaration_from_json(data)


def test_a_missing_kernel_says_how_to_build_it(monkeypatch, tmp_path):
    monkeypatch.setenv("CUTLASS_OPS_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("CUTLASS_OPS_JIT", "0")
    declared = QuantizeSpec(bf16, e4m3, 128, "sm_90")
    with pytest.raises(MissingKernelError, match=r"build SPEC.json.*\"quantize\""):
        Registry.current().kernel(declared)


def test_other_devices_are_refused():
    with pytest.raises(UnsupportedError, match="FP8 is stored on sm_90 alone"):
        quantizing._spec(bf16, e4m3, 128, (8, 0))
    assert quantizing._spec(bf16, e4m3, 128, (9, 0)).target == "sm_90"


# ---- Until its kernel is there ---------------------------------------------------------------------------------------


class Kernels:
    """Stand for the registry and the background: a kernel comes when a test says so."""

    def __init__(self):
        self.loaded, self.asked, self.launched, self.compiled = set(), [], 0, 0
        self.wanted = Wanted(lambda artifact: None, True)
        self.wanted.looked.set()

    def has(self, spec):
        return spec in self.loaded

    def kernel(self, spec):
        self.compiled += not self.has(spec)
        self.loaded.add(spec)
        return SimpleNamespace(launch=self._launch)

    def _launch(self, x, d, scale):
        self.launched += 1
        quantizing._by_pytorch(x, "e4m3", 128, d, scale)
        return 0

    def take(self, spec, artifact, device):
        self.loaded.add(spec)

    def needed(self, spec):
        return None

    def need(self, spec, load):
        self.asked.append(spec)
        return self.wanted


@pytest.fixture
def kernels(monkeypatch):
    found = Kernels()
    monkeypatch.setattr(quantizing, "device_of", lambda _: H100)
    with Session({Registry: found, Background: found}).active():
        yield found


def quantised(x):
    d, scale = quantizing._results(x, "e4m3", 128, {"d": None, "d_scale": None})
    quantizing._by_kernel(x, e4m3, 128, d, scale)
    return d, scale


def test_pytorch_quantises_until_the_kernel_is_there(kernels):
    x = torch.randn(5, 300).to(BF16)
    wanted = co.Scaled.quantize(x, "e4m3")
    for _ in range(2):
        for mine, theirs in zip(quantised(x), wanted, strict=True):
            assert torch.equal(mine.float(), theirs.float())
    assert (kernels.launched, kernels.compiled) == (0, 0)
    (spec,) = set(kernels.asked)
    assert spec == QuantizeSpec(bf16, e4m3, 128, "sm_90")
    kernels.loaded.add(spec)
    kernels.wanted.set_result(None)
    quantised(x)
    assert (kernels.launched, kernels.compiled) == (1, 0)


def test_a_setting_has_a_quantisation_wait(kernels, monkeypatch):
    monkeypatch.setenv("CUTLASS_OPS_STAND_IN", "0")
    quantised(torch.randn(5, 300).to(BF16))
    assert (kernels.launched, kernels.compiled, kernels.asked) == (1, 1, [])


def test_a_quantisation_whose_kernel_cannot_be_had_warns_once(kernels):
    kernels.wanted.set_exception(MissingKernelError("no compiler"))
    with pytest.warns(RuntimeWarning, match=r"quantize of bf16 to e4m3.*no compiler.*STAND_IN=0") as caught:
        found = [quantised(torch.randn(5, 300).to(BF16)) for _ in range(3)]
    assert len(found) == 3
    assert len(caught) == 1
