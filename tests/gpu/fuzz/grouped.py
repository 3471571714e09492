"""Drawn calls of groups of rows, each with a weight of its own, and of the gradients of such weights."""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

import cutlass_ops as co
from cutlass_ops.base import mma
from cutlass_ops.epilogue import composed
from cutlass_ops.epilogue.trace import Epilogue
from tests.gpu import oracle
from tests.gpu.fuzz.case import Case, Exact, Wanted, moved_by
from tests.gpu.fuzz.dense import torch_type
from tests.gpu.memory import Memory, Placed

# Of kernels that are chosen for a family: rows of each group, N and K.
PROBLEMS = ((512, 4096, 1024), (4, 512, 2048))
_REFUSED, _FALSE = 0.05, 0.03  # parts of all calls
_MOST = 5_000_000  # elements of what the float64 result is computed from
_ALPHA = 0.5
_ROOMS = 16  # groups that have room each


@co.epilogue
def routed(acc, bias: co.Row, weight: co.Col, residual: co.Tile, alpha: co.Scalar):
    return co.e.silu(acc + bias) * weight * alpha + residual


@co.epilogue
def saved(acc, bias: co.Row):
    z = acc + bias
    return {"d": co.e.relu(z), "pre": z}


@co.epilogue
def accumulate(acc, before: co.Tile, alpha: co.Scalar):
    return acc * alpha + before


@dataclass(frozen=True)
class Given:
    """The inputs of an epilogue, with a line for each row of D that belongs to a group: nothing here is the library's.

    Attributes
    ----------
    bias, residual, up : Tensor
        (T, N); up is x times the further weight.
    weight : Tensor
        (T, 1).
    """

    bias: Tensor
    residual: Tensor
    up: Tensor
    weight: Tensor


Formula = Callable[[Tensor, Given], dict[str, Tensor]]


def _routed(acc: Tensor, of: Given) -> dict[str, Tensor]:
    return {"d": F.silu(acc + of.bias) * of.weight * _ALPHA + of.residual}


def _saved(acc: Tensor, of: Given) -> dict[str, Tensor]:
    return {"d": (acc + of.bias).relu(), "pre": acc + of.bias}


def _gated(acc: Tensor, of: Given) -> dict[str, Tensor]:
    return {"d": F.silu(acc) * of.up}


