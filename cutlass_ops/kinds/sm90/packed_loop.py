"""The main loop of packed weights, as an Sm90 kernel's source says it."""

from __future__ import annotations

from cutlass_ops.base.dtypes import PACKED, u4
from cutlass_ops.declare.spec import KernelSpec
from cutlass_ops.kinds.sm90 import packed
from cutlass_ops.kinds.sm90.loop import Aliases, Loop, config_of


class PackedLoop(Loop):
    """``packed_mainloop.h``: threads convert a weight of 4 bits, and give it to ``wgmma`` in registers."""

    reads = PACKED
    headers = ("packed_mainloop",)
    launched = ("packed_launch",)
    reader = ("PackedOperands", "packed")

    def fields(self, spec: KernelSpec, given: Aliases) -> Aliases:  # noqa: D102
        (name,), parts = spec.epilogue.parts, 2 if spec.b.dtype is u4 else 1
        own = {
            "name": name,
            "type": "cutlass_ops::PackedWeight",
            "read": f"packed.weight<Element_{name}>(o.b, o.problem, {packed.group_of(spec)}, {parts})",
        }
        return [own if field["name"] == name else field for field in given]

    def instruction(self, spec: KernelSpec) -> str:  # noqa: D102
        return packed.instruction(spec, config_of(spec))

    def types(self, spec: KernelSpec) -> Aliases:  # noqa: D102
        of_a = "typename cutlass::layout::LayoutTranspose<LayoutA>::type"
        spelled = (
            f"cutlass_ops::PackedMainloop<\n    ElementB, {packed.group_of(spec)}, ElementA, {of_a},\n"
            "    ThreadblockShape, ClusterShape, Stages, MainloopSchedule>"
        )
        return [{"name": "CollectiveMainloop", "type": spelled}]

    def params(self, spec: KernelSpec) -> str:  # noqa: D102
        return "cutlass_ops::PackedParams"

    def fill(self, spec: KernelSpec) -> list[str]:  # noqa: D102
        config, (name,), parts = config_of(spec), spec.epilogue.parts, 2 if spec.b.dtype is u4 else 1
        tile = config.threadblock
        numbers = f"{tile.m // packed.LINE}, {tile.k}, {packed.scales_of_line(spec, config)}"
        return [
            f"cutlass_ops::PackedStage{{{numbers}}}.fill(mainloop, o.{name}, {parts});",
            f"cutlass_ops::Side<ElementA, true> const side_b{{{tile.n}, {tile.k}, 1, {config.cluster.m}}};",
            "mainloop.rows_b = o.problem.m;",
            "mainloop.b = side_b.encoded(o.a, mainloop.rows_b, o.problem.k, {0});",
            "mainloop.tma_transaction_bytes += side_b.stage_bytes();",
        ]
