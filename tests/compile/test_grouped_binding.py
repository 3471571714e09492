"""How a launch finds groups of rows (``grouped.h``), and what it refuses, without a kernel and without a GPU."""

import pytest
import torch

from cutlass_ops.artifacts.loader import Reason
from tests.compile import host

pytestmark = pytest.mark.compile

# Prints the status, the problem, and of every tensor where it begins and its distances between rows and groups.
PROGRAM = (
    r"""
#include "cutlass_ops/grouped.h"

CUTLASS_OPS_TYPE(int32_t, kDLInt)
CUTLASS_OPS_TYPE(float, kDLFloat)
"""
    + host.READER
    + r"""
void print(void const* data, Batches const& x) {
  std::cout << " " << place(data) << " " << x.inner << " " << x.outer;
}

int main() {
  std::string line;
  while (std::getline(std::cin, line)) {
    Given<10> given(line);
    Call call(given.arguments, 10);
    GroupedOperands groups(call);
    auto const a = groups.rows<Half, Major::kRow, 2, false>();
    auto const b = groups.weights<Half, Major::kCol, 2, false>();
    auto const d = groups.result<Half, Major::kRow, 2, true>();
    auto const p = groups.problem(a, b, d);
    auto const ends = groups.groups(p);
    auto const row = groups.row<Half>(p);
    auto const col = groups.col<Half>(p);
    auto const tile = groups.tile<Half, Major::kRow, 1, false>(p);
    auto const second = groups.second<Half, Major::kCol, 2>(p);
    GroupedScales const of_rows = groups.row_scales<float>(p, 4), of_weights = groups.weight_scales<float>(p, 4, 4);
    groups.check();
    std::cout << call.status();
    if (call.status() == 0) {
      for (int x : {p.m, p.n, p.k, p.count, p.inner}) std::cout << " " << x;
      for (int x : {ends.count, ends.rows, ends.room, ends.all()}) std::cout << " " << x;
      for (BatchedMatrix const& x : {a, b, d}) print(x.data, x.batches);
      print(ends.ends, {});
      for (auto const& x : {row, col}) print(x.values, x.batches);
      for (BatchedMatrix const& x : {tile, second}) print(x.data, x.batches);
      for (GroupedScales const& x : {of_rows, of_weights}) {
        print(x.data, {x.by_row, x.by_group});
        std::cout << " " << x.stride << " " << x.step_stride;
      }
      std::cout << " " << of_weights.last;
    }
    std::cout << std::endl;
  }
}
"""
)

T, E, N, K = 10, 3, 6, 8
NAMES = ("a", "b", "out", "offsets", "row", "col", "tile", "second", "row_scales", "weight_scales")
SHAPES = {
    "a": (T, K),
    "b": (E, N, K),
    "out": (T, N),
    "offsets": (E,),
    "row": (E, N),
    "col": (T,),
    "tile": (T, N),
    "second": (E, N, K),
    "row_scales": (T, 2),  # a block is 4 of K, and 4 columns of B
    "weight_scales": (E, 2, 2),
}


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    with host.running(tmp_path_factory.mktemp("binding"), PROGRAM) as running:
        yield running


def tensors(shapes=SHAPES, /, **changes):
    """Return tensors of a call, each far from the others, or as given."""
    buffer = torch.empty(1 << 20, dtype=torch.float16)
    found = {}
    for at, name in enumerate(NAMES):
        x = buffer[at << 16 :][: torch.Size(shapes[name]).numel()].view(shapes[name])
        found[name] = x.mT if name in ("b", "second") else x
    found["offsets"] = buffer[3 << 16 :][: 2 * E].view(torch.int32)
    for name in ("row_scales", "weight_scales"):
        size = torch.Size(shapes[name]).numel()
        found[name] = buffer[NAMES.index(name) << 16 :][: 2 * size].view(torch.float32).view(shapes[name])
    return buffer, found | {name: change(found, buffer) for name, change in changes.items()}


def ask(program, buffer, given):
    return host.ask(program, buffer, [given[name] for name in NAMES])


def overlapped(out):
    """Return scales of T rows that lie in the memory of D."""
    return out.flatten()[: 4 * T].view(torch.float32).view(T, 2)


