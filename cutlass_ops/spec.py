"""The declaration of one kernel: operand types, epilogue and configuration, frozen and hashable."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, cast

from cutlass_ops import arch, plain
from cutlass_ops.config import Config, Sm80Config, Sm90Config, config_from_json, config_to_json
from cutlass_ops.dtypes import DType, dtype, f32
from cutlass_ops.epilogue.graph import Graph, Input, Kind, Output
from cutlass_ops.errors import ConfigError

Major = Literal["row", "col"]

_OPERAND = re.compile(r"(?P<dtype>[a-z0-9]+)(\.(?P<major>row|col))?(\.align(?P<alignment>[0-9]{1,4}))?")


@dataclass(frozen=True)
class Operand:
    """Type of a tensor: element type, major and alignment.

    Attributes
    ----------
    dtype : DType
        Element type.
    major : str
        ``"row"`` if neighbours along the last dimension are adjacent in memory, ``"col"`` if those along the first are.
    alignment : int
        Largest power of two, in elements and up to 16 bytes, that divides the address, every leading dimension and
        the extent along the major dimension's accesses. 16 bytes is what TMA needs.
    """

    dtype: DType
    major: Major
    alignment: int

    @classmethod
    def of(cls, text: str | DType | Operand) -> Operand:
        """Parse ``"bf16.row"``, ``"f16.col.align2"`` or ``"f32"``; the alignment defaults to 16 bytes.

        Raises
        ------
        ValueError
            If the text is not of that form, or names an unknown dtype.
        """
        if isinstance(text, Operand):
            return text
        if isinstance(text, DType):
            return cls(text, "row", text.tma_alignment)
        match = _OPERAND.fullmatch(text)
        if match is None:
            raise ValueError(
                f"operand {plain.shown(text)} is not of the form DTYPE[.row|.col][.alignN], such as 'bf16.row'"
            )
        element = dtype(match["dtype"])
        alignment = int(match["alignment"]) if match["alignment"] else element.tma_alignment
        return cls(element, cast(Major, match["major"] or "row"), alignment)

    @property
    def aligned(self) -> bool:
        """Whether TMA can address the operand."""
        return self.alignment * self.dtype.bytes >= arch.TMA_ALIGNMENT_BYTES

    @property
    def transposed(self) -> Operand:
        """The same memory seen as the transposed matrix."""
        return Operand(self.dtype, "col" if self.major == "row" else "row", self.alignment)

    def __str__(self) -> str:
        tail = "" if self.aligned else f".align{self.alignment}"
        return f"{self.dtype}.{self.major}{tail}"


class HasGraph(Protocol):
    """Anything that carries an epilogue graph: a traced function, or a wrapper of one."""

    @property
    def graph(self) -> Graph:
        """The traced epilogue."""
        ...


@dataclass(frozen=True, init=False)
class KernelSpec:
    """One kernel: D = epilogue(A @ B, inputs), with everything that decides its code.

    Parameters
    ----------
    a, b, d : str or Operand
        Types of A (M, K), B (K, N) and D (M, N), such as ``"bf16.row"``.
    epilogue : Graph or traced function
        What happens to the FP32 accumulator.
    config : Sm80Config, Sm90Config or GemvConfig
        Tile shapes and schedule.
    inputs, outputs : mapping of str to str or Operand, optional
        Types of the epilogue's inputs and further outputs by name. By default inputs have D's dtype (scalars FP32,
        a product B's type), further tiles D's type, and reductions FP32.
    target : str, optional
        Machine-code target; by default sm_90a for an :class:`Sm90Config` and sm_80 for the others.

    Raises
    ------
    ValueError
        If an operand or target cannot be parsed, or ``inputs``/``outputs`` names something the epilogue has not.
    """

    a: Operand
    b: Operand
    d: Operand
    epilogue: Graph
    inputs: tuple[Operand, ...]
    outputs: tuple[Operand, ...]
    config: Config
    target: str
    # The configuration as given, with launch arguments, which make no other kernel.
    launch_config: Config = field(compare=False)

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
    ) -> None:
        graph = epilogue if isinstance(epilogue, Graph) else epilogue.graph
        d_type = Operand.of(d)
        given_inputs, given_outputs = dict(inputs or {}), dict(outputs or {})
        default: dict[Kind, DType | Operand] = {Kind.SCALAR: f32, Kind.PRODUCT: Operand.of(b)}
        input_types = tuple(
            _normal(i.kind, given_inputs.pop(i.name, default.get(i.kind, d_type))) for i in graph.inputs
        )
        output_types = tuple(
            _normal(o.kind, given_outputs.pop(o.name, f32 if o.reduce else d_type)) for o in graph.outputs[1:]
        )
        for what, unknown in (("inputs", given_inputs), ("outputs", given_outputs)):
            if unknown:
                raise ValueError(f"{what} names {', '.join(sorted(unknown))}, which the epilogue does not have")
        for name, value in (
            ("a", Operand.of(a)),
            ("b", Operand.of(b)),
            ("d", d_type),
            ("epilogue", graph),
            ("inputs", input_types),
            ("outputs", output_types),
            ("config", config.binary()),
            ("launch_config", config),
            ("target", arch.target(target or config.default_target).name),
        ):
            object.__setattr__(self, name, value)

    def to_json(self) -> dict[str, Any]:
        """Return the canonical JSON form: equal specs give equal values."""
        return {
            "a": str(self.a),
            "b": str(self.b),
            "d": str(self.d),
            "epilogue": self.epilogue.to_json(),
            "inputs": {i.name: str(t) for i, t in self.typed_inputs},
            "outputs": {o.name: str(t) for o, t in self.typed_outputs},
            "config": config_to_json(self.config),
            "target": self.target,
        }

    def canonical(self) -> str:
        """Return the canonical JSON text, the part of a kernel's identity that the user declares."""
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
            raise ConfigError(f"a kernel spec is a JSON object, not {type(data).__name__}")
        if set(data) != fields:
            found = plain.shown(", ".join(sorted(map(str, data))))
            raise ConfigError(f"a kernel spec has the fields {', '.join(sorted(fields))}, not {found}")
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
            )
        except (TypeError, KeyError, AttributeError, ValueError) as exc:
            raise ConfigError(f"not a kernel spec: {exc}") from exc

    @property
    def slug(self) -> str:
        """Short readable name with a digest of the whole declaration: fit for a file or a C++ identifier."""
        digest = hashlib.sha256(self.canonical().encode()).hexdigest()[:12]
        types = "_".join(str(t).replace(".", "") for t in (self.a, self.b, self.d))
        return f"gemm_{types}_{self.config.slug}_{self.target}_{digest}"

    @property
    def typed_inputs(self) -> tuple[tuple[Input, Operand], ...]:
        """The epilogue's inputs with their types."""
        return tuple(zip(self.epilogue.inputs, self.inputs, strict=True))

    @property
    def typed_outputs(self) -> tuple[tuple[Output, Operand], ...]:
        """The outputs after D with their types."""
        return tuple(zip(self.epilogue.outputs[1:], self.outputs, strict=True))

    @property
    def sm90(self) -> Sm90Config | None:
        """The configuration if it is an Sm90 one."""
        return self.config if isinstance(self.config, Sm90Config) else None

    @property
    def sm80(self) -> Sm80Config | None:
        """The configuration if it is an Sm80 one."""
        return self.config if isinstance(self.config, Sm80Config) else None


def _normal(kind: Kind, given: str | DType | Operand) -> Operand:
    """Vectors and scalars have neither major nor a wider alignment than their element's."""
    operand = Operand.of(given)
    return operand if kind in (Kind.TILE, Kind.PRODUCT) else Operand(operand.dtype, "row", 1)
