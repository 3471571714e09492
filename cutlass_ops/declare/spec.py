"""The declaration of one kernel: operand types, epilogue and configuration, frozen and hashable."""

from __future__ import annotations

import hashlib
import json
import re
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, Protocol, cast, get_args

from cutlass_ops.base import arch, checked_json
from cutlass_ops.base.dtypes import (
    ALL,
    DECLARED,
    FP8,
    INTEGERS,
    NAMES,
    REDUCED,
    UNREAD,
    DType,
    bf16,
    dtype,
    f32,
    f64,
    i32,
    i64,
)
from cutlass_ops.base.errors import ConfigError
from cutlass_ops.base.frozen import KEPT_HASH, hashed_once, plain_field
from cutlass_ops.base.mma import MmaSpec, mma_of
from cutlass_ops.declare.config import CONFIGS, Config, config_from_json, config_to_json
from cutlass_ops.declare.form import DENSE, Form
from cutlass_ops.declare.order import USUAL_ORDER, TileOrder
from cutlass_ops.epilogue.graph import Graph
from cutlass_ops.epilogue.nodes import PARTS, Input, Kind, Output

Major = Literal["row", "col"]

# Compiled when they are first needed, as re does with texts.
_OPERAND = (
    r"(?P<dtype>[a-z0-9]+)(\.(?P<major>row|col))?(\.align(?P<alignment>[0-9]{1,4}))?"
    r"(\.blocks(?P<rows>[1-9][0-9]{0,4})x(?P<columns>[1-9][0-9]{0,4}))?(?P<promoted>\.promoted)?"
)
_INTEGERS = tuple(t.name for t in INTEGERS)
_MAJOR = r"\.(row|col)"
_FORM = "DTYPE[.row|.col][.alignN][.blocksRxC][.promoted], such as 'bf16.row'"


