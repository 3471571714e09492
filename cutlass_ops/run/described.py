"""What ``help`` says of an op: ops are objects, so that their documentation is made of their epilogue."""

from __future__ import annotations

import inspect
from collections.abc import Sequence

from cutlass_ops.epilogue import Epilogue
from cutlass_ops.epilogue.nodes import Kind


def signature(names: Sequence[str]) -> inspect.Signature:
    """Return the signature of an op with these inputs."""
    positional = [inspect.Parameter(n, inspect.Parameter.POSITIONAL_OR_KEYWORD) for n in ("a", "b", *names)]
    keyword = [inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY, default=None) for n in ("out", "out_dtype")]
    return inspect.Signature([*positional, *keyword])


_SHAPES = {
    Kind.ROW: "(N,)",
    Kind.COL: "(M,)",
    Kind.TILE: "(M, N)",
    Kind.SCALAR: "number or 0-d",
    Kind.PRODUCT: "(K, N), the same dtype and major as b",
    Kind.INTEGER: "int or 0-d",
    Kind.BLOCKS_A: "(..., M, K / 128), FP32, rounded up",
    Kind.BLOCKS_B: "(N / 128, K / 128) or (N, K / 128), FP32, rounded up",
    Kind.BLOCKS_D: "(..., M, N / 128), FP32, rounded up",
}


def docstring(epilogue: Epilogue) -> str:
    """Return the documentation of an epilogue's op, without examples."""
    inputs = "".join(f"{i.name} : {_SHAPES[i.kind]}\n" for i in epilogue.graph.inputs)
    outputs = "\n".join(f"{o.name} : {_SHAPES[o.kind]}" for o in epilogue.graph.outputs)
    return (
        f"{epilogue.doc}\n\nParameters\n----------\na : (..., M, K), FP16 or BF16, either major\n"
        f"b : (K, N), the same dtype, either major; or (..., K, N), a GEMM for each batch\n{inputs}"
        "out : Tensor or mapping, optional\n    Where to write the outputs.\n"
        "out_dtype : torch.dtype, optional\n    D's dtype; by default that of a.\n\n"
        f"Returns\n-------\n{outputs}\n\n"
        "Raises\n------\nTypeError, ValueError\n    If an argument does not fit. The message names it.\n"
        "UnsupportedError\n    If no kernel supports the device.\n"
    )
