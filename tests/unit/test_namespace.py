"""The operations of the epilogue language stand in ``co.e``, and not among what completion and ``import *`` offer."""

import builtins
import importlib
import inspect
import pkgutil
from pathlib import Path

import pytest
from processes import run_with_pytorch

import cutlass_ops as co
from cutlass_ops import e
from cutlass_ops.epilogue import functions

ROOT = Path(__file__).parents[2]
OPERATIONS = [
    name
    for subject in pkgutil.iter_modules(functions.__path__, f"{functions.__name__}.")
    for name, value in vars(importlib.import_module(subject.name)).items()
    if inspect.isfunction(value) and value.__module__ == subject.name
]
ANNOTATIONS = ["Col", "Integer", "Product", "Row", "Scalar", "Tile"]
# In co.e alone: co.Scaled.quantize does the same to a tensor.
ONLY_HERE = {"quantize"}


def test_it_has_every_operation_and_annotation_and_the_decorator():
    assert len(OPERATIONS) > 25
    assert sorted(e.__all__) == sorted([*OPERATIONS, *ANNOTATIONS, "epilogue"])
    assert {name for name in dir(e) if not name.startswith("__")} == set(e.__all__)


def test_star_import_and_completion_offer_no_operation():
    names = {}
    exec("from cutlass_ops import *", names)
    for offered in (set(co.__all__), set(dir(co)), set(names)):
        assert offered & set(OPERATIONS) == set()
        assert {"e", "gemm", "Row", "epilogue", "tune"} <= offered
    assert {name for name in set(names) - {"__builtins__"} if hasattr(builtins, name)} == set()
    assert all(name in co.__all__ or name.startswith("__") for name in dir(co))


def test_the_package_itself_has_the_operations():
    assert {name for name in OPERATIONS if getattr(co, name, None) is not getattr(functions, name)} == ONLY_HERE


# What the command line leaves for later is what others have at once.
_NAMES = """
import sys
sys.argv = [{script!r}]
import cutlass_ops as co
for x in [getattr(co, name) for name in co.__all__]:
    print(getattr(x, "__module__", ""), repr(x).partition(" at 0x")[0])
"""


@pytest.mark.slow
def test_in_the_command_lines_process_names_are_the_same():
    command, script = (run_with_pytorch(_NAMES.format(script=name)).stdout for name in ("cutlass-ops", "script.py"))
    assert command == script
    assert len(command.splitlines()) == len(co.__all__)


_TYPED = """
import cutlass_ops as co
from cutlass_ops import e, relu
from cutlass_ops.e import abs, sum
x: co.types.Value = relu(1.0) + co.relu(1.0) + co.e.relu(1.0) + e.clamp(1.0, max=2.0) + abs(-1.0)
y: co.types.Reduction = co.e.sum(x, dim=1)
row: type[co.Row] = co.e.Row
co.e.relu("1")
co.relu("1")
co.e.celu(1.0)
co.tune(co.gemm, shapes=1)
"""


@pytest.mark.slow
def test_the_type_checker_knows_the_names(tmp_path):
    api = pytest.importorskip("mypy.api")
    (tmp_path / "typed.py").write_text(_TYPED)
    # The cache of checks of this repository: without one, PyTorch's types take 20 s.
    said, _, status = api.run(["--strict", "--cache-dir", str(ROOT / ".mypy_cache"), str(tmp_path / "typed.py")])
    lines = sorted(int(line.split(":")[1]) for line in said.splitlines() if ": error: " in line)
    assert (status, lines) == (1, [8, 9, 10, 11]), said


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("CompileError", "it is co.errors.CompileError"),
        ("PreparedWeight", "it is co.types.PreparedWeight"),
        ("quantize", "call co.e.quantize in an epilogue, and co.Scaled.quantize for a tensor. docs"),
    ],
)
def test_names_of_other_namespaces_are_answered(name, advice):
    with pytest.raises(AttributeError, match=rf"^module 'cutlass_ops' has no attribute '{name}'.*{advice}"):
        getattr(co, name)
