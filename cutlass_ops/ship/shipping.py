"""Catalogues, declared in TOML or Python, and the kernels, choices and tables that they select."""

from __future__ import annotations

import itertools
import os
import runpy
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast, get_args

import torch

from cutlass_ops.artifacts.bundles import Bundles
from cutlass_ops.artifacts.manifest import MAX_VERSION, Choice
from cutlass_ops.base import checked_json, dtypes
from cutlass_ops.base.dtypes import DType
from cutlass_ops.base.errors import ConfigError
from cutlass_ops.base.mma import OPERANDS
from cutlass_ops.choose import dispatch, policies, tables
from cutlass_ops.choose.policies import Policy
from cutlass_ops.choose.tables import Table
from cutlass_ops.declare.config import Config
from cutlass_ops.declare.device import Device
from cutlass_ops.declare.gpus import BY_TARGET
from cutlass_ops.declare.problem import Problem
from cutlass_ops.declare.quantizing import Declaration, declaration_from_json
from cutlass_ops.declare.rows import ROWS
from cutlass_ops.declare.signature import OpSignature
from cutlass_ops.declare.spec import HasGraph, KernelSpec, Major
from cutlass_ops.declare.spelling import INPUT_DTYPES, OPS, epilogue_of, problems_of, weights_of
from cutlass_ops.epilogue.graph import Graph
from cutlass_ops.kinds import legality
from cutlass_ops.operand.call import call_at, signature_of
from cutlass_ops.run.requests import called, foreign, import_object
from cutlass_ops.ship import catalog

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


FORMAT = 1

_FORMS = "a TOML file, a Python file, or MODULE:NAME of a catalogue; `build` and `generate` also take SPEC.json"
# Maximum elements of a matrix: more than any memory holds, and few enough to count bytes in 64 bits.
_MOST = 1 << 48
_MAX_SPEC = 1 << 20  # bytes
_MAX_PATH = 4096  # characters, Linux's limit
# M for entries that give only a weight: any value with TMA's alignment.
_ALIGNED = 1024
# What D may be: whole numbers if A and B are.
_RESULTS = (*dtypes.STORED, dtypes.i8, dtypes.i32)


@dataclass(frozen=True)
class Kernels:
    """Kernels for some ops and problems.

    Attributes
    ----------
    ops : tuple of str or Epilogue
        Named ops such as ``"gemm_bias_relu"`` or ``cutlass_ops.gemm_bias_relu``, epilogues, ``cutlass_ops.gemm`` for
        D = A @ B, or import paths ``"MODULE:NAME"`` of these.
    archs : tuple of str
        Targets: sm_80, sm_86, sm_89, sm_90a. On sm_90a, operands that TMA cannot address get kernels for sm_90.
    dtypes : tuple of str
        Dtypes of A and B.
    layouts : tuple of str
        Majors of A and B: ``"row,col"`` for a weight (N, K) passed as ``weight.t()``.
    out_dtypes : tuple of str
        Dtypes of D, FP8 among them. The default is the dtype of A, and BF16 for FP8.
    input_dtypes : tuple of (str, str)
        Names and dtypes of epilogue inputs that have not D's usual dtype, such as ``("mean_square", "f32")``.
    shapes : tuple of str
        Problems ``"MxNxK"``. Extents may be lists, as in ``"1,16x4096x4096"``. They determine the alignments.
    weights : tuple of str
        Shapes ``"NxK"`` of B, for every M.
    """

    ops: tuple[str | HasGraph, ...]
    archs: tuple[str, ...]
    dtypes: tuple[str, ...] = ("bf16",)
    layouts: tuple[str, ...] = ("row,col",)
    out_dtypes: tuple[str, ...] = ()
    input_dtypes: tuple[tuple[str, str], ...] = ()
    shapes: tuple[str, ...] = ()
    weights: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("archs", "dtypes", "layouts", "out_dtypes", "shapes", "weights"):
            _require_tuple(getattr(self, name), name, str, "strings")
        _require_tuple(self.ops, "ops", object, "names and epilogues")
        _require_tuple(self.input_dtypes, "input_dtypes", tuple, "pairs of strings")
        for pair in self.input_dtypes:
            if len(pair) != 2:
                raise ConfigError(f"input_dtypes must have pairs of name and dtype, not {checked_json.shown(pair)}")
        for name in ("ops", "archs", "dtypes", "layouts"):
            if not getattr(self, name):
                raise ConfigError(f"{name} is empty: at least one is needed")
        if not self.shapes and not self.weights:
            raise ConfigError("neither shapes nor weights are given: give the problems that need kernels")
        _require_known(self.archs, "archs", BY_TARGET)
        _require_dtypes(self.dtypes, "dtypes", OPERANDS)
        _require_dtypes(self.out_dtypes, "out_dtypes", _RESULTS)
        _require_dtypes((dtype for _, dtype in self.input_dtypes), "input_dtypes", dtypes.READ)
        majors = get_args(Major)
        _require_known(self.layouts, "layouts", [f"{a},{b}" for a in majors for b in majors])
        for op in self.ops:
            named = [i.name for i in _graph(op).inputs]
            unknown = [name for name, _ in self.input_dtypes if name not in named]
            if unknown:
                raise ConfigError(
                    f"input_dtypes has {unknown[0]!r}: the inputs of {op} are {', '.join(named) or 'none'}"
                )
        for text in self.shapes:
            problems_of(text)
        for text in self.weights:
            weights_of(text, _ALIGNED)


