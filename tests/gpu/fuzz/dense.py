"""Drawn calls of one GEMM and of batches: 16 bits, FP8 with scales, TF32, 3xTF32, INT8 and FP64."""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

import cutlass_ops as co
from cutlass_ops.base import mma
from cutlass_ops.base.dtypes import FP8 as FP8_TYPES
from cutlass_ops.base.dtypes import DType, bf16, e4m3, e5m2, f16, f32, f64, i8, i32, tf32
from cutlass_ops.epilogue.nodes import Kind
from cutlass_ops.epilogue.trace import Epilogue
from cutlass_ops.operand import matrices, reference
from tests.gpu import multiplied, oracle
from tests.gpu.fuzz.case import Case, Exact, Wanted, moved_by
from tests.gpu.memory import Memory, Placed

# Of kernels that are chosen for a family: many rows, and few rows of a long K.
PROBLEMS = ((4096, 4096, 1024), (48, 512, 4096))
_EMPTY, _ODD_SCALES, _REFUSED = 0.03, 0.25, 0.05  # parts of all calls
_NEAR_TILES = (63, 64, 65, 127, 128, 129, 191, 192, 193, 255, 256, 257)
_SCALES = (0.0, float("inf"), float("-inf"), float("nan"), -1.0, 2.0**-149, 2.0**-140, 2.0**100)
_BLOCK_SCALES = (0.0, float("nan"), -1.0, 2.0**-40, 2.0**40)
TYPES_BY_NAME = {t.name: t for t in (bf16, f16, e4m3, e5m2, f32, f64, i8, i32)}


@co.epilogue
def bias_gelu(acc, bias: co.Row):
    return co.e.gelu(acc + bias)


@co.epilogue
def bias_residual(acc, bias: co.Row, r: co.Tile):
    return acc + bias + r


@co.epilogue
def quantised(acc, scale: co.Scalar):
    return {"d": acc * scale, "amax": co.e.amax(acc, dim=1)}


