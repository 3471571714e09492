"""Ops for JAX arrays on the CPU: shapes, errors, results of the reference, and what a kernel would be passed."""

import doctest
import os
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import cutlass_ops as co


def test_without_jax_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "jax", None)
    monkeypatch.delitem(sys.modules, "cutlass_ops.jax", raising=False)
    monkeypatch.delitem(vars(co), "jax", raising=False)
    with pytest.raises(ImportError, match=r"pip install \"jax\[cuda13\]\" jax-tvm-ffi"):
        co.jax  # noqa: B018


@pytest.fixture
def jax():
    return pytest.importorskip("jax")


@pytest.fixture
def cj(jax):
    import cutlass_ops.jax

    return cutlass_ops.jax


@co.epilogue
def scaled(acc, bias: co.Row, residual: co.Tile, scale: co.Scalar):
    return {"d": (acc + bias) * scale + residual, "top": co.e.max(acc, dim=1)}


def arrays(jax, dtype, *shapes):
    keys = jax.random.split(jax.random.key(0), len(shapes))
    return [
        jax.random.uniform(key, shape, "float32", -1, 1).astype(dtype) for key, shape in zip(keys, shapes, strict=True)
    ]


def tensor(array):
    return torch.from_numpy(np.array(array.astype("float32"))).to(getattr(torch, array.dtype.name))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_results_are_those_of_the_op(jax, cj, dtype):
    a, b, bias, residual = arrays(jax, dtype, (2, 3, 16), (16, 8), (8,), (2, 3, 8))
    for name in (n for n in cj.__all__ if n != "gemm"):
        inputs = [{"bias": bias, "residual": residual}[n] for n in getattr(co, name).names]
        found = jax.jit(getattr(cj, name))(a, b, *inputs)
        wanted = getattr(co, name)(tensor(a), tensor(b), *map(tensor, inputs))
        assert (found.shape, found.dtype.name) == ((2, 3, 8), dtype)
        assert torch.equal(tensor(found), wanted)
    assert torch.equal(
        tensor(cj.gemm(a, b, out_dtype="float32")), co.gemm(tensor(a), tensor(b), out_dtype=torch.float32)
    )


@pytest.mark.slow
def test_an_epilogue_with_outputs_and_what_broadcasts(jax, cj):
    a, b, bias, residual = arrays(jax, "bfloat16", (6, 16), (16, 8), (1, 8), (1, 8))

    @jax.jit
    def call(a, b, bias, residual):
        found = cj.gemm(a, b, epilogue=scaled, bias=bias, residual=residual, scale=0.5)
        return found, found.top + 1

    found, above = call(a, b, bias, residual)
    wanted = co.gemm(tensor(a), tensor(b), epilogue=scaled, bias=tensor(bias), residual=tensor(residual), scale=0.5)
    assert found._fields == ("d", "top")
    assert torch.equal(tensor(found.d), wanted.d)
    assert torch.equal(tensor(found.top), wanted.top)
    assert np.array_equal(above, found.top + 1)


def test_the_examples_of_its_documentation_run(jax, cj):
    globs = {"jax": jax, "jnp": jax.numpy, "co": co}
    example = doctest.DocTestParser().get_doctest(cj.gemm.__doc__, globs, "gemm", None, 0)
    said = []
    assert doctest.DocTestRunner().run(example, out=said.append).failed == 0, "".join(said)
    assert all("as for :func:`gemm`" in getattr(cj, name).__doc__ for name in cj.__all__ if name != "gemm")


def test_shapes_and_dtypes_need_no_device(jax, cj):
    def shaped(*shape, dtype="bfloat16"):
        return jax.ShapeDtypeStruct(shape, dtype)

    found = jax.eval_shape(cj.gemm_bias, shaped(4096, 2, 8192), shaped(8192, 512), shaped(512))
    assert (found.shape, found.dtype) == ((4096, 2, 512), "bfloat16")
    found = jax.eval_shape(lambda a, b: cj.gemm(a, b, out_dtype="float32"), shaped(8, 16), shaped(16, 4))
    assert (found.shape, found.dtype) == ((8, 4), "float32")