@dataclass(frozen=True, repr=False)
class Operand:
    """Type of a tensor: element type, major, alignment and scaling.

    Attributes
    ----------
    dtype : DType
        Element type.
    major : str
        ``"row"`` if elements of a row are adjacent in memory, ``"col"`` if elements of a column are.
    alignment : int
        Alignment of every line in elements, a power of two of at most 16 bytes: it divides the address, every leading
        dimension and the extent along which the tensor is contiguous. TMA needs 16 bytes.
    scaling : tuple of (int, int), optional
        Rows and columns of a block of elements that share one FP32 scale, which the main loop applies; None by default.
        Scales for the whole tensor, for rows or for columns are inputs of the epilogue instead.
    promoted : bool
        Whether sums of FP8 products must be added up in FP32 after every 128 elements along K. Set it for both A and B
        or for neither. Block scales imply it.

    Raises
    ------
    ConfigError
        If a field has the wrong type, or the alignment is not positive.

    Examples
    --------
    >>> weight = co.Operand.of("bf16.col")
    >>> weight.major, weight.alignment, weight.aligned
    ('col', 8, True)
    >>> co.Operand.of("f16.row.align2").aligned
    False
    """

    dtype: DType
    major: Major
    alignment: int
    scaling: tuple[int, int] | None = None
    promoted: bool = False

    def __post_init__(self) -> None:
        if type(self.alignment) is not int:
            plain_field(self, "alignment")
        if self.dtype not in (*DECLARED, *INTEGERS):
            said = f"dtype must be an element type, not {reprlib.repr(self.dtype)}"
            raise ConfigError(f"{said}: use Operand.of('bf16.row'), or the dtype of another operand")
        if self.major not in get_args(Major):
            raise ConfigError(f"major must be 'row' or 'col', not {reprlib.repr(self.major)}")
        if type(self.alignment) is not int or self.alignment < 1:
            raise ConfigError(f"alignment must be a positive number of elements, not {self.alignment!r}")
        if self.scaling is not None and not _is_block(self.scaling):
            raise ConfigError(f"scaling is None or the (rows, columns) of a block, not {self.scaling!r}")
        if not isinstance(self.promoted, bool):
            raise ConfigError(f"promoted must be True or False, not {reprlib.repr(self.promoted)}")

    @classmethod
    def of(cls, text: str | DType | Operand) -> Operand:
        """Parse ``"bf16.row"``, ``"f16.col.align2"``, ``"bf16.row.blocks1x128"`` or ``"f32"``.

        The alignment defaults to 16 bytes.

        Raises
        ------
        TypeError
            If it is not a string, a :class:`DType` or an operand.
        ValueError
            If the text has another form, or an unknown dtype.
        """
        if isinstance(text, Operand):
            return text
        if isinstance(text, DType):
            return cls(text, "row", text.tma_alignment)
        if not isinstance(text, str):
            raise TypeError(f"an operand must be a text of the form {_FORM}, not {text!r}")
        match = re.fullmatch(_OPERAND, text)
        if match is None:
            raise ValueError(f"operand {checked_json.shown(text)} is not of the form {_FORM}")
        element = dtype(match["dtype"], (*DECLARED, *INTEGERS) if match["dtype"] in _INTEGERS else DECLARED)
        alignment = int(match["alignment"]) if match["alignment"] else element.tma_alignment
        scaling = (int(match["rows"]), int(match["columns"])) if match["rows"] else None
        return cls(element, cast(Major, match["major"] or "row"), alignment, scaling, bool(match["promoted"]))

    @property
    def aligned(self) -> bool:
        """Whether TMA can address the operand."""
        return self.dtype.bytes_of(self.alignment) >= arch.TMA_ALIGNMENT_BYTES

    @property
    def transposed(self) -> Operand:
        """The same memory seen as the transposed matrix."""
        scaling = None if self.scaling is None else (self.scaling[1], self.scaling[0])
        return Operand(self.dtype, "col" if self.major == "row" else "row", self.alignment, scaling, self.promoted)

    def __str__(self) -> str:
        tail = "" if self.aligned else f".align{self.alignment}"
        tail += "" if self.scaling is None else ".blocks{}x{}".format(*self.scaling)
        tail += ".promoted" if self.promoted else ""
        return f"{self.dtype}.{self.major}{tail}"

    def __repr__(self) -> str:
        return f"Operand.of({str(self)!r})"


def _is_block(value: object) -> bool:
    return isinstance(value, tuple) and len(value) == 2 and all(type(extent) is int and extent > 0 for extent in value)


def copied(a: Operand, b: Operand) -> tuple[bool, bool]:
    """Return whether A, and whether B, must be copied before a kernel that loads by TMA can multiply them.

    That is an operand that does not begin, with all its lines, at multiples of 16 bytes, as TMA needs; and one whose
    lines do not lie along K, of types that the instruction reads along K only. Copies are aligned, and of such types
    lie along K.
    """
    only = _along_k(a, b)
    return not a.aligned or (only and a.major != "row"), not b.aligned or (only and b.major != "col")


def _along_k(a: Operand, b: Operand) -> bool:
    mma = mma_of(a.dtype, b.dtype)
    unit = None if mma is None else mma.by_tma
    return unit is not None and unit.k_major_only


def loaded(a: Operand, b: Operand) -> tuple[Operand, Operand]:
    """Return A and B as TMA loads them: as they are, or their copies."""
    pairs = zip((a, b), copied(a, b), strict=True)
    of_a, of_b = (replace(x, alignment=x.dtype.tma_alignment) if is_copied else x for x, is_copied in pairs)
    return (replace(of_a, major="row"), replace(of_b, major="col")) if _along_k(a, b) else (of_a, of_b)


class HasGraph(Protocol):
    """Anything with an epilogue graph: a traced function, or a wrapper of one."""

    @property
    def graph(self) -> Graph:
        """The traced epilogue."""
        ...