def wanted(buffer, given, extents):
    """Return the extents, and of each tensor where it begins and its distances between rows and groups."""
    room = given["out"].ndim > 2
    rows, weights = given["row_scales"], given["weight_scales"]
    distances = {
        "a": (0, 0),
        **{name: (0, given[name].stride(0) if given[name].shape[0] > 1 else 0) for name in ("b", "second")},
        **{name: (given[name].stride(-2), 0) for name in ("out", "tile")},
        "offsets": (0, 0),
        "row": (0, given["row"].stride(0) if given["row"].ndim > 1 else 0),
        "col": (1, 0),
        "row_scales": (0, rows.stride(0)) if room else (rows.stride(0), 0),
        "weight_scales": (0, weights.stride(0)),
    }
    found = [*extents]
    for name in NAMES:
        scales = given[name].stride()[-2:] if name.endswith("scales") else ()
        found += [given[name].data_ptr() - buffer.data_ptr(), *distances[name], *scales]
    return [*found, 1]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"b": lambda found, _: found["b"][:1].expand(E, K, N)},
        {"a": lambda _, buffer: buffer[: T * 2 * K].view(T, 2 * K)[:, :K]},
        {"out": lambda _, buffer: buffer[2 << 16 :][: T * 4 * N].view(T, 4 * N)[:, N : 2 * N]},
        {"row": lambda _, buffer: buffer[4 << 16 :][:N]},
        {"row": lambda _, buffer: buffer[4 << 16 :][: 2 * E * N].view(E, 2 * N)[:, :N]},
        {"tile": lambda found, _: found["out"]},
        {"row_scales": lambda _, buffer: buffer[12 << 16 :][: 4 * T].view(torch.float32).view(2, T).t()},
        {"weight_scales": lambda found, _: found["weight_scales"][:1, :1].expand(E, 2, 2)},
    ],
    ids=lambda changes: " ".join(changes),
)
def test_rows_and_groups_lie_where_their_strides_say(program, changes):
    buffer, given = tensors(**changes)
    assert ask(program, buffer, given) == wanted(buffer, given, (T, N, K, E, 1, E, T, 0, T))


@pytest.mark.parametrize(
    ("changes", "position", "reason"),
    [
        ({"a": lambda found, _: found["a"][:, :6]}, 1, Reason.SHAPE),
        ({"a": lambda found, _: found["a"][:0]}, 0, Reason.SHAPE),
        ({"a": lambda found, _: found["a"][None]}, 0, Reason.SHAPE),
        ({"a": lambda found, _: found["a"].t().contiguous().t()}, 0, Reason.MAJOR),
        ({"a": lambda _, buffer: buffer[1 : 1 + T * K].view(T, K)}, 0, Reason.ALIGNMENT),
        ({"b": lambda found, _: found["b"][0]}, 1, Reason.SHAPE),
        ({"b": lambda found, _: found["b"].contiguous()}, 1, Reason.MAJOR),
        ({"b": lambda _, buffer: buffer[1 << 16 :].as_strided((E, K, N), (N * K + 1, 1, K))}, 1, Reason.ALIGNMENT),
        ({"out": lambda found, _: found["out"][:-1]}, 2, Reason.SHAPE),
        ({"out": lambda found, _: found["out"][:1].expand(T, N)}, 2, Reason.MAJOR),
        ({"out": lambda found, _: found["a"][:, :N]}, 2, Reason.OVERLAP),
        ({"offsets": lambda found, _: found["offsets"][:-1]}, 3, Reason.SHAPE),
        ({"offsets": lambda found, _: found["offsets"][None]}, 3, Reason.SHAPE),
        ({"offsets": lambda found, _: found["offsets"].long()}, 3, Reason.DTYPE),
        ({"offsets": lambda found, _: torch.stack([found["offsets"]] * 2, 1)[:, 0]}, 3, Reason.MAJOR),
        ({"offsets": lambda _, buffer: buffer[2 << 16 :][: 2 * E].view(torch.int32)}, 2, Reason.OVERLAP),
        ({"row": lambda found, _: found["row"][:-1]}, 4, Reason.SHAPE),
        ({"row": lambda found, _: found["row"].t().contiguous().t()}, 4, Reason.MAJOR),
        ({"col": lambda found, _: found["col"][:-1]}, 5, Reason.SHAPE),
        ({"col": lambda found, _: found["col"][None]}, 5, Reason.SHAPE),
        ({"tile": lambda found, _: found["tile"][None]}, 6, Reason.SHAPE),
        ({"tile": lambda found, buffer: buffer[(2 << 16) + 2 :][: T * N].view(T, N)}, 2, Reason.OVERLAP),
        ({"second": lambda found, _: found["second"][:, :, :-1]}, 7, Reason.SHAPE),
        ({"second": lambda found, _: found["second"][:-1]}, 7, Reason.SHAPE),
        ({"row_scales": lambda found, _: found["row_scales"][:-1]}, 8, Reason.SHAPE),
        ({"row_scales": lambda found, _: found["row_scales"][None]}, 8, Reason.SHAPE),
        ({"row_scales": lambda found, _: found["row_scales"].half()}, 8, Reason.DTYPE),
        ({"row_scales": lambda found, _: overlapped(found["out"])}, 2, Reason.OVERLAP),
        ({"weight_scales": lambda found, _: found["weight_scales"][0]}, 9, Reason.SHAPE),
        ({"weight_scales": lambda found, _: found["weight_scales"][:, :1]}, 9, Reason.SHAPE),
    ],
)
def test_what_does_not_fit_is_refused(program, changes, position, reason):
    assert ask(program, *tensors(**changes)) == (position, reason)


