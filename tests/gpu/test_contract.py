"""What every kind of call keeps on a GPU: each test here is over all rows of ``tests/unit/op_table.py``.

The table has few rows and small weights. It is asked for larger extents as well, which other kernels serve.
"""

import contextlib
import dataclasses
import math

import pytest
import torch

import cutlass_ops as co
from cutlass_ops.base.session import Session
from cutlass_ops.compilation.background import Background, Wanted
from cutlass_ops.operand import reference
from cutlass_ops.run.registry import Registry
from cutlass_ops.run.requests import requested
from tests.gpu import oracle, tensors
from tests.gpu.cases import captured, other_stream
from tests.gpu.warm import served_warm
from tests.unit.op_table import flat, of_counts, of_groups, rows, wide

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

TABLES = {"small": rows(), "large": rows(333, 528, 1040), "few rows": rows(3, 272, 4112)}
CASES = {f"{size}, {name}": row for size, table in TABLES.items() for name, row in table.items()}
every = pytest.mark.parametrize("row", CASES.values(), ids=CASES)
small = pytest.mark.parametrize("row", TABLES["small"].values(), ids=TABLES["small"])
NAMES = {torch.bfloat16: "bf16", torch.float16: "f16", torch.float8_e4m3fn: "e4m3", torch.int8: "i8"}


def on_gpu(value):
    """Return an argument on the GPU."""
    if isinstance(value, torch.Tensor):
        return value.cuda()
    fields = dataclasses.fields(value) if dataclasses.is_dataclass(value) else ()
    return dataclasses.replace(value, **{f.name: on_gpu(getattr(value, f.name)) for f in fields}) if fields else value


def given_of(row):
    """Return a row's arguments on the GPU, and what they are on the CPU."""
    given = row.given()
    if row.options.get("math") or any(x.dtype is torch.int8 for x in given.values() if isinstance(x, torch.Tensor)):
        tensors.require_hopper()
    return {name: on_gpu(x) for name, x in given.items()}, given


def op_of(row, given):
    return requested(row.function, **row.named(given)).op


def poisoned(row, given, results):
    """Return outputs full of NaN to give, and the tensors among them."""
    made = [torch.full_like(x, math.nan if x.is_floating_point() else 77) for x in results]
    if row.function is co.gemm_residual_rms:
        return made[0], made[:1]
    names = op_of(row, given).outputs
    return (made[0] if len(made) == 1 else dict(zip(names, made, strict=True))), made


def same(row, found, wanted):
    pairs = zip(flat(found), flat(wanted), strict=True)
    return all(torch.equal(row.written(x).float(), row.written(y).float()) for x, y in pairs)


def sums_of(row, given):
    """Return what sums may be off by: that of the type that is multiplied."""
    multiplied = next(iter(given.values())).dtype
    named = {torch.float32: {"tf32": "tf32", "3xtf32": "tf32x3"}.get(row.options.get("math")), torch.float64: "f64"}
    return oracle.SUMS[NAMES.get(multiplied) or named[multiplied]]


@every
def test_results_are_right_and_outputs_are_written_whole_cold_and_warm(row):
    given, on_cpu = given_of(row)
    op = op_of(row, given)
    found = row.call(given)
    out, made = poisoned(row, given, flat(found))
    row.call(given, out=out)
    for x, y in zip(made, flat(found), strict=False):
        assert torch.equal(row.written(x).float(), row.written(y).float())
    if row.written in (of_groups, of_counts):  # rows of no group stay as they are
        for x in made:
            own = row.written(torch.zeros_like(x, dtype=torch.float32)).numel()
            assert int((~x.isnan()).sum()) == own
    if row.warm:
        assert same(row, served_warm(op, lambda: row.call(given)), found)
    results = [x.cpu() for x in flat(found)]
    if "d_scale" in op.outputs:
        results = [results[0].float() * results[1].repeat_interleave(128, 1)]
    for x, wanted in zip(results, row.wanted(on_cpu), strict=True):
        written = row.written(x) if row.written(x).shape == wanted.shape else x
        if not written.is_floating_point():
            assert torch.equal(written, wanted.to(written.dtype))
            continue
        rounding = oracle.error(reference.rounded(wanted, written.dtype), wanted)
        assert oracle.error(written, wanted) <= max(row.within or 0.0, 1.05 * rounding + sums_of(row, given))


@every
def test_a_prepared_launch_and_a_graph_have_the_bits_of_a_call_and_read_what_memory_has(row):
    given, _ = given_of(row)
    first = next(iter(given.values()))
    before, other = first.clone(), first.float().flip(-1).to(first.dtype)
    row.call(given)
    runs = [captured(lambda: row.call(given))]
    runs = [(graph.replay, flat(results)) for graph, results in runs]
    if row.unprepared is None:
        launch = co.prepare_launch(row.function, **row.named(given))
        runs.append((launch, flat(launch.results)))
        graph, _ = captured(launch)
        runs.append((graph.replay, flat(launch.results)))
    both = []
    for values in (other, before):
        first.copy_(values)
        wanted = row.call(given)
        both.append([x.clone() for x in flat(wanted)])
        for run, results in runs:
            for x in results:
                x.fill_(3)
            run()
            assert same(row, results, flat(wanted))
    assert not same(row, *both)
    if row.unprepared is None:
        with other_stream():
            torch.cuda._sleep(10_000_000)  # what runs on another stream would read this before it is written
            first.copy_(other)
            launch()
        assert same(row, flat(launch.results), flat(row.call(given)))
        own = [x.clone() for x in flat(launch.results)]
        out, _ = poisoned(row, given, own)
        earlier = given | {next(iter(given)): before}
        multiplied = requested(row.function, **row.named(earlier)).arguments[0]
        assert same(row, launch(a=multiplied, out=out), row.call(earlier))
        if not isinstance(out, dict):
            assert same(row, flat(launch.results)[:1], own[:1])


