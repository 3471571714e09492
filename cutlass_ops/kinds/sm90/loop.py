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
    # Besides those of other kernels: for the device, and for a launch.
    headers: ClassVar[tuple[str, ...]] = ()
    launched: ClassVar[tuple[str, ...]] = ()
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

    def params(self, spec: KernelSpec) -> str:
        """Spell the type of the main loop's parameters."""
        rows = scales = "cutlass_ops::Nothing"
        if means_taken(spec) == "beside":
            rows = "cutlass_ops::RowsToShare<ElementA>"
        if spec.epilogue.block_scales:
            each = "GroupedScales" if spec.form == GROUPED else "StridedScales"
            scales = f"cutlass_ops::BlockScalesParams<cutlass_ops::{each}>"
        found = f"cutlass_ops::MainloopParams<{flag(bool(spec.epilogue.products))}, {rows}, {scales}>"
        around = {GROUPED: "WithGroups", RAGGED_K: "WithGroupsOfK"}.get(spec.form)
        return f"cutlass_ops::{around}<{found}>" if around else found

    def fill(self, spec: KernelSpec) -> list[str]:
        """Spell how a launch fills them: descriptors of A and B, in the kernel's orientation, and what is beside."""
        config, products = config_of(spec), spec.epilogue.products
        now = loaded(spec.a, spec.b) if config.realign else (spec.a, spec.b)
        along_k = {"a": now[0].major == "row", "b": now[1].major == "col"}
        tile, cluster = config.threadblock, config.cluster
        lines = []
        for side, name, rows, blocks in zip(
            "ab", "ba" if swapped(spec) else "ab", (tile.m, tile.n), (cluster.n, cluster.m), strict=True
        ):
            matrices = [name, *products] if name == "b" else [name]
            numbers = f"{rows}, {tile.k}, {len(matrices)}, {blocks}"
            lines += [
                f"cutlass_ops::Side<Element{name.upper()}, {flag(along_k[name])}> const side_{side}{{{numbers}}};",
                f"mainloop.rows_{side} = o.problem.{'m' if name == 'a' else 'n'};",
            ]
            for to, of in zip((side, "second"), matrices, strict=False):
                place = "o.problem.k, cutlass_ops::batching(o.problem, o.{0})"
                if spec.form == RAGGED_K:
                    place = "cutlass_ops::kRaggedRows, cutlass_ops::twice(o.{0}.ld)"
                given = f"o.{of}, mainloop.rows_{side}, {place.format(of)}"
                lines.append(f"mainloop.{to} = side_{side}.encoded({given});")
        lines += [
            "mainloop.tma_transaction_bytes = side_a.stage_bytes() + side_b.stage_bytes();",
            "mainloop.inverse_k = 1.0f / float(o.problem.k);",
        ]
        if means_taken(spec) == "beside":
            lines.append("mainloop.rows = o.rows;")
        if spec.epilogue.block_scales:
            of_rows, of_columns = spec.epilogue.block_scales[::-1] if swapped(spec) else spec.epilogue.block_scales
            lines.append(f"mainloop.scales = {{o.{of_rows}, o.{of_columns}}};")
        if spec.form == GROUPED:
            lines.append(f"mainloop.rows_{'b' if swapped(spec) else 'a'} = INT32_MAX;  // boxes are whole")
        if spec.form in WRAPPED:
            lines.append("mainloop.groups = o.groups;")
        if spec.form == RAGGED_K:
            m, n = "nm" if swapped(spec) else "mn"
            tiles = f"kShape.clusters_down(o.problem.{m}) * kShape.clusters_across(o.problem.{n})"
            lines.append(f"mainloop.of_group = cutlass_ops::Divisor({tiles});")
        return lines


# Main loops by the type of B. Of other types, it is the library's own.
LOOPS: dict[DType, Loop] = {}
_OWN = Loop()


def loop_of(spec: KernelSpec) -> Loop:
    """Return the main loop of a kernel."""
    return LOOPS.get(spec.b.dtype, _OWN)
