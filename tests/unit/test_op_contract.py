"""What every call keeps, whatever it computes: each test here is over all rows of ``op_table.py``.

On the CPU, PyTorch computes; ``device`` is a made-up H100, whose kernels check what they are given as real ones do.
"""

import contextlib
import functools
import pickle
import re

import pytest
import torch
from fake_device import FakeDevice, fake_device
from op_table import BF16, COUNTS, E4M3, ENDS, F16, F32, F64, FIELDS, ROWS, flat, of_counts, of_groups, wide
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode

import cutlass_ops as co
from cutlass_ops.operand import reference
from cutlass_ops.run import ops, plan
from cutlass_ops.run.requests import requested

every = pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
slow = pytest.mark.slow


def of(rows, turn=None):
    """Parametrise a test by rows. With `turn`, the quick tests take each fourth of them, from there on."""
    cases = [
        pytest.param(row, id=name, marks=slow if turn is not None and at % 4 != turn else ())
        for at, (name, row) in enumerate((name, row) for name, row in ROWS.items() if row in rows)
    ]
    return pytest.mark.parametrize("row", cases)


def some(turn):
    return of(ROWS.values(), turn)


def op_of(row, given):
    return requested(row.function, **row.named(given)).op


def tensors(given):
    """Return the names of arguments that are tensors with dimensions, those of numbers first."""
    return sorted(
        (n for n, x in given.items() if isinstance(x, torch.Tensor) and x.ndim), key=("offsets", "counts").count
    )


def arguments():
    """Return each row with each tensor among its arguments."""
    return [(row, name) for row in ROWS.values() for name in tensors(row.given())]


EACH = arguments()
NAMES = {id(row): name for name, row in ROWS.items()}


def each(turn):
    """Parametrise a test by rows and tensors. The quick tests take each fifth of them, from `turn` on."""
    cases = [
        pytest.param(row, name, id=f"{NAMES[id(row)]}-{name}", marks=slow if at % 5 != turn else ())
        for at, (row, name) in enumerate(EACH)
    ]
    return pytest.mark.parametrize(("row", "name"), cases)


@pytest.fixture(scope="module")
def _one():
    return FakeDevice()


@pytest.fixture
def warm_device(_one, monkeypatch):
    """The made-up device of all tests that ask for this: what one of them chose, the others find."""
    with fake_device(monkeypatch, again=_one):
        _one.launches.clear()
        yield _one


def equal(found, wanted, written=lambda x: x):
    pairs = list(zip(flat(found), flat(wanted), strict=True))
    assert all(x.dtype == y.dtype and x.shape == y.shape for x, y in pairs)
    return all(torch.equal(written(x).float(), written(y).float()) for x, y in pairs)


def same(row):
    """Return how to compare two results: rows of no group hold anything."""
    return functools.partial(equal, written=row.written)


def poisoned(row, given, result):
    """Return outputs full of NaN to give, and the tensors among them."""
    made = [
        torch.full_like(x, 77) if x.dtype in (torch.int32, torch.int8) else torch.full_like(x, torch.nan)
        for x in flat(result)
    ]
    if row.function is co.gemm_residual_rms:
        return made[0], made[:1]
    names = op_of(row, given).outputs
    return (made[0] if len(made) == 1 else dict(zip(names, made, strict=True))), made


def shown(name):
    """Return a pattern of how messages call an argument: by the name in a call, or in the op behind it."""
    return {"b_gate": r"\b(b_gate|b)\b", "b_up": r"\b(b_up|up)\b"}.get(name, rf"\b{name}\b")


# ---- Results ---------------------------------------------------------------------------------------------------------


def relative(x, wanted):
    return float((x.double() - wanted).norm() / wanted.norm())


@every
def test_results_are_rounded_once_and_outputs_are_written_whole(row):
    given = row.given()
    before = {name: x.clone() for name, x in given.items() if isinstance(x, torch.Tensor)}
    found = row.call(given)
    out, made = poisoned(row, given, found)
    again = row.call(given, out=out)
    assert [x is y for x, y in zip(flat(again), made, strict=False)] == [True] * len(made)
    assert same(row)(again, found)
    assert all(torch.equal(given[name].float(), x.float()) for name, x in before.items())
    results = flat(found)
    if "d_scale" in op_of(row, given).outputs:
        results = [results[0].float() * results[1].repeat_interleave(128, 1)]
    for x, wanted in zip(results, row.wanted(given), strict=True):
        written = row.written(x) if row.written(x).shape == wanted.shape else x
        rounding = relative(reference.rounded(wanted, x.dtype), wanted) if x.dtype.is_floating_point else 0
        assert relative(written, wanted) <= (row.within or 1.05 * rounding + 2e-7)


