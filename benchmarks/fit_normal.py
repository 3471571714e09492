"""Fits the polynomial of GELU in `templates/include/cutlass_ops/normal.h`, and prints its coefficients and errors.

    python benchmarks/fit_normal.py

The normal distribution's tail at z >= 0 is t 2^(P(t) - z^2 log2(e) / 2) with t = 1 / (1 + 0.4 z). P is a polynomial in
t, which follows from the tail with errors that are nearly equal everywhere (Lawson's iteration). Needs no GPU.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.polynomial import chebyshev, polynomial

DEGREE, SLOPE = 8, 0.4
FARTHEST = 12.5  # beyond it, the tail is no normal number of FP32
_NODES, _ROUNDS = 4000, 60

Values = np.ndarray[tuple[int, ...], np.dtype[np.float64]]


def tail(z: Values) -> Values:
    """Return the normal distribution beyond z."""
    return 0.5 * np.vectorize(math.erfc)(z / math.sqrt(2))


def fit() -> list[float]:
    """Return the coefficients of P, from that of 1 on."""
    nearest = 1 / (1 + SLOPE * FARTHEST)
    u = np.cos(np.pi * (np.arange(_NODES) + 0.5) / _NODES)  # of [-1, 1]
    t = nearest + (1 - nearest) * (u + 1) / 2
    z = (1 / t - 1) / SLOPE
    wanted = np.log2(tail(z) / t) + z * z * (math.log2(math.e) / 2)
    weights = np.ones(_NODES)
    for _ in range(_ROUNDS):
        found = chebyshev.chebfit(u, wanted, DEGREE, w=np.sqrt(weights))
        wrong = np.abs(chebyshev.chebval(u, found) - wanted)
        weights *= wrong / wrong.max() + 1e-3
        weights /= weights.max()
    line = [-(1 + nearest) / (1 - nearest), 2 / (1 - nearest)]  # u, in powers of t
    powers = np.zeros(1)
    for each in chebyshev.cheb2poly(found)[::-1]:
        powers = polynomial.polyadd(polynomial.polymul(powers, line), [each])
    return [float(each) for each in powers[: DEGREE + 1]]


def gelu(x: Values, coefficients: list[float]) -> Values:
    """Return GELU as a kernel computes it: in FP32, with rounded powers and reciprocals."""

    def fma(a: Values, b: Values, c: Values) -> Values:
        return (a.astype(np.float64) * b + c).astype(np.float32)

    x = x.astype(np.float32)
    z, one = np.abs(x), np.ones_like(x)
    t = (1 / fma(z, one * np.float32(SLOPE), one).astype(np.float64)).astype(np.float32)
    power = one * np.float32(coefficients[-1])
    for each in coefficients[-2::-1]:
        power = fma(power, t, one * np.float32(each))
    power = fma(z * np.float32(-math.log2(math.e) / 2), z, power)
    beyond = t * np.exp2(power.astype(np.float64)).astype(np.float32)
    return x * np.where(x < 0, beyond, 1 - beyond)


def main() -> None:
    """Fit, and print."""
    found = fit()
    x = np.linspace(-FARTHEST, FARTHEST, 500_001).astype(np.float32).astype(np.float64)
    exact = x * tail(-x)
    wrong = np.abs(gelu(x, found) - exact)
    near = np.abs(x) < 4
    print(", ".join(f"{each:.9g}f" for each in found))
    print(f"largest error: {(wrong / np.maximum(1, np.abs(exact))).max():.2g}, of values above 1 relative")
    print(f"largest relative error: {(wrong[near & (x != 0)] / np.abs(exact[near & (x != 0)])).max():.2g} for |x| < 4")


if __name__ == "__main__":
    main()
