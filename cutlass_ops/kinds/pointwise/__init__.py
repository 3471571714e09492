"""Pointwise kernels: epilogues that read no product, on Sm80 and every later target."""
