"""How a launch finds batches (``batched.h``), and what it refuses, without a kernel and without a GPU."""

import itertools

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from cutlass_ops.artifacts.loader import Reason
from cutlass_ops.operand import batches
from tests.compile import host

pytestmark = pytest.mark.compile

# Prints the status, the problem, and where each batch of each tensor begins.
PROGRAM = (
    r"""
#include "cutlass_ops/batched.h"
"""
    + host.READER
    + r"""
void print(void const* data, Batches const& batches, Problem const& p) {
  for (int i = 0; i < p.count; ++i) std::cout << " " << place(data) + 2 * batches.offset(i, p.inner);
}

int main() {
  std::string line;
  while (std::getline(std::cin, line)) {
    Given<6> given(line);
    Call call(given.arguments, 6);
    BatchedOperands batched(call);
    auto const a = batched.input<Half, Major::kRow, 2, false>();
    auto const b = batched.input<Half, Major::kCol, 2, false>();
    auto const d = batched.result<Half, Major::kRow, 2, true>();
    auto const p = batched.problem(a, b, d);
    auto const row = batched.row<Half>(p);
    auto const col = batched.col<Half>(p);
    auto const tile = batched.tile<Half, Major::kRow, 1, false>(p);
    batched.check();
    std::cout << call.status();
    if (call.status() == 0) {
      std::cout << " " << p.m << " " << p.n << " " << p.k << " " << p.count;
      for (BatchedMatrix const& x : {a, b, d, tile}) print(x.data, x.batches, p);
      for (auto const& x : {row, col}) print(x.values, x.batches, p);
    }
    std::cout << std::endl;
  }
}
"""
)

M, N, K = 4, 6, 8
NAMES = ("a", "b", "out", "row", "col", "tile")


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    with host.running(tmp_path_factory.mktemp("binding"), PROGRAM) as running:
        yield running


def tensors(lead=(2, 3), **changes):
    """Return tensors of a call in order, each far from the others, or as given: with a place in elements."""
    shapes = {"a": (*lead, M, K), "b": (*lead, N, K), "out": (*lead, M, N), "row": (N,), "col": (M,), "tile": (M, N)}
    buffer = torch.empty(1 << 20, dtype=torch.float16)
    found = {}
    for at, (name, shape) in enumerate(shapes.items()):
        x = buffer[at << 16 :][: torch.Size(shape).numel()].view(shape)
        found[name] = x.mT if name == "b" else x
    return buffer, found | {name: change(found, buffer) for name, change in changes.items()}


def ask(program, buffer, given):
    return host.ask(program, buffer, [given[name] for name in NAMES])


def begins(buffer, x, own, lead):
    """Return where each batch's own tensor begins."""
    x = x.expand(*lead, *x.shape[x.ndim - own :])
    places = itertools.product(*map(range, lead))
    return [x[place].data_ptr() - buffer.data_ptr() for place in places]


def assert_found(program, buffer, given):
    *lead, m, n = given["out"].shape
    found = ask(program, buffer, given)
    own = {"a": 2, "b": 2, "out": 2, "tile": 2, "row": 1, "col": 1}
    wanted = [m, n, given["a"].shape[-1], torch.Size(lead).numel()]
    for name, dimensions in own.items():
        wanted += begins(buffer, given[name], dimensions, lead)
    assert found == wanted


@pytest.mark.parametrize("lead", [(1,), (5,), (2, 3), (1, 3), (4, 1)], ids=str)
def test_batches_lie_where_their_strides_say(program, lead):
    assert_found(program, *tensors(lead))


def spread(name, *shape):
    return {
        name: lambda found, buffer: found[name][(0,) * (found[name].ndim - 2)].expand(*shape, *found[name].shape[-2:])
    }


PERMUTED = {
    "a": lambda _, buffer: buffer.as_strided((2, 3, M, K), (M * 3 * K, K, 3 * K, 1)),
    "b": lambda _, buffer: buffer[1 << 16 :].as_strided((2, 3, K, N), (N * 3 * K, K, 1, 3 * K)),
    "out": lambda _, buffer: buffer[2 << 16 :].as_strided((2, 3, M, N), (M * 3 * N, N, 3 * N, 1)),
}


@pytest.mark.parametrize(
    "changes",
    [
        {"a": lambda found, _: found["a"][0, 0]},
        {"a": lambda found, _: found["a"][0]},
        {"b": lambda found, _: found["b"][:, :1]},
        {"b": lambda found, _: found["b"][:1]},
        {"a": lambda found, _: found["a"][:1], "b": lambda found, _: found["b"][:, :1]},
        spread("a", 2, 3),
        PERMUTED,
        {"row": lambda _, buffer: buffer[3 << 16 :][: 6 * N].view(2, 3, N)},
        {"row": lambda _, buffer: buffer[3 << 16 :][: 2 * N].view(2, 1, N).expand(2, 3, N)},
        {"col": lambda _, buffer: buffer[4 << 16 :][: 6 * M].view(3, 2, M).transpose(0, 1)},
        {"tile": lambda _, buffer: buffer[5 << 16 :][: 6 * M * N].view(2, M, 3, N).transpose(1, 2)},
        {"tile": lambda found, _: found["out"]},
    ],
    ids=lambda changes: " ".join(changes),
)
def test_views_are_read_where_they_lie(program, changes):
    assert_found(program, *tensors(**changes))


