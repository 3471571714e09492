"""The main loop of an Sm90 kernel, as its source says it: the instruction, the types and the launch arguments."""

from __future__ import annotations

from typing import ClassVar

from cutlass_ops.base.arch import WGMMA
from cutlass_ops.base.dtypes import DType, i32
from cutlass_ops.base.mma import mma_of, unit_of
from cutlass_ops.declare.form import DENSE, GROUPED, RAGGED_K
from cutlass_ops.declare.orientation import swapped
from cutlass_ops.declare.spec import KernelSpec, loaded
from cutlass_ops.kinds.lower import flag, layout_of
from cutlass_ops.kinds.sm90 import footprint
from cutlass_ops.kinds.sm90.config import Sm90Config

Aliases = list[dict[str, str]]
# The class around the main loop of a form, and the name of what it is around.
WRAPPED = {GROUPED: ("MainloopOfRows", "GroupedMainloop"), RAGGED_K: ("MainloopOfK", "RaggedKMainloop")}


def config_of(spec: KernelSpec) -> Sm90Config:
    """Return the configuration of an Sm90 kernel."""
    assert isinstance(spec.config, Sm90Config)
    return spec.config


def loads_along_k(spec: KernelSpec) -> bool:
    """Whether wgmma reads the operands' types along K only."""
    unit = unit_of(spec.a.dtype, spec.b.dtype, WGMMA)
    return unit is not None and unit.k_major_only


def means_taken(spec: KernelSpec) -> str | None:
    """Return where means of A's rows are taken, if not by the main loop from its own tiles."""
    means = config_of(spec).means
    return means if spec.epilogue.gathered and means != "gathered" else None


class Loop:
    """The library's own main loop (``mainloop.h``). Another one is a subclass, with the types of B that it reads."""

    reads: ClassVar[tuple[DType, ...]] = ()
    headers: ClassVar[tuple[str, ...]] = ()  # besides those of other kernels
    # The class that reads a call's operands, and its object's name; None for the form's.
    reader: ClassVar[tuple[str, str] | None] = None

    def __init_subclass__(cls) -> None:
        LOOPS.update(dict.fromkeys(cls.reads, cls()))

    def fields(self, spec: KernelSpec, given: Aliases) -> Aliases:
        """Return the launch arguments after A, B and D, as it takes them."""
        return given

    def instruction(self, spec: KernelSpec) -> str:
        """Spell the kernel's instruction with the types that it multiplies, in the kernel's orientation."""
        a, b = (spec.b.dtype, spec.a.dtype) if swapped(spec) else (spec.a.dtype, spec.b.dtype)
        mma = mma_of(a, b)
        assert mma is not None
        macro = "CUTLASS_OPS_INTEGER_WGMMA" if mma.accumulator is i32 else "CUTLASS_OPS_WGMMA"
        return f'{macro}({a.cpp}, {b.cpp}, "{mma.wgmma_types}", {flag(not loads_along_k(spec))})'

    def types(self, spec: KernelSpec) -> Aliases:
        """Spell the main loop, of the operands in the kernel's orientation, and what a form needs around it."""
        now = loaded(spec.a, spec.b) if config_of(spec).realign else (spec.a, spec.b)
        operands = []
        for name, before, after in (("A", spec.a, now[0]), ("B", spec.b, now[1])):
            layout = f"Layout{name}" if after.major == before.major else f"cutlass::layout::{layout_of(after)}"
            operands.append(
                (name, f"typename cutlass::layout::LayoutTranspose<{layout}>::type" if swapped(spec) else layout)
            )
        ordered = operands[::-1] if swapped(spec) else operands
        spelled = [
            f"Element{name}, " + (layout if spec.form == DENSE else f"cutlass_ops::Batched{side}<{layout}>")
            for side, (name, layout) in zip("AB", ordered, strict=True)
        ]
        lines = spelled if swapped(spec) else [", ".join(spelled)]
        rest = f"ThreadblockShape, ClusterShape, Stages, MainloopSchedule{self._options(spec)}>"
        if swapped(spec) or spec.form != DENSE:
            lines.append(rest)
        else:
            lines = [f"{lines[0]}, {rest}"]
        name, wrapper = WRAPPED.get(spec.form, ("CollectiveMainloop", ""))
        found = [{"name": name, "type": "cutlass_ops::Mainloop<\n    " + ",\n    ".join(lines)}]
        if wrapper:
            options = f"{name}, {flag(swapped(spec))}" if spec.form == GROUPED else name
            found.append({"name": "CollectiveMainloop", "type": f"cutlass_ops::{wrapper}<{options}>"})
        return found

    def _options(self, spec: KernelSpec) -> str:
        """Spell the main loop's further template arguments, none for the usual one."""
        means = ["Means"] if footprint.gathers(spec) else ["void", "Rows"] if means_taken(spec) == "beside" else []
        if config_of(spec).accumulation == "promoted":
            means = ["void", "cutlass_ops::NoRows", "true"]
        if spec.epilogue.block_scales:
            blocks = [*map(str, footprint.scaled_rows(spec))]
            blocks += ["cutlass_ops::GroupedScales"] * (spec.form == GROUPED)
            means.append(f"cutlass_ops::BlockScales<{', '.join(blocks)}>")
        if not means and not spec.epilogue.products:
            return ""
        options = [flag(swapped(spec)), str(1 + len(spec.epilogue.products)), *means]
        return "".join(f", {option}" for option in options)

    def arguments(self, spec: KernelSpec) -> str:
        """Spell the main loop's arguments: A and B, a second weight, and what is taken beside them."""
        order = ("b", "a") if swapped(spec) else ("a", "b")
        spelled = [
            f"o.{name}.ptr<Element{name.upper()}>(), cutlass_ops::stride<typename GemmKernel::Stride{side}>(o.{name})"
            for side, name in zip("AB", order, strict=True)
        ]
        side = "A" if swapped(spec) else "B"
        products = [
            f"o.{name}.ptr<ElementB>(), cutlass_ops::stride<typename GemmKernel::Stride{side}>(o.{name})"
            for name in spec.epilogue.products
        ]
        spelled += products
        if means_taken(spec) == "beside":
            spelled.append("o.rows" if products else "nullptr, {}, o.rows")
        if spec.epilogue.block_scales:
            rows, columns = spec.epilogue.block_scales[::-1] if swapped(spec) else spec.epilogue.block_scales
            spelled.append(f"nullptr, {{}}, {{}}, {{o.{rows}, o.{columns}}}")
        found = "{" + ",\n         ".join(spelled) + "}"
        return f"{{{found}, o.groups}}" if spec.form in WRAPPED else found


# Main loops by the type of B. Of other types, it is the library's own.
LOOPS: dict[DType, Loop] = {}
_OWN = Loop()


def loop_of(spec: KernelSpec) -> Loop:
    """Return the main loop of a kernel."""
    return LOOPS.get(spec.b.dtype, _OWN)