@dataclass(frozen=True)
class Tuned:
    """A tuning table and its kernels."""

    table: Table  # table from `cutlass-ops tune --folder`
    arch: str  # target of the device that it was measured on
    kernels: int = tables.MAX_KERNELS  # number of kernels to ship, the most useful first

    def __post_init__(self) -> None:
        if not isinstance(self.table, Table):
            raise ConfigError(f"table must be a Table, not {self.table!r}: use cutlass_ops.choose.tables.load")
        _require_known((self.arch,), "arch", BY_TARGET)
        if type(self.kernels) is not int or self.kernels < 1:
            raise ConfigError(f"kernels must be a positive integer, not {checked_json.shown(self.kernels)}")


@dataclass(frozen=True)
class Catalogue:
    """What to ship.

    Attributes
    ----------
    kernels : tuple of Kernels
        Kernels by op and problem.
    tuned : tuple of Tuned
        Kernels by tuning table.
    specs : tuple of KernelSpec
        Kernels by exact declaration.
    version : int, optional
        Version of the bundle, such as 3 or 20261126. Programs that load bundles may require a minimum version.

    Raises
    ------
    ConfigError
        If the catalogue is empty, or a declaration is illegal.
    """

    kernels: tuple[Kernels, ...] = ()
    tuned: tuple[Tuned, ...] = ()
    specs: tuple[KernelSpec, ...] = ()
    version: int | None = None

    def __post_init__(self) -> None:
        _require_tuple(self.kernels, "kernels", Kernels, "Kernels")
        _require_tuple(self.tuned, "tuned", Tuned, "Tuned")
        _require_tuple(self.specs, "specs", KernelSpec, "KernelSpec")
        if not (self.kernels or self.tuned or self.specs):
            raise ConfigError("the catalogue is empty: it has no [[kernels]], no [[tables]] and no specs")
        if self.version is not None:
            checked_json.integer(self.version, "version", 1, MAX_VERSION)
        for spec in self.specs:
            legality.require_legal(spec)


@dataclass
class Shipment:
    """The contents that a catalogue selects."""

    # All kernels, in the order of their first use in the catalogue.
    specs: dict[KernelSpec, None] = field(default_factory=dict)
    choices: dict[OpSignature, tuple[Choice, ...]] = field(default_factory=dict)  # which kernel runs which problem
    tables: tuple[Table, ...] = ()  # tuning tables to include


def default() -> Catalogue:
    """Return the default catalogue: one kernel per named op, element type and target, as in ``generated/``."""
    return Catalogue(specs=tuple(entry.spec for entry in catalog.default()))