@dataclass(frozen=True)
class Rows:
    """Calls with groups of rows of one signature.

    Attributes
    ----------
    name : str
        In results.
    x, w, d : str
        Types.
    across : bool
        Whether weights are (E, K, N) in memory, and not (E, N, K).
    aligned_d : bool
        Whether N is a multiple of 16 elements; odd otherwise.
    epilogue : Epilogue, optional
        What follows.
    formula : callable
        The same in PyTorch.
    scales : str, optional
        Of x and all weights: one of the "tensor" each, of "rows" and columns, or of "blocks".
    math : str, optional
        How sums of FP8 are added up.
    exact : Exact, optional
        How results are right to the last bit; by default, they are right within a bound.
    room : bool
        Whether each group has room for the same number of rows, and counts those that it has.
    """

    name: str
    x: str
    w: str
    d: str
    across: bool = False
    aligned_d: bool = True
    epilogue: Epilogue | None = None
    formula: Formula = lambda acc, _: {"d": acc}
    scales: str | None = None
    math: str | None = None
    exact: Exact | None = None
    room: bool = False
    few_rows: ClassVar[bool] = False

    @property
    def problems(self) -> tuple[tuple[int, int, int], ...]:
        """For which kernels are chosen."""
        return PROBLEMS

    def usual(self) -> Case:
        """Return a case without data, whose signature is the family's."""
        memory = Memory("meta", random.Random(0))
        return self._case(memory, [64] * 8, 0, 512 if self.aligned_d else 511, 512)

    def draw(self, rng: random.Random, device: str) -> Case:
        """Draw a call."""
        sizes = draw_sizes(rng)[: _ROOMS if self.room else None]
        n, k = _extents(rng, len(sizes) * max(1, sum(sizes)))
        memory = Memory(device, rng) if self.exact is None else self.exact.memory(device, rng, k)
        n = -(-n // 16) * 16 if self.aligned_d else n | 1
        case = self._case(memory, sizes, rng.choice((0, 0, 1, 90)), n, k)
        chance = rng.random()
        if chance < _REFUSED and sum(sizes) > 1:
            return self._refused(memory, case)
        is_false = device == "cuda" and chance > 1 - _FALSE and not self.room
        return _with_false_offsets(case, rng) if is_false else case

    def _case(self, memory: Memory, sizes: list[int], unused: int, n: int, k: int) -> Case:
        rng, experts, used, device = memory.rng, len(sizes), sum(sizes), memory.device
        groups = (experts, max(sizes) + unused) if self.room else (used + unused,)
        counts = torch.tensor(sizes, device=device)
        own = torch.arange(groups[-1], device=device) < (counts[:, None] if self.room else used)
        rows = math.prod(groups)

        def of_groups(flat: Tensor) -> Tensor:
            return flat.unflatten(0, groups)

        of_x, of_w, d = (torch_type(name) for name in (self.x, self.w, self.d))
        x = memory.placed((rows, k), of_x).view
        of_weights, loud = (max(k, 1) ** -0.5, 1.0) if self.exact is None else (1.0, self.exact.loud)
        drawn = memory.values((rows, k), of_x, loud)
        x.copy_(drawn.where(own.flatten()[:, None], torch.nan))  # as rows that nothing was written to
        x = of_groups(x)
        major = "row" if self.across else "col"
        w, up = (memory.matrix((experts, k, n), of_w, of_weights, major) for _ in range(2))
        read = torch.float32 if d.itemsize == 1 else d
        inputs: dict[str, Any] = {
            "bias": memory.values((experts, n), read, loud).to(read),
            "weight": memory.vector(rows, torch.float32).view.copy_(memory.factors((rows,))),
            "residual": memory.matrix((rows, n), read, loud, aligned=self.aligned_d),
            "alpha": _ALPHA,
            "up": up,
        }
        inputs |= {name: of_groups(inputs[name]) for name in ("weight", "residual")}
        names = set() if self.epilogue is None else {i.name for i in self.epilogue.graph.inputs}
        named = {name: value for name, value in inputs.items() if name in names}
        if "bias" in named and device != "meta" and rng.random() < 0.2:
            named["bias"] = inputs["bias"] = inputs["bias"][0].clone()  # one for all
        steps = mma.blocks(k)
        shapes: dict[str | None, tuple[tuple[int, ...], ...]] = {
            None: (),
            "tensor": ((), ()),
            "rows": (groups, (experts, n)),
            "blocks": ((*groups, steps), (experts, mma.blocks(n), steps)),
        }
        scales = tuple(map(memory.factors, shapes[self.scales]))
        out: dict[str, Placed] = {}
        if device != "meta" and rng.random() < 0.7:
            outputs = ("d",) if self.epilogue is None else (o.name for o in self.epilogue.graph.outputs)
            flat = {name: memory.placed((rows, n), d, aligned=self.aligned_d) for name in outputs}
            out = {name: replace(placed, view=of_groups(placed.view)) for name, placed in flat.items()}
        named |= {} if self.epilogue is None else {"epilogue": self.epilogue}
        named |= {} if self.math is None else {"math": self.math}
        case = Case(
            co.gemm,
            (x, w, counts.int() if self.room else ends_of(sizes, device), *scales),
            {**named, "out_dtype": d},
            out,
            dict,
            oracle.SUMS[self.x] if self.exact is None else 0.0,
            used=own if self.room else used,
            about=f"{groups} rows, N {n}, K {k}, groups {sizes}",
            grouped="counts" if self.room else "offsets",
        )
        case.wanted = functools.partial(self._wanted, case, sizes, inputs, own)
        return case

    def _wanted(self, case: Case, sizes: list[int], inputs: Mapping[str, Any], own: Tensor) -> Mapping[str, Wanted]:
        x, w = case.arguments[:2]
        used, experts = sum(sizes), len(sizes)
        expert = torch.repeat_interleave(torch.tensor(sizes), output_size=used).to(x.device)
        x, w, at = x[own].double(), w.double(), torch.arange(used, device=x.device)
        scales = [scale.double() for scale in case.arguments[3:]]
        if self.scales == "blocks":
            k, n = w.shape[1:]
            x = x * _wide(scales[0][own], k, -1)
            w = w * _wide(_wide(scales[1].mT, k, -2), n, -1)

        def each(left: Tensor, weights: Tensor) -> Tensor:
            return (left @ weights)[expert, at]

        acc, slack = each(x, w), each(x.square(), w.square()).sqrt() * case.sums
        if self.exact is not None:
            self.exact.require(each(x.abs(), w.abs()))
        if self.scales in ("tensor", "rows"):
            scale_a, scale_b = scales
            both = scale_a * scale_b if self.scales == "tensor" else scale_a[own][:, None] * scale_b[expert]
            acc, slack = acc * both, slack * both
        bias = inputs["bias"].double().expand(experts, -1)[expert]
        residual, weight = (inputs[name][own].double() for name in ("residual", "weight"))
        of = Given(bias, residual, each(x, inputs["up"].double()) if "up" in case.named else bias, weight[:, None])
        return moved_by(lambda sums: self.formula(sums, of), acc, slack)

    def _refused(self, memory: Memory, case: Case) -> Case:
        x, w, ends, *scales = case.arguments
        (*groups, rows, k), n = x.shape, w.shape[2]

        def other(x: Tensor = x, w: Tensor = w, ends: Tensor = ends, **named: Any) -> Case:
            return replace(case, arguments=(x, w, ends, *scales), named={**case.named, **named})

        narrow = memory.placed((*groups, rows, k | 1), x.dtype, aligned=False).view[..., :k]
        ways = [
            (rf"^{case.grouped} is torch.int64", other(ends=ends.long())),
            (rf"^{case.grouped} has", other(ends=torch.cat((ends, ends[-1:])))),
            (r"^a\b", other(x[..., : k - 1])),
            (r"\bb\b", other(w=w[:, :, None])),
            (r"^out\b", replace(case, out={"d": memory.placed((*groups, rows + 1, n), case.named["out_dtype"])})),
        ]
        if k > 1:
            ways += [(r"^a has ", other(x.mT.contiguous().mT)), (r"^a .*16 bytes", other(narrow))]
        ways += [(r"^residual\b", other(residual=case.named["residual"][:-1]))] if "residual" in case.named else []
        pattern, found = memory.rng.choice(ways)
        return replace(found, refused=pattern)


@dataclass(frozen=True)
class Weights:
    """Calls that add up the rows of groups, of one signature. Attributes are as those of :class:`Rows`."""

    name: str
    x: str
    d: str
    adds: bool = False
    exact: Exact | None = None
    few_rows: ClassVar[bool] = False

    @property
    def problems(self) -> tuple[tuple[int, int, int], ...]:
        """For which kernels are chosen."""
        return ((4096, 4096, 512), (256, 512, 1024))

    def usual(self) -> Case:
        """Return a case without data, whose signature is the family's."""
        return self._case(Memory("meta", random.Random(0)), [64] * 8, 0, 512, 512)

    def draw(self, rng: random.Random, device: str) -> Case:
        """Draw a call."""
        sizes = draw_sizes(rng)
        memory = Memory(device, rng) if self.exact is None else self.exact.memory(device, rng, max(sizes))
        n, m = _extents(rng, len(sizes) * max(1, sum(sizes)))
        step = rng.choice((8, 8, 16, 64))
        n, m = (-(-extent // step) * step for extent in (n, min(m, 300)))
        case = self._case(memory, sizes, rng.choice((0, 0, 1, 90)), n, m)
        return self._refused(memory, case) if rng.random() < _REFUSED and sum(sizes) > 1 else case

    def _case(self, memory: Memory, sizes: list[int], unused: int, n: int, m: int) -> Case:
        rng, experts, used = memory.rng, len(sizes), sum(sizes)
        rows, (of_x, d) = used + unused, (torch_type(name) for name in (self.x, self.d))
        x, gradient = (memory.placed((rows, extent), of_x).view for extent in (m, n))
        for each in (x, gradient):
            each[:used].copy_(memory.values((used, each.shape[1]), of_x))
        named: dict[str, Any] = {"out_dtype": d}
        if self.adds:
            named |= {"epilogue": accumulate, "alpha": _ALPHA, "before": memory.matrix((experts, m, n), d)}
        is_given = memory.device != "meta" and rng.random() < 0.7
        case = Case(
            co.gemm,
            (x.mT, gradient, ends_of(sizes, memory.device)),
            named,
            {"d": memory.placed((experts, m, n), d)} if is_given else {},
            dict,
            oracle.SUMS[self.x] if self.exact is None else 0.0,
            about=f"{rows} rows, K {m}, N {n}, groups {sizes}",
            grouped="offsets",
        )
        case.wanted = functools.partial(self._wanted, case, sizes)
        return case

    def _wanted(self, case: Case, sizes: list[int]) -> Mapping[str, Wanted]:
        used = sum(sizes)
        a, b = case.arguments[:2]
        x, gradient = (each[:used].double() for each in (a.mT, b))
        expert = torch.repeat_interleave(torch.tensor(sizes), output_size=used).to(x.device)
        mine = (torch.arange(len(sizes), device=x.device)[:, None] == expert).double()[..., None]
        acc = (x * mine).mT @ gradient
        slack = ((x.square() * mine).mT @ gradient.square()).sqrt() * case.sums
        if self.exact is not None:
            self.exact.require((x.abs() * mine).mT @ gradient.abs())

        def d(sums: Tensor) -> dict[str, Tensor]:
            return {"d": sums * _ALPHA + case.named["before"].double() if self.adds else sums}

        return moved_by(d, acc, slack)

    def _refused(self, memory: Memory, case: Case) -> Case:
        a, gradient, ends = case.arguments
        x = a.mT

        def other(x: Tensor = x, gradient: Tensor = gradient, ends: Tensor = ends) -> Case:
            return replace(case, arguments=(x.mT, gradient, ends))

        narrow = memory.placed((x.shape[0], x.shape[1] | 1), x.dtype, aligned=False).view[:, : x.shape[1]]
        ways = [
            (r"^offsets is torch.int64", other(ends=ends.long())),
            (r"\bb\b", other(gradient=gradient[1:])),
            (r"^b has strides", other(gradient=gradient.t().contiguous().t())),
            (r"^a .*16 bytes", other(narrow)),
        ]
        pattern, found = memory.rng.choice(ways)
        return replace(found, refused=pattern)


def _wide(scales: Tensor, length: int, dim: int) -> Tensor:
    """Return a scale for each value, of those for blocks of 128."""
    return scales.repeat_interleave(mma.BLOCK_K, dim).narrow(dim, 0, length)


def ends_of(sizes: list[int], device: str) -> Tensor:
    """Return where groups end."""
    return torch.tensor(sizes, device=device).cumsum(0).int()


def draw_sizes(rng: random.Random) -> list[int]:
    """Draw the rows of each group: like a router's, one alone, alike, none, many groups with a row or without."""
    experts = rng.choice((1, rng.randrange(2, 9), rng.randrange(9, 40), rng.randrange(40, 300)))
    rows = rng.choice((0, rng.randrange(1, 20), rng.randrange(20, 300), rng.randrange(300, 900)))
    way = rng.choice(("router", "router", "one", "alike", "few"))
    if way == "one":
        alone = rng.randrange(experts)
        return [rows if expert == alone else 0 for expert in range(experts)]
    if way == "alike":
        return [rows // experts] * experts
    sizes = [0] * experts
    some = rng.sample(range(experts), max(1, experts // 8)) if way == "few" else range(experts)
    for expert in rng.choices(some, k=rows):
        sizes[expert] += 1
    return sizes


def _extents(rng: random.Random, of_groups: int) -> tuple[int, int]:
    n, k = (rng.choice((rng.randrange(1, 20), 64, 128, 136, rng.randrange(20, 600))) for _ in range(2))
    if rng.random() < 0.1:
        k = rng.randrange(600, 3000)
    return max(1, min(n, _MOST // of_groups)), k


def _with_false_offsets(case: Case, rng: random.Random) -> Case:
    """Return a call whose offsets fall or lead nowhere: any result does, but nothing outside of D is written."""
    x, w, ends, *others = case.arguments
    false = [rng.choice((-5, 0, 7, len(x), len(x) + 9, 1 << 30, -(1 << 31))) for _ in range(len(ends))]
    arguments = (x, w, torch.tensor(false, dtype=torch.int32, device=x.device), *others)

    def anything() -> dict[str, Wanted]:
        shape = (len(x), w.shape[2])
        nothing = torch.zeros(shape, dtype=torch.float64, device=x.device)
        known = torch.ones(shape, dtype=torch.bool, device=x.device)
        return {name: Wanted(nothing, nothing, unknown=known) for name in case.request().op.outputs}

    return replace(case, arguments=arguments, wanted=anything, used=None, about=f"{case.about}, false offsets {false}")


FAMILIES = (
    Rows("BF16", "bf16", "bf16", "bf16"),
    Rows("FP16, to FP32, weights across K", "f16", "f16", "f32", across=True),
    Rows("BF16, odd columns", "bf16", "bf16", "bf16", aligned_d=False),
    Rows("BF16, routed", "bf16", "bf16", "bf16", epilogue=routed, formula=_routed),
    Rows("FP16, routed, odd columns", "f16", "f16", "f16", aligned_d=False, epilogue=routed, formula=_routed),
    Rows("BF16, a further output", "bf16", "bf16", "bf16", epilogue=saved, formula=_saved),
    Rows("BF16, gated", "bf16", "bf16", "bf16", epilogue=composed.swiglu, formula=_gated),
    Rows("FP8, scales", "e4m3", "e4m3", "bf16", scales="rows", math="fast"),
    Rows("FP8, promoted", "e4m3", "e5m2", "bf16", scales="rows", math="promoted"),
    Weights("weights' gradients", "bf16", "bf16"),
    Weights("weights' gradients, added up", "bf16", "f32", adds=True),
)
