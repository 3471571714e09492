"""Multistage mma.sync kernels (CUTLASS 2.x), for Sm80 and every later target."""
