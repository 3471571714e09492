"""The table of calls: a row for each kind of call of this library, with what it computes in float64.

A new op or operand is a row here. ``test_op_contract.py`` has the tests that every row passes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812

import cutlass_ops as co

BF16, F16, F32, F64, I8 = torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int8
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
M, N, K, T, E = 24, 48, 32, 20, 3
WIDE = 256  # columns or K, where blocks have scales
EPS = 1e-5
# What a packed weight calls its tensors when it is made.
FIELDS = {"b": "values", "scale_b": "scale", "meta_b": "meta"}
GROUP = 64  # numbers of a packed weight that share a scale
ENDS, COUNTS = (5, 5, 18), (3, 0, 8)  # groups end there, of T rows; rows that each group uses


def itself(x: torch.Tensor) -> torch.Tensor:
    return x


@dataclass(frozen=True)
class Row:
    """A kind of call.

    Attributes
    ----------
    function : callable
        What a user calls.
    make : callable
        Draws the arguments by name. Tensors that a test changes or converts are among them.
    exact : callable
        From the same arguments, tensors of numbers in float64, to the results in float64. It uses PyTorch alone.
    options : dict
        Further arguments, which are the same in all tests: the epilogue, `out_dtype`, `math`.
    within : float, optional
        How far results may be from `exact`, relative to its norm. Without it, one rounding to their type.
    grads : str
        Names of the arguments that have gradients, with spaces between them.
    unprepared : str or None
        Why no launch can be prepared, in words of the message; None if one can.
    warm : bool
        Whether a second call goes straight to its kernel.
    written : callable
        From a result's place to the elements that a call writes: others of a given output stay as they are.
    """

    function: Callable[..., Any]
    make: Callable[[], dict[str, Any]]
    exact: Callable[..., Any]
    options: Mapping[str, Any] = field(default_factory=dict)
    within: float | None = None
    grads: str = ""
    unprepared: str | None = None
    warm: bool = True
    written: Callable[[torch.Tensor], torch.Tensor] = itself

    def given(self) -> dict[str, Any]:
        """Draw the arguments, the same ones each time."""
        torch.manual_seed(0)
        return self.make()

    def call(self, given: Mapping[str, Any], **named: Any) -> Any:
        """Call the function."""
        return self.function(**self.named(given, **named))

    def named(self, given: Mapping[str, Any], **named: Any) -> dict[str, Any]:
        """Return all arguments of a call: tensors in operand values and groups, if they have scales or ends."""
        return as_call({**given, **self.options, **named})

    def wanted(self, given: Mapping[str, Any]) -> list[torch.Tensor]:
        """Return the results in float64."""
        found = self.exact(**{name: wide(x) for name, x in given.items()})
        return list(found) if isinstance(found, tuple) else [found]


def as_call(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments with scales in their operands, and offsets and counts in groups."""
    found = dict(given)
    numbers = found.pop("numbers", None)
    if numbers == "sparse":
        found["b"] = co.Sparse(found.get("b"), found.pop("meta_b", None))
        return found
    if numbers is not None:
        found["b"] = co.Packed(found.get("b"), found.pop("scale_b", None), GROUP, numbers)
        return found
    for name, scale in (("a", "scale_a"), ("b", "scale_b"), ("b_gate", "scale_b"), ("b_up", "scale_up")):
        if name in found and scale in given:
            found[name] = co.Scaled(found[name], given[scale])
    ends = {name: found.pop(name) for name in ("offsets", "counts", "expected") if name in found}
    found |= {"groups": co.Groups(**ends)} if ends else {}
    return {name: x for name, x in found.items() if name not in ("scale_a", "scale_b", "scale_up")}


def wide(x: Any) -> Any:
    """Return what an argument stands for, in float64. Offsets and counts stay."""
    if isinstance(x, torch.Tensor):
        return x if x.dtype in (torch.int32, torch.int64) else x.double()
    if isinstance(x, co.RowStatistic):
        return x.rstd.double()
    return x


