"""Arrays of CuPy and JAX on a GPU: the kernels that serve tensors, on these packages' streams."""

import os

import pytest
import torch

import cutlass_ops as co
from tests.gpu.oracle import EAGER, assert_close

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]

# M, N, K: few rows, a tile and more, extents that no tile divides, lines that are not aligned to 16 bytes.
PROBLEMS = [(3, 512, 1024), (256, 512, 1024), (200, 136, 264), (64, 130, 100)]
INPUTS = {"gemm": (), "gemm_bias_relu": ("bias",), "gemm_bias_residual": ("bias", "residual")}


def operands(m, n, k, dtype):
    a, b = torch.randn(m, k, device="cuda"), torch.randn(k, n, device="cuda") / k**0.5
    bias, residual = torch.randn(n, device="cuda"), torch.randn(m, n, device="cuda")
    return {name: x.to(dtype) for name, x in {"a": a, "b": b, "bias": bias, "residual": residual}.items()}


def require_right(name, found, given):
    a, b, *inputs = (given[n] for n in ("a", "b", *INPUTS[name]))
    wanted = EAGER[name](*(x.double() for x in (a, b, *inputs)))
    assert_close(found, wanted, EAGER[name](a, b, *inputs))


@co.epilogue
def scaled(acc, bias: co.Row, residual: co.Tile, scale: co.Scalar):
    z = (acc + bias) * scale
    return {"d": z + residual, "z": z, "top": co.e.max(acc, dim=1)}


# ---- CuPy ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def cupy():
    return pytest.importorskip("cupy")


@pytest.fixture
def cc(cupy):
    import cutlass_ops.cupy

    return cutlass_ops.cupy


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_cupy_arrays_are_served_by_the_same_kernel(cupy, cc, problem):
    given = operands(*problem, torch.float16)
    arrays = {name: cupy.from_dlpack(x) for name, x in given.items()}
    for name, of_epilogue in INPUTS.items():
        inputs = [arrays[n] for n in of_epilogue]
        found = getattr(cc, name)(arrays["a"], arrays["b"], *inputs)
        assert isinstance(found, cupy.ndarray)
        require_right(name, torch.from_dlpack(found), given)
        inputs = [given[n] for n in of_epilogue]
        assert torch.equal(torch.from_dlpack(found), getattr(co, name)(given["a"], given["b"], *inputs))


def test_cupys_current_stream_runs_them(cupy, cc):
    with cupy.cuda.Stream(non_blocking=True) as stream:
        a = cupy.random.uniform(-1, 1, (4096, 4096), dtype=cupy.float32).astype(cupy.float16)
        out = cupy.zeros((4096, 4096), cupy.float16)
        # Nothing waits for another stream: what comes before and after is ordered by this one alone.
        a *= 2
        assert cc.gemm(a, a, out=out) is out
        total = out.astype(cupy.float32).sum()
        stream.synchronize()
        wanted = (a.astype(cupy.float32) @ a.astype(cupy.float32)).sum()
        assert abs(float(total - wanted)) <= 1e-2 * float(abs(out.astype(cupy.float32)).sum())


def test_cupy_outputs_by_name(cupy, cc):
    given = {name: cupy.from_dlpack(x) for name, x in operands(128, 64, 256, torch.float16).items()}
    z = cupy.empty((128, 64), cupy.float16)
    a, b = given.pop("a"), given.pop("b")
    found = cc.gemm(a, b, epilogue=scaled, scale=0.5, out={"z": z}, **given)
    assert found.z is z
    assert found.top.dtype == cupy.float32
    assert cupy.allclose(found.d, z + given["residual"], atol=1e-2)


# ---- JAX -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def jax():
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # PyTorch's tensors need memory too
    jax = pytest.importorskip("jax")
    if not any(d.platform == "gpu" for d in jax.devices()):
        pytest.skip("JAX has no GPU")
    pytest.importorskip("jax_tvm_ffi")
    return jax


@pytest.fixture
def cj(jax):
    import cutlass_ops.jax

    return cutlass_ops.jax


def as_arrays(jax, given):
    return {name: jax.dlpack.from_dlpack(x) for name, x in given.items()}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "f16"])
@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_xla_calls_kernels(jax, cj, problem, dtype):
    given = operands(*problem, dtype)
    arrays = as_arrays(jax, given)
    for name, of_epilogue in INPUTS.items():
        inputs = [arrays[n] for n in of_epilogue]
        compiled = jax.jit(getattr(cj, name)).lower(arrays["a"], arrays["b"], *inputs).compile()
        assert "cutlass_ops." in compiled.as_text()
        for _ in range(3):
            found = compiled(arrays["a"], arrays["b"], *inputs)
        require_right(name, torch.from_dlpack(jax.block_until_ready(found)), given)


def test_a_program_around_kernels_is_ordered(jax, cj):
    given = operands(512, 512, 512, torch.bfloat16)
    arrays = as_arrays(jax, given)

    @jax.jit
    def program(a, b, bias, residual):
        a = a * 2
        first = cj.gemm(a, b, epilogue=scaled, bias=bias, residual=residual, scale=0.5)
        second = cj.gemm_bias_relu(first.d + 1, b, bias)
        return first, second - 1

    for _ in range(3):
        first, second = jax.block_until_ready(program(*arrays.values()))
    a, b, bias, residual = given.values()
    wanted = co.gemm(a * 2, b, epilogue=scaled, bias=bias, residual=residual, scale=0.5)
    for x, y in zip(first, wanted, strict=True):
        assert_close(torch.from_dlpack(x), y.double())
    last = co.gemm_bias_relu(torch.from_dlpack(first.d) + 1, b, bias) - 1
    assert_close(torch.from_dlpack(second), last.double())


def test_a_loop_of_xla_calls_them_again(jax, cj):
    given = operands(128, 256, 256, torch.bfloat16)
    x, w, bias = (as_arrays(jax, given)[name] for name in ("a", "b", "bias"))
    found = jax.jit(lambda x: jax.lax.fori_loop(0, 4, lambda _, y: cj.gemm_bias_relu(y, w, bias), x))(x)
    wanted = given["a"]
    for _ in range(4):
        wanted = co.gemm_bias_relu(wanted, given["b"], given["bias"])
    assert_close(torch.from_dlpack(jax.block_until_ready(found)), wanted.double())
