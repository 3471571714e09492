"""The documentation of ops for ``help``: ops are objects, so their documentation is made from their epilogue."""

from __future__ import annotations

import inspect
from collections.abc import Sequence

from cutlass_ops.epilogue import Epilogue
from cutlass_ops.epilogue.nodes import PARTS, Kind


def signature(names: Sequence[str]) -> inspect.Signature:
    """Return the signature of an op with these inputs."""
    positional = [inspect.Parameter(n, inspect.Parameter.POSITIONAL_OR_KEYWORD) for n in ("a", "b", *names)]
    keyword = [
        inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY, default=None)
        for n in ("groups", "out", "out_dtype", "math")
    ]
    return inspect.Signature([*positional, *keyword])


_SHAPES = {
    Kind.ROW: "(N,), or (..., N) with batches",
    Kind.COL: "(M,), or (..., M) with batches",
    Kind.TILE: "(..., M, N)",
    Kind.SCALAR: "number, or tensor of one element",
    Kind.PRODUCT: "(K, N), the same dtype and major as b",
    Kind.INTEGER: "int, or integer tensor of one element",
    **{kind: part.shape for kind, part in PARTS.items()},
    Kind.BLOCKS_D: "(..., M, N / 128), FP32, rounded up",
}


def docstring(epilogue: Epilogue) -> str:
    """Return the documentation of an epilogue's op, without examples."""
    inputs = "".join(f"{i.name} : {_SHAPES[i.kind]}\n" for i in epilogue.graph.inputs)
    outputs = "\n".join(f"{o.name} : {_SHAPES[o.kind]}" for o in epilogue.graph.outputs)
    return (
        f"{epilogue.doc}\n\nParameters\n----------\n"
        "a : (..., M, K), FP16 or BF16, either major; other dtypes as for :func:`cutlass_ops.gemm`\n"
        f"b : (K, N), the same dtype, either major; or (..., K, N), a GEMM for each batch\n{inputs}"
        "groups : Groups, optional\n    Where groups of rows end, as for :func:`cutlass_ops.gemm`.\n"
        "out : Tensor or mapping, optional\n    Where to write the outputs.\n"
        "out_dtype : torch.dtype, optional\n    D's dtype. Default: that of a, or BF16 for FP8 and INT8.\n"
        "math : str, optional\n    How FP32 or FP8 operands are multiplied, as for :func:`cutlass_ops.gemm`.\n\n"
        f"Returns\n-------\n{outputs}\n\n"
        "Raises\n------\nTypeError, ValueError\n"
        "    If an argument does not fit. The message names it and says what to do.\n"
        "UnsupportedError\n    If no kernel supports the device.\n"
        "MissingKernelError, CompileError, ToolchainError, StoreError, LoadError\n"
        "    If the call waits for its kernel, and that cannot be compiled, stored or loaded. Otherwise, PyTorch\n"
        "    serves.\n"
    )
