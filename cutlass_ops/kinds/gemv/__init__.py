"""Kernels of ordinary loads for few rows of A, for Sm80 and every later target."""
