"""A layer of JAX with an epilogue of its own, under jax.jit, and its error against FP32 beside that of jax.numpy.

On a GPU, XLA calls one kernel, for which ``pip install jax-tvm-ffi`` is needed. On the CPU, PyTorch computes it.
"""

from __future__ import annotations

import sys

import jax
import jax.numpy as jnp

import cutlass_ops as co
import cutlass_ops.jax as cj

M, N, K = 256, 512, 1024


@co.epilogue
def gated(acc, bias: co.Row, gate: co.Tile):  # noqa: ANN001, ANN201
    """silu(A @ B + bias) * gate, and the greatest absolute value of each row."""
    d = co.e.silu(acc + bias) * gate
    return {"d": d, "amax": co.e.amax(d, dim=1)}


@jax.jit
def fused(x: jax.Array, w: jax.Array, bias: jax.Array, gate: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the layer's result and the greatest absolute value of each row, by one kernel."""
    d, amax = cj.gemm(x, w, epilogue=gated, bias=bias, gate=gate)
    return d, amax


@jax.jit
def plain(x: jax.Array, w: jax.Array, bias: jax.Array, gate: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the same by jax.numpy."""
    d = jax.nn.silu(x @ w + bias) * gate
    return d, jnp.abs(d).max(axis=1)


def error(found: jax.Array, exact: jax.Array) -> float:
    """Return the relative error."""
    return float(jnp.linalg.norm(found.astype(jnp.float32) - exact) / jnp.linalg.norm(exact))


def main() -> None:
    """Compute the layer both ways."""
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = ((M, K), (K, N), (N,), (M, N))
    wide = [jax.random.normal(key, shape, jnp.float32) for key, shape in zip(keys, shapes, strict=True)]
    wide[1] /= K**0.5
    given = [x.astype(jnp.bfloat16) for x in wide]
    with jax.default_matmul_precision("highest"):
        exact = plain(*(x.astype(jnp.float32) for x in given))
    ours, theirs = ([error(x, y) for x, y in zip(f(*given), exact, strict=True)] for f in (fused, plain))
    print(f"errors against FP32, of d and of amax: fused {ours[0]:.2e}, {ours[1]:.2e}")
    print(f"jax.numpy {theirs[0]:.2e}, {theirs[1]:.2e}")
    if ours[0] > 2 * theirs[0]:
        sys.exit("the result is wrong")


if __name__ == "__main__":
    main()
