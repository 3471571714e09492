"""Explanations of a call: what its tensors allow, which kernels were considered, how close the best is to the limit."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cutlass_ops.base import env
from cutlass_ops.base.dtypes import f32, f64, i32
from cutlass_ops.base.errors import CutlassOpsError, UnsupportedError
from cutlass_ops.base.mma import mma_of, sums_of
from cutlass_ops.choose import dispatch, policies
from cutlass_ops.choose.dispatch import unserved
from cutlass_ops.choose.knowledge import Candidate
from cutlass_ops.choose.policies import Policy
from cutlass_ops.declare.chips import CHIPS
from cutlass_ops.declare.config import Config
from cutlass_ops.declare.device import Device
from cutlass_ops.declare.form import GROUPED, MASKED, RAGGED_K
from cutlass_ops.declare.problem import Problem
from cutlass_ops.declare.roofline import Roofline, roofline
from cutlass_ops.declare.spec import KernelSpec, copied
from cutlass_ops.kinds import spreads
from cutlass_ops.kinds.table import kind_of
from cutlass_ops.kinds.traits import Traits
from cutlass_ops.operand import watching
from cutlass_ops.operand.call import Call, accumulation, device_of, signature_of, without_modes
from cutlass_ops.run import refusals, supply
from cutlass_ops.run.ops import Op
from cutlass_ops.run.registry import OpSignature, Registry
from cutlass_ops.run.requests import requested


@dataclass(frozen=True)
class Finding:
    """One property of a call or its kernel, as text."""

    name: str
    says: str


# Candidates that the text shows.
_SHOWN = 5


@dataclass(frozen=True, repr=False)
class Explanation:
    """How a call is served, and why.

    Attributes
    ----------
    op : str
        The op's name.
    problem : tuple of int
        M, N and K.
    served_by : str
        Name of the kernel, or ``"PyTorch"``, with the name of PyTorch's implementation if tuning allowed it to serve.
    why : str
        The reason, in a sentence.
    contract : tuple of Finding
        Consequences of the tensors' types, layouts and addresses.
    candidates : tuple of Candidate
        The kernels considered, best first. The first serves the call, unless PyTorch does.
    roofline : Roofline or None
        Lower bounds of the time; None if the chip's peaks are unknown.
    peers : dict of str to float
        Measured times of PyTorch's implementations of the same computation, in microseconds.
    device : str
        Name of the device, or ``"the CPU"``.
    microseconds : float or None
        Expected time on the device in microseconds, without the host's; None if unknown.
    parts : tuple of Explanation
        If several ops serve the call, an explanation of each. If each batch takes its own call, an explanation of the
        first.
    batches : int
        Number of GEMMs of this size, or of groups, which have M rows in total.
    grouped : bool
        Whether the GEMMs are groups of rows.

    Examples
    --------
    >>> a, b = torch.ones(2, 8).bfloat16(), torch.ones(8, 3).bfloat16()
    >>> explanation = co.explain(co.gemm, a, b)
    >>> explanation.problem, explanation.device, explanation.microseconds
    ((2, 3, 8), 'the CPU', None)
    >>> explanation.to_json()["served_by"]
    'PyTorch'
    """

    op: str
    problem: tuple[int, int, int]
    served_by: str
    why: str
    contract: tuple[Finding, ...] = ()
    candidates: tuple[Candidate, ...] = ()
    roofline: Roofline | None = None
    peers: dict[str, float] | None = None
    device: str = "the CPU"
    microseconds: float | None = None
    parts: tuple[Explanation, ...] = ()
    batches: int = 1
    grouped: bool = False

    @property
    def is_served(self) -> bool:
        """Whether anything serves the call."""
        return self.served_by != _NOTHING

    @property
    def verdict(self) -> str:
        """What serves the call, its expected time and the reason, in one sentence."""
        m, n, k = self.problem
        time = "" if self.microseconds is None else f", expected to take {self.microseconds:.1f} us"
        several = f" in {self.batches} groups" if self.grouped else f" in {self.batches} batches"
        several = "" if self.batches == 1 else several
        what = f"{self.op}, M={m} N={n} K={k}{several}, on {self.device}"
        return f"{what} is served by {self.served_by}{time}: {self.why}."

    @property
    def achieved(self) -> float | None:
        """The roofline's time over the kernel's: 1 is as fast as the chip allows. None if unknown."""
        if self.roofline is None or not self.candidates:
            return None
        return max(self.roofline.compute, self.roofline.memory) / self.candidates[0].microseconds

    def to_json(self) -> dict[str, Any]:
        """Return the explanation as plain values."""
        return {
            "op": self.op,
            "problem": list(self.problem),
            **({} if self.batches == 1 else {"groups" if self.grouped else "batches": self.batches}),
            "device": self.device,
            "verdict": self.verdict,
            "served_by": self.served_by,
            "microseconds": None if self.microseconds is None else round(self.microseconds, 2),
            "why": self.why,
            "contract": {f.name: f.says for f in self.contract},
            "candidates": [
                {
                    "config": c.config.slug,
                    **_order(c),
                    "microseconds": round(c.microseconds, 2),
                    "source": c.source,
                }
                for c in self.candidates
            ],
            "roofline": None if self.roofline is None else {**asdict(self.roofline), "bound": self.roofline.bound},
            "achieved": self.achieved,
            "peers": self.peers,
            "parts": [part.to_json() for part in self.parts],
        }

    def __repr__(self) -> str:
        problem = Problem(*self.problem, self.batches)
        time = "" if self.microseconds is None else f", {self.microseconds:.1f} us"
        return f"<explanation of {self.op} {problem} on {self.device}: {self.served_by}{time}>"

    def __str__(self) -> str:
        """Return the verdict, a table of the best candidates and the details, for the whole and each part."""
        whole = "\n".join([self.verdict, *self._table(), *self._details()])
        return "\n\n".join([whole, *map(str, self.parts)])

    def _table(self) -> list[str]:
        if not self.candidates:
            return []
        first, more = self.candidates[:_SHOWN], len(self.candidates) - _SHOWN
        peers = sorted((self.peers or {}).items(), key=lambda peer: peer[1])
        rows = [(c.microseconds, c.source, _named(c)) for c in first]
        rows += [(us, "measured", f"{name} (PyTorch's)") for name, us in peers]
        serves = next((f"{name} (PyTorch's)" for name, _ in peers if f"({name})" in self.served_by), rows[0][2])
        lines = ["", "           us  known by     kernel"]
        lines += [f"  {'->' if name == serves else '':2} {us:8.1f}  {source:<12} {name}" for us, source, name in rows]
        return [*lines, *([f"     and {more} more: see to_json()"] if more > 0 else [])]

    def _details(self) -> list[str]:
        findings = [*self._limit(), *self.contract]
        return ["", *(f"  {f.name:<10} {f.says}" for f in findings)] if findings else []

    def _limit(self) -> list[Finding]:
        roof, achieved = self.roofline, self.achieved
        if not self.candidates:
            return []
        if roof is None or achieved is None:
            return [Finding("limit", "no roofline: this chip's peaks are unknown")]
        says = (
            f"at least {roof.compute:.1f} us of compute, {roof.memory:.1f} of memory, {roof.launch:.1f} of launch: "
            f"bound by {roof.bound}; the kernel reaches {100 * achieved:.0f}% of the roofline"
        )
        return [Finding("limit", says)]


@watching.in_no_program(
    "cutlass_ops.explain looks for a kernel now: call it outside of the function that torch.compile traces"
)
def explain(op: object, /, *arguments: Any, **named: Any) -> Explanation:
    """Explain how a call would be served, and why, without running or compiling its kernel.

    Preparation by a function itself, such as folding gamma into a weight, does run.

    Parameters
    ----------
    op : Op, Epilogue, function or str
        A named op such as ``cutlass_ops.gemm_bias_relu``, a decorated function, ``cutlass_ops.gemm`` with
        ``epilogue=``, or a function such as ``cutlass_ops.rmsnorm_gemm``. Or the name of one, such as
        ``"gemm_bias_relu"``.
    *arguments, **named
        The arguments of a call.

    Returns
    -------
    Explanation
        Print it as text, or use ``to_json()`` for plain values.

    Raises
    ------
    TypeError, ValueError
        As the call itself, if an argument does not fit.

    Examples
    --------
    >>> a, b = torch.ones(2, 8).bfloat16(), torch.ones(8, 3).bfloat16()
    >>> co.explain(co.gemm, a, b).served_by
    'PyTorch'

    On a GPU, the text names the kernel, its expected time, the reason and the alternatives:

    >>> print(co.explain(co.gemm_bias_relu, x, weight.t(), bias))  # doctest: +SKIP
    """
    request = requested(op, *arguments, **named).as_autocast()
    asked, (a, b, *inputs), given = request.op, request.arguments, dict(request.named)
    out, out_dtype = given.pop("out", None), given.pop("out_dtype", None)
    call = asked.checked(a, b, tuple(inputs), given, out, out_dtype)
    if call.is_reference:
        refusals.require(asked.name, call, asked.instead_of)
        where = "an extent is 0" if 0 in call.problem else "the tensors are on the CPU"
        why = f"{where}, so the reference implementation computes it"
        grouped = bool(call.arguments.form.operands)
        batches = call.problem.count
        return Explanation(
            asked.name, call.problem.extents, "PyTorch", why, device=_name(a.device), batches=batches, grouped=grouped
        )
    return explain_call(asked.name, call, device_of(a.device), asked)


@without_modes()
def explain_call(name: str, call: Call, device: Device, op: Op | None = None) -> Explanation:
    """Explain how a device would serve a checked call, whose tensors need no data."""
    # For groups, the problem for which a kernel is chosen: the host does not know how many rows each group has.
    problem, grouped = call.chosen_for, bool(call.arguments.form.operands)
    if call.why_apart is not None:
        return _otherwise(name, call, device, op, call.why_apart)
    signature = signature_of(call, device)
    try:
        decision = dispatch.decide(signature, device, call.chosen_for)
    except UnsupportedError as exc:
        return _otherwise(name, call, device, op, str(exc))
    if decision is None:
        what = f"a {signature.a}, b {signature.b}, d {signature.d}"
        return _otherwise(name, call, device, op, unserved(what, signature, device, device.name))
    policy, ranked = policies.policy(signature, device), decision.candidates()
    count = len(decision.kept)
    why = _BUNDLED.format(count) if decision.bundled else _why(policy, problem, ranked[0], count)
    served_by, peers = decision.spec.slug, dict(policy.peers(problem))
    expected: float | None = ranked[0].microseconds
    if decision.peer is not None:
        served_by, expected = f"PyTorch ({decision.peer})", peers.get(decision.peer)
        why = "measured faster than every kernel here, and tuning allowed PyTorch"
    origin = _origin(decision.spec) if decision.peer is None else None
    missing = decision.peer is None and origin is None
    compiles, by_pytorch = env.jit_enabled() or bool(env.REMOTE_STORE.text), not supply.waits(decision)
    if missing and not compiles:
        served_by, expected = "PyTorch" if by_pytorch else _NOTHING, None
        why = f"{decision.spec.slug} is not here, and {env.JIT.name}=0 forbids compiling it"
    findings = [*_contract(signature, device), *_of_kernel(call, signature, device, problem, ranked[0].config)]
    if origin is not None:
        findings.append(Finding("kernel", origin))
    if missing and compiles and by_pytorch:
        findings.append(Finding("now", "the kernel is not compiled yet: until it is, PyTorch serves"))
    chip, mma = CHIPS.get(device.name), mma_of(signature.a.dtype, signature.b.dtype)
    whole, rate = Traits.of(signature).whole(problem), mma.rate if mma else 1.0
    return Explanation(
        name, call.problem.extents, served_by, why, tuple(findings), ranked,
        roofline(whole, _moved(call, problem), chip, rate) if chip else None,
        peers, _called(device), expected, batches=problem.count, grouped=grouped,
    )  # fmt: skip


def _otherwise(name: str, call: Call, device: Device, op: Op | None, why: str) -> Explanation:
    """Explain a call that no single kernel serves: by its fallback ops, if all of them are served."""
    problem, batches = call.problem.extents, call.problem.count
    contract = tuple(_contract(signature_of(call, device), device))
    parts = tuple(explain_call(part.name, each, device, part) for part, each in op.instead_of(call)) if op else ()
    # If one is not served, the call raises its error.
    missing = next((part.why for part in parts if not part.is_served), None)
    if op is None or not parts or missing:
        return Explanation(name, problem, _NOTHING, missing or why, contract, device=_called(device), batches=batches)
    gemms = batches if call.why_apart is not None else len(parts)
    times = [part.microseconds for part in parts] * (gemms // len(parts))
    return Explanation(
        name,
        problem,
        f"{_NUMBERS.get(gemms, str(gemms))} GEMMs",
        op.why_instead(call),
        contract,
        device=_called(device),
        microseconds=sum(t for t in times if t is not None) if None not in times else None,
        parts=parts,
        batches=batches,
    )


def _origin(spec: KernelSpec) -> str | None:
    """Say where the kernel comes from, or why it cannot be looked up; None if it is not there."""
    try:
        return Registry.current().origin(spec)
    except CutlassOpsError as exc:
        return f"cannot be looked up: {exc}"


_NOTHING = "nothing"
_NUMBERS = {1: "one", 2: "two", 3: "three"}
_BUNDLED = "chosen when its bundle was made; one of {} bundled kernels for this weight"


def _tensors(call: Call) -> list[Tensor]:
    inputs = [x for x in call.arguments.inputs.values() if isinstance(x, Tensor)]
    return [call.arguments.a, call.arguments.b, *inputs, *call.outputs]


def _moved(call: Call, problem: Problem) -> float:
    """Return the least bytes that a call moves through device memory.

    Weights of groups without rows are not read. Their number depends on the spread of rows, so this is the geometric
    mean over spreads, like the time for which a kernel is chosen.
    """
    everything = sum(map(_bytes, _tensors(call)))
    if call.arguments.form not in (GROUPED, MASKED):
        return everything
    weights = _bytes(call.arguments.b) + sum(_bytes(call.arguments.inputs[name]) for name in call.graph.products)
    rows, groups = np.float64(problem.m * problem.count), np.float64(problem.count)
    read = {each: float(each.groups(rows, groups).counts.sum() / groups) for each in spreads.ASSUMED}
    return math.exp(sum(each.weight * math.log(everything - (1 - read[each]) * weights) for each in spreads.ASSUMED))


def _bytes(x: Tensor | float) -> int:
    return x.numel() * x.element_size() if isinstance(x, Tensor) else 0


def _why(policy: Policy, problem: Problem, best: Candidate, count: int) -> str:
    mine, others = "this epilogue on this kind of device", "another epilogue, element type or device"
    measured_for = mine if policy.own and policy.own.at(problem) else others
    corrected_for = " and ".join(dict.fromkeys(mine if table is policy.own else others for table in policy.tables))
    how_many = "groups=..." if policy.signature.form.operands else ""
    measure = f" (run cutlass_ops.tune({how_many}) to measure)"
    how = {
        "measured": f"measured fastest at exactly this shape, for {measured_for}",
        "interpolated": f"predicted by the cost model, corrected by measurements at similar shapes for {corrected_for}",
        "model": f"predicted by the cost model, since nothing similar was measured{measure}",
    }[best.source]
    bound = policy.own is not None and policy.own.deterministic
    only = ", all with bit-identical results (deterministic tuning)" if bound else ""
    kept = "the only kernel kept" if count == 1 else f"one of {count} kernels kept"
    return f"{how}; {kept} for this weight{only}"


def _contract(signature: OpSignature, device: Device) -> Iterator[Finding]:
    """Yield what follows from the operands' types and layouts."""
    major, minor = device.capability
    yield Finding("device", f"compute capability {major}.{minor}, {device.multiprocessors} multiprocessors")
    sums = sums_of(signature.a.dtype, signature.b.dtype)
    whole = "INT32, which D is" if signature.d.dtype is i32 else "INT32, and brought to FP32 for the epilogue"
    named = {f32: "FP32", f64: "FP64, as the epilogue is computed", i32: whole}[sums]
    yield Finding("a, b", f"{signature.a} and {signature.b}, accumulated in {named}")
    mma = mma_of(signature.a.dtype, signature.b.dtype)
    if mma is not None and mma.along_k_only and not signature.realigns:
        says = (
            "along K, from multiples of 16 bytes, as a call needs of this type: nothing is copied, transposed or padded"
        )
        yield Finding("lines", says)


