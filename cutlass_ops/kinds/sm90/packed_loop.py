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

    def arguments(self, spec: KernelSpec) -> str:  # noqa: D102
        (name,) = spec.epilogue.parts
        stride = "cutlass_ops::stride<typename GemmKernel::StrideB>(o.a)"
        return f"{{o.{name}, o.a.ptr<ElementA>(), {stride}}}"