class _Types(tuple[Operand, ...]):
    """Types of an epilogue's inputs or outputs, in their order.

    They know of what they are, since dataclasses.replace passes them on, perhaps beside another epilogue.
    """

    kinds: Mapping[str, Kind]

    @classmethod
    def of(cls, named: Mapping[str, tuple[Kind, Operand]]) -> _Types:
        found = cls(operand for _, operand in named.values())
        found.kinds = {name: kind for name, (kind, _) in named.items()}
        return found

    def beside(self, usual: Mapping[str, tuple[Kind, Operand]]) -> dict[str, Operand]:
        """Return the types by name, as far as they do not belong to another kind of a name."""
        named = zip(self.kinds.items(), self, strict=True)
        return {name: operand for (name, kind), operand in named if name not in usual or usual[name][0] is kind}


@hashed_once
@dataclass(frozen=True, init=False, repr=False)
class KernelSpec:
    """A declaration of one kernel: D = epilogue(A @ B, inputs), with everything that affects its code.

    Parameters
    ----------
    a, b, d : str or Operand
        Types of A (M, K), B (K, N) and D (M, N), such as ``"bf16.row"``.
    epilogue : Graph or traced function
        Function of the FP32 accumulator and the inputs.
    config : Config
        Tile shapes and schedule, such as an :class:`Sm90Config`.
    inputs, outputs : mapping of str to str or Operand, optional
        Types of the epilogue's inputs and further outputs, by name. By default, inputs have D's dtype (a scalar FP32, a
        product B's type), further tiles D's type, and reductions FP32. Inputs are never FP8 or integers: with such a D,
        they are BF16 by default.
    target : str, optional
        Target of the machine code; by default sm_90a for an :class:`Sm90Config`, and sm_80 for the others.
    order : TileOrder, optional
        The order in which calls of this kernel visit its tiles. It is a launch argument: specs that differ only in it
        are equal.
    form : str or Form
        ``"dense"`` is one GEMM. ``"batched"`` is one for each batch of A (..., M, K), B (..., K, N) and D (..., M, N).
        ``"grouped"`` and ``"ragged_k"`` are for groups of rows (docs/grouped.md).

    Raises
    ------
    TypeError
        If an argument has the wrong type. The message names it and the right type.
    ValueError
        If an operand or target cannot be parsed, a matrix has no major, ``inputs`` or ``outputs`` has a name that the
        epilogue does not have, or the configuration does not support the order.

    Examples
    --------
    >>> @co.epilogue
    ... def bias_relu(acc, bias: co.Row):
    ...     return co.e.relu(acc + bias)
    >>> config = co.Sm90Config(co.ThreadblockShape(128, 128, 64), co.ClusterShape(2, 1))
    >>> spec = co.KernelSpec(a="bf16.row", b="bf16.col", d="bf16.row", epilogue=bias_relu, config=config)
    >>> spec.target, co.check(spec)
    ('sm_90a', ())
    >>> co.KernelSpec.from_json(spec.to_json()) == spec
    True
    >>> import dataclasses
    >>> str(dataclasses.replace(spec, d="f32.row").inputs[0])  # what is not named stays as it is
    'bf16.row.align1'
    """

    a: Operand
    b: Operand
    d: Operand
    epilogue: Graph
    inputs: tuple[Operand, ...]
    outputs: tuple[Operand, ...]
    config: Config
    target: str
    # A launch argument: it makes no other kernel.
    order: TileOrder = field(compare=False)
    form: Form = DENSE

    def __init__(
        self,
        *,
        a: str | Operand,
        b: str | Operand,
        d: str | Operand,
        epilogue: Graph | HasGraph,
        config: Config,
        inputs: Mapping[str, str | Operand] | None = None,
        outputs: Mapping[str, str | Operand] | None = None,
        target: str | None = None,
        order: TileOrder | None = None,
        form: str | Form = DENSE,
    ) -> None:
        graph, a_type = _graph(epilogue), _matrix("a", a)
        # FP64 alone asks what its constants were, and refuses it then.
        graph = graph if a_type.dtype is f64 else graph.of_kernels()
        b_type, d_type = _matrix("b", b), _matrix("d", d)
        typed_inputs, typed_outputs = _defaults(graph, a_type, b_type, d_type)
        for name, value in (
            ("a", a_type),
            ("b", b_type),
            ("d", d_type),
            ("epilogue", graph),
            ("inputs", _types("inputs", inputs, typed_inputs)),
            ("outputs", _types("outputs", outputs, typed_outputs)),
            ("form", Form.of(form)),
            *_of_config(config, target, order).items(),
        ):
            object.__setattr__(self, name, value)

    def with_config(self, config: Config, target: str | None = None, order: TileOrder | None = None) -> KernelSpec:
        """Return this declaration with another configuration. Only the configuration is checked again.

        Parameters
        ----------
        config : Config
            The configuration.
        target, order
            As for the declaration itself.

        Raises
        ------
        TypeError, ValueError
            As for the declaration itself.

        Examples
        --------
        >>> @co.epilogue
        ... def plain(acc):
        ...     return acc
        >>> small, large = (co.Sm90Config(co.ThreadblockShape(m, 128, 64)) for m in (64, 128))
        >>> spec = co.KernelSpec(a="bf16.row", b="bf16.col", d="bf16.row", epilogue=plain, config=small)
        >>> spec.with_config(large).config.threadblock
        ThreadblockShape(128, 128, 64)
        """
        other = object.__new__(KernelSpec)
        same = {name: value for name, value in vars(self).items() if name != KEPT_HASH}
        vars(other).update(same, **_of_config(config, target, order))
        return other

    def __repr__(self) -> str:
        """Return the declaration on one line, without defaults, and with the epilogue's title."""
        given = [f"{name}={str(getattr(self, name))!r}" for name in ("a", "b", "d")]
        given += [f"epilogue={self.epilogue!r}", f"config={self.config!r}"]
        typed_inputs, typed_outputs = _defaults(self.epilogue, self.a, self.b, self.d)
        for name, types, usual in (("inputs", self.inputs, typed_inputs), ("outputs", self.outputs, typed_outputs)):
            others = {n: _text(k, t) for (n, (k, u)), t in zip(usual.items(), types, strict=True) if t != u}
            given += [f"{name}={others}"] if others else []
        given += [f"target={self.target!r}"] if self.target != self.config.default_target else []
        given += [f"order={self.order!r}"] if self.order != USUAL_ORDER else []
        given += [f"form={self.form.name!r}"] if self.form != DENSE else []
        return f"KernelSpec({', '.join(given)})"

    def to_json(self) -> dict[str, Any]:
        """Return the canonical JSON: equal specs give equal values. A dense form is omitted."""
        values = {
            "a": str(self.a),
            "b": str(self.b),
            "d": str(self.d),
            "epilogue": self.epilogue.to_json(),
            "inputs": {i.name: str(t) for i, t in self.typed_inputs},
            "outputs": {o.name: str(t) for o, t in self.typed_outputs},
            "config": config_to_json(self.config),
            "target": self.target,
        }
        return values if self.form == DENSE else {**values, "form": self.form.name}

    def canonical(self) -> str:
        """Return the canonical JSON text, the declared part of a kernel's identity."""
        return json.dumps(self.to_json(), sort_keys=True, separators=(",", ":"), allow_nan=False)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> KernelSpec:
        """Rebuild a spec from :meth:`to_json`'s value.

        Raises
        ------
        ConfigError
            If a field is missing, unknown or of the wrong type.
        """
        fields = {"a", "b", "d", "epilogue", "inputs", "outputs", "config", "target"}
        if not isinstance(data, Mapping):
            raise ConfigError(f"a kernel spec must be a JSON object, not {type(data).__name__}")
        given = set(data) - {"form"}
        if given != fields:
            wrong = checked_json.difference(given, fields)
            raise ConfigError(f"a kernel spec must have the fields {', '.join(sorted(fields))}: {wrong}")
        try:
            return cls(
                a=data["a"],
                b=data["b"],
                d=data["d"],
                epilogue=Graph.from_json(data["epilogue"]),
                inputs=data["inputs"],
                outputs=data["outputs"],
                config=config_from_json(data["config"]),
                target=data["target"],
                form=data.get("form", DENSE),
            )
        except (TypeError, KeyError, AttributeError, ValueError) as exc:
            raise ConfigError(f"not a kernel spec: {exc}") from exc

    @property
    def slug(self) -> str:
        """The kernel's name in files, C++, traces and profiles: readable, with a digest of the whole declaration."""
        digest = hashlib.sha256(self.canonical().encode()).hexdigest()[:12]
        form = "" if self.form == DENSE else self.form.name
        what = "_".join(filter(None, ("gemm", form, self.epilogue.title)))
        types = "_".join(str(t).replace(".", "") for t in (self.a, self.b, self.d))
        return f"{what}_{types}_{self.config.slug}_{self.target}_{digest}"

    @cached_property
    def typed_inputs(self) -> tuple[tuple[Input, Operand], ...]:
        """The epilogue's inputs with their types."""
        return tuple(zip(self.epilogue.inputs, self.inputs, strict=True))

    @cached_property
    def typed_outputs(self) -> tuple[tuple[Output, Operand], ...]:
        """The outputs after D with their types."""
        return tuple(zip(self.epilogue.outputs[1:], self.outputs, strict=True))


