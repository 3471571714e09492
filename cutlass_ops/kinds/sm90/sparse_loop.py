"""The main loop of 2:4 sparse weights, as an Sm90 kernel's source says it."""

from __future__ import annotations

from cutlass_ops.base.dtypes import SPARSE
from cutlass_ops.declare.spec import KernelSpec
from cutlass_ops.kinds.sm90 import sparse
from cutlass_ops.kinds.sm90.loop import Aliases, Loop, config_of


class SparseLoop(Loop):
    """``sparse_mainloop.h``: ``wgmma`` multiplies the stored elements, whose metadata threads give to it."""

    reads = SPARSE
    headers = ("sparse_mainloop",)
    reader = ("SparseOperands", "sparse")

    def fields(self, spec: KernelSpec, given: Aliases) -> Aliases:  # noqa: D102
        (name,) = spec.epilogue.parts
        own = {"name": name, "type": "cutlass_ops::SparseWeight", "read": "sparse.weight(o.b, o.problem)"}
        return [own if field["name"] == name else field for field in given]

    def instruction(self, spec: KernelSpec) -> str:  # noqa: D102
        return sparse.instruction(spec, config_of(spec))

    def types(self, spec: KernelSpec) -> Aliases:  # noqa: D102
        of_a = "typename cutlass::layout::LayoutTranspose<LayoutA>::type"
        spelled = (
            f"cutlass_ops::SparseMainloop<\n    ElementB, ElementA, {of_a},\n"
            "    ThreadblockShape, ClusterShape, Stages, MainloopSchedule>"
        )
        return [{"name": "CollectiveMainloop", "type": spelled}]

    def arguments(self, spec: KernelSpec) -> str:  # noqa: D102
        (name,) = spec.epilogue.parts
        stride = "cutlass_ops::stride<typename GemmKernel::StrideB>(o.a)"
        return f"{{o.{name}, o.a.ptr<ElementA>(), {stride}}}"