@small
def test_a_further_call_neither_waits_for_the_device_nor_compiles(row, monkeypatch):
    given, _ = given_of(row)
    wanted = row.call(given)
    row.call(given)
    monkeypatch.setenv("CUTLASS_OPS_JIT", "0")
    with tensors.without_synchronisation():
        found = row.call(given)
    assert same(row, found, wanted)


@small
def test_a_lazy_negation_keeps_its_sign_in_every_argument(row):
    given, _ = given_of(row)
    wanted = row.call(given)
    launch = co.prepare_launch(row.function, **row.named(given)) if row.unprepared is None else None
    for name, x in given.items():
        if isinstance(x, torch.Tensor) and x.dtype not in (torch.int8, torch.float8_e4m3fn):  # PyTorch has none
            lazy = torch._neg_view(-x)
            for _ in range(2):
                assert same(row, row.call(given | {name: lazy}), wanted)
            if launch is not None:
                with pytest.raises(ValueError, match="is a lazy negation"):
                    co.prepare_launch(row.function, **row.named(given | {name: lazy}))


@small
def test_inductor_compiles_a_call_between_others(row):
    given, _ = given_of(row)
    first, x = next(iter(given.items()))
    if x.dtype in (torch.int8, torch.float8_e4m3fn):
        pytest.skip("PyTorch multiplies no such tensors by numbers")
    torch._dynamo.reset()

    def function(given):
        return [row.written(y).double() + 1 for y in flat(row.call(given | {first: given[first] * 2}))]

    with torch.no_grad():
        found, wanted = torch.compile(function, fullgraph=True)(given), function(given)
    for y, z in zip(found, wanted, strict=True):
        torch.testing.assert_close(y, z)


def weighted(results, row, weights):
    """Return a number that depends on all elements that a call writes."""
    pairs = [
        (row.written(x) if row.written(x).shape == w.shape else x, w) for x, w in zip(results, weights, strict=True)
    ]
    return sum((x.double() * w).sum() for x, w in pairs)


DIFFERENTIABLE = {name: row for name, row in CASES.items() if row.grads and not name.startswith("few rows")}


@pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS:UserWarning")  # of PyTorch's thread of gradients
@pytest.mark.parametrize("way", ["stored", "recomputed", "inductor"])
@pytest.mark.parametrize("to", [torch.bfloat16, torch.float16], ids=["bf16", "f16"])
@pytest.mark.parametrize("row", DIFFERENTIABLE.values(), ids=DIFFERENTIABLE)
def test_gradients_are_those_of_float64(row, to, way):
    given = {
        name: x.to(to) if isinstance(x, torch.Tensor) and x.dtype is torch.bfloat16 else x
        for name, x in row.given().items()
    }
    leaves = {name: on_gpu(given[name]).detach().requires_grad_() for name in row.grads.split()}
    exact = {name: x.detach().cpu().double().requires_grad_() for name, x in leaves.items()}
    wanted = row.exact(**{name: wide(x) for name, x in given.items()} | exact)
    wanted = list(wanted) if isinstance(wanted, tuple) else [wanted]
    weights = [torch.randn(x.shape, dtype=torch.float64) for x in wanted]
    call = row.call
    if way == "inductor":
        torch._dynamo.reset()
        call = torch.compile(lambda given: row.call(given), fullgraph=True)
    with co.recompute() if way == "recomputed" else contextlib.nullcontext():
        found = flat(call({name: on_gpu(x) for name, x in given.items()} | leaves))
        mine = torch.autograd.grad(weighted(found, row, [on_gpu(w) for w in weights]), list(leaves.values()))
    theirs = torch.autograd.grad(weighted(wanted, row, weights), list(exact.values()))
    bounds = {torch.float64: 1e-10, torch.float32: 0.01}
    for (name, leaf), x, y in zip(leaves.items(), mine, theirs, strict=True):
        assert (x.shape, x.dtype, x.stride()) == (leaf.shape, leaf.dtype, leaf.stride())
        assert oracle.error(x.cpu(), y) <= bounds.get(leaf.dtype, 0.02), name


@pytest.fixture
def never(tmp_path, monkeypatch):
    """Have nothing compiled, and no kernel ever arrive."""

    def need(background, spec, load):
        wanted = Wanted(load, True)
        wanted.looked.set()
        return wanted

    monkeypatch.setenv("CUTLASS_OPS_CACHE_DIR", str(tmp_path / "store"))
    monkeypatch.setenv("CUTLASS_OPS_STAND_IN", "1")
    monkeypatch.setattr(Background, "guess", lambda *_: None)
    monkeypatch.setattr(Background, "need", need)
    with Session().active():
        yield
        Background.current().close()


@pytest.mark.background
@pytest.mark.usefixtures("never")
@small
def test_what_pytorch_computes_meanwhile_is_what_the_kernel_would(row):
    given, on_cpu = given_of(row)
    wanted = row.call(on_cpu)
    for at in range(3):  # cold, warm, and without waiting for the device
        with tensors.without_synchronisation() if at == 2 else contextlib.nullcontext():
            found = flat(row.call(given))
        for x, y in zip(found, flat(wanted), strict=True):
            assert (x.dtype, x.shape, x.stride()) == (y.dtype, y.shape, y.stride())
            x, y = (row.written(z.cpu()).double() for z in (x, y))
            # TF32 and FP8 are multiplied as cuBLAS does.
            assert (x - y).norm() <= 0.02 * y.norm()
    assert Registry.current().entries() == ()