def _of_config(config: Config, target: str | None, order: TileOrder | None) -> dict[str, Any]:
    """Return the fields that depend on the configuration."""
    if not isinstance(config, Config):
        known = ", ".join(sorted(cls.__name__ for cls in CONFIGS.values()))
        raise TypeError(f"config must be one of {known}, not {reprlib.repr(config)}")
    name = arch.target(config.default_target if target is None else target).name
    return {"config": config, "target": name, "order": _order(config, order)}


def _order(config: Config, given: TileOrder | None) -> TileOrder:
    order = USUAL_ORDER if given is None else given
    if not isinstance(order, TileOrder):
        raise TypeError(f"order must be a TileOrder, not {reprlib.repr(order)}")
    refusal = config.refuses(order)
    if refusal:
        raise ConfigError(f"{config!r} does not take {order!r}: {refusal}")
    return order


def _graph(epilogue: object) -> Graph:
    graph = getattr(epilogue, "graph", epilogue)
    if isinstance(graph, Graph):
        return graph
    what = getattr(epilogue, "__name__", None) or reprlib.repr(epilogue)
    advice = "decorate the function with @cutlass_ops.epilogue" if callable(epilogue) else "write a function of acc"
    raise TypeError(
        f"epilogue must be a function decorated with @cutlass_ops.epilogue, not {what}: {advice}; for D = A @ B, "
        "return acc"
    )


