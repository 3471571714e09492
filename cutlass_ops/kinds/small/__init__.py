"""Small kernels: a warp for each tile, for batches of small GEMMs, on Sm80 and every later target."""