UNUSED = [row for row in ROWS.values() if row.written in (of_groups, of_counts)]


@of(UNUSED)
@pytest.mark.parametrize("on_device", [False, True])
def test_rows_of_no_group_stay_as_they_are(row, on_device, request):
    if on_device:
        request.getfixturevalue("device")
    given = row.given()
    out, made = poisoned(row, given, row.call(given))
    row.call(given, out=out)
    for x in made:
        assert not row.written(x).isnan().any()
        unused = [x[ENDS[-1] :]] if row.written is of_groups else [one[n:] for one, n in zip(x, COUNTS, strict=True)]
        assert all(rest.isnan().all() for rest in unused)


# ---- Warm calls and prepared launches --------------------------------------------------------------------------------


@some(0)
def test_a_warm_call_has_the_same_bits_and_looks_at_nothing_again(row, device, monkeypatch):
    given = row.given()
    wanted = row.call(given)
    launched = len(device.launches)
    assert launched
    if row.warm:
        monkeypatch.setattr(ops, "check_call", None)  # which looks at a call
    device.closed = True
    out, made = poisoned(row, given, wanted)
    assert same(row)(row.call(given), wanted)
    assert len(device.launches) == 2 * launched
    monkeypatch.undo()
    assert same(row)(row.call(given, out=out), wanted)
    assert same(row)(flat(row.call(given, out=out))[: len(made)], made)


PREPARED = [row for row in ROWS.values() if row.unprepared is None]


@of(PREPARED, 1)
@pytest.mark.parametrize("on_device", [True, False])
def test_a_prepared_launch_has_the_bits_of_a_call_and_reads_what_memory_has_now(row, on_device, request, monkeypatch):
    device = request.getfixturevalue("warm_device") if on_device else None
    given = row.given()
    wanted = row.call(given)
    launch = co.prepare_launch(row.function, **row.named(given))
    if device is not None:
        device.launches.clear()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ops, "check_call", None)
            patch.setattr(plan.Plan, "run", None)
            assert same(row)(launch(), wanted)
            assert launch() is launch.results
        assert {launched.spec for launched in device.launches} == {launch.spec}
        assert len(device.launches) == 2
    first = next(iter(given.values()))
    first.copy_(first.float().flip(-1).to(first.dtype))
    assert same(row)(launch(), row.call(given))
    assert not same(row)(launch(), wanted)


@of([row for row in ROWS.values() if row.unprepared])
def test_what_takes_more_than_one_kernel_is_not_prepared(row, warm_device):
    given = row.given()
    with pytest.raises((ValueError, co.errors.UnsupportedError), match=row.unprepared):
        co.prepare_launch(row.function, **row.named(given))
    assert warm_device.launches == []


# ---- Programs --------------------------------------------------------------------------------------------------------


def compiled(row, given, wanted):
    torch._dynamo.reset()
    program = torch.compile(lambda given: row.call(given), backend="aot_eager", fullgraph=True)
    found = program(given)
    assert type(found) is type(wanted)
    assert [x.stride() for x in flat(found)] == [x.stride() for x in flat(wanted)]
    assert same(row)(found, wanted)


def compiled_with_outputs(row, given, wanted):
    torch._dynamo.reset()
    out, made = poisoned(row, given, wanted)

    def call(given, out):
        row.call(given, out=out)

    torch.compile(call, backend="aot_eager", fullgraph=True)(given, out)
    assert same(row)(made, flat(wanted)[: len(made)])


class Module(torch.nn.Module):
    def __init__(self, row, given):
        super().__init__()
        self.row, self.kept = row, {n: x for n, x in given.items() if not isinstance(x, torch.Tensor)}

    def forward(self, given):
        return tuple(flat(self.row.call(given | self.kept)))


def exported(row, given, wanted):
    moving = {name: x for name, x in given.items() if isinstance(x, torch.Tensor)}
    program = torch.export.export(Module(row, given), (moving,), strict=False)
    assert sum("cutlass_ops.fused" in str(n.target) for n in program.graph.nodes) == 1
    assert same(row)(program.module()(moving), flat(wanted))


def traced(row, given, wanted):
    moving = {name: x for name, x in given.items() if isinstance(x, torch.Tensor)}
    program = make_fx(Module(row, given), tracing_mode="fake", _allow_non_fake_inputs=True)(moving)
    assert sum("cutlass_ops.fused" in str(n.target) for n in program.graph.nodes) == 1
    assert same(row)(program(moving), flat(wanted))


