"""The epilogues of the service; the build machine and the container both import them."""

import cutlass_ops as co


@co.epilogue
def scaled_swish(acc, bias: co.Row, scale: co.Scalar):  # noqa: ANN001, ANN201
    """D = silu(A @ B + bias) * scale."""
    return co.e.silu(acc + bias) * scale
