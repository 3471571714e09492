"""Every operation and reduction of the language goes through the real compiler, in kernels of every kind."""

import pytest

import cutlass_ops as co
from cutlass_ops.compilation.builder import build_artifact
from cutlass_ops.epilogue.operations import GATHERED, INDICES, OPS, REDUCTIONS, SWAP_PAIRS
from cutlass_ops.kinds.table import shared_memory
from cutlass_ops.tools.inspection import inspect
from tests.gpu import language

pytestmark = [pytest.mark.compile, pytest.mark.slow]

SPECIAL = ("cast", "gelu_tanh", SWAP_PAIRS)
UNARY = ["neg", *(name for name, info in OPS.items() if info.arity == 1 and not info.typed and name not in SPECIAL)]


@co.epilogue
def everything(acc, c: co.Row, d: co.Col, new: co.Scalar, seed: co.Integer):
    """Every operation but pairs and products, and what only some kinds of kernels have."""
    x = co.where((co.column_index() <= 2 * co.row_index() - 1) & ~co.isnan(acc) | (acc != c), acc, d)
    for name in UNARY:
        x = x + getattr(co, name)(x)
    x = co.gelu(x, approximate="tanh") - co.leaky_relu(x, 0.5) / co.elu(x, new)
    x = co.minimum(co.maximum(x, c), d) + co.pow(x, new) + co.cast(x, "bf16")
    x = x + (x < 1) + (x <= c) + (x > 3) + (x >= 2) + (x == new)
    return co.where(co.dropout_mask(new, seed, 7), x, co.uniform(seed))


@co.epilogue
def all_of_rows(acc, c: co.Row, d: co.Col, new: co.Scalar, seed: co.Integer):
    x = everything(acc, c, d, new, seed)
    return {"d": x} | {f"{name}_": getattr(co, name)(x, 1) for name in REDUCTIONS}


# Names that C++ and CUDA have, as far as no other epilogue here has them.
TAKEN = {"sum": "stream", "max": "MAX__"}


@co.epilogue
def all_of_columns(acc, n: co.Row, d: co.Col, float_: co.Scalar, threadIdx: co.Integer):  # noqa: N803
    x = everything(acc, n, d, float_, threadIdx)
    return {"d": x} | {TAKEN.get(name, f"{name}_"): getattr(co, name)(x, 0) for name in REDUCTIONS}


def test_everything_is_everything():
    used = {node.op for node in everything.graph.nodes}
    assert used >= {*OPS, *INDICES} - {SWAP_PAIRS}
    assert not used & set(GATHERED)
    assert [o.reduce for o in all_of_rows.outputs[1:]] == list(REDUCTIONS)


SHAPE = co.ThreadblockShape
SWAPPED = co.Sm90Config(SHAPE(64, 16, 64), schedule="warp_specialized", swap_ab=True)
SM80 = co.Sm80Config(SHAPE(64, 64, 32), co.WarpShape(32, 32, 32), stages=3)
KERNELS = {
    "sm90 transposed": (all_of_columns, SWAPPED, "HGMMA"),
    "sm80": (all_of_rows, SM80, "HMMA"),
    "gemv": (everything, co.types.GemvConfig(4), None),
    "gemv by tiles": (everything, co.types.GemvConfig(16, 4, 4), "HMMA"),
}


@pytest.mark.parametrize(("epilogue", "config", "opcode"), KERNELS.values(), ids=KERNELS)
def test_every_operation_compiles(epilogue, config, opcode):
    spec = co.KernelSpec(a="bf16.row", b="bf16.col", d="bf16.row", epilogue=epilogue, config=config)
    assert co.check(spec) == ()
    report = inspect(build_artifact(spec))
    if not isinstance(config, co.types.GemvConfig):
        assert report.static_shared_memory + report.dynamic_shared_memory == shared_memory(spec)
    assert opcode is None or report.sass[opcode] > 0
    assert report.spill_stores == report.spill_loads == 0


def test_places_in_cutlass_s_own_epilogue_compile():
    """The other kernels with places compile where tests/gpu/test_language.py runs them."""
    spec = language.specs()[f"placed_and_saved-{language.SM90.slug}"]
    report = inspect(build_artifact(spec))
    assert report.static_shared_memory + report.dynamic_shared_memory == shared_memory(spec)
    assert report.spill_stores == report.spill_loads == 0