def flat(found: Any) -> list[torch.Tensor]:
    """Return the tensors of a result."""
    if isinstance(found, torch.Tensor):
        return [found]
    if isinstance(found, co.types.ResidualRms):
        return [found.y, found.rstd.sum_square]
    if isinstance(found, co.types.QuantizedResidualRms):
        return [found.y, found.rstd.sum_square, found.quantized]
    return list(found)


# ---- What is drawn ---------------------------------------------------------------------------------------------------


def draw(*shape: int, dtype: torch.dtype = BF16, scale: float = 0.5) -> torch.Tensor:
    if dtype == I8:
        return torch.randint(-9, 9, shape, dtype=I8)
    return (torch.randn(*shape) * scale).to(dtype)


def weight(k: int, n: int, dtype: torch.dtype = BF16, *lead: int) -> torch.Tensor:
    """Return a B, lines of which lie along K, as a linear layer's transposed weight."""
    return draw(*lead, n, k, dtype=dtype, scale=k**-0.5).mT


def positive(*shape: int) -> torch.Tensor:
    return torch.rand(*shape) + 0.5


def ends(*offsets: int) -> torch.Tensor:
    return torch.tensor(offsets, dtype=torch.int32)


# ---- Epilogues -------------------------------------------------------------------------------------------------------


@co.epilogue
def everything(acc, bias: co.Row, factor: co.Col, residual: co.Tile, scale: co.Scalar):
    x = (acc + bias) * factor
    y = co.e.silu(x) * scale + residual
    return {"d": y, "x": co.e.cast(x, "bf16"), "sums": co.e.sum(y, dim=1), "most": co.e.max(x, dim=0)}


def in_everything(acc, bias, factor, residual, scale):
    x = (acc + bias) * factor[:, None]
    y = F.silu(x) * scale + residual
    return y, x, y.sum(1), x.amax(0)


@co.epilogue
def mixed(acc, bias: co.Row, factor: co.Col, residual: co.Tile, scale: co.Scalar):
    return co.e.gelu(acc * factor + bias) * scale + residual


@co.epilogue
def of_places(acc, seed: co.Integer):
    kept = co.e.uniform(seed, 3) < 2.0
    return co.e.where(kept, acc, 0.0) + co.e.where(co.e.column_index() <= co.e.row_index(), 1.0, 0.0)


@co.epilogue
def biased(acc, bias: co.Row):
    return co.e.gelu(acc + bias)


@co.epilogue
def saved(acc, bias: co.Row):
    return {"d": co.e.silu(acc + bias), "pre": acc}


@co.epilogue
def summed(acc):
    return {"d": acc, "of_rows": co.e.sum(acc, dim=1), "of_columns": co.e.max(acc, dim=0)}


@co.epilogue
def gated(acc, up: co.Product, bias: co.Row):
    return co.e.sigmoid(acc + bias) * up


@co.epilogue
def means(acc, eps: co.Scalar):
    return acc * co.e.rsqrt(co.e.mean_square_of_a() + eps) + co.e.mean_of_a()


@co.epilogue
def quantised(acc):
    return co.e.quantize(acc, "e4m3")


# ---- The same in PyTorch ---------------------------------------------------------------------------------------------


def dense(a, b, bias=None, residual=None, activation=lambda x: x):
    x = torch.matmul(a, b)
    x = activation(x if bias is None else x + bias)
    return x if residual is None else x + residual


def rms(x, eps):
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt()


def layer(x, eps):
    return F.layer_norm(x, x.shape[-1:], eps=eps)


def grouped(a, b, offsets, bias=None, activation=lambda x: x):
    rows, begin = [], 0
    for at, end in enumerate(offsets.tolist()):
        one = a[begin:end] @ b[at]
        rows.append(activation(one if bias is None else one + (bias[at] if bias.ndim > 1 else bias)))
        begin = end
    return torch.cat(rows)


def masked(a, b, counts, bias=None, activation=lambda x: x):
    found = a @ b
    found = activation(found if bias is None else found + bias[:, None])
    return torch.cat([each[:count] for each, count in zip(found, counts.tolist(), strict=True)])