PROGRAMS = (compiled, compiled_with_outputs, exported, traced)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("row", "program"),
    [
        pytest.param(row, program, id=f"{name}-{program.__name__}", marks=() if at % 4 == turn else slow)
        for at, (name, row) in enumerate(ROWS.items())
        for turn, program in enumerate(PROGRAMS)
        if (at + turn) % 2 == 0  # each row has two of the four
    ],
)
def test_a_program_holds_one_operator_with_the_same_bits(row, program):
    given = row.given()
    with torch.no_grad():
        program(row, given, row.call(given))


@some(2)
def test_tensors_without_data_give_shapes_types_and_strides(row):
    given = row.given()
    wanted = [(x.shape, x.dtype, x.stride()) for x in flat(row.call(given))]

    def moved(to):
        return {
            name: to(x) if isinstance(x, torch.Tensor)
            else co.RowStatistic(to(x.sum_square), x.count, x.eps) if isinstance(x, co.RowStatistic) else x
            for name, x in given.items()
        }  # fmt: skip

    fake = FakeTensorMode()
    for to, mode in ((lambda x: x.to("meta"), contextlib.nullcontext()), (fake.from_tensor, fake)):
        without = moved(to)
        with mode:
            found = flat(row.call(without))
        assert [(x.shape, x.dtype, x.stride()) for x in found] == wanted
        assert all(x.device.type == "meta" or isinstance(x, FakeTensor) for x in found)


@every
def test_an_op_goes_through_its_string(row):
    given = row.given()
    op = op_of(row, given)
    again = pickle.loads(pickle.dumps(op))
    assert (again.name, again.graph, again.about, again.names) == (op.name, op.graph, op.about, op.names)
    from cutlass_ops.run import portable

    made = portable._made.__wrapped__(op.about.split(";", 4)[4])  # as where this process has never seen it
    assert (type(made), made.name, made.graph, made.about) == (type(op), op.name, op.graph, op.about)


# ---- What surrounds a call -------------------------------------------------------------------------------------------


@of(
    [row for row in ROWS.values() if all(x.dtype != F16 for x in row.given().values() if isinstance(x, torch.Tensor))],
    3,
)
def test_autocast_casts_what_is_multiplied(row):
    given = row.given()
    if "numbers" in row.options:
        pytest.skip("a packed weight is of one type of A")
    multiplied = next(iter(given.values())).dtype
    to = {BF16: F16, F32: BF16}.get(multiplied, multiplied)  # FP64, FP8 and INT8 stay as they are
    operands = [n for n in ("a", "b", "b_gate", "b_up", "up") if n in given]
    cast = given | {name: given[name].to(to) for name in operands}
    named = {"math": None} if multiplied == F32 else {}
    if row.options.get("out_dtype") is None and multiplied == BF16:
        named["out_dtype"] = None
    if row.function is co.gemm_residual_rms:
        named.pop("out_dtype", None)
    wanted = row.call(cast, **named)
    with torch.autocast("cpu", to if to in (F16, BF16) else BF16):
        found = row.call(given, **named)
    assert same(row)(found, wanted)


def negated(x):
    """Return an equal tensor whose memory has the other sign."""
    return torch._neg_view((-x.float()).to(x.dtype) if x.dtype == E4M3 else -x)


@each(0)
def test_a_lazy_negation_is_carried_out_and_no_launch_takes_it(row, name, warm_device):
    given = row.given()
    if given[name].dtype in (torch.int8, E4M3):
        pytest.skip("PyTorch cannot carry it out")
    wanted, lazy = row.call(given), given | {name: negated(given[name])}
    for _ in range(2):
        assert same(row)(row.call(lazy), wanted)
    with Watching():
        assert same(row)(row.call(lazy), wanted)
    if row.unprepared is None:
        launch = co.prepare_launch(row.function, **row.named(given))
        with pytest.raises(ValueError, match=shown(name) + ".* is a lazy negation"):
            co.prepare_launch(row.function, **row.named(lazy))
        assert same(row)(launch(), wanted)


def left_over(transform):
    def make(x):
        found = []
        transform(lambda x: (found.append(x), x.float().sum())[1])(x)
        return found[0]

    return make