def shipment(catalogue: Catalogue) -> Shipment:
    """Return a catalogue's kernels and choices. Nothing is compiled."""
    found = Shipment(dict.fromkeys(catalogue.specs), tables=tuple(t.table for t in catalogue.tuned))
    needs: dict[tuple[OpSignature, Device], _Need] = {}
    # What is shipped must not depend on bundles that are loaded here.
    with Bundles.aside():
        for kernels, op in ((each, op) for each in catalogue.kernels for op in each.ops):
            with _said_of(op if isinstance(op, str) else getattr(op, "name", repr(op))):
                for signature, device, problem, whole in _calls(kernels, op):
                    need = needs.setdefault((signature, device), _Need(policies.policy(signature, device)))
                    need.add(problem, whole)
        for tuned in catalogue.tuned:
            device = Device(BY_TARGET[tuned.arch].capability, tuned.table.multiprocessors, tuned.table.device)
            need = needs.setdefault((tuned.table.signature, device), _Need(_policy(tuned.table, device)))
            need.add_table(tuned)
        for (signature, device), need in needs.items():
            found.specs |= {device.spec(signature, config): None for config in need.configs}
            found.choices[signature] = (*found.choices.get(signature, ()), *need.choices())
    return found


class _Need:
    """A catalogue's kernels and choices for one signature on one device."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.configs: dict[Config, None] = {}
        self._rows: dict[tuple[int, int], set[int]] = {}

    def add(self, problem: Problem, whole: bool) -> None:
        m, n, k = problem.extents
        policy = self._policy
        if not policy.kernels:
            signature, device = policy.signature, policy.device
            what = f"a {signature.a}, b {signature.b}, d {signature.d}"
            raise ConfigError(dispatch.unserved(what, signature, device, device.name))
        chosen = policies.kept(policy, n, k, problem.count) if whole else (policy.choose(problem).config,)
        self.configs |= dict.fromkeys(chosen)
        self._rows.setdefault((n, k), set()).add(m)

    def add_table(self, tuned: Tuned) -> None:
        table = tuned.table if tuned.table.kernels else tuned.table.select()
        self.configs |= dict.fromkeys(table.kernels[: tuned.kernels])
        for point in table.points:
            m, n, k = point.problem.extents
            self._rows.setdefault((n, k), set()).add(m)

    def choices(self) -> Iterator[Choice]:
        """Yield the choices for each weight among the shipped kernels."""
        before = self._policy
        policy = Policy.of(before.tables, before.signature, before.device, self.configs)
        for (n, k), rows in self._rows.items():
            best = ((m, policy.best(Problem(m, n, k))) for m in sorted({*ROWS, *rows}))
            # More rows than any kernel can be launched with are no choice of the bundle's.
            found = [(m, candidate.ordered) for m, candidate in best if candidate is not None]
            if not found:
                policy.choose(Problem(min(rows), n, k))  # raises an error with the reason
            # If consecutive values of M get the same configuration, keep only the last.
            last = [row for row, after in itertools.pairwise(found) if row[1] != after[1]]
            yield Choice(policy.device.capability, n, k, (*last, found[-1]))


def _policy(table: Table, device: Device) -> Policy:
    signature = table.signature
    usual = policies.policy(signature, device)
    return Policy.of((table, *usual.tables), signature, device, (*table.kernels, *usual.kernels))


def _calls(kernels: Kernels, op: str | HasGraph) -> Iterator[tuple[OpSignature, Device, Problem, bool]]:
    """Yield (signature, device, problem, whether for every M) of an entry's calls of an op."""
    problems = [(p, False) for text in kernels.shapes for p in problems_of(text)]
    problems += [(Problem(_ALIGNED, n, k), True) for text in kernels.weights for n, k in weights_of(text, _ALIGNED)]
    inputs = {**(INPUT_DTYPES.get(op, {}) if isinstance(op, str) else {}), **dict(kernels.input_dtypes)}
    for dtype in kernels.dtypes:
        for layout in kernels.layouts:
            a, _, b = layout.partition(",")
            for out in kernels.out_dtypes or (None,):
                for target in kernels.archs:
                    for problem, whole in problems:
                        graph = _graph(op, dtype)
                        call = call_at(graph, problem, dtype, cast(Major, a), cast(Major, b), _torch(out), inputs)
                        yield signature_of(call, BY_TARGET[target]), BY_TARGET[target], problem, whole