def of_weights(a, b, offsets):
    begins = [0, *offsets.tolist()]
    return torch.stack([a[:, i:j] @ b[i:j] for i, j in pairwise(begins)])


def of_groups(x):
    """Return the elements that groups of rows write."""
    return x[: ENDS[-1]]


def of_counts(x):
    return torch.cat([each[:count] for each, count in zip(x, COUNTS, strict=True)])


def spread(scale, rows, columns):
    """Return scales of blocks of 1 or 128 by 128, each as often as it counts."""
    down = 1 if scale.shape[-2] == rows else 128
    return scale.repeat_interleave(down, -2)[..., :rows, :].repeat_interleave(128, -1)[..., :columns]


def in_blocks(a, b, scale_a, scale_b):
    """Multiply, b (..., K, N) with scales of its transpose."""
    a = a * spread(scale_a, *a.shape[-2:])
    return a @ (b.mT * spread(scale_b, *b.mT.shape[-2:])).mT


def packed(symmetric):
    """Draw a packed weight (256, N): its numbers and scales."""
    found = co.Packed.from_dense(weight(WIDE, N), group=GROUP, symmetric=symmetric)
    return {"b": found.values, "scale_b": found.scale}


def sparse():
    """Draw a sparse weight (256, N): its stored elements and metadata."""
    found = co.sparsify(weight(WIDE, N))
    return {"b": found.values, "meta_b": found.meta}