def _matrix(name: str, given: object) -> Operand:
    """Parse the type of A, B or D. The major is required: no default suits both A and a linear layer's weight."""
    operand = _operand(name, given)
    if not isinstance(given, Operand) and not re.search(_MAJOR, str(given)):
        either = f"'{operand.dtype}.row' or '{operand.dtype}.col'"
        raise ValueError(f"{name} is {str(given)!r}, which has no major: use {either}")
    known = (*DECLARED, i32) if name == "d" else DECLARED
    if operand.dtype not in known:
        raise ValueError(f"{name} is {operand.dtype}: use one of {', '.join(map(str, known))}")
    return operand


def _operand(name: str, given: object) -> Operand:
    try:
        return Operand.of(cast(str, given))
    except (TypeError, ValueError) as exc:
        # A torch.dtype has a known name, but no major.
        element = str(given).removeprefix("torch.")
        known = type(given).__name__ == "dtype" and element in NAMES
        advice = f"; use '{NAMES[element]}.row' or '{NAMES[element]}.col'" if known else ""
        raise type(exc)(f"{name}: {exc}{advice}") from None


Typed = dict[str, tuple[Kind, Operand]]


def _defaults(graph: Graph, a: Operand, b: Operand, d: Operand) -> tuple[Typed, Typed]:
    """Return kind and default type of the inputs, and of the outputs after D, by name."""
    mma = mma_of(a.dtype, b.dtype)
    scalar = f32 if mma is None else mma.compute
    usual: dict[Kind, DType | Operand] = {Kind.SCALAR: scalar, Kind.PRODUCT: b, Kind.INTEGER: i64}
    usual |= {kind: dtype(part.dtypes[0], DECLARED) for kind, part in PARTS.items()}
    read = _read_beside(mma, d)
    inputs = {i.name: (i.kind, _normal(i.kind, Operand.of(usual.get(i.kind, read)))) for i in graph.inputs}
    outputs = {o.name: (o.kind, _normal(o.kind, _stored(graph, o, d))) for o in graph.outputs[1:]}
    return inputs, outputs


