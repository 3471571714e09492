"""The epilogues of the named ops, written as any user would write them."""

from __future__ import annotations

from cutlass_ops.epilogue import Epilogue, Row, Tile, epilogue, gelu, relu, silu


@epilogue
def identity(acc):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
    """D = A @ B."""
    return acc


@epilogue
def bias(acc, bias: Row):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
    """D = A @ B + bias."""
    return acc + bias


@epilogue
def bias_relu(acc, bias: Row):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
    """D = relu(A @ B + bias)."""
    return relu(acc + bias)


@epilogue
def bias_gelu(acc, bias: Row):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
    """D = gelu(A @ B + bias), the exact GELU (erf)."""
    return gelu(acc + bias)


@epilogue
def bias_silu(acc, bias: Row):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
    """D = silu(A @ B + bias)."""
    return silu(acc + bias)


@epilogue
def residual(acc, residual: Tile):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
    """D = A @ B + residual."""
    return acc + residual


@epilogue
def bias_residual(acc, bias: Row, residual: Tile):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
    """D = A @ B + bias + residual."""
    return acc + bias + residual


@epilogue
def bias_relu_residual(acc, bias: Row, residual: Tile):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
    """D = relu(A @ B + bias) + residual."""
    return relu(acc + bias) + residual


# For each named op of cutlass_ops.run.named, its epilogue.
BY_OP: dict[str, Epilogue] = {
    "gemm": identity,
    "gemm_bias": bias,
    "gemm_bias_relu": bias_relu,
    "gemm_bias_gelu": bias_gelu,
    "gemm_bias_silu": bias_silu,
    "gemm_residual": residual,
    "gemm_bias_residual": bias_residual,
    "gemm_bias_relu_residual": bias_relu_residual,
}
