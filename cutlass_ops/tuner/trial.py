"""One problem on one device: kernels are checked against FP64, and those that are right race each other and PyTorch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from cutlass_ops.artifacts.loader import LoadedKernel, refusal
from cutlass_ops.base import mma
from cutlass_ops.base.dtypes import OWN, PACKED
from cutlass_ops.choose.tables import Measured
from cutlass_ops.declare.config import Config, Ordered
from cutlass_ops.declare.form import BATCHED, DENSE, GROUPED, RAGGED_K, Form
from cutlass_ops.declare.problem import Problem
from cutlass_ops.declare.spec import Operand
from cutlass_ops.epilogue.nodes import PARTS, Kind
from cutlass_ops.kinds import spreads
from cutlass_ops.kinds.table import kind_of
from cutlass_ops.operand import packing, reference, sparsity
from cutlass_ops.operand.call import device_of
from cutlass_ops.run.peers import Peer, peers
from cutlass_ops.run.registry import OpSignature
from cutlass_ops.tuner.timing import Run, Standing, Stopwatch, expected_us, race, rotation

# How many kernels are tried with every order of tiles.
_FINALISTS = 3

# A kernel's error may be twice that of rounding the exact result to the output's type, besides that of sums.
_ROUNDING = 2.0

# Kernels of this many microseconds heat the chip enough to move its clock, by a quarter and for many rounds: it takes
# more of them to see all clocks. Which kernel is the fastest depends on it. Races know a chip at its limit of power, as
# programs that work without a pause do: what wins at rest is up to 7% behind there (benchmarks/NOTES.md).
_HEATING_US = 40.0
_MORE_ROUNDS = 3

_SCALAR = 0.5
_INTEGER = 7
# The share of whole numbers that may differ: indices, since values so near each other may come out in another order,
# and results in INT8, since values so near the middle between two may come out on its other side.
_OTHER_INDICES = 0.01


@dataclass(frozen=True)
class _Tensors:
    """One set of a problem's tensors."""

    a: Tensor
    b: Tensor
    inputs: tuple[Tensor | float, ...]
    outputs: tuple[Tensor, ...]


@dataclass(frozen=True)
class _Way:
    """One way to launch kernels: one spread of rows over groups, or the only way without groups."""

    weight: float = 1.0  # how much its time counts; all weights add up to 1
    sizes: tuple[int, ...] = ()  # how many rows each group has
    operands: tuple[Tensor, ...] = ()  # what a kernel takes after D: where the groups end


