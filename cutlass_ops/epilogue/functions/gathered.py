"""Values of A's rows, which the kernel gathers."""

from __future__ import annotations

from cutlass_ops.epilogue.values import Value, apply


def mean_of_a() -> Value:
    """Return the mean of A's row over K: one FP32 value for each row of D, which the kernel computes.

    Examples
    --------
    >>> @co.epilogue
    ... def centred(acc, column_sum: co.Row):
    ...     return acc - co.e.mean_of_a() * column_sum
    >>> a, b = torch.tensor([[1.0, 3.0]]).bfloat16(), torch.eye(2).bfloat16()
    >>> co.gemm(a, b, epilogue=centred, column_sum=torch.ones(2)).tolist()
    [[-1.0, 1.0]]
    """
    return apply("mean_of_a")


def mean_square_of_a() -> Value:
    """Return the mean square of A's row over K: one FP32 value for each row of D, which the kernel computes.

    Examples
    --------
    >>> @co.epilogue
    ... def rms_normed(acc, eps: co.Scalar):
    ...     return acc * co.e.rsqrt(co.e.mean_square_of_a() + eps)
    >>> a, b = torch.tensor([[2.0, -2.0]]).bfloat16(), torch.eye(2).bfloat16()
    >>> co.gemm(a, b, epilogue=rms_normed, eps=0.0).tolist()
    [[1.0, -1.0]]
    """
    return apply("mean_square_of_a")
