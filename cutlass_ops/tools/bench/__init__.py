"""An op against other ways to compute the same, as a table, JSON and a page.

`benching` goes from what a user asks to a result. `rivals` are the other ways, `triton_gemm` (the only importer of
triton) one of them. `result` is what users get.
The methods are in :mod:`cutlass_ops.tuner.comparing`.
"""