def of_sparse(a, b, meta_b):
    """Multiply a sparse weight, found from its metadata bit by bit."""
    half, n = b.shape
    bits = torch.stack((meta_b % 16, meta_b // 16 % 16), -1).long()
    bits = bits.reshape(-1, 2 * half // 64, 4, 8, 4, 2, 4).permute(0, 2, 5, 3, 1, 4, 6).reshape(-1, half // 2)[:n]
    places = torch.stack((bits % 4, bits // 4), -1)
    found = torch.zeros(n, half // 2, 4, dtype=b.dtype).scatter_(2, places, b.t().reshape(n, half // 2, 2))
    return a @ found.reshape(n, -1).t()


def of_packed(a, b, scale_b, bias=None):
    """Multiply a packed weight, found from its bytes one by one. With zero points there is a bias as well."""
    scale, parts = scale_b, 1 if bias is None else 2
    half, n = b.shape
    k, groups = 2 * half, scale.shape[1] // parts
    nibbles = b.t().reshape(n // 16, k // 64, 8, 4, 4, 2, 2)
    both = torch.stack((nibbles % 16, nibbles // 16), -1)
    numbers = both.permute(0, 7, 2, 1, 4, 6, 3, 5).reshape(n, groups, k // groups)
    each = scale.reshape(n // 16, groups, parts, 8, 2).permute(2, 0, 4, 3, 1).reshape(parts, n, groups, 1)
    zero = 8 if parts == 1 else -128 - each[1]
    x = a @ ((numbers - zero) * each[0]).reshape(n, k).t()
    return x if bias is None else F.gelu(x + bias)


def residual_rms(a, b, residual, eps):
    y = a @ b + residual
    return y, y.square().sum(-1)


# ---- The table -------------------------------------------------------------------------------------------------------


def _everything(a, b, **inputs):
    return in_everything(a @ b, **inputs)


def _rms_gate(a, b_gate, b_up, eps):
    return F.silu(rms(a, eps) @ b_gate) * (rms(a, eps) @ b_up)


def rows(M: int = M, N: int = N, K: int = K) -> dict[str, Row]:  # noqa: N803
    """Return the table with some extents: N and K are multiples of 16."""

    def _dense(dtype=BF16, **more):
        return lambda: {
            "a": draw(M, K, dtype=dtype),
            "b": weight(K, N, dtype),
            **{n: make() for n, make in more.items()},
        }

    def _of_everything(dtype=BF16):
        return {
            "a": draw(M, K, dtype=dtype), "b": weight(K, N, dtype),
            "bias": draw(N), "factor": draw(M), "residual": draw(M, N), "scale": 0.5,
        }  # fmt: skip

    bias, tile = partial(draw, N), partial(draw, M, N)
    return {
        "gemm": Row(co.gemm, _dense(), dense, grads="a b"),
        "gemm, a weight along N": Row(co.gemm, lambda: {"a": draw(M, K), "b": draw(K, N)}, dense, grads="a b"),
        "gemm, A along M": Row(co.gemm, lambda: {"a": draw(K, M).t(), "b": weight(K, N)}, dense, grads="a b"),
        "gemm, odd": Row(co.gemm, lambda: {"a": draw(7, 21), "b": draw(21, 13)}, dense, grads="a b"),
        "gemm, one row": Row(co.gemm, lambda: {"a": draw(1, K), "b": weight(K, N)}, dense, grads="a b"),
        "gemm, folded": Row(co.gemm, lambda: {"a": draw(2, 3, K), "b": weight(K, N)}, dense, grads="a b"),
        "gemm, FP16": Row(co.gemm, _dense(F16), dense, grads="a b"),
        "gemm, D in FP32": Row(co.gemm, _dense(), dense, {"out_dtype": F32}, grads="a b"),
        "gemm_bias": Row(co.gemm_bias, _dense(bias=bias), dense, grads="a b bias"),
        "gemm_bias_relu": Row(
            co.gemm_bias_relu, _dense(bias=partial(draw, N, dtype=F32)), partial(dense, activation=F.relu),
            grads="a b bias",
        ),
        "gemm_bias_gelu": Row(
            co.gemm_bias_gelu, _dense(bias=bias), partial(dense, activation=F.gelu), grads="a b bias"
        ),
        "gemm_bias_silu": Row(
            co.gemm_bias_silu, _dense(bias=bias), partial(dense, activation=F.silu), grads="a b bias"
        ),
        "gemm_residual": Row(co.gemm_residual, _dense(residual=tile), dense, grads="a b residual"),
        "gemm_bias_residual": Row(
            co.gemm_bias_residual, _dense(bias=bias, residual=tile), dense, grads="a b bias residual"
        ),
        "gemm_bias_relu_residual": Row(
            co.gemm_bias_relu_residual, _dense(bias=bias, residual=tile), partial(dense, activation=F.relu),
            grads="a b bias residual",
        ),
        "everything": Row(
            co.gemm, _of_everything, _everything, {"epilogue": everything}, within=0.01,
            grads="a b bias factor residual",
        ),
        "everything, FP16": Row(
            co.gemm, partial(_of_everything, F16), _everything, {"epilogue": everything}, within=0.01,
            grads="a b bias factor residual",
        ),
        "places": Row(
            co.gemm, lambda: {"a": draw(M, K), "b": weight(K, N), "seed": 7},
            lambda a, b, seed: a @ b + torch.ones(M, N).tril(), {"epilogue": of_places}, grads="a b",
        ),
        "means": Row(
            co.gemm, lambda: {"a": draw(M, K), "b": weight(K, N), "eps": EPS},
            lambda a, b, eps: rms(a, eps) @ b + a.mean(1, keepdim=True), {"epilogue": means}, grads="a b",
        ),
        "a product": Row(
            co.gemm, _dense(up=partial(weight, K, N), bias=bias),
            lambda a, b, up, bias: (a @ b + bias).sigmoid() * (a @ up), {"epilogue": gated}, grads="a b up bias",
        ),
        "batches": Row(
            co.gemm, lambda: {"a": draw(2, M, K), "b": weight(K, N, BF16, 2), "bias": draw(2, N)},
            lambda a, b, bias: F.gelu(a @ b + bias[:, None]), {"epilogue": biased}, grads="a b bias",
        ),
        "batches of one A": Row(
            co.gemm,
            lambda: {
                "a": draw(1, M, K), "b": weight(K, N, BF16, 2), "bias": draw(N), "factor": draw(M),
                "residual": draw(2, M, N), "scale": 0.5,
            },
            lambda a, b, bias, factor, residual, scale: F.gelu(a @ b * factor[:, None] + bias) * scale + residual,
            {"epilogue": mixed}, grads="a b bias factor residual",
        ),
        "batches apart": Row(
            co.gemm, lambda: {"a": draw(2, M, K), "b": weight(K, N, BF16, 2)},
            lambda a, b: (a @ b, (a @ b).sum(-1), (a @ b).amax(-2)), {"epilogue": summed}, grads="a b",
            unprepared="a prepared launch is one kernel", warm=False,
        ),
        "TF32": Row(
            co.gemm_bias_silu, lambda: _dense(F32, bias=partial(draw, N, dtype=F32))(),
            partial(dense, activation=F.silu), {"math": "tf32"}, within=2e-3, grads="a b bias",
        ),
        "3xTF32": Row(
            co.gemm_bias_silu, lambda: _dense(F32, bias=partial(draw, N, dtype=F32))(),
            partial(dense, activation=F.silu), {"math": "3xtf32"}, within=2e-6, grads="a b bias",
        ),
        "FP64": Row(
            co.gemm_bias_silu, lambda: _dense(F64, bias=partial(draw, N, dtype=F64))(),
            partial(dense, activation=F.silu), within=1e-12, grads="a b bias",
        ),
        "INT8": Row(co.gemm, _dense(I8), dense, {"out_dtype": torch.int32}),
        "INT8, scales": Row(
            co.gemm, _dense(I8, scale_a=partial(positive, M), scale_b=partial(positive, N)),
            lambda a, b, scale_a, scale_b: a @ b * scale_a[:, None] * scale_b,
        ),
        "FP8": Row(co.gemm, _dense(E4M3), dense),
        "FP8, numbers": Row(
            co.gemm, _dense(E4M3, scale_a=lambda: 0.5, scale_b=lambda: torch.tensor(0.25)),
            lambda a, b, scale_a, scale_b: a @ b * scale_a * scale_b,
        ),
        "FP8, rows": Row(
            co.gemm, _dense(E4M3, scale_a=partial(positive, M), scale_b=partial(positive, N), bias=bias),
            lambda a, b, scale_a, scale_b, bias: F.gelu(a @ b * scale_a[:, None] * scale_b + bias),
            {"epilogue": biased},
        ),
        "FP8, blocks": Row(
            co.gemm,
            lambda: {
                "a": draw(M, WIDE, dtype=E4M3), "b": weight(WIDE, N, E4M3), "scale_a": positive(M, 2),
                "scale_b": positive(-(-N // 128), 2),
            },
            in_blocks,
        ),
        "packed": Row(
            co.gemm, lambda: {"a": draw(M, WIDE), **packed(True)}, of_packed, {"numbers": "int4"}, within=0.01,
            grads="a",
        ),
        "packed, zero points": Row(
            co.gemm, lambda: {"a": draw(M, WIDE), **packed(False), "bias": draw(N)}, of_packed,
            {"numbers": "uint4", "epilogue": biased}, within=0.01, grads="a bias",
        ),
        "sparse": Row(
            co.gemm, lambda: {"a": draw(M, WIDE), **sparse()}, of_sparse, {"numbers": "sparse"}, within=0.01,
            grads="a b",
        ),
        "FP8 result": Row(co.gemm, _dense(), dense, {"out_dtype": E4M3}),
        "quantised": Row(
            co.gemm, lambda: {"a": draw(M, K), "b": weight(K, WIDE)}, lambda a, b: a @ b, {"epilogue": quantised},
            within=0.04,
        ),
        "rmsnorm_gemm": Row(
            co.rmsnorm_gemm, lambda: {"a": draw(M, K), "b": weight(K, N), "eps": EPS},
            lambda a, b, eps: rms(a, eps) @ b, grads="a b",
        ),
        "rmsnorm_gemm, gamma": Row(
            co.rmsnorm_gemm, lambda: {"a": draw(M, K), "b": weight(K, N), "gamma": positive(K), "eps": EPS},
            lambda a, b, gamma, eps: (rms(a, eps) * gamma) @ b, within=0.005, grads="a b gamma",
            unprepared="prepare the weight once",
        ),
        "rmsnorm_gemm, statistic": Row(
            co.rmsnorm_gemm,
            lambda: {
                "a": (a := draw(M, K)), "b": weight(K, N), "bias": draw(N),
                "rstd": co.RowStatistic(a.float().square().sum(1), K, EPS),
            },
            lambda a, b, bias, rstd: F.gelu(a * rstd[:, None] @ b + bias), {"epilogue": biased}, grads="a b bias",
        ),
        "layernorm_gemm": Row(
            co.layernorm_gemm, lambda: {"a": draw(M, K), "b": weight(K, N), "eps": EPS},
            lambda a, b, eps: layer(a, eps) @ b, within=0.005, grads="a b", unprepared="prepare the weight once",
        ),
        "gemm_residual_rms": Row(
            co.gemm_residual_rms, lambda: {"a": draw(M, K), "b": weight(K, N), "residual": draw(M, N), "eps": EPS},
            residual_rms, within=0.005, grads="a b residual",
        ),
        "gemm_swiglu": Row(
            co.gemm_swiglu, lambda: {"a": draw(M, K), "b_gate": weight(K, N), "b_up": weight(K, N)},
            lambda a, b_gate, b_up: F.silu(a @ b_gate) * (a @ b_up), grads="a b_gate b_up",
        ),
        "gemm_swiglu, normed": Row(
            co.gemm_swiglu, lambda: {"a": draw(M, K), "b_gate": weight(K, N), "b_up": weight(K, N), "eps": EPS},
            _rms_gate, grads="a b_gate b_up",
        ),
        "groups": Row(
            co.gemm,
            lambda: {"a": draw(T, K), "b": weight(K, N, BF16, E), "offsets": ends(*ENDS), "bias": draw(E, N)},
            partial(grouped, activation=F.gelu), {"epilogue": biased}, grads="a b bias", written=of_groups,
        ),
        "groups, two outputs": Row(
            co.gemm,
            lambda: {"a": draw(T, K), "b": weight(K, N, BF16, E), "offsets": ends(*ENDS), "bias": draw(N)},
            lambda a, b, offsets, bias: (grouped(a, b, offsets, bias, F.silu), grouped(a, b, offsets)),
            {"epilogue": saved}, grads="a b bias", written=of_groups,
        ),
        "scaled groups": Row(
            co.gemm,
            lambda: {
                "a": draw(T, K, dtype=E4M3), "b": weight(K, N, E4M3, E), "offsets": ends(*ENDS),
                "scale_a": positive(T), "scale_b": positive(E, N),
            },
            lambda a, b, offsets, scale_a, scale_b: grouped(a * scale_a[:, None], b * scale_b[:, None], offsets),
            written=of_groups,
        ),
        "scaled groups, blocks": Row(
            co.gemm,
            lambda: {
                "a": draw(T, WIDE, dtype=E4M3), "b": weight(WIDE, N, E4M3, E), "offsets": ends(*ENDS),
                "scale_a": positive(T, 2), "scale_b": positive(E, -(-N // 128), 2),
            },
            lambda a, b, offsets, scale_a, scale_b: grouped(
                a * spread(scale_a, T, WIDE), (b.mT * spread(scale_b, N, WIDE)).mT, offsets
            ),
            written=of_groups,
        ),
        "groups with room": Row(
            co.gemm,
            lambda: {"a": draw(E, 8, K), "b": weight(K, N, BF16, E), "counts": ends(*COUNTS), "bias": draw(E, N)},
            partial(masked, activation=F.gelu), {"epilogue": biased}, written=of_counts,
        ),
        "scaled groups with room": Row(
            co.gemm,
            lambda: {
                "a": draw(E, 8, K, dtype=E4M3), "b": weight(K, N, E4M3, E), "counts": ends(*COUNTS),
                "scale_a": positive(E, 8), "scale_b": positive(E, N),
            },
            lambda a, b, counts, scale_a, scale_b: masked(a * scale_a[..., None], b * scale_b[:, None], counts),
            written=of_counts,
        ),
        "sums over groups": Row(
            co.gemm,
            lambda: {"a": draw(T, K).mT, "b": draw(T, N), "offsets": ends(*ENDS)}, of_weights,
        ),
    }  # fmt: skip


ROWS = rows()