@dataclass(frozen=True)
class Family:
    """Calls of one signature.

    Attributes
    ----------
    name : str
        In results.
    a, b, d : str
        Types of A, B and D.
    majors : tuple of str
        Of A and B.
    aligned, aligned_d : bool
        Whether lines of A and B, and of D and tiles that the epilogue reads, begin at multiples of 16 bytes.
    whole : bool
        Whether lines of A and B are whole pieces of 16 bytes, as ``mma.sync`` kernels read them.
    scales : str, optional
        Of the "tensor", of "rows" and columns, of "blocks" or of blocks of "columns".
    epilogue : Epilogue, optional
        What follows.
    math : str, optional
        As calls have it.
    batched : bool
        Whether there are several GEMMs.
    most_k : int
        The longest K that is drawn: sums over more may be off by more than the bound.
    exact : Exact, optional
        How results are right to the last bit; by default, they are right within a bound.
    few_rows : bool
        Whether drawn kernels are those for few rows.
    """

    name: str
    a: str
    b: str
    d: str
    majors: tuple[str, str] = ("row", "col")
    aligned: bool = True
    aligned_d: bool = True
    whole: bool = False
    scales: str | None = None
    epilogue: Epilogue | None = None
    math: Any = None
    batched: bool = False
    most_k: int = 4096
    exact: Exact | None = None
    few_rows: bool = False

    @property
    def problems(self) -> tuple[tuple[int, int, int], ...]:
        """For which kernels are chosen."""
        return PROBLEMS

    def usual(self) -> Case:
        """Return a case without data, whose signature is the family's."""
        m = k = 512 if self.aligned else 511
        return self._case(Memory("meta", random.Random(0)), (m, 512 if self.aligned_d else 511, k))

    def draw(self, rng: random.Random, device: str) -> Case:
        """Draw a call."""
        extents = self._extents(rng)
        memory = Memory(device, rng) if self.exact is None else self.exact.memory(device, rng, extents[2])
        refused = rng.random() < _REFUSED and min(extents) > 4
        if refused:
            return self._refused(memory, extents)
        case = self._case(memory, extents)
        if self.exact is not None:
            usual = replace(self, exact=None)
            case.of_any_values = lambda: usual._case(Memory(device, rng), extents)
        return case

    # Extents.

    def _extents(self, rng: random.Random) -> tuple[int, int, int]:
        m, n = (_extent(rng, 700) for _ in range(2))
        m = 1 + m % 40 if self.few_rows else m
        k = _extent(rng, 700)
        if rng.random() < 0.1:
            k = rng.randrange(700, self.most_k + 1)
            m, n = min(m, 300), min(n, 300)
        of_a, of_b = self.majors
        step = TYPES_BY_NAME[self.a].tma_alignment
        if not self.aligned:
            m, n, k = m | (of_a == "col"), n | (of_b == "row"), k | (of_a == "row" or of_b == "col")
        elif self.whole:
            m = _up(m, step) if of_a == "col" else m
            n = _up(n, step) if of_b == "row" else n
            k = _up(k, step) if of_a == "row" or of_b == "col" else k
        if self.exact is not None and self.exact.eps is not None:
            k = max(8, 1 << k.bit_length() - 1)  # divides without rounding
        n = _up(n, 16) if self.aligned_d else n | 1
        if rng.random() < _EMPTY:
            m, n, k = rng.choice(((0, n, k), (m, 0, k), (m, n, 0)))
        return m, n, k

    # Tensors.

    def _case(self, memory: Memory, extents: tuple[int, int, int]) -> Case:
        m, n, k = extents
        rng, is_drawn = memory.rng, memory.device != "meta"
        batch = (rng.choice((1, 3)), rng.randrange(1, 4)) if self.batched else ()
        shared = self.batched and is_drawn and rng.random() < 0.2
        of_a, of_b, d = (torch_type(name) for name in (self.a, self.b, self.d))
        size = rng.choice((0.25, 1.0, 8.0)) if self.exact is None else self.exact.loud
        a = memory.matrix((*batch, m, k), of_a, size, self.majors[0], aligned=self.aligned)
        b = memory.matrix((*(() if shared else batch), k, n), of_b, 1.0, self.majors[1], aligned=self.aligned)
        b = b.expand(*batch, k, n) if shared else b
        if self.exact is not None and self.exact.eps is not None and is_drawn:
            a.copy_(4.0 * (torch.rand(a.shape, device=a.device).argsort(-1) < k // 4))
        scales, odd = self._scale(memory, extents)
        typical = max(k, 1) ** 0.5 * (64 * 64 if self.a == "i8" else size) if self.exact is None else 1.0  # of sums
        named = {**self._inputs(memory, batch, extents, typical), "out_dtype": d}
        named |= {} if self.math is None else {"math": self.math}
        named |= {} if self.epilogue is None else {"epilogue": self.epilogue}
        case = Case(
            co.gemm,
            (a, b, *scales),
            named,
            self._out(memory, (*batch, m, n), d) if is_drawn and rng.random() < 0.7 else {},
            dict,
            self._sums,
            about=f"{(*batch, m, n, k)}, strides {a.stride()} and {b.stride()}",
        )
        case.wanted = functools.partial(self._wanted, case, odd)
        return case

    @property
    def _sums(self) -> float:
        if self.exact is not None or (self.a == "i8" and self.scales is None and self.epilogue is None):
            return 0.0  # exact, and rounded to FP32 once
        return oracle.SUMS[mma.MATHS[self.math].name if self.math in mma.MATHS else self.a]

    def _scale(self, memory: Memory, extents: tuple[int, int, int]) -> tuple[tuple[Any, ...], dict[str, list[int]]]:
        """Draw scales of A and B, some of them not usual, and return which rows have such."""
        m, n, k = extents
        rng, odd = memory.rng, {}
        unusual = memory.device != "meta" and self.exact is None and rng.random() < _ODD_SCALES
        # What follows may have a value of its own at infinity.
        choices = _SCALES if self.epilogue is None else [x for x in _SCALES if not math.isinf(x)]

        def usual(*shape: int) -> Tensor:
            place = memory.vector(shape[0], torch.float32)
            if len(shape) > 1:
                place = memory.placed(shape, torch.float32, rng.choice(("row", "col")), aligned=False)
            return place.view.copy_(memory.factors(shape))

        if self.scales == "tensor":
            usual_scale = rng.uniform(0.25, 1.25) if self.exact is None else 2.0 ** rng.randrange(5)
            scale = rng.choice(choices) if unusual else usual_scale
            if unusual:
                odd[f"a scale of {scale}"] = list(range(m))
            on_device = torch.tensor(scale, device=memory.device)
            return (on_device, rng.choice((0.5, torch.tensor(0.5, device=memory.device)))), odd
        if self.scales == "rows":
            scale_a, scale_b = usual(m), usual(n)
            for row in rng.sample(range(m), min(m, 3)) if unusual else ():
                scale = rng.choice(choices)
                scale_a[row] = scale
                odd.setdefault(f"a scale of {scale}", []).append(row)
            return (scale_a, scale_b), odd
        if self.scales in ("blocks", "columns"):
            steps = mma.blocks(k)
            scale_a, scale_b = usual(m, steps), usual(n if self.scales == "columns" else mma.blocks(n), steps)
            for row in rng.sample(range(m), min(m, 3)) if unusual and steps else ():
                scale = rng.choice(_BLOCK_SCALES)
                scale_a[row, rng.randrange(steps)] = scale
                odd.setdefault(f"a scale of {scale}", []).append(row)
            return (scale_a, scale_b), odd
        return (), odd

    def _inputs(
        self, memory: Memory, batch: tuple[int, ...], extents: tuple[int, int, int], typical: float
    ) -> dict[str, Any]:
        m, n, k = extents
        if self.epilogue is None:
            return {}
        loud = 1.0 if self.exact is None else self.exact.loud
        read = torch.float32 if self.d in ("e4m3", "e5m2") else torch_type(self.d)
        found: dict[str, Any] = {}
        for declared in self.epilogue.graph.inputs:
            if declared.kind is Kind.ROW:
                found[declared.name] = memory.numbers(n, read, loud)
            elif declared.kind is Kind.COL:
                found[declared.name] = memory.vector(m, read).view.copy_(memory.factors((m,)) / typical)
            elif declared.kind is Kind.TILE:
                found[declared.name] = memory.matrix((*batch, m, n), read, loud, aligned=self.aligned_d)
            elif declared.kind is Kind.PRODUCT:
                of_b = torch_type(self.b)
                found[declared.name] = memory.matrix((*batch, k, n), of_b, 1.0, self.majors[1], aligned=self.aligned)
            else:
                eps = None if self.exact is None else self.exact.eps
                found[declared.name] = 0.5 / typical if eps is None else eps
        return found

    def _out(self, memory: Memory, shape: tuple[int, ...], d: torch.dtype) -> dict[str, Placed]:
        m, n = shape[-2:]
        outputs = () if self.epilogue is None else self.epilogue.graph.outputs[1:]
        found = {"d": memory.placed(shape, d, aligned=self.aligned_d)}
        for output in outputs:
            assert output.reduce is not None
            found[output.name] = memory.vector(n if output.kind is Kind.ROW else m, torch.float32)
        return found

    # What is right.

    def _wanted(self, case: Case, odd: Mapping[str, list[int]]) -> Mapping[str, Wanted]:
        op, (a, b, *inputs), named = case.request()
        graph = op.graph
        by_name = dict(zip(op.names, inputs, strict=False)) | named
        # Where a scalar is a tensor, it may have any shape of one element.
        scalars = (i.name for i in graph.inputs if i.kind is Kind.SCALAR and isinstance(by_name[i.name], Tensor))
        by_name |= {name: by_name[name].reshape(()) for name in scalars}
        type_a, type_b = (self._multiplied(x) for x in (a, b))
        x, w = matrices.as_multiplied(a, type_a).double(), matrices.as_multiplied(b, type_b).double()
        if graph.block_scales:
            scales = [torch.as_tensor(by_name[name]).double() for name in graph.block_scales]
            x_scaled, w_scaled = reference.dequantised(x, w, *scales)
            sums = reference.accumulator(graph, x, w, by_name, torch.float64)
        else:
            x_scaled, w_scaled = x, w
            sums = x @ w
        if self.exact is not None:
            self.exact.require(x_scaled.abs() @ w_scaled.abs())
        # What sums of as many products of both signs are like: results near zero are no better than that.
        slack = (x_scaled.square() @ w_scaled.square()).sqrt() * case.sums
        if tf32 in (
            type_a,
            type_b,
        ):  # which of two numbers a value halfway between them becomes is the hardware's choice
            slack += _halfway(a) @ w.abs() + x.abs() @ _halfway(b)
        slack = torch.where(slack.isfinite(), slack, 0.0)

        def outputs(of: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
            return reference.evaluate(graph, of, by_name, dtype, a=a)

        found = moved_by(lambda of: outputs(of, torch.float64), sums, slack)
        if odd:
            narrow = moved_by(lambda of: outputs(of, torch.float32), sums, slack)
            may_be_0 = sums.abs() <= oracle.WORST * slack  # the slack is a mean: one sum may be off by more
            found = {name: _with_odd_rows(each, narrow[name], odd, may_be_0) for name, each in found.items()}
        return found

    def _multiplied(self, tensor: Tensor) -> DType:
        if tensor.dtype is torch.float32:
            return mma.MATHS[self.math]
        return next(t for t in TYPES_BY_NAME.values() if torch_type(t.name) is tensor.dtype)

    # Calls that must be refused.

    def _refused(self, memory: Memory, extents: tuple[int, int, int]) -> Case:
        case, (m, n, k) = self._case(memory, extents), extents
        a, b, *scales = case.arguments

        def other(a: Tensor = a, b: Tensor = b, **named: Any) -> Case:
            return replace(case, arguments=(a, b, *scales), named={**case.named, **named})

        wide = memory.placed((m, n + 1), torch_type(self.d))
        ways = [
            (r"\ba\b.*\bb\b", other(a[..., : k - 1])),
            (r"^out\b", replace(case, out={"d": wide})),
            (r"^out_dtype\b", other(out_dtype=torch.int64)),
        ]
        given = {name: x for name, x in case.named.items() if isinstance(x, Tensor)}
        ways += [(rf"^{name}\b", other(**{name: x[..., :-1]})) for name, x in given.items()]
        if memory.device == "cuda":
            ways.append((r"^b is on cpu", other(b=b.cpu())))
        if not self.batched:
            ways.append((r"^a\b", other(a.new_zeros(2 * m, 2 * k)[::2, ::2])))
        if TYPES_BY_NAME[self.a] in FP8_TYPES:  # those of INT8 are copied
            ways.append((r"^b\b.*along K", other(b=b.contiguous())))
            narrow = memory.placed((m, k | 1), a.dtype, aligned=False).view[:, :k]
            ways.append((r"^a\b.*16 bytes", other(narrow)))
        pattern, found = memory.rng.choice(ways)
        return replace(found, refused=pattern)


def _halfway(x: Tensor) -> Tensor:
    """Return how far each value moves if it is halfway between two numbers of TF32 and becomes the other one."""
    bits = x.contiguous().view(torch.int32)
    other = (bits & ~0x1FFF).view(torch.float32).double()
    moved = (matrices.as_multiplied(x, tf32).double() - other).abs()
    return torch.where((bits & 0x1FFF == 0x1000) & x.isfinite(), moved, 0.0)


def _with_odd_rows(found: Wanted, narrow: Wanted, odd: Mapping[str, list[int]], undecided: Tensor) -> Wanted:
    """Return what is wanted with rows of unusual scales as FP32 computes them, which overflows and underflows.

    A sum that may be 0 may have either sign. Times an infinite scale it is no number or an infinity: it is not known
    which.
    """
    rows = sorted({row for each in odd.values() for row in each})
    exact, moved = found.exact.clone(), found.moved.clone()
    exact[rows], moved[rows] = narrow.exact[rows], narrow.moved[rows]
    unknown = undecided if exact.ndim == 2 else undecided.any(1)
    return Wanted(exact, moved, odd, unknown & ~exact.isfinite())


def torch_type(name: str) -> torch.dtype:
    """Return the type of tensors."""
    found: torch.dtype = getattr(torch, TYPES_BY_NAME[name].torch_name)
    return found


def _extent(rng: random.Random, most: int) -> int:
    return rng.choice((rng.randrange(1, 9), rng.choice(_NEAR_TILES), rng.randrange(1, most)))


def _up(extent: int, step: int) -> int:
    return -(-extent // step) * step


_FUSED, _ELEMENTWISE = multiplied.fused, multiplied.elementwise
_ODD = {"aligned": False, "aligned_d": False}

_LONG = 16384  # where sums are promoted, or exact

FP8 = (
    Family("tensor scales", "e4m3", "e4m3", "bf16", scales="tensor", math="fast"),
    Family("row scales, promoted", "e4m3", "e4m3", "bf16", scales="rows", math="promoted", most_k=_LONG),
    Family("row scales, to FP32", "e4m3", "e5m2", "f32", scales="rows", math="fast"),
    Family("odd columns", "e5m2", "e4m3", "bf16", scales="tensor", math="promoted", aligned_d=False, most_k=_LONG),
    Family("an epilogue", "e5m2", "e5m2", "f16", scales="rows", math="fast", epilogue=bias_gelu),
    Family("blocks", "e4m3", "e4m3", "bf16", scales="blocks", most_k=_LONG),
    Family("blocks of columns", "e4m3", "e4m3", "f32", scales="columns", epilogue=bias_residual, most_k=_LONG),
    Family("a result in FP8", "e4m3", "e4m3", "e4m3", scales="tensor", math="fast", epilogue=quantised),
)

TYPES = (
    Family("TF32", "f32", "f32", "f32", math="tf32"),
    Family("TF32, fused", "f32", "f32", "f32", math="tf32", epilogue=_FUSED),
    Family("TF32, across K", "f32", "f32", "f32", ("col", "row"), whole=True, math="tf32", epilogue=_ELEMENTWISE),
    Family("TF32, odd", "f32", "f32", "f32", math="tf32", epilogue=_ELEMENTWISE, **_ODD),
    Family("3xTF32", "f32", "f32", "f32", whole=True, math="3xtf32", epilogue=multiplied.bias_relu, most_k=1040),
    Family("3xTF32, odd", "f32", "f32", "f32", ("row", "row"), math="3xtf32", epilogue=_FUSED, most_k=1040, **_ODD),
    Family("FP64", "f64", "f64", "f64", whole=True),
    Family("FP64, odd", "f64", "f64", "f64", ("col", "row"), epilogue=_ELEMENTWISE, **_ODD),
    Family("INT8", "i8", "i8", "f32", most_k=_LONG),
    Family("INT8, scales", "i8", "i8", "bf16", scales="rows", most_k=_LONG),
    Family("INT8, odd columns", "i8", "i8", "f32", aligned_d=False, epilogue=_FUSED, most_k=_LONG),
)

DENSE = (
    Family("BF16", "bf16", "bf16", "bf16"),
    Family("BF16, to FP32, odd columns", "bf16", "bf16", "f32", aligned_d=False),
    Family("BF16, B across K", "bf16", "bf16", "bf16", ("row", "row"), epilogue=bias_residual),
    Family("FP16, both across K", "f16", "f16", "f16", ("col", "row"), epilogue=bias_gelu),
    Family("BF16, odd", "bf16", "bf16", "bf16", epilogue=bias_residual, **_ODD),
    Family("FP16, odd, across K", "f16", "f16", "f16", ("col", "row"), **_ODD),
    Family("BF16, reductions", "bf16", "bf16", "bf16", epilogue=_FUSED),
    Family("FP16, reductions, odd columns", "f16", "f16", "f32", aligned_d=False, epilogue=_FUSED),
    Family("BF16, batches", "bf16", "bf16", "bf16", batched=True, epilogue=bias_residual),
    Family("FP16, batches, across K", "f16", "f16", "f32", ("row", "row"), batched=True),
)
