"""GEMV kernels: ordinary loads, for small M, on Sm80 and every later target."""
