"""Names that other libraries have, and what to write here instead."""

from __future__ import annotations

import re

from cutlass_ops.epilogue.operations import OPS

# Functions that only have another name here.
_NAMES = {
    "absolute": "abs",
    "clip": "clamp",
    "divide": "div",
    "equal": "eq",
    "expit": "sigmoid",
    "fabs": "abs",
    "fmax": "maximum",
    "fmin": "minimum",
    "greater": "gt",
    "greater_equal": "ge",
    "hswish": "hardswish",
    "inverse": "reciprocal",
    "leaky": "leaky_relu",
    "less": "lt",
    "less_equal": "le",
    "logistic": "sigmoid",
    "lrelu": "leaky_relu",
    "multiply": "mul",
    "negative": "neg",
    "norm_cdf": "ndtr",
    "not_equal": "ne",
    "power": "pow",
    "rand": "uniform",
    "rint": "round",
    "signum": "sign",
    "subtract": "sub",
    "swish": "silu",
    "true_divide": "div",
    **dict.fromkeys(("dropout", "dropout2d"), "dropout_mask"),
    **dict.fromkeys(("astype", "to", "type", "bfloat16", "half"), "cast"),
}

# Functions of x that are an expression here.
_EXPRESSIONS = {
    "celu": "alpha * co.e.elu(x / alpha)",
    "clamp_max": "co.e.minimum(x, limit)",
    "clamp_min": "co.e.maximum(x, limit)",
    "cosh": "(co.e.exp(x) + co.e.exp(-x)) / 2",
    "erfc": "1 - co.e.erf(x)",
    "gelu_erf": "co.e.gelu(x)",
    "gelu_exact": "co.e.gelu(x)",
    **dict.fromkeys(
        ("gelu_accurate", "gelu_approx", "gelu_fast", "gelu_new", "gelu_pytorch_tanh", "gelu_tanh"),
        'co.e.gelu(x, approximate="tanh")',
    ),
    "hardshrink": "co.e.where(co.e.abs(x) > 0.5, x, 0.0)",
    "hardsigmoid": "co.e.clamp(x / 6 + 0.5, 0, 1)",
    "hardtanh": "co.e.clamp(x, -1, 1)",
    "identity": "x",
    "log10": "co.e.log(x) / math.log(10)",
    "logsigmoid": "-co.e.softplus(-x)",
    "masked_fill": "co.e.where(condition, value, x)",
    "prelu": "co.e.leaky_relu(x, slope)",
    "quick_gelu": "x * co.e.sigmoid(1.702 * x)",
    **dict.fromkeys(
        ("relu2", "relu_square", "relu_squared", "square_relu", "squared_relu", "sqrelu"),
        "co.e.square(co.e.relu(x))",
    ),
    "relu6": "co.e.clamp(x, 0, 6)",
    "select": "co.e.where(condition, x, y)",
    "selu": "1.0507009873554805 * co.e.elu(x, 1.6732632423543772)",
    "sinh": "(co.e.exp(x) - co.e.exp(-x)) / 2",
    "softsign": "x / (1 + co.e.abs(x))",
    "tan": "co.e.sin(x) / co.e.cos(x)",
    "tanhshrink": "x - co.e.tanh(x)",
    "threshold": "co.e.where(x > limit, x, value)",
}

_ROWS = "needs a whole row of D before its first element is known, and a kernel computes D tile by tile: "
_GATED = "multiplies two products: call co.gemm_swiglu, or write an epilogue with a co.Product, {}(acc) * up"
_AFTER = "computes with more than one element of D: apply it in PyTorch to the result"
_SHAPE = "an epilogue computes element by element and changes no shape: apply it in PyTorch to a, b or the result"

