"""What to ship: a catalogue, declared in TOML or in Python, and the kernels, choices and tables that it means."""

from __future__ import annotations

import importlib
import itertools
import runpy
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast, get_args

import torch

from cutlass_ops.artifacts.bundles import Bundles
from cutlass_ops.artifacts.manifest import MAX_VERSION, Choice
from cutlass_ops.base import arch, checked_json, dtypes
from cutlass_ops.base.errors import ConfigError, CutlassOpsError
from cutlass_ops.choose import policies, tables
from cutlass_ops.choose.policies import ROWS, Policy
from cutlass_ops.choose.tables import Table
from cutlass_ops.declare.config import Config
from cutlass_ops.declare.device import Device
from cutlass_ops.declare.gpus import BY_TARGET
from cutlass_ops.declare.problem import Problem
from cutlass_ops.declare.signature import OpSignature
from cutlass_ops.declare.spec import HasGraph, KernelSpec, Major
from cutlass_ops.declare.spelling import INPUT_DTYPES, OPS, epilogue_of, problems_of, weights_of
from cutlass_ops.epilogue.graph import Graph
from cutlass_ops.kinds import legality
from cutlass_ops.run.call import call_at, signature_of
from cutlass_ops.run.ops import called
from cutlass_ops.ship import catalog

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


FORMAT = 1

_DTYPES = ("bf16", "f16", "f32")
# Elements of a matrix: more than any memory holds, and few enough to count bytes in 64 bits.
_MOST = 1 << 48
_MAX_SPEC = 1 << 20  # bytes
_MAX_PATH = 4096  # characters, as Linux has it
# Rows of A where a weight is given alone: any that TMA can address.
_ALIGNED = 1024


@dataclass(frozen=True)
class Kernels:
    """Kernels for some ops and problems.

    Attributes
    ----------
    ops : tuple of str or Epilogue
        Named ops such as ``"gemm_bias_relu"`` or ``cutlass_ops.gemm_bias_relu``, epilogues, ``cutlass_ops.gemm`` for
        D = A @ B, or import paths ``"MODULE:NAME"`` of such.
    archs : tuple of str
        Targets that stand for devices: sm_80, sm_86, sm_89, sm_90a. On sm_90a, operands that TMA cannot address get
        kernels for sm_90.
    dtypes : tuple of str
        Of A and B.
    layouts : tuple of str
        Majors of A and B, ``"row,col"`` for a weight (N, K) passed as ``weight.t()``.
    out_dtypes : tuple of str
        Of D; by default that of A.
    input_dtypes : tuple of (str, str)
        Dtypes of the epilogue's inputs by name, where they are not that of A, such as ``("mean_square", "f32")``.
    shapes : tuple of str
        Problems ``"MxNxK"``; extents may be lists, as in ``"1,16x4096x4096"``. Their alignments follow from them.
    weights : tuple of str
        B's extents ``"NxK"``, for every number of rows.
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
            _require_tuple(getattr(self, name), name, str, "texts")
        _require_tuple(self.ops, "ops", object, "names and epilogues")
        _require_tuple(self.input_dtypes, "input_dtypes", tuple, "pairs of texts")
        for pair in self.input_dtypes:
            if len(pair) != 2:
                raise ConfigError(f"input_dtypes has {checked_json.shown(pair)}: pairs of name and dtype are needed")
        for name in ("ops", "archs", "dtypes", "layouts"):
            if not getattr(self, name):
                raise ConfigError(f"{name} is empty: at least one is needed")
        if not self.shapes and not self.weights:
            raise ConfigError("neither shapes nor weights are given: say for which problems kernels are needed")
        _require_known(self.archs, "archs", BY_TARGET)
        _require_dtypes(self.dtypes, "dtypes", ("bf16", "f16"))
        _require_dtypes(self.out_dtypes, "out_dtypes", _DTYPES)
        _require_dtypes((dtype for _, dtype in self.input_dtypes), "input_dtypes", _DTYPES)
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
    """Kernels that a tuning table names, and the table.

    Attributes
    ----------
    table : Table
        From ``cutlass-ops tune --folder``.
    arch : str
        Target that stands for the device it was measured on.
    kernels : int
        How many of its kernels, the most useful first.
    """

    table: Table
    arch: str
    kernels: int = tables.MAX_KERNELS

    def __post_init__(self) -> None:
        if not isinstance(self.table, Table):
            raise ConfigError(f"table is {self.table!r}: load one with cutlass_ops.choose.tables.load")
        _require_known((self.arch,), "arch", BY_TARGET)
        if type(self.kernels) is not int or self.kernels < 1:
            raise ConfigError(f"kernels is {checked_json.shown(self.kernels)}: a positive integer is needed")


@dataclass(frozen=True)
class Catalogue:
    """What to ship.

    Attributes
    ----------
    kernels : tuple of Kernels
        By ops and problems.
    tuned : tuple of Tuned
        By tuning tables.
    specs : tuple of KernelSpec
        Exact declarations.
    version : int, optional
        Of the bundle, such as 3 or 20261126: what loads bundles may ask for a version that it must have at least.

    Raises
    ------
    ConfigError
        If it is empty, or a declaration is illegal.
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
    """What a catalogue means.

    Attributes
    ----------
    specs : dict of KernelSpec to None
        All kernels, in the order in which the catalogue needs them first.
    choices : dict of OpSignature to tuple of Choice
        Which of them serve which problems.
    tables : tuple of Table
        What travels along.
    """

    specs: dict[KernelSpec, None] = field(default_factory=dict)
    choices: dict[OpSignature, tuple[Choice, ...]] = field(default_factory=dict)
    tables: tuple[Table, ...] = ()