@pytest.mark.slow
def test_mistakes_are_told(jax, cj):
    a, b, bias = arrays(jax, "bfloat16", (4, 16), (16, 8), (8,))

    @co.epilogue
    def dropped(acc, seed: co.Integer):
        return acc * co.e.dropout_mask(0.1, seed)

    cases = [
        (lambda: cj.gemm(a, b.T), ValueError, "b looks like a weight of shape"),
        (lambda: cj.gemm(a, b[None]), ValueError, r"takes one matrix \(K, N\)"),
        (lambda: cj.gemm(a[:0], b), ValueError, "no extent of 0"),
        (
            lambda: cj.gemm(a.astype("float32"), b),
            TypeError,
            "a is float32: cutlass_ops.jax takes float16 and bfloat16",
        ),
        (lambda: cj.gemm(a, b.astype("int32")), TypeError, "b is int32"),
        (lambda: cj.gemm(a, b.astype("float16")), TypeError, "must have the same dtype"),
        (lambda: cj.gemm(torch.ones(4, 16), b), TypeError, "a must be a jax.Array, not Tensor"),
        (lambda: cj.gemm(co.Scaled(a, 1.0), b), TypeError, "not Scaled: pass a.values, and a.scale as an input"),
        (lambda: cj.gemm(a, b, groups=None), TypeError, "cutlass_ops.jax has no groups"),
        (lambda: cj.gemm_bias(a, b), TypeError, "bias is missing"),
        (lambda: cj.gemm_bias(a, b, bias[:4]), ValueError, r"bias has shape \(4,\)"),
        (lambda: cj.gemm(a, b, out_dtype="int32"), TypeError, "out_dtype is int32: use float16"),
        (lambda: cj.gemm(a, b, epilogue=dropped, seed=1), TypeError, "an Integer of 64 bits"),
        (lambda: jax.grad(lambda x: cj.gemm(x, b).sum())(a), NotImplementedError, "has no gradients"),
        (lambda: jax.vmap(lambda x: cj.gemm(x, b))(a[None]), NotImplementedError, r"not mapped by jax\.vmap"),
    ]
    for call, error, match in cases:
        with pytest.raises(error, match=match):
            call()


# ---- Inside shard_map ----------------------------------------------------------------------------------------------


def on_meshes(jax, cj, function, *shapes, in_specs, out_specs, **named):
    """Return what JAX says of a function of a GEMM in a shard_map: with ``cj.gemm``, and with ``@``."""
    mesh = jax.sharding.AbstractMesh((2, 2), ("d", "e"))
    given = [jax.ShapeDtypeStruct(shape, "bfloat16") for shape in shapes]

    def said(gemm):
        mapped = jax.shard_map(
            lambda *x: function(gemm, *x), mesh=mesh, in_specs=in_specs, out_specs=out_specs, **named
        )
        try:
            found = jax.eval_shape(mapped, *given)
        except ValueError as exc:
            return str(exc).partition(" was given out_specs")[1]
        return jax.tree.map(lambda x: (x.shape, x.dtype), found)

    return said(cj.gemm), said(lambda a, b: a @ b)


def of_scan(jax, gemm, a, b):
    return jax.lax.scan(lambda c, _: (gemm(c, b), None), a, None, length=3)[0]


def of_cond(jax, gemm, a, b):
    return jax.lax.cond(a[0, 0] > 0, lambda: gemm(a, b), lambda: a)


def of_product(jax, gemm, a, b):
    return gemm(a, b)


def of_sum(jax, gemm, a, b):
    return jax.lax.psum(gemm(a, b), "e")


# What is computed, the specs of a and b, a result's spec, and whether it is refused since more varies.
MAPPED = {
    "rows": (of_product, ("d", None), (None, None), ("d",), False),
    "rows are not all": (of_product, ("d", None), (None, None), (), True),
    "both": (of_product, ("d", None), (None, "e"), ("d", "e"), False),
    "both are not all": (of_product, ("d", None), (None, "e"), ("d",), True),
    "neither": (of_product, (None, None), (None, None), (), False),
    "sums": (of_sum, ("d", "e"), ("e", None), ("d",), False),
    "sums are not added": (of_product, ("d", "e"), ("e", None), ("d",), True),
    "scan": (of_scan, ("d", None), (None, None), ("d",), False),
    "scan is not all": (of_scan, ("d", None), (None, None), (), True),
    "cond": (of_cond, ("d", None), (None, None), ("d",), False),
    "cond is not all": (of_cond, ("d", None), (None, None), (), True),
}


@pytest.mark.parametrize(("function", "of_a", "of_b", "of_d", "refused"), MAPPED.values(), ids=MAPPED)
def test_results_vary_as_those_of_a_product_do(jax, cj, function, of_a, of_b, of_d, refused):
    spec = jax.sharding.PartitionSpec
    found, wanted = on_meshes(
        jax,
        cj,
        lambda gemm, a, b: function(jax, gemm, a, b),
        (8, 16),
        (16, 16),
        in_specs=(spec(*of_a), spec(*of_b)),
        out_specs=spec(*of_d),
    )
    assert found == wanted
    assert (found == " was given out_specs") == refused