# What is none of these, and what to do.
_REASONS = {
    **{
        name: f"{name} {_ROWS}return co.e.logsumexp(x, dim=1) as a further output, and compute {after} in PyTorch"
        for name, after in {
            "softmax": "(d - logsumexp[:, None]).exp()",
            "log_softmax": "d - logsumexp[:, None]",
            "cross_entropy": "the loss from it",
        }.items()
    },
    "layer_norm": f"a norm {_ROWS}call co.layernorm_gemm for a norm of a, or apply it in PyTorch to the result",
    "rms_norm": f"a norm {_ROWS}call co.rmsnorm_gemm for a norm of a, or co.gemm_residual_rms for one of the result",
    "batch_norm": "a norm with known statistics is acc * scale + shift, with scale and shift annotated co.Row",
    "mean": "return co.e.sum(x, dim) as an output, and divide that in PyTorch",
    **dict.fromkeys(
        ("std", "var"), "return co.e.sum(x, dim) and co.e.sum_square(x, dim) as outputs, and compute it in PyTorch"
    ),
    **{
        name: f"{name} {_AFTER}"
        for name in ("all", "any", "argsort", "cumprod", "cumsum", "median", "prod", "roll", "sort", "topk")
    },
    **dict.fromkeys(
        ("cat", "concat", "permute", "reshape", "squeeze", "stack", "transpose", "unsqueeze", "view"), _SHAPE
    ),
    "glu": f"glu {_GATED.format('co.e.sigmoid')}",
    "geglu": f"geglu {_GATED.format('co.e.gelu')}",
    "reglu": f"reglu {_GATED.format('co.e.relu')}",
    "swiglu": "call co.gemm_swiglu, or write an epilogue with a co.Product, co.e.silu(acc) * up",
    "arange": "use co.e.row_index() or co.e.column_index()",
    "float": "leave it out: values have the type in which the epilogue computes",
    **dict.fromkeys(
        ("dense", "fc", "linear"),
        "call co.gemm(x, weight.t()), or with a bias co.gemm_bias(x, weight.t(), bias); the layer is co.nn.Linear",
    ),
    **dict.fromkeys(
        ("bmm", "dot", "einsum", "matmul", "mm", "tensordot"), "call co.gemm(a, b), which takes batches as well"
    ),
    **dict.fromkeys(("addmm", "baddbmm"), "call co.gemm_bias(a, b, bias)"),
    **dict.fromkeys(
        ("scaled_mm", "scaled_gemm", "fp8_gemm", "gemm_fp8"),
        "call co.gemm(co.Scaled(a, scale_a), co.Scaled(b, scale_b))",
    ),
    **dict.fromkeys(("grouped_mm", "grouped_gemm", "moe", "moe_gemm"), "call co.gemm(a, b, groups=co.Groups(offsets))"),
    "masked_gemm": "call co.gemm(a, b, groups=co.Groups(counts=counts))",
    "int_mm": "call co.gemm(a, b, out_dtype=torch.int32)",
    "prepare_layernorm": 'call co.prepare(w, gamma, beta, norm="layer")',
    "patch_report": "call co.patch(model, dry_run=True)",
    **dict.fromkeys(
        ("attention", "flash_attention", "sdpa", "scaled_dot_product_attention"),
        "call torch.nn.functional.scaled_dot_product_attention",
    ),
    **dict.fromkeys(("conv", "conv1d", "conv2d", "conv3d"), "call PyTorch's: this library has GEMMs"),
    **dict.fromkeys(("quantize", "quantise"), "call co.e.quantize in an epilogue, and co.Scaled.quantize for a tensor"),
    "autotune": "call co.tune",
    "benchmark": "call co.bench",
    **dict.fromkeys(("compile", "fuse", "jit"), "decorate a function with @co.epilogue"),
}


def _plain(name: str) -> str:
    """Return a name without case and underscores, in which libraries differ."""
    return name.lower().replace("_", "")


_HINTS = {_plain(name): f"did you mean {ours}?" for name, ours in _NAMES.items()}
_HINTS |= {_plain(name): f"write {expression}" for name, expression in _EXPRESSIONS.items()}
_HINTS |= {_plain(name): reason for name, reason in _REASONS.items()}
# Of one value; others than this have a default.
_UNARY = [*(op for op, info in OPS.items() if info.arity == 1 and op not in ("cast", "gelu_tanh")), "leaky_relu", "elu"]
_OF_ONE = {_plain(op): f"co.e.{op}(x)" for op in _UNARY}
_OF_ONE |= {_plain(name): f"co.e.{ours}(x)" for name, ours in _NAMES.items() if ours in _UNARY}
_OF_ONE |= {_plain(name): expression for name, expression in _EXPRESSIONS.items()}


def hint(name: str) -> str:
    """Return what to write for a name of another library; an empty string for an unknown name."""
    return _HINTS.get(_plain(name), "")


def expression_of(name: str, x: str) -> str:
    """Return the expression, of `x`, of a function of one value such as an activation; else an empty string.

    `name` is its name here, in PyTorch or elsewhere, such as ``"SiLU"`` or ``"swish"``.
    """
    return re.sub(r"\bx\b", x, _OF_ONE.get(_plain(name), ""))