def _torch(name: str | None) -> torch.dtype | None:
    return None if name is None else cast(torch.dtype, getattr(torch, dtypes.dtype(name, _RESULTS).torch_name))


# ---- Reading -----------------------------------------------------------------------------------------------------


def load(name: str) -> Catalogue:
    """Read a catalogue.

    ``name`` is a TOML file, a Python file that defines ``catalogue``, or an import path ``MODULE:NAME``.
    """
    path = Path(name)
    if path.suffix == ".toml":
        try:
            data = _parsed(path.read_bytes())
            with _importing_from(path.absolute().parent):
                return _catalogue(data, path.absolute().parent)
        except ConfigError as exc:
            raise ConfigError(f"{path.absolute()}: {checked_json.said(exc)}") from None
    if path.suffix == ".py":
        path.open("rb").close()  # an unreadable file is an OSError, not a ConfigError
        with _importing_from(path.absolute().parent), foreign(name):
            defined = runpy.run_path(name)
        if "catalogue" not in defined:
            raise ConfigError(
                f"{name} defines no `catalogue`: set catalogue = Catalogue(...) of cutlass_ops.ship.shipping there, "
                "which lists ops or epilogues and their problems"
            )
        found = defined["catalogue"]
    elif os.path.isdir(name):
        raise ConfigError(f"{name} is a folder: use {_FORMS}")
    elif os.path.exists(name):
        raise ConfigError(f"{name} is a file of another kind: use {_FORMS}")
    else:
        with _importing_from(Path.cwd()):
            found = import_object(name, _FORMS)
    if not isinstance(found, Catalogue):
        what = "`catalogue` in " if path.suffix == ".py" else ""
        raise ConfigError(f"{what}{name} must be a cutlass_ops.ship.shipping.Catalogue, not {type(found).__name__}")
    return found


def _parsed(text: bytes) -> dict[str, Any]:
    try:
        return dict(tomllib.loads(text.decode()))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as exc:
        raise ConfigError(str(exc)) from None
    except (ValueError, RecursionError):  # thousands of digits or brackets
        raise ConfigError("it has a number that is too long, or is nested too deeply") from None


def _catalogue(data: Mapping[str, Any], folder: Path) -> Catalogue:
    _require_fields(data, "the catalogue", required=("format",), optional=("version", "kernels", "tables", "specs"))
    if type(data["format"]) is not int or data["format"] != FORMAT:
        raise ConfigError(f"format is {checked_json.shown(data['format'])}: this version reads {FORMAT}")
    return Catalogue(
        kernels=tuple(_each(data, "kernels", _kernels)),
        tuned=tuple(_each(data, "tables", lambda entry: _tuned(entry, folder))),
        specs=tuple(read_spec(folder / _path(name, "specs")) for name in _texts(data.get("specs", []), "specs")),
        version=data.get("version"),
    )


def _each(data: Mapping[str, Any], name: str, read: Callable[[Mapping[str, Any]], Any]) -> Iterator[Any]:
    entries = data.get(name, [])
    if not isinstance(entries, list) or not all(isinstance(e, dict) for e in entries):
        raise ConfigError(f"{name} must be an array of tables: write [[{name}]] before each")
    for number, entry in enumerate(entries, 1):
        with _said_of(f"[[{name}]] number {number}"):
            yield read(entry)


@contextmanager
def _said_of(what: str) -> Iterator[None]:
    try:
        yield
    except ConfigError as exc:
        raise ConfigError(f"{what}: {exc}") from None


def _kernels(entry: Mapping[str, Any]) -> Kernels:
    names = ("dtypes", "layouts", "out_dtypes", "input_dtypes", "shapes", "weights")
    _require_fields(entry, "it", required=("ops", "archs"), optional=names)
    lists = {name: tuple(_texts(value, name)) for name, value in entry.items() if name != "input_dtypes"}
    inputs = entry.get("input_dtypes", {})
    if not isinstance(inputs, dict) or not all(isinstance(dtype, str) for dtype in inputs.values()):
        raise ConfigError(f'input_dtypes must be a table such as {{ NAME = "f32" }}, not {checked_json.shown(inputs)}')
    return Kernels(**lists, input_dtypes=tuple(inputs.items()))


