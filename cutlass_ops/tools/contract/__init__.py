"""Which instruction will multiply two matrices, which conditions it needs, and what to change.

`given` reads sizes and tensors. `library` has the rules of well-written kernels, `triton` those of Triton's compiler.
`result` has what they return. `predicting` is the public function. The instructions are in
:mod:`cutlass_ops.tools.contract.tensor_cores`.
"""
