"""Why a call is served as it is: what its tensors allow, which kernels were considered, how near the limit it is."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from cutlass_ops.base import arch
from cutlass_ops.base.errors import UnsupportedError
from cutlass_ops.choose import policies
from cutlass_ops.choose.knowledge import Candidate
from cutlass_ops.choose.policies import Policy
from cutlass_ops.declare.chips import CHIPS
from cutlass_ops.declare.config import Config, Sm90Config
from cutlass_ops.declare.device import Device, Problem
from cutlass_ops.declare.roofline import Roofline, roofline
from cutlass_ops.kinds.table import kind_of
from cutlass_ops.kinds.traits import Traits
from cutlass_ops.run.call import Call, device_of, signature_of, without_modes
from cutlass_ops.run.ops import Op, decide, requested
from cutlass_ops.run.registry import OpSignature


@dataclass(frozen=True)
class Finding:
    """One part of the Tensor Cores' contract, and how the call's tensors fulfil it."""

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
        Slug of the kernel's specification, or ``"PyTorch"``, with the peer's name where tuning allowed it.
    why : str
        The reason, in a sentence.
    contract : tuple of Finding
        What the tensors' types, layouts and addresses lead to.
    candidates : tuple of Candidate
        The kernels considered, the best first; the first is taken.
    roofline : Roofline or None
        What the problem takes at least; None where the chip's peaks are not known.
    peers : dict of str to float
        Microseconds of PyTorch's ways to compute the same, where the tuner measured them.
    device : str
        Name of the device, or ``"the CPU"``.
    microseconds : float or None
        What the call is expected to take on the device, without its launch from Python; None where nothing is known.
    parts : tuple of Explanation
        Where no kernel serves the call and several ops do, one after the other: how each of them is served.

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

    @property
    def is_served(self) -> bool:
        """Whether anything serves the call."""
        return self.served_by != _NOTHING

    @property
    def verdict(self) -> str:
        """What serves the call, how long it is expected to take, and why, in a sentence."""
        m, n, k = self.problem
        time = "" if self.microseconds is None else f", expected to take {self.microseconds:.1f} us"
        return f"{self.op}, M={m} N={n} K={k}, on {self.device} is served by {self.served_by}{time}: {self.why}."

    @property
    def achieved(self) -> float | None:
        """The roofline over the kernel's time: 1 is as fast as the chip allows. None if nothing is known."""
        if self.roofline is None or not self.candidates:
            return None
        return max(self.roofline.compute, self.roofline.memory) / self.candidates[0].microseconds

    def to_json(self) -> dict[str, Any]:
        """Return the explanation as plain values."""
        return {
            "op": self.op,
            "problem": list(self.problem),
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
        m, n, k = self.problem
        time = "" if self.microseconds is None else f", {self.microseconds:.1f} us"
        return f"<explanation of {self.op} {m}x{n}x{k} on {self.device}: {self.served_by}{time}>"

    def __str__(self) -> str:
        """Return the verdict, a table of the best candidates, and the details, as lines of text; so for each part."""
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
        return [*lines, *([f"     and {more} more, which to_json() has"] if more > 0 else [])]

    def _details(self) -> list[str]:
        findings = [*self._limit(), *self.contract]
        return ["", *(f"  {f.name:<10} {f.says}" for f in findings)] if findings else []

    def _limit(self) -> list[Finding]:
        roof, achieved = self.roofline, self.achieved
        if not self.candidates:
            return []
        if roof is None or achieved is None:
            says = "how near that is to the roofline is not known: nothing is known of this chip's peaks"
            return [Finding("limit", says)]
        says = (
            f"at least {roof.compute:.1f} us of compute, {roof.memory:.1f} of memory, {roof.launch:.1f} of launch: "
            f"bound by {roof.bound}; the kernel reaches {100 * achieved:.0f}% of the roofline"
        )
        return [Finding("limit", says)]


def explain(op: object, /, *arguments: Any, **named: Any) -> Explanation:
    """Say how a call would be served, and why, without running or compiling a kernel.

    What a function does to its arguments before its kernel, such as folding gamma into a weight, is done.

    Parameters
    ----------
    op : Op, Epilogue or function
        What is called: a named op such as ``cutlass_ops.gemm_bias_relu``, a decorated function, ``cutlass_ops.gemm``
        with its ``epilogue=``, or another function such as ``cutlass_ops.rmsnorm_gemm``.
    *arguments, **named
        What it is called with.

    Returns
    -------
    Explanation
        Readable as text, and as plain values with ``to_json()``.

    Raises
    ------
    TypeError, ValueError
        If an argument does not fit, as the call itself would.

    Examples
    --------
    >>> a, b = torch.ones(2, 8).bfloat16(), torch.ones(8, 3).bfloat16()
    >>> co.explain(co.gemm, a, b).served_by
    'PyTorch'

    On a GPU the text has the kernel, its expected time, the reason and the alternatives:

    >>> print(co.explain(co.gemm_bias_relu, x, weight.t(), bias))  # doctest: +SKIP
    """
    request = requested(op, *arguments, **named)
    asked, (a, b, *inputs), given = request.op, request.arguments, dict(request.named)
    out, out_dtype = given.pop("out", None), given.pop("out_dtype", None)
    call = asked.checked(a, b, tuple(inputs), given, out, out_dtype)
    if call.is_reference:
        problem = (call.problem.m, call.problem.n, call.problem.k)
        where = "an extent is 0" if 0 in problem else "the tensors are on the CPU"
        why = f"{where}, so that the reference implementation computes it"
        return Explanation(asked.name, problem, "PyTorch", why, device=_name(a.device))
    return explain_call(asked.name, call, device_of(a.device), asked)


@without_modes()
def explain_call(name: str, call: Call, device: Device, op: Op | None = None) -> Explanation:
    """Say how a checked call would be served on a device.

    Parameters
    ----------
    name : str
        The op's name.
    call : Call
        The call; its tensors need no data.
    device : Device
        Where it would run.
    op : Op, optional
        What is called, if that is known: it says which other ops serve the call where no kernel does.
    """
    problem = (call.problem.m, call.problem.n, call.problem.k)
    signature = signature_of(call, device)
    try:
        decision = decide(signature, device, call)
    except UnsupportedError as exc:
        return _otherwise(name, call, device, op, str(exc))
    if decision is None:
        what = f"a {signature.a}, b {signature.b}, d {signature.d}"
        return _otherwise(name, call, device, op, arch.unserved(what, device.capability, device.name))
    policy, ranked = policies.policy(signature, device), decision.candidates()
    count = len(decision.kept)
    why = _BUNDLED.format(count) if decision.bundled else _why(policy, problem, ranked[0], count)
    served_by, peers = decision.spec.slug, dict(policy.peers(problem))
    expected: float | None = ranked[0].microseconds
    if decision.peer is not None:
        served_by, expected = f"PyTorch ({decision.peer})", peers.get(decision.peer)
        why = "measured to be faster than every kernel here, and tuning was told to allow it"
    whole = (call.problem.m, call.problem.n * Traits.of(signature).weights, call.problem.k)
    chip = CHIPS.get(device.name)
    moved = sum(t.numel() * t.element_size() for t in _tensors(call))
    return Explanation(
        name,
        problem,
        served_by,
        why,
        (*_contract(signature, device, ranked[0].config), *_means(signature, ranked[0].config)),
        ranked,
        roofline(whole, moved, chip) if chip else None,
        peers,
        _called(device),
        expected,
    )


def _otherwise(name: str, call: Call, device: Device, op: Op | None, why: str) -> Explanation:
    """Explain a call that no one kernel serves: by the ops that compute it instead, if all of them are served."""
    problem = (call.problem.m, call.problem.n, call.problem.k)
    contract = _contract(signature_of(call, device), device, None)
    parts = tuple(explain_call(part.name, each, device, part) for part, each in op.instead_of(call)) if op else ()
    # Without all of them the call ends in an error, which is that of the first one that is not served.
    unserved = next((part.why for part in parts if not part.is_served), None)
    if op is None or not parts or unserved:
        return Explanation(name, problem, _NOTHING, unserved or why, contract, device=_called(device))
    times = [part.microseconds for part in parts]
    return Explanation(
        name,
        problem,
        f"{_NUMBERS.get(len(parts), str(len(parts)))} GEMMs",
        op.why_instead,
        contract,
        device=_called(device),
        microseconds=sum(t for t in times if t is not None) if None not in times else None,
        parts=parts,
    )


_NOTHING = "nothing"
_NUMBERS = {2: "two", 3: "three"}
_BUNDLED = "chosen when the loaded bundle was made; one of {} kernels that bundles have for this signature"


def _tensors(call: Call) -> list[Tensor]:
    inputs = [x for x in call.problem.inputs.values() if isinstance(x, Tensor)]
    return [call.problem.a, call.problem.b, *inputs, *call.outputs]


def _why(policy: Policy, problem: Problem, best: Candidate, count: int) -> str:
    mine, others = "this epilogue on this kind of device", "another epilogue, element type or device"
    measured_for = mine if policy.own and policy.own.at(problem) else others
    corrected_for = " and ".join(dict.fromkeys(mine if table is policy.own else others for table in policy.tables))
    how = {
        "measured": f"the fastest at exactly this shape, as measured for {measured_for}",
        "interpolated": f"predicted by the cost model, corrected by measurements at similar shapes for {corrected_for}",
        "model": "predicted by the cost model: nothing similar was measured; cutlass_ops.tune() would",
    }[best.source]
    bound = policy.own is not None and policy.own.deterministic
    only = ", all of which add up K as a whole (deterministic tuning)" if bound else ""
    return f"{how}; one of {count} kernels kept for this weight{only}"


def _contract(signature: OpSignature, device: Device, config: Config | None) -> tuple[Finding, ...]:
    major, minor = device.capability
    types = (
        Finding("device", f"compute capability {major}.{minor}, {device.multiprocessors} multiprocessors"),
        Finding("a, b", f"{signature.a} and {signature.b}, accumulated in FP32"),
    )
    if config is None:
        return types
    instruction, stored = kind_of(config).unit(config)
    usual = "by TMA or whole vectors" if signature.d.aligned else f"{signature.d.alignment} elements at a time"
    reason = f": {_misaligned(signature, config)}" if device.has_wgmma and signature.realigns else ""
    return (
        *types,
        Finding("d", f"{signature.d}, stored {stored or usual}"),
        Finding("unit", f"{instruction}{reason}"),
    )


def _means(signature: OpSignature, config: Config) -> tuple[Finding, ...]:
    """Say where means of A's rows are from, if the epilogue takes any."""
    if not signature.epilogue.gathered:
        return ()
    return (Finding("rows of a", kind_of(config).means(config)),)


def _misaligned(signature: OpSignature, config: Config | None) -> str:
    names = [n for n, o in (("a", signature.a), ("b", signature.b)) if not o.aligned]
    copied = isinstance(config, Sm90Config) and config.realign
    return (
        f"{' and '.join(names)} not aligned to 16 bytes in address and leading dimension, which TMA needs"
        + (", so copied to aligned lines first, in workspace; " if copied else "; ")
        + "pad the leading dimension to a multiple of 8 elements"
    )


def _called(device: Device) -> str:
    major, minor = device.capability
    return device.name or f"a device of compute capability {major}.{minor}"


def _name(device: torch.device) -> str:
    return "the CPU" if device.type == "cpu" else str(device)


def _named(candidate: Candidate) -> str:
    return candidate.config.slug + "".join(f", {name} {value}" for name, value in _order(candidate).items())


def _order(candidate: Candidate) -> dict[str, Any]:
    config = candidate.config
    if not isinstance(config, Sm90Config) or not config.ordered:
        return {}
    return {"raster": config.raster, "swizzle": config.swizzle, "by_gpc": config.by_gpc}