def _tuned(entry: Mapping[str, Any], folder: Path) -> Tuned:
    _require_fields(entry, "it", required=("path", "arch"), optional=("kernels",))
    path, arch = _path(entry["path"], "path"), checked_json.text(entry["arch"], "arch")
    try:
        table = tables.load(folder / path)
    except OSError as exc:
        raise ConfigError(f"{path} cannot be read: {exc.strerror}") from None
    return Tuned(table, arch, entry.get("kernels", tables.MAX_KERNELS))


def _path(value: object, name: str) -> str:
    return checked_json.text(value, name, _MAX_PATH, ascii_only=False)


def read_declaration(path: Path) -> Declaration:
    """Read the declaration of any kernel from a JSON file."""
    try:
        with path.open("rb") as file:
            return checked_json.read(file.read(_MAX_SPEC + 1), "it", _MAX_SPEC, declaration_from_json)
    except ConfigError as exc:
        raise ConfigError(f"{path}: {checked_json.said(exc)}") from None


def read_spec(path: Path) -> KernelSpec:
    """Read the declaration of a GEMM's kernel from a JSON file."""
    found = read_declaration(path)
    if not isinstance(found, KernelSpec):
        raise ConfigError(f"{path}: {found.slug} is not a GEMM kernel, and a catalogue has only these: leave it out")
    return found


def graph_named(name: str, dtype: str = "bf16") -> HasGraph:
    """Return the epilogue of a named op for a dtype of A and B, or the epilogue at an import path."""
    known = epilogue_of(name, dtype)
    if known is not None:
        return known
    found = import_object(name, f"{', '.join(OPS)}, or MODULE:NAME of an epilogue")
    return _epilogue(found, name)


def _epilogue(found: object, name: object) -> HasGraph:
    try:
        return called(found)
    except TypeError as exc:
        what = type(found).__name__
        raise ConfigError(
            f"{name} is of the type {what}: name a function decorated with @cutlass_ops.epilogue"
        ) from exc


def _graph(op: str | HasGraph, dtype: str = "bf16") -> Graph:
    return (graph_named(op, dtype) if isinstance(op, str) else _epilogue(op, repr(op))).graph


@contextmanager
def _importing_from(folder: Path) -> Iterator[None]:
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        if str(folder) in sys.path:
            sys.path.remove(str(folder))


def _require_fields(
    data: Mapping[str, Any], what: str, *, required: Iterable[str], optional: Iterable[str] = ()
) -> None:
    missing = sorted(set(required) - set(data))
    unknown = sorted(set(data) - set(required) - set(optional))
    if missing:
        raise ConfigError(f"{what} has no {', '.join(missing)}")
    if unknown:
        raise ConfigError(f"{what} has no field {unknown[0]!r}: use {', '.join((*required, *optional))}")


def _texts(value: object, name: str) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(v, str) for v in value):
        raise ConfigError(f'{name} must be a list of strings such as ["..."], not {checked_json.shown(value)}')
    return value


def _require_tuple(values: object, name: str, kind: type, words: str) -> None:
    if not isinstance(values, tuple) or not all(isinstance(v, kind) for v in values):
        raise ConfigError(f"{name} must be a tuple of {words}, not {checked_json.shown(values)}")


def _require_dtypes(values: Iterable[str], name: str, known: tuple[DType, ...]) -> None:
    for value in values:
        if dtypes.NAMES.get(value.lower().removeprefix("torch.")) not in known:
            raise ConfigError(f"{name} has {value!r}: use {', '.join(map(str, known))}")


def _require_known(values: Iterable[str], name: str, known: Iterable[str]) -> None:
    unknown = [value for value in values if value not in known]
    if unknown:
        raise ConfigError(f"{name} has {unknown[0]!r}: use {', '.join(known)}")
