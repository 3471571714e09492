"""How many bytes a kernel's parameters have: what docs/legality.md says of them, by the host's half alone."""

import subprocess

import pytest

from cutlass_ops.base import arch, elf
from cutlass_ops.compilation import identity
from cutlass_ops.compilation.compiler import compile_flags, link_inputs
from cutlass_ops.compilation.toolchain import environment, find_toolchain
from cutlass_ops.declare.config import ThreadblockShape
from cutlass_ops.declare.spec import KernelSpec
from cutlass_ops.epilogue.graph import MAX_INPUTS, MAX_OUTPUTS, canonical
from cutlass_ops.epilogue.nodes import Input, Kind, Node, Output
from cutlass_ops.kinds import render
from cutlass_ops.kinds.sm90.config import Sm90Config
from tests import ledger

pytestmark = [pytest.mark.compile, pytest.mark.slow]

LIMIT = 32764  # bytes: CUDA C++ Programming Guide, "Function parameters"


def sum_of_tiles(inputs, outputs):
    """An epilogue that adds up tiles, and gives that several times."""
    names = [f"t{i}" for i in range(inputs)]
    nodes = [Node("acc")]
    for name in names:
        nodes += [Node("input", (), name), Node("add", (len(nodes) - 1, len(nodes)))]
    first = len(nodes) - 1
    found = [Output("d", first)]
    for i in range(outputs - 1):
        nodes += [Node("const", (), float(i + 2)), Node("mul", (first, len(nodes)))]
        found.append(Output(f"r{i}", len(nodes) - 1))
    return canonical([Input(n, Kind.TILE) for n in names], nodes, found)


def parameter_bytes(spec, folder):
    toolchain, target = find_toolchain(), arch.target(spec.target)
    link_inputs(folder, toolchain)
    (folder / "kernel.cu").write_text(render.render(spec))
    command = [toolchain.host_compiler, *compile_flags(target)["host"], "-o", "kernel.o", "kernel.cu"]
    subprocess.run([str(part) for part in command], cwd=folder, env=environment(toolchain.path), check=True)
    sections = elf.sections((folder / "kernel.o").read_bytes())
    return next(int.from_bytes(s.data, "little") for s in sections if s.name == f".cutlass_ops.{spec.slug}")


def test_the_largest_epilogue_s_parameters_fit(tmp_path, request):
    graph, config = sum_of_tiles(MAX_INPUTS, MAX_OUTPUTS), Sm90Config(ThreadblockShape(64, 32, 64))
    spec = KernelSpec(a="bf16.row", b="bf16.col", d="f32.row", epilogue=graph, config=config)
    text, flags = render.render(spec), compile_flags(arch.target(spec.target))["host"]
    with ledger.once(request, text, identity.headers_digest(text), flags):
        assert parameter_bytes(spec, tmp_path) < LIMIT // 2