def _of_kernel(
    call: Call, signature: OpSignature, device: Device, problem: Problem, config: Config
) -> Iterator[Finding]:
    """Yield what the kernel that serves does."""
    instruction, stored = kind_of(config).unit(config)
    usual = "by TMA or whole vectors" if signature.d.aligned else f"{signature.d.alignment} elements at a time"
    yield Finding("d", f"{signature.d}, stored {stored or usual}")
    reason = f": {_unread(signature, config)}" if device.has_tma and signature.realigns else ""
    yield Finding("unit", f"{instruction}{reason}")
    if config.copies:
        yield Finding("copied", _copies(signature, problem, config))
    found, why = accumulation(call)
    if found is not None:
        yield Finding("accumulation", f"{found}: {why}")
    if signature.epilogue.gathered:
        yield Finding("rows of a", kind_of(config).means(config))
    form = call.arguments.form
    if form.operands:
        mean, spread = (problem.k, "") if form == RAGGED_K else (problem.m, ", spread in several ways")
        groups = f"chosen for {problem.count} with a mean of {mean} rows{spread}"
        yield Finding("groups", f"{groups}, since only the device knows how many each has")


def _unread(signature: OpSignature, config: Config) -> str:
    """Say why kernels of wgmma cannot read an operand as it lies, what follows, and what to do."""
    a, b = signature.a, signature.b
    misaligned = [name for name, operand in (("a", a), ("b", b)) if not operand.aligned]
    across = [n for n, now, read in zip("ab", signature.majors, signature.loaded_majors, strict=True) if now != read]
    whys, todo = [], []
    if misaligned:
        names = " and ".join(misaligned)
        whys.append(f"{names} not aligned to 16 bytes in address and leading dimension, which TMA needs")
        todo.append(f"pad the leading dimension to a multiple of {a.dtype.tma_alignment} elements")
    if across:
        whys.append(f"wgmma reads {a.dtype} along K only, and a is {a} and b is {b}")
        todo += ["pass a row-major a"] * ("a" in across)
        todo += ["pass prepare(b).matrix, which is copied once"] * ("b" in across)
    found = ""
    if config.copies:
        them = [name for name, is_copied in zip("ab", copied(a, b), strict=True) if is_copied]
        found = f", so {' and '.join(them)} {'is' if len(them) == 1 else 'are'} copied to aligned workspace first"
    return f"{', and '.join(whys)}{found}; {', and '.join(todo)}"


def _copies(signature: OpSignature, problem: Problem, config: Config) -> str:
    """Say what a kernel copies before each GEMM, and how long that is expected to take."""
    traits = Traits.of(signature)
    m, n, k = traits.whole(problem).extents
    pairs = zip("ab", (m * k, k * n), traits.copied, strict=True)
    sizes = {name: size for name, size, is_copied in pairs if is_copied}
    megabytes = sum(sizes.values()) * traits.element_bytes / 1e6
    us = kind_of(config).copying(traits, [traits.whole(problem)]).item()
    names = " and ".join(sizes)
    return f"{names}, {megabytes:.1f} MB read and written before each GEMM, {us:.1f} us of the expected time"


def _called(device: Device) -> str:
    major, minor = device.capability
    return device.name or f"a device of compute capability {major}.{minor}"


def _name(device: torch.device) -> str:
    return "the CPU" if device.type == "cpu" else str(device)


def _named(candidate: Candidate) -> str:
    return candidate.config.slug + "".join(f", {name} {value}" for name, value in _order(candidate).items())


def _order(candidate: Candidate) -> dict[str, Any]:
    """Return the order of a candidate's tiles, if a launch may choose it."""
    return asdict(candidate.order) if candidate.config.ordered else {}
