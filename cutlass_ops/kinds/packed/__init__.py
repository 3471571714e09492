"""Kernels for few rows of A and a packed weight, on Sm80 and every later target."""