# ---- Groups with room for as many rows each --------------------------------------------------------------------------

M = 5
WITH_ROOM = {**SHAPES, "a": (E, M, K), "out": (E, M, N), "col": (E, M), "tile": (E, M, N), "row_scales": (E, M, 2)}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"a": lambda _, buffer: buffer[: E * M * 2 * K].view(E, M, 2 * K)[..., :K]},
        {"out": lambda _, buffer: buffer[2 << 16 :][: E * M * 4 * N].view(E, M, 4 * N)[..., N : 2 * N]},
        {"row": lambda _, buffer: buffer[4 << 16 :][:N]},
        {"tile": lambda found, _: found["out"]},
        {"row_scales": lambda _, buffer: buffer[12 << 16 :][: 4 * E * M].view(torch.float32).view(E, 2, M).mT},
    ],
    ids=lambda changes: " ".join(changes),
)
def test_groups_may_have_room(program, changes):
    buffer, given = tensors(WITH_ROOM, **changes)
    assert ask(program, buffer, given) == wanted(buffer, given, (E * M, N, K, E, 1, E, M, M, E * M))


def test_groups_with_room_for_one_row_are_as_far_apart_as_rows(program):
    one = {**WITH_ROOM, "a": (E, 1, K), "out": (E, 1, N), "col": (E, 1), "tile": (E, 1, N), "row_scales": (E, 1, 2)}
    buffer, given = tensors(one, out=lambda _, buffer: buffer[2 << 16 :][: E * 4 * N].view(E, 4 * N)[:, None, :N])
    found = ask(program, buffer, given)
    assert found[:9] == [E, N, K, E, 1, E, 1, 1, E]
    assert found[9 + 2 * 3 :][:3] == [given["out"].data_ptr() - buffer.data_ptr(), 4 * N, 0]


@pytest.mark.parametrize(
    ("changes", "position", "reason"),
    [
        ({"a": lambda found, _: found["a"][:-1]}, 0, Reason.SHAPE),
        ({"a": lambda found, _: found["a"][:1]}, 0, Reason.SHAPE),
        ({"a": lambda found, _: found["a"][:1].expand(E, M, K)}, 0, Reason.MAJOR),
        ({"a": lambda _, buffer: buffer[: E * 2 * M * K].view(E, 2 * M, K)[:, :M]}, 0, Reason.MAJOR),
        ({"out": lambda found, _: found["out"].view(E * M, N)}, 2, Reason.SHAPE),
        ({"out": lambda found, _: found["out"][:, :-1].contiguous()}, 2, Reason.SHAPE),
        ({"out": lambda _, buffer: buffer[2 << 16 :][: E * 2 * M * N].view(E, 2 * M, N)[:, :M]}, 2, Reason.MAJOR),
        ({"out": lambda found, _: found["a"][..., :N]}, 2, Reason.OVERLAP),
        ({"offsets": lambda found, _: found["offsets"][:-1]}, 3, Reason.SHAPE),
        ({"col": lambda found, _: found["col"].view(E * M)}, 5, Reason.SHAPE),
        ({"col": lambda found, _: found["col"][0]}, 5, Reason.MAJOR),
        ({"col": lambda _, buffer: buffer[5 << 16 :][: E * 2 * M].view(E, 2 * M)[:, :M]}, 5, Reason.MAJOR),
        ({"tile": lambda found, _: found["tile"][0]}, 6, Reason.MAJOR),
        ({"tile": lambda found, _: found["tile"].view(E * M, N)}, 6, Reason.SHAPE),
        ({"second": lambda found, _: found["second"][:-1]}, 7, Reason.SHAPE),
        ({"row_scales": lambda found, _: found["row_scales"].view(E * M, 2)}, 8, Reason.SHAPE),
        ({"row_scales": lambda found, _: found["row_scales"][:, :-1]}, 8, Reason.SHAPE),
    ],
)
def test_what_does_not_fit_groups_with_room_is_refused(program, changes, position, reason):
    assert ask(program, *tensors(WITH_ROOM, **changes)) == (position, reason)


def test_more_rows_than_a_descriptor_counts_are_refused(program):
    many = (1 << 30) + 2
    buffer, given = tensors()

    class Large:  # tensors of so many rows, without memory
        def __init__(self, x, *shape):
            self.dtype, self.shape, self.ndim, self._x = x.dtype, shape, len(shape), x
            self._strides = tuple(torch.empty(shape, device="meta").stride())

        def data_ptr(self):
            return self._x.data_ptr()

        def element_size(self):
            return 2

        def stride(self):
            return self._strides

    shapes = {"a": (many, K), "out": (many, N), "tile": (many, N), "col": (many,), "row_scales": (many, 2)}
    for name, shape in shapes.items():
        given[name] = Large(given[name], *shape)
    assert ask(program, buffer, given) == (0, Reason.SHAPE)