# What has no memory of its own, made from a tensor.
NO_MEMORY = {
    "nested": lambda x: torch.nested.nested_tensor([x, x]),
    "jagged": lambda x: torch.nested.nested_tensor([x, x], layout=torch.jagged),
    "quantised": lambda x: torch.quantize_per_tensor(x.float(), 0.1, 0, torch.qint8),
    "sparse": lambda x: x.to_sparse(),
    "sparse rows": lambda x: x.float().reshape(x.shape[0], -1).to_sparse_csr(),
    "oneDNN": lambda x: x.float().to_mkldnn(),
    "vmap": left_over(torch.vmap),
    "grad": left_over(torch.func.grad),
    "meta": lambda x: x.to("meta"),
    "conjugated": lambda x: x.to(torch.complex64).conj(),
}
LAZY = {"negation": torch._neg_view, "zeros": lambda x: torch._efficientzerotensor(x.shape, dtype=x.dtype)}


def of_each_kind(like, kinds):
    """Yield a tensor of each kind that PyTorch makes of one like another."""
    made = 0
    for make in kinds.values():
        with contextlib.suppress(RuntimeError, ValueError):
            yield make(like)
            made += 1
    assert made > len(kinds) // 2


@each(1)
@pytest.mark.filterwarnings("ignore")
def test_what_has_no_memory_is_refused_by_name_cold_warm_and_prepared(row, name, request):
    given = row.given()
    wrong = [given | {name: x} for x in of_each_kind(given[name], NO_MEMORY)]
    named = f"{shown(name)}|^{FIELDS[name]}" if "numbers" in row.options and name in FIELDS else shown(name)

    def refuse(run):
        for each in wrong:
            with pytest.raises((TypeError, ValueError), match=named):
                run(each)

    refuse(row.call)
    request.getfixturevalue("warm_device")
    row.call(given)
    refuse(row.call)
    if row.unprepared is not None:
        return
    refuse(functools.partial(prepared, row))
    launch = prepared(row, given)
    if name in ("a", "b", "bias", "residual", "offsets", "counts"):
        refuse(lambda wrong: launch(**{name: wrong[name]}))


def prepared(row, given, **named):
    return co.prepare_launch(row.function, **row.named(given, **named))


@some(2)
@pytest.mark.filterwarnings("ignore")
def test_what_is_written_is_memory(row, warm_device):
    given = row.given()
    result = row.call(given)
    out, _ = poisoned(row, given, result)
    row.call(given, out=out)
    names = list(out) if isinstance(out, dict) else [None]
    for name in names:
        like = out[name] if name else out
        for wrong in of_each_kind(like, NO_MEMORY | LAZY):
            for run in (row.call, *([functools.partial(prepared, row)] if row.unprepared is None else [])):
                with pytest.raises((TypeError, ValueError), match=r"\bout\b"):
                    run(given, out={**out, name: wrong} if name else wrong)


@each(2)
@pytest.mark.filterwarnings("ignore:`torch.jit.script")
def test_a_tangent_is_refused_by_name_whether_or_not_gradients_are_recorded(row, name, warm_device):
    given = row.given()
    if not given[name].is_floating_point():
        pytest.skip("PyTorch has no tangents of integers")
    row.call(given)
    for recorded in (False, True):
        with torch.set_grad_enabled(recorded), forward_ad.dual_level():
            dual = forward_ad.make_dual(given[name], torch.ones_like(given[name]))
            with pytest.raises(ValueError, match=shown(name) + ".* has a tangent"):
                row.call(given | {name: dual})
            assert warm_device.launches


TRANSFORMED = {
    "vmap": lambda f, x: torch.vmap(f)(torch.stack([x, x])),
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (x,)),
    "grad": lambda f, x: torch.func.grad(lambda x: flat(f(x))[0].float().sum())(x),
}


@pytest.mark.filterwarnings("ignore:.*torch.jit")  # PyTorch's own
@pytest.mark.parametrize("transform", TRANSFORMED)
@some(3)
def test_transforms_are_refused_in_words(row, transform):
    given = row.given()
    name, x = next(iter(given.items()))
    if not x.is_floating_point() or (x.dtype == E4M3 and transform != "vmap"):
        pytest.skip("PyTorch has no gradients of this type")
    said = r"does not support torch\.func\.grad, jvp or vmap|has a tangent, and cutlass_ops has no forward-mode"
    with pytest.raises((NotImplementedError, ValueError), match=said):
        TRANSFORMED[transform](lambda x: row.call(given | {name: x}), x)


@each(3)
def test_a_wrapper_of_two_tensors_gives_the_results_of_each(row, name):
    given = row.given()
    with torch.no_grad():
        found = flat(row.call(given | {name: TwoTensor(given[name], given[name])}))
        wanted = flat(row.call(given))
    assert all(torch.equal(x.a, x.b) for x in found if row.written(x) is x)
    assert same(row)([x.a for x in found], wanted)