@pytest.mark.parametrize("which", ["bias", "residual", "scale"])
def test_results_vary_with_every_input(jax, cj, which):
    """Also one that is a number on each device."""
    spec, mesh = jax.sharding.PartitionSpec, jax.sharding.AbstractMesh((2,), ("d",))
    shapes = {"bias": (1, 8), "residual": (4, 8), "scale": ()}
    given = {name: jax.ShapeDtypeStruct((2, *shape), "float32") for name, shape in shapes.items()}
    a, b = (jax.ShapeDtypeStruct(shape, "bfloat16") for shape in ((4, 16), (16, 8)))

    def call(a, b, inputs):
        return tuple(cj.gemm(a, b, epilogue=scaled, **{name: x[0] for name, x in inputs.items()}))

    def said(d):
        of_inputs = {name: spec("d") if name == which else spec() for name in shapes}
        mapped = jax.shard_map(call, mesh=mesh, in_specs=(spec(), spec(), of_inputs), out_specs=d)
        return [x.shape for x in jax.eval_shape(mapped, a, b, given)]

    with pytest.raises(ValueError, match="out_specs"):
        said((spec(), spec()))
    assert said((spec("d"), spec("d"))) == [(8, 8), (8,)]


ON_TWO_DEVICES = """
import jax, jax.numpy as jnp, numpy as np, torch
import cutlass_ops.jax as cj
from jax.sharding import PartitionSpec as P

mesh = jax.sharding.Mesh(np.array(jax.devices()), ("d",))
a, b = (jax.random.normal(jax.random.key(0), shape).astype("bfloat16") for shape in ((8, 16), (16, 16)))

def of(gemm):
    @jax.custom_vjp
    def product(a, b):
        return gemm(a, b)

    def backward(given, gradient):
        a, b = given
        return gradient @ b.T, jax.lax.psum(a.T @ gradient, "d")

    product.defvjp(lambda a, b: (gemm(a, b), (a, b)), backward)

    def gradients(a, b):
        return jax.grad(lambda a, b: product(a, b).astype("float32").sum(), (0, 1))(a, b)

    def loop(a, b):
        return jax.lax.scan(lambda c, _: (gemm(c, b) * 0.1, None), a, None, length=3)[0]

    rows, both = P("d"), (P("d"), P())
    return [
        jax.shard_map(gemm, mesh=mesh, in_specs=both, out_specs=rows),
        jax.shard_map(loop, mesh=mesh, in_specs=both, out_specs=rows),
        jax.shard_map(gradients, mesh=mesh, in_specs=both, out_specs=both),
        jax.shard_map(gemm, mesh=mesh, in_specs=both, out_specs=rows, check_vma=False),
        lambda a, b: jax.pmap(gemm, in_axes=(0, None))(a.reshape(2, 4, 16), b),
    ]

for found, wanted in zip(of(cj.gemm), of(lambda a, b: a @ b), strict=True):
    for run in (found, jax.jit(found)):
        for x, y in zip(jax.tree.leaves(run(a, b)), jax.tree.leaves(wanted(a, b)), strict=True):
            np.testing.assert_allclose(x.astype("float32"), y.astype("float32"), rtol=0.02, atol=0.1)
for call in (jax.grad(lambda a, b: cj.gemm(a, b).sum()), jax.vmap(cj.gemm, (0, None))):
    try:
        jax.shard_map(lambda a, b: call(a[None], b), mesh=mesh, in_specs=(P("d"), P()), out_specs=P("d"))(a, b)
    except NotImplementedError:
        continue
    raise AssertionError("it is served")
"""


@pytest.mark.slow
def test_two_devices_have_their_own_rows(jax):
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", ON_TWO_DEVICES], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.fixture
def kernels(jax, cj, device, monkeypatch):
    """Have XLA call a made-up device's kernels, on the CPU, by the functions that a GPU's are called by."""
    pytest.importorskip("jax_tvm_ffi")
    from jax.interpreters import mlir

    make, device.workspaces = device._kernel, []

    def exported(spec):
        kernel = make(spec)

        def launch(*arguments):
            given = [torch.from_dlpack(x) if hasattr(x, "__dlpack__") else x for x in arguments]
            workspace = given.pop() if isinstance(given[-1], torch.Tensor) else None
            # XLA would not see a refusal.
            status = kernel.launch(*given, workspace)
            assert status == 0 or workspace is not None  # XLA would not see a refusal
            for launched in device.launches[-1:]:
                launched.outputs, launched.workspace = (), None  # memory that is XLA's again
            if workspace is not None:
                device.workspaces.append((workspace.numel(), workspace.data_ptr() % 256))
            return status

        return SimpleNamespace(launch=launch, workspace_size=kernel.workspace_size, load_on=lambda _: None)

    monkeypatch.setattr(device, "_kernel", exported)
    monkeypatch.setattr(cj, "_PLATFORM", "cpu")
    monkeypatch.setattr(cj, "_device", lambda: torch.device("cpu"))
    monkeypatch.setattr(cj, "device_of", lambda _: device.device)
    register = sys.modules["jax_tvm_ffi"].register_ffi_target
    monkeypatch.setattr(
        "jax_tvm_ffi.register_ffi_target", lambda *x, **named: register(*x, **named | {"pass_owned_tensor": True})
    )
    jax.clear_caches()
    mlir.register_lowering(cj._GEMM, mlir.lower_fun(cj._by_kernel, multiple_results=True), platform="cpu")
    yield device
    mlir.register_lowering(cj._GEMM, mlir.lower_fun(cj._by_reference, multiple_results=True), platform="cpu")
    jax.clear_caches()