@pytest.mark.parametrize(
    ("changes", "position", "reason"),
    [
        ({"a": lambda found, _: found["a"][:, :2]}, 0, Reason.SHAPE),
        ({"b": lambda found, _: found["b"][:1].expand(3, 3, K, N)}, 1, Reason.SHAPE),
        ({"a": lambda found, _: found["a"][:1], "b": lambda found, _: found["b"][:1]}, 2, Reason.SHAPE),
        ({"out": lambda found, _: found["out"][0, 0]}, 2, Reason.SHAPE),
        ({"out": lambda found, _: found["out"][None]}, 2, Reason.SHAPE),
        ({"out": lambda found, _: found["out"][:0]}, 2, Reason.SHAPE),
        (spread("out", 2, 3), 2, Reason.MAJOR),
        ({"out": lambda _, buffer: buffer[2 << 16 :].as_strided((2, 3, M, N), (6, 2 * M * N, N, 1))}, 2, Reason.MAJOR),
        ({"a": lambda found, _: found["a"].mT.contiguous().mT}, 0, Reason.MAJOR),
        ({"a": lambda _, buffer: buffer.as_strided((2, 3, M, K), (100, 33, K, 1))}, 0, Reason.ALIGNMENT),
        ({"out": lambda found, _: found["a"][..., :N]}, 2, Reason.OVERLAP),
        ({"out": lambda found, _: found["b"].mT[..., :M, :N]}, 2, Reason.OVERLAP),
        ({"tile": lambda found, _: found["out"][:, :, :, :].flip(0).flip(0)[0]}, 5, Reason.SHAPE),
        ({"row": lambda _, buffer: buffer[3 << 16 :][: 3 * N].view(3, N)}, 3, Reason.SHAPE),
        ({"row": lambda _, buffer: buffer[3 << 16 :][: N + 1]}, 3, Reason.SHAPE),
        ({"row": lambda _, buffer: buffer[3 << 16 :][: 2 * N : 2]}, 3, Reason.MAJOR),
        ({"col": lambda found, _: found["out"][0, 0].flatten()[:M]}, 2, Reason.OVERLAP),
        ({"tile": lambda found, _: found["out"][0, 0]}, 2, Reason.OVERLAP),
    ],
)
def test_what_does_not_fit_is_refused(program, changes, position, reason):
    assert ask(program, *tensors(**changes)) == (position, reason)


def test_heads_of_one_buffer_interleave(program):
    def slices(at):
        return lambda _, buffer: buffer[at * 3 * K :].as_strided((2, 3, M, K), (M * 6 * K, K, 6 * K, 1))

    buffer, given = tensors(a=slices(0), out=slices(1), tile=lambda _, buffer: buffer[1 << 19 :][: M * K].view(M, K))
    given["b"] = buffer[1 << 18 :][: 6 * K * K].view(2, 3, K, K).mT
    given["row"] = buffer[1 << 19 :][:K]
    found = ask(program, buffer, given)
    assert found[:4] == [M, K, K, 6]
    given["out"] = slices(0)(None, buffer)
    assert ask(program, buffer, given) == (2, Reason.OVERLAP)


STRIDES = st.integers(0, 60).map(lambda x: 2 * x)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    shape=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    strides=st.tuples(STRIDES, STRIDES, st.integers(3, 20).map(lambda x: 2 * x)),
    offset=st.integers(-100, 100).map(lambda x: 2 * x),
    other=st.none() | st.tuples(STRIDES, STRIDES, st.integers(4, 20).map(lambda x: 2 * x)),
)
def test_memory_is_shared_where_an_element_is(program, shape, strides, offset, other):
    buffer, given_tensors = tensors(shape)
    of_a = strides if other is None else other
    assume(of_a[2] >= K)
    given_tensors["out"] = buffer[1 << 15 :].as_strided((*shape, M, N), (*strides, 1))
    given_tensors["a"] = buffer[(1 << 15) + offset :].as_strided((*shape, M, K), (*of_a, 1))
    places = torch.arange(1 << 18)
    written = places[1 << 15 :].as_strided((*shape, M, N), (*strides, 1)).flatten().tolist()
    read = places[(1 << 15) + offset :].as_strided((*shape, M, K), (*of_a, 1)).flatten().tolist()
    found = ask(program, buffer, given_tensors)
    if len(set(written)) < len(written):
        assert found == (2, Reason.MAJOR)
    elif set(written) & set(read):
        assert found in [(2, Reason.MAJOR), (2, Reason.OVERLAP)]
    elif of_a == strides and batches.is_nested(given_tensors["a"]) and batches.is_nested(given_tensors["out"]):
        assert found[0] == M  # slices of one buffer interleave
