"""The main loop of 2:4 sparse weights, as an Sm90 kernel's source says it."""

from __future__ import annotations

from cutlass_ops.base.dtypes import SPARSE
from cutlass_ops.base.mma import META_BLOCK
from cutlass_ops.declare.spec import KernelSpec
from cutlass_ops.kinds.sm90 import sparse
from cutlass_ops.kinds.sm90.loop import Aliases, Loop, config_of


class SparseLoop(Loop):
    """``sparse_mainloop.h``: ``wgmma`` multiplies the stored elements, whose metadata threads give to it."""

    reads = SPARSE
    headers = ("sparse_mainloop",)
    launched = ("sparse_launch",)
    reader = ("SparseOperands", "sparse")

    def fields(self, spec: KernelSpec, given: Aliases) -> Aliases:  # noqa: D102
        (name,) = spec.epilogue.parts
        own = {"name": name, "type": "cutlass_ops::SparseMeta", "read": "sparse.meta(o.problem)"}
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

    def params(self, spec: KernelSpec) -> str:  # noqa: D102
        return "cutlass_ops::SparseParams"

    def fill(self, spec: KernelSpec) -> list[str]:  # noqa: D102
        config, (name,) = config_of(spec), spec.epilogue.parts
        tile, cluster = config.threadblock, config.cluster
        down, meta = tile.m // META_BLOCK, sparse.meta_bytes(config)
        stored = "typename cutlass_ops::StoredOf<ElementB>::Type"
        return [
            f"cutlass_ops::Side<{stored}, true> const side_a{{{tile.m}, {tile.k // 2}, 1, {cluster.n}}};",
            "mainloop.rows_a = o.problem.n;",
            "mainloop.a = side_a.encoded(o.b, mainloop.rows_a, o.problem.k / 2, {});",
            f"cutlass_ops::Side<ElementA, true> const side_b{{{tile.n}, {tile.k}, 1, {cluster.m}}};",
            "mainloop.rows_b = o.problem.m;",
            "mainloop.b = side_b.encoded(o.a, mainloop.rows_b, o.problem.k, {});",
            f"cutlass_ops::encode_meta(mainloop.meta, o.{name}, {tile.k}, {down});",
            f"mainloop.tma_transaction_bytes = side_a.stage_bytes() + side_b.stage_bytes() + {meta};",
        ]