@pytest.mark.slow
def test_xla_calls_the_chosen_kernel(jax, cj, kernels):
    a, b, bias, residual = arrays(jax, "bfloat16", (2, 3, 64), (64, 32), (32,), (2, 1, 32))

    @jax.jit
    def call(a, b, bias, residual):
        one = cj.gemm(a, b, epilogue=scaled, bias=bias, residual=residual, scale=0.5)
        return one, cj.gemm_bias_relu(a, b, bias)

    for _ in range(2):
        found, relu = jax.block_until_ready(call(a, b, bias, residual))
    product = tensor(a).float() @ tensor(b).float()
    exact = (product + tensor(bias).float()) * 0.5 + tensor(residual).float()
    assert (tensor(found.d).float() - exact).norm() <= 0.01 * exact.norm()
    assert (tensor(found.top) - product.amax(-1)).norm() <= 0.01 * product.norm()
    exact = (product + tensor(bias).float()).relu()
    assert (tensor(relu).float() - exact).norm() <= 0.01 * exact.norm()
    # Two kernels, each chosen once, called twice each.
    assert len(kernels.loaded) == 2
    assert len(kernels.launches) == 4
    assert {x.spec.b.major for x in kernels.launches} == {"row"}


def test_a_program_for_a_gpu_is_lowered_without_one(jax, cj, kernels):
    shapes = [(2, 128, 512), (512, 256), (256,), (2, 128, 256)]

    def call(a, b, bias, residual):
        return cj.gemm(a, b, epilogue=scaled, bias=bias, residual=residual, scale=0.5)

    traced = jax.jit(call).trace(*(jax.ShapeDtypeStruct(shape, "bfloat16") for shape in shapes))
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    (spec,) = kernels.loaded
    assert spec.slug in text
    # Both outputs take over memory that nothing fills: the third operand's, and the last one's.
    assert text.count("@AllocateBuffer()") == text.count("output_operand_alias<") == 2
    assert "output_tuple_indices = [0], operand_index = 2," in text
    assert "output_tuple_indices = [1], operand_index = 6," in text
    assert "broadcast" not in text
    assert "transpose" not in text


@pytest.mark.slow
def test_a_kernel_gets_its_workspace_from_xla(jax, cj, kernels):
    a, b, bias, residual = arrays(jax, "bfloat16", (4, 64), (64, 32), (32,), (4, 32))
    kernels.workspace = 1000
    found = cj.gemm(a, b, epilogue=scaled, bias=bias, residual=residual, scale=0.5)
    ((size, beside),) = kernels.workspaces
    assert size >= 1000
    assert beside == 0
    assert len(found) == 2
    exact = tensor(a).float() @ tensor(b).float()
    assert (tensor(found.top) - exact.amax(-1)).norm() <= 0.01 * exact.norm()


@pytest.mark.slow
def test_a_kernel_that_refuses_its_workspace_is_an_error(jax, cj, kernels):
    a, b = arrays(jax, "bfloat16", (4, 64), (64, 32))
    kernels.workspace = 1000
    make = kernels._kernel

    def refusing(spec):
        kernel = make(spec)
        kernel.launch = lambda *_: 1
        return kernel

    kernels._kernel = refusing
    with pytest.raises(Exception, match="the kernel refused its operands"):
        cj.gemm(a, b).block_until_ready()


@pytest.mark.slow
def test_without_jax_tvm_ffi_it_says_what_to_install(jax, cj, kernels, monkeypatch):
    monkeypatch.setitem(sys.modules, "jax_tvm_ffi", None)
    with pytest.raises(ImportError, match="pip install jax-tvm-ffi"):
        cj.gemm(*arrays(jax, "bfloat16", (4, 64), (64, 32)))