def _read_beside(mma: MmaSpec | None, d: Operand) -> Operand:
    """Return the type of inputs of which nothing else is said: D's, and D's usual one where that is never read."""
    if d.dtype not in UNREAD:
        return d
    return _like(d, bf16 if mma is None else mma.result)


def _stored(graph: Graph, output: Output, d: Operand) -> Operand:
    """Return the type of a further output of which nothing else is said."""
    name = graph.stored_type(output)
    return _like(d, dtype(name, (*REDUCED, *FP8))) if name else d


def _like(d: Operand, element: DType) -> Operand:
    """Return D's type with other elements: aligned to 16 bytes if D is."""
    return Operand(element, d.major, element.tma_alignment if d.aligned else min(d.alignment, element.tma_alignment))


def _types(what: str, given: object, usual: Typed) -> _Types:
    """Return the types of inputs or outputs: the given ones, and defaults for the others."""
    given = {} if given is None else given
    copied = isinstance(given, _Types)
    given = given.beside(usual) if isinstance(given, _Types) else given
    if not isinstance(given, Mapping):
        raise TypeError(f"{what} must be a mapping from names to types such as 'bf16.row', not {reprlib.repr(given)}")
    unknown = [str(name) for name in given if name not in usual]
    if unknown:
        known = f"it has {', '.join(usual)}" if usual else "it has none"
        known += ", and d is a separate argument" if what == "outputs" else ""
        known += f". Pass {what} to dataclasses.replace as well: {{}} means the usual types" if copied else ""
        raise ValueError(f"{what} names {', '.join(sorted(unknown))}, which the epilogue does not have: {known}")
    found = {name: _operand(f"{what}[{name!r}]", text) for name, text in given.items()}
    for name, operand in found.items():
        if operand.scaling is not None:
            raise ValueError(f"{what}[{name!r}] is {operand}: only a and b have blocks with scales; use one without")
        # Indices and seeds have one type, which no other value has.
        wanted = usual[name][1].dtype
        if operand.dtype != wanted and {operand.dtype, wanted} & set(INTEGERS):
            possible = wanted if wanted in INTEGERS else ", ".join(map(str, ALL))
            raise ValueError(f"{what}[{name!r}] is {operand.dtype}: use {possible}")
    given_ones = {name: (usual[name][0], _normal(usual[name][0], operand)) for name, operand in found.items()}
    return _Types.of({**usual, **given_ones})


_MATRICES = (Kind.TILE, Kind.PRODUCT)


def _normal(kind: Kind, operand: Operand) -> Operand:
    """Drop major and alignment of vectors and scalars."""
    return operand if kind in _MATRICES else Operand(operand.dtype, "row", 1)


def _text(kind: Kind, operand: Operand) -> str:
    return str(operand if kind in _MATRICES else operand.dtype)
