"""Pointwise kernels, run by the host's compiler with a thread for each of the GPU's: against the reference."""

import subprocess
from pathlib import Path

import pytest
import torch

from cutlass_ops.declare.spec import KernelSpec
from cutlass_ops.epilogue.graph import canonical
from cutlass_ops.epilogue.nodes import Input, Kind, Node, Output
from cutlass_ops.kinds import legality
from cutlass_ops.kinds.pointwise.config import PointwiseConfig
from cutlass_ops.kinds.render import render
from cutlass_ops.operand import reference
from tests.compile import host

pytestmark = [pytest.mark.compile, pytest.mark.slow]

BF16 = torch.bfloat16
NODES = [
    *(Node("input", (), name) for name in ("x", "y", "bias", "scale", "alpha")),
    *(Node("mul", (0, 4)), Node("add", (5, 1)), Node("tanh", (6,)), Node("add", (7, 2)), Node("mul", (8, 3))),
]
# Of the same, D has pairs of columns the other way round.
TURNS = Node("swap_pairs", (9,))
INPUTS = [
    *(Input("x", Kind.TILE), Input("y", Kind.TILE), Input("bias", Kind.ROW), Input("scale", Kind.COL)),
    Input("alpha", Kind.SCALAR),
]
OUTPUTS = (
    *(Output("d", 9), Output("copy", 6)),
    *(Output("col_sum", 9, Kind.ROW, "sum"), Output("col_at", 6, Kind.ROW, "argmax")),
    *(Output("row_sum", 9, Kind.COL, "sum"), Output("row_lse", 6, Kind.COL, "logsumexp")),
)
GRAPH = canonical(INPUTS, NODES, OUTPUTS)
TURNED = canonical(INPUTS, [*NODES, TURNS], (Output("d", 10), *OUTPUTS[1:]))


def spec(rows, aligned, epilogue):
    narrow = "" if aligned else ".align1"
    return KernelSpec(
        a="bf16.row",
        b="bf16.col",
        d=f"bf16.row{narrow}",
        inputs={"x": f"bf16.row{narrow}", "y": "f32.col.align1", "bias": "bf16", "scale": "f32", "alpha": "f32"},
        outputs={"copy": f"f32.row{narrow}", "col_sum": "f32", "col_at": "i32", "row_sum": "f32", "row_lse": "f32"},
        epilogue=epilogue,
        config=PointwiseConfig(rows),
        target="sm_90",
    )


PROGRAMS = {"aligned": (2, True, GRAPH), "misaligned": (1, False, GRAPH), "turned": (4, True, TURNED)}


@pytest.fixture(scope="module", params=PROGRAMS.values(), ids=PROGRAMS)
def program(request, tmp_path_factory):
    wanted = spec(*request.param)
    assert legality.check(wanted) == ()
    folder = tmp_path_factory.mktemp("host")
    (folder / "kernel.cu").write_text(render(wanted))
    source = Path(__file__).with_name("pointwise_on_the_host.cpp")
    flags = (*host.UNRESOLVED, "-pthread", "-no-pie", f'-DPROGRAM="{folder / "kernel.cu"}"')
    return host.program(folder, source, *flags, standard="c++20"), *request.param[1:]


def stored(folder, **tensors):
    for name, x in tensors.items():
        (folder / name).write_bytes(x.contiguous().view(torch.uint8).numpy().tobytes())


def loaded(folder, name, dtype, *shape):
    return torch.frombuffer(bytearray((folder / name).read_bytes()), dtype=dtype).reshape(shape)


@pytest.mark.parametrize(
    ("m", "n", "in_place"), [(1, 8, 0), (3, 256, 0), (17, 264, 0), (33, 1, 0), (50, 515, 0), (17, 264, 1)]
)
def test_results_are_the_reference_s(program, tmp_path, m, n, in_place):
    path, aligned, graph = program
    if aligned and n % 8:
        n += 8 - n % 8  # a row of an aligned tensor is as long as this; see the other program
    torch.manual_seed(0)
    room = 8 if aligned else 3
    x, y = torch.randn(m, n + room).to(BF16), torch.randn(n, m + 1)
    bias, scale = torch.randn(n).to(BF16), torch.randn(m)
    d = torch.full((m, n + room), 7.0, dtype=BF16)
    copy = torch.full((m, n), torch.nan)
    stored(tmp_path, x=x, y=y, bias=bias, scale=scale, d=d, copy=copy)
    subprocess.run([path, tmp_path, *map(str, (m, n, n + room, m + 1, n + room, in_place))], check=True)

    values = {"x": x[:, :n], "y": y.t()[:m], "bias": bias, "scale": scale, "alpha": torch.tensor(0.75)}
    exact = reference.evaluate(graph, torch.zeros(m, n, dtype=torch.float64), values, torch.float64)
    found = loaded(tmp_path, "d", BF16, m, n + room)
    beside = x[:, n:] if in_place else torch.full((m, room), 7.0, dtype=BF16)
    assert torch.equal(found[:, n:], beside)
    torch.testing.assert_close(found[:, :n].double(), exact["d"].double(), rtol=2**-8, atol=1e-2)
    tile = loaded(tmp_path, "copy", torch.float32, m, n)
    torch.testing.assert_close(tile.double(), exact["copy"].double(), rtol=1e-5, atol=1e-5)
    assert torch.equal(loaded(tmp_path, "col_at", torch.int32, n).long(), tile.argmax(0))
    for name, length in (("col_sum", n), ("row_sum", m), ("row_lse", m)):
        wanted = exact[name].double().reshape(length)
        torch.testing.assert_close(loaded(tmp_path, name, torch.float32, length).double(), wanted, rtol=1e-4, atol=1e-3)