class Watching(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(str(function))
        return function(*args, **(kwargs or {}))


@some(1)
def test_modes_see_one_operator(row):
    given = row.given()
    with torch.no_grad(), Watching() as mode:
        found = row.call(given)
    assert sum("cutlass_ops::fused" in name or "cutlass_ops.fused" in name for name in mode.names) == 1
    assert same(row)(found, row.call(given))


# ---- Gradients -------------------------------------------------------------------------------------------------------


@of([row for row in ROWS.values() if row.grads], 2)
@pytest.mark.parametrize("recompute", [False, True])
def test_gradients_are_those_of_float64(row, recompute):
    given, names = row.given(), row.grads.split()
    leaves = {name: given[name].detach().requires_grad_() for name in names}
    with co.recompute() if recompute else contextlib.nullcontext():
        found = flat(row.call(given | leaves))
    exact = {name: x.detach().double().requires_grad_() for name, x in leaves.items()}
    wanted = row.exact(**{name: wide(x) for name, x in given.items()} | exact)
    wanted = list(wanted) if isinstance(wanted, tuple) else [wanted]
    weights = [torch.randn(x.shape, dtype=F64) for x in wanted]
    sums = [
        (row.written(x) if row.written(x).shape == w.shape else x).double().mul(w).sum()
        for x, w in zip(found, weights, strict=True)
    ]
    mine = torch.autograd.grad(sum(sums), list(leaves.values()))
    theirs = torch.autograd.grad(sum((x * w).sum() for x, w in zip(wanted, weights, strict=True)), list(exact.values()))
    for name, x, y in zip(names, mine, theirs, strict=True):
        assert (x.shape, x.dtype) == (y.shape, given[name].dtype)
        assert relative(x, y) <= {F64: 1e-10, F32: 0.01}.get(given[name].dtype, 0.02), name


@each(4)
def test_a_gradient_that_there_is_not_is_refused_by_name(row, name):
    given = row.given()
    if name in row.grads.split() or not given[name].is_floating_point():
        pytest.skip("it has one, or no number does")
    given[name].requires_grad_()
    with pytest.raises((ValueError, NotImplementedError, TypeError), match=r"gradient|requires grad"):
        row.call(given)
    with torch.no_grad():
        assert not any(x.requires_grad for x in flat(row.call(given)))


# ---- Wrong arguments -------------------------------------------------------------------------------------------------


@every
def test_missing_unknown_and_repeated_arguments_are_named(row):
    given = row.given()
    optional = {"offsets", "counts"}
    if row.function is co.gemm_swiglu or "gamma" in given:
        optional |= {"gamma", "eps"}
    for name in given.keys() - optional:
        with pytest.raises(TypeError, match=rf"{shown(name)}.*missing|missing.*{shown(name)}"):
            row.call({n: x for n, x in given.items() if n != name})
    with pytest.raises(TypeError, match="nonesuch"):
        row.call(given | {"nonesuch": 1})
    first = next(iter(given))
    with pytest.raises(TypeError, match=rf"{shown(first)}.*twice|multiple values.*'{first}'"):
        row.function(given[first], **row.named(given))


WRONG = {
    "a list": lambda x: [[1.0]],
    "NumPy": lambda x: x.float().numpy(),
    "another device": lambda x: x.to("meta"),
    "complex": lambda x: x.to(torch.complex64),
    "truth": lambda x: x.to(torch.bool),
    "no dimension left": lambda x: x.new_ones(()),
    "two dimensions more": lambda x: x[None, None].expand(2, 3, *x.shape),
    "one element more": lambda x: torch.cat([x.float(), x[-1:].float()]).to(x.dtype),
}
SHAPES = ("no dimension left", "two dimensions more", "one element more")


@each(0)
def test_a_wrong_argument_is_refused_by_name(row, name, request):
    given = row.given()
    for kind, make in WRONG.items():
        try:
            row.call(given | {name: make(given[name])})
        except (TypeError, ValueError) as exc:
            refused = str(exc)
        else:
            refused = ""
        # Of two shapes that do not fit, either may be named. A matrix may have more rows, and vectors be broadcast.
        names = list(given if kind in SHAPES else [name])
        names += [FIELDS[name]] if "numbers" in row.options and name in FIELDS else []
        assert any(re.search(shown(each), refused) for each in names) or (kind in SHAPES and not refused), (
            kind,
            refused,
        )