class Trial:
    """Kernels of one signature at one problem, on a CUDA device with an index.

    For groups, the problem's M is the mean of a group's rows, or its K is if these are added up. Inputs are normal: the
    variance of the accumulator is 1, and that of a further product as well. Scalars are 0.5. By default rows are spread
    over groups in all ways that are assumed. A kernel's time is then the geometric mean over them, as in the time
    model.
    """

    def __init__(
        self,
        signature: OpSignature,
        problem: Problem,
        device: torch.device,
        seed: int = 0,
        spreads: Sequence[str] = (),
    ) -> None:
        self._signature = signature
        self._problem = problem
        self._device = device
        self._generator = torch.Generator(device).manual_seed(seed)
        width = signature.a.dtype.bits / 8
        l2_bytes = torch.cuda.get_device_properties(self._device).L2_cache_size
        of_b = signature.b.dtype.bits / 8
        self._sets = [self._draw() for _ in range(rotation(problem.bytes(width, of_b, width), l2_bytes))]
        self._ways = _ways(signature.form, problem, spreads, device, seed) if signature.form.operands else (_Way(),)
        self._wanted = [self._exact(self._sets[0], way.sizes) for way in self._ways]
        self._watch = Stopwatch(expected_us(problem, width))
        self._kernels: dict[Ordered, LoadedKernel] = {}
        self._peers: list[str] = []

    def admit(self, entrant: Ordered, kernel: LoadedKernel) -> str | None:
        """Enter a kernel for the race if it is right; return what is wrong if it is not."""
        runs = [self._run(entrant, kernel, way) for way in self._ways]
        for run, wanted in zip(runs, self._wanted, strict=True):
            for output in self._sets[0].outputs:
                output.fill_(float("nan") if output.is_floating_point() else torch.iinfo(output.dtype).min)
            status = run(0)
            torch.cuda.synchronize(self._device)
            if status != 0:
                position, reason = refusal(status)
                return f"it refused argument {position}: {reason.name.lower()}"
            wrong = self._wrong(wanted)
            if wrong is not None:
                return wrong
        self._kernels[entrant] = kernel
        for name, run in zip(self._names(entrant), runs, strict=True):
            self._watch.add(name, run)
        return None

    def _names(self, entrant: Ordered | str) -> list[object]:
        """Return the stopwatch's names of an entrant, one for each way to launch it."""
        return [entrant] if len(self._ways) == 1 else [(entrant, way) for way in range(len(self._ways))]

    def rehearse(self, entrant: Ordered) -> None:
        """Run an admitted kernel alone, as the race will: if it fails only then, its name is known."""
        self._watch.round(self._names(entrant))

    def admit_peers(self) -> None:
        """Enter PyTorch's ways to compute the same. Groups have none."""
        if self._signature.form.operands:
            return
        for name, peer in peers(self._signature.epilogue, self._sets[0].a.dtype).items():
            if self._signature.form != DENSE and name != "eager":
                continue
            self._watch.add(name, self._run_peer(peer))
            self._peers.append(name)

    def race(
        self, rounds: int, on_round: Callable[[], None]
    ) -> tuple[tuple[Measured, ...], tuple[tuple[str, float], ...]]:
        """Race all that entered, then the tile orders of the best.

        Short kernels that stay run `rounds` times. `on_round` is called before each round. Returns the kernels, the
        fastest first, and the peers' microseconds.
        """
        if not self._kernels:
            return (), ()
        measure = self._measurement(on_round)
        rounds *= _MORE_ROUNDS if _heats(self._problem) else 1
        # A peer that is ahead must not cost the kernels their rounds.
        entrants: list[Ordered | str] = [*self._kernels]
        standings = race(entrants, measure, guests=self._peers, rounds=rounds)
        ranked = [s.entrant for s in standings if not isinstance(s.entrant, str)]
        finalists = _best_orders(ranked)[:_FINALISTS]
        further = self._further(finalists)
        entrants = [finalists[0], *further]
        second = race(entrants, measure, guests=self._peers, rounds=rounds) if further else []
        ratios = _combined(standings, second, finalists[0])
        # Medians over different rounds cannot be compared, since the chip's clock moves; ratios within a round can.
        best = min((c for c in ratios if not isinstance(c, str)), key=ratios.__getitem__)
        unit = next(s.median for s in [*second, *standings] if s.entrant == best) / ratios[best]
        measured = [
            Measured(c.config, unit * r, r / ratios[best] - 1, c.order)
            for c, r in sorted(ratios.items(), key=lambda item: item[1])
            if not isinstance(c, str)
        ]
        return tuple(measured), tuple((name, unit * ratios[name]) for name in self._peers)

    def _further(self, finalists: Sequence[Ordered]) -> list[Ordered]:
        """Enter different tile orders of some kernels."""
        entered: list[Ordered] = []
        if self._signature.form.operands:
            return entered  # whose tiles have one order
        for finalist in finalists:
            config = finalist.config
            for order in kind_of(config).orders(config, self._problem, device_of(self._device)):
                other = Ordered(config, order)
                if other not in self._kernels:
                    self._watch.add(other, self._run(other, self._kernels[finalist], *self._ways))
                    entered.append(other)
        return entered

    def _measurement(self, on_round: Callable[[], None]) -> Callable[[Sequence[Ordered | str]], list[float]]:
        """Return a function that times one round after another, and reports before each."""
        weights = [way.weight for way in self._ways]

        def measure(order: Sequence[Ordered | str]) -> list[float]:
            on_round()
            times = self._watch.round([name for entrant in order for name in self._names(entrant)])
            each = [times[at : at + len(weights)] for at in range(0, len(times), len(weights))]
            return [math.exp(sum(w * math.log(us) for w, us in zip(weights, own, strict=True))) for own in each]

        return measure

    def _run(self, entrant: Ordered, kernel: LoadedKernel, way: _Way = _Way()) -> Callable[[int], int]:
        raster, swizzle = entrant.order.numbers
        problem, of_way = _launched(self._problem, self._signature.form), way.operands
        with torch.cuda.device(self._device):
            size = int(kernel.workspace_size(*problem, raster, swizzle))
        workspace = torch.empty(size, dtype=torch.uint8, device=self._device) if size else None
        # The stopwatch keeps what it captured, and no trial: a cycle with graphs in it would be collected at any time,
        # and a graph that goes while another is captured spoils that one.
        sets = self._sets

        def run(index: int) -> int:
            x = sets[index % len(sets)]
            d, *others = x.outputs
            return kernel.launch(x.a, x.b, d, *of_way, *x.inputs, *others, raster, swizzle, workspace)

        return run

    def _run_peer(self, peer: Peer) -> Run:
        sets = self._sets

        def run(index: int) -> object:
            x = sets[index % len(sets)]
            return peer(x.a, x.b, x.inputs)

        return run

    # ---- Tensors -------------------------------------------------------------------------------------------------

    def _draw(self) -> _Tensors:
        signature, problem = self._signature, self._problem
        form, mean = signature.form, problem.k
        # All tiles of batches are their own; they share vectors. Groups have weights and rows of values of their own.
        of_d = (problem.count,) if form.stacked else ()
        lead = of_d if form == BATCHED else ()
        each = (problem.count,) if form == GROUPED else ()
        m, n, k = _launched(problem, form).extents
        extents = {Kind.ROW: (*each, n), Kind.COL: (m,), Kind.TILE: (*of_d, m, n), Kind.PRODUCT: (*each, k, n)}
        scales = {Kind.PRODUCT: mean**-0.25}
        graph = signature.epilogue
        steps = -(-k // mma.BLOCK_K)
        of_b = (signature.b.scaling or (mma.BLOCK_K, 1))[1]
        extents |= {Kind.BLOCKS_A: (m, steps), Kind.BLOCKS_B: (*each, -(-n // of_b), steps)}
        extents[Kind.BLOCKS_D] = (m, -(-n // mma.BLOCK_K))
        known: dict[Kind, Tensor | float] = {Kind.SCALAR: _SCALAR, Kind.INTEGER: _INTEGER}
        b = None
        if signature.b.dtype in OWN:
            own = self._packed if signature.b.dtype in PACKED else self._sparse
            b, known[next(i.kind for i in graph.inputs if i.kind in PARTS)] = own(n, k, mean**-0.25)
        inputs = tuple(
            known[i.kind] if i.kind in known else self._normal(extents[i.kind], o, scales.get(i.kind, 1.0))
            for i, o in zip(graph.inputs, signature.inputs, strict=True)
        )
        types = (signature.d, *signature.outputs)
        outputs = tuple(_empty(extents[o.kind], t, self._device) for o, t in zip(graph.outputs, types, strict=True))
        return _Tensors(
            self._normal((*lead, m, k), signature.a, mean**-0.25),
            self._normal((*lead, *each, k, n), signature.b, mean**-0.25) if b is None else b,
            inputs,
            outputs,
        )

    def _packed(self, n: int, k: int, deviation: float) -> tuple[Tensor, Tensor]:
        """Draw a packed B, and its scales."""
        b, dtype = self._signature.b, getattr(torch, self._signature.a.dtype.torch_name)
        group = (b.scaling or (k, 1))[0]
        values, scale = packing.drawn(n, k, group, b.dtype, dtype, deviation, self._generator)
        return values.t(), scale

    def _sparse(self, n: int, k: int, deviation: float) -> tuple[Tensor, Tensor]:
        """Draw a sparse B, and its metadata."""
        w = _empty((n, k), Operand.of(self._signature.a.dtype), self._device)
        values, meta = sparsity.compressed(filled(w, deviation, self._generator), sparsity.kept(w))
        return values.t(), meta

    def _normal(self, shape: tuple[int, ...], operand: Operand, scale: float = 1.0) -> Tensor:
        return filled(_empty(shape, operand, self._device), scale, self._generator)

    def _exact(self, x: _Tensors, sizes: Sequence[int] = ()) -> list[Tensor]:
        """Return the outputs in FP64; for groups, whose rows follow each other, with the given rows of each."""
        if sizes:
            ends = np.cumsum([0, *sizes]).tolist()
            places = [(group, slice(*both)) for group, both in enumerate(pairwise(ends))]
            if self._signature.form == RAGGED_K:
                found = [self._exact(self._of_group_of_k(x, *place)) for place in places]
                return [torch.stack(each) for each in zip(*found, strict=True)]
            found = [self._exact(self._of_group(x, *place)) for place, size in zip(places, sizes, strict=True) if size]
            return [torch.cat(each) for each in zip(*found, strict=True)]
        graph = self._signature.epilogue
        # Scales of a packed B and metadata of a sparse one stay as they are.
        inputs = {
            i.name: v.double() if isinstance(v, Tensor) and not (i.kind in PARTS and v.itemsize <= 2) else v
            for i, v in zip(graph.inputs, x.inputs, strict=True)
        }
        acc = reference.accumulator(graph, x.a, x.b, inputs, torch.float64)
        values = reference.evaluate(graph, acc, inputs, torch.float64, a=x.a)
        return [values[o.name] for o in graph.outputs]

    def _of_group(self, x: _Tensors, group: int, rows: slice) -> _Tensors:
        """Return one group's tensors, without outputs."""
        own: dict[Kind, int | slice] = dict.fromkeys((Kind.ROW, Kind.PRODUCT, Kind.BLOCKS_B), group)
        own |= dict.fromkeys((Kind.COL, Kind.TILE, Kind.BLOCKS_A), rows)
        inputs = tuple(
            value[own[i.kind]] if isinstance(value, Tensor) and i.kind in own else value
            for i, value in zip(self._signature.epilogue.inputs, x.inputs, strict=True)
        )
        return _Tensors(x.a[rows], x.b[group], inputs, ())

    def _of_group_of_k(self, x: _Tensors, group: int, rows: slice) -> _Tensors:
        """Return one group's tensors, whose rows are added up, without outputs."""
        inputs = tuple(
            value[group] if i.kind is Kind.TILE and isinstance(value, Tensor) else value
            for i, value in zip(self._signature.epilogue.inputs, x.inputs, strict=True)
        )
        return _Tensors(x.a[:, rows], x.b[rows], inputs, ())

    def _wrong(self, every: Sequence[Tensor]) -> str | None:
        outputs = self._signature.epilogue.outputs
        instructions = mma.mma_of(self._signature.a.dtype, self._signature.b.dtype)
        assert instructions is not None
        sums = instructions.error
        sums *= 1 + len(self._signature.epilogue.products)  # a product of two values has the errors of both
        for output, found, wanted in zip(outputs, self._sets[0].outputs, every, strict=True):
            if not found.dtype.is_floating_point:
                rounded = reference.rounded(wanted, found.dtype)
                others = float((found != rounded).double().mean())
                if others > _OTHER_INDICES:
                    return f"{output.name} is wrong: {others:.2g} of its whole numbers are others"
                continue
            exact = found.double()
            if found.dtype.itemsize == 1:  # which saturates
                most = torch.finfo(found.dtype).max
                wanted = wanted.clamp(-most, most)
            if not torch.equal(exact.isnan(), wanted.isnan()):
                return f"{output.name} has NaN where it should not, or parts of it were not written"
            finite = wanted.isfinite()
            exact, wanted = exact[finite], wanted[finite]
            scale = float(wanted.norm()) or 1.0
            rounding = _rounding(wanted, found.dtype)
            error = float((exact - wanted).norm()) / scale
            if not error <= _ROUNDING * rounding + sums:
                return f"{output.name} is wrong: its relative error is {error:.2g}, and {rounding:.2g} is rounding"
        return None


def filled(tensor: Tensor, scale: float, generator: torch.Generator | None = None) -> Tensor:
    """Fill a tensor with normal numbers, or with whole numbers of 8 bits, and return it."""
    if not tensor.dtype.is_floating_point:
        return tensor.random_(-128, 128, generator=generator)
    if tensor.dtype.itemsize > 1:
        return tensor.normal_(0, scale, generator=generator)
    return tensor.copy_(torch.empty(tensor.shape, device=tensor.device).normal_(0, scale, generator=generator))


def _rounding(values: Tensor, dtype: torch.dtype) -> float:
    """Return the relative error of rounding values of this size to a type.

    They may be of that type already: what an epilogue rounds itself falls to the other side of a tie now and then.
    """
    between = values * (2 / 3)
    return float((reference.rounded(between, dtype).double() - between).norm()) / (float(between.norm()) or 1.0)


def _heats(problem: Problem) -> bool:
    """Whether kernels at a problem heat the chip."""
    return expected_us(problem) > _HEATING_US


def _launched(problem: Problem, form: Form) -> Problem:
    """Return the problem of a launch: with all rows of groups, if it has the mean of their rows."""
    if form == RAGGED_K:
        return problem._replace(k=problem.k * problem.count)
    return problem._replace(m=problem.m * problem.count) if form.operands else problem


def _ways(form: Form, problem: Problem, names: Sequence[str], device: torch.device, seed: int) -> tuple[_Way, ...]:
    """Draw groups for each way in which rows may be spread."""
    generator, found = np.random.default_rng(seed), []
    rows = _launched(problem, form)
    for spread in spreads.named(names):
        sizes = spread.drawn(rows.k if form == RAGGED_K else rows.m, problem.count, generator)
        ends = torch.tensor(sizes).cumsum(0).to(device, torch.int32)
        found.append(_Way(spread.weight, tuple(sizes), (ends,)))
    return tuple(found)


def _empty(shape: tuple[int, ...], operand: Operand, device: torch.device) -> Tensor:
    """Return a tensor that has an operand's type and no better alignment."""
    dtype = getattr(torch, operand.dtype.torch_name)
    if len(shape) == 1:
        return torch.empty(shape, dtype=dtype, device=device)
    *lead, rows, columns = shape
    outer, inner = (rows, columns) if operand.major == "row" else (columns, rows)
    units = -(-inner // operand.alignment)
    if not operand.aligned and units % 2 == 0:
        units += 1  # a leading dimension that no wider access divides
    matrix = torch.empty(*lead, outer, units * operand.alignment, dtype=dtype, device=device)[..., :inner]
    return matrix if operand.major == "row" else matrix.mT


def _best_orders(ranked: Sequence[Ordered]) -> list[Ordered]:
    """Return each kernel once, in the first of the orders of tiles in which it is there."""
    best: dict[Config, Ordered] = {}
    for entrant in ranked:
        best.setdefault(entrant.config, entrant)
    return list(best.values())


def _combined(
    first: Sequence[Standing[Ordered | str]], second: Sequence[Standing[Ordered | str]], anchor: Ordered
) -> dict[Ordered | str, float]:
    """Return all times over that of the anchor, which ran in both races; the second race takes precedence."""
    found: dict[Ordered | str, float] = {}
    for standings in (first, second):
        unit = next((1 + s.behind for s in standings if s.entrant == anchor), 1.0)
        found |= {s.entrant: (1 + s.behind) / unit for s in standings}
    return found