def default() -> Catalogue:
    """Return the default catalogue: one kernel for each named op, element type and target, as in ``generated/``."""
    return Catalogue(specs=tuple(entry.spec for entry in catalog.default()))


def shipment(catalogue: Catalogue) -> Shipment:
    """Return the kernels that a catalogue means, and which of them serves what; nothing is compiled.

    Raises
    ------
    ConfigError
        If no kernel serves an entry of it.
    """
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
    """What a catalogue needs for one signature on one kind of device."""

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
            raise ConfigError(arch.unserved(what, device.capability, device.name))
        chosen = policies.kept(policy, n, k) if whole else (policy.choose(problem).config,)
        self.configs |= dict.fromkeys(chosen)
        self._rows.setdefault((n, k), set()).add(m)

    def add_table(self, tuned: Tuned) -> None:
        table = tuned.table if tuned.table.kernels else tuned.table.select()
        self.configs |= dict.fromkeys(table.kernels[: tuned.kernels])
        for point in table.points:
            m, n, k = point.problem.extents
            self._rows.setdefault((n, k), set()).add(m)

    def choices(self) -> Iterator[Choice]:
        """Yield what is chosen for each weight among the kernels that are shipped."""
        before = self._policy
        policy = Policy.of(before.tables, before.signature, before.device, self.configs)
        for (n, k), rows in self._rows.items():
            best = ((m, policy.best(Problem(m, n, k))) for m in sorted({*ROWS, *rows}))
            # More rows than any kernel can be launched with are no choice of the bundle's.
            found = [(m, candidate.ordered) for m, candidate in best if candidate is not None]
            if not found:
                policy.choose(Problem(min(rows), n, k))  # says why, in its error
            # Of numbers of rows that follow each other and get the same, the last one stands for all.
            last = [row for row, after in itertools.pairwise(found) if row[1] != after[1]]
            yield Choice(policy.device.capability, n, k, (*last, found[-1]))


def _policy(table: Table, device: Device) -> Policy:
    signature = table.signature
    usual = policies.policy(signature, device)
    return Policy.of((table, *usual.tables), signature, device, (*table.kernels, *usual.kernels))


def _calls(kernels: Kernels, op: str | HasGraph) -> Iterator[tuple[OpSignature, Device, Problem, bool]]:
    """Yield signature, device and problem of an op's calls that an entry means, and whether for any number of rows."""
    problems = [(p, False) for text in kernels.shapes for p in problems_of(text)]
    problems += [(Problem(_ALIGNED, n, k), True) for text in kernels.weights for n, k in weights_of(text, _ALIGNED)]
    inputs = {**(INPUT_DTYPES.get(op, {}) if isinstance(op, str) else {}), **dict(kernels.input_dtypes)}
    for dtype in kernels.dtypes:
        for layout in kernels.layouts:
            a, _, b = layout.partition(",")
            for out in kernels.out_dtypes or (dtype,):
                for target in kernels.archs:
                    for problem, whole in problems:
                        graph = _graph(op, dtype)
                        call = call_at(graph, problem, dtype, cast(Major, a), cast(Major, b), _torch(out), inputs)
                        yield signature_of(call, BY_TARGET[target]), BY_TARGET[target], problem, whole


def _torch(name: str) -> torch.dtype:
    return cast(torch.dtype, getattr(torch, dtypes.dtype(name).torch_name))


# ---- Reading -----------------------------------------------------------------------------------------------------


def load(name: str) -> Catalogue:
    """Read a catalogue.

    Parameters
    ----------
    name : str
        A TOML file, a Python file that defines ``catalogue``, or an import path ``MODULE:NAME`` of a
        :class:`Catalogue`. Import paths and files within a file are looked for in its folder first.

    Raises
    ------
    ConfigError
        If it is none; the message says where and why.
    OSError
        If the file cannot be read.
    """
    path = Path(name)
    if path.suffix == ".toml":
        return _from_toml(path.absolute())
    if path.suffix == ".py":
        path.open("rb").close()  # that it cannot be read is no error in it
        with _importing_from(path.absolute().parent), _foreign(name):
            found = runpy.run_path(name).get("catalogue")
    else:
        with _importing_from(Path.cwd()):
            found = import_object(name, "a TOML file, a Python file, or MODULE:NAME of a catalogue")
    if not isinstance(found, Catalogue):
        raise ConfigError(f"{name} is not a cutlass_ops.ship.shipping.Catalogue: it is {type(found).__name__}")
    return found


def _from_toml(path: Path) -> Catalogue:
    try:
        data = _parsed(path.read_bytes())
        with _importing_from(path.parent):
            return _catalogue(data, path.parent)
    except ConfigError as exc:
        raise ConfigError(f"{path}: {checked_json.said(exc)}") from None


def _parsed(text: bytes) -> dict[str, Any]:
    try:
        return dict(tomllib.loads(text.decode()))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as exc:
        raise ConfigError(str(exc)) from None
    except (ValueError, RecursionError):  # thousands of digits, or of brackets
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
        raise ConfigError(f"{name} are tables of their own: write [[{name}]] before each")
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
        raise ConfigError(f'input_dtypes is {checked_json.shown(inputs)}: write {{ NAME = "f32" }}')
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


def read_spec(path: Path) -> KernelSpec:
    """Read a declaration from a JSON file.

    Raises
    ------
    ConfigError
        If it is none; the message names the file.
    OSError
        If it cannot be read.
    """
    try:
        with path.open("rb") as file:
            return checked_json.read(file.read(_MAX_SPEC + 1), "it", _MAX_SPEC, KernelSpec.from_json)
    except ConfigError as exc:
        raise ConfigError(f"{path}: {checked_json.said(exc)}") from None


def graph_named(name: str, dtype: str = "bf16") -> HasGraph:
    """Return a named op's epilogue for a dtype of A and B, or what an import path names.

    Raises
    ------
    ConfigError
        If there is no such op, or the path leads to no epilogue.
    """
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
        raise ConfigError(f"{name} is a {what}: it must be decorated with @cutlass_ops.epilogue") from exc


def import_object(name: str, instead: str) -> object:
    """Return what an import path ``MODULE:NAME`` names.

    Raises
    ------
    ConfigError
        If it names nothing; ``instead`` says what else could stand there.
    """
    module, colon, attribute = name.partition(":")
    if not colon:
        raise ConfigError(f"{name!r} is not known here: use {instead}")
    with _foreign(name):
        return cast(object, getattr(importlib.import_module(module), attribute))


@contextmanager
def _foreign(name: str) -> Iterator[None]:
    """Have whatever a user's own module raises, which may be anything, end in one message with its place."""
    try:
        yield
    except (CutlassOpsError, ImportError, AttributeError) as exc:
        raise ConfigError(f"{name} cannot be imported: {exc}") from exc
    except (Exception, SystemExit) as exc:
        last = traceback.extract_tb(exc.__traceback__)[-1]
        where = "" if isinstance(exc, SyntaxError) else f" ({last.filename}, line {last.lineno})"
        raise ConfigError(f"{name} cannot be imported: {type(exc).__name__}: {exc}{where}") from exc


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
        raise ConfigError(f'{name} is {checked_json.shown(value)}: a list of texts is needed, such as ["..."]')
    return value


def _require_tuple(values: object, name: str, kind: type, words: str) -> None:
    if not isinstance(values, tuple) or not all(isinstance(v, kind) for v in values):
        raise ConfigError(f"{name} is {checked_json.shown(values)}: a tuple of {words} is needed")


def _require_dtypes(values: Iterable[str], name: str, known: Iterable[str]) -> None:
    for value in values:
        try:
            found = dtypes.dtype(value).name
        except ValueError:
            found = value
        if found not in known:
            raise ConfigError(f"{name} has {value!r}: use {', '.join(known)}")


def _require_known(values: Iterable[str], name: str, known: Iterable[str]) -> None:
    unknown = [value for value in values if value not in known]
    if unknown:
        raise ConfigError(f"{name} has {unknown[0]!r}: use {', '.join(known)}")
