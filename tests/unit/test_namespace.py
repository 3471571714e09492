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
# Of a traced value in co.e, and of a tensor as well in co.
OF_TENSORS = {"quantize"}


def test_it_has_every_operation_and_annotation_and_the_decorator():
    assert len(OPERATIONS) > 25
    assert sorted(e.__all__) == sorted([*OPERATIONS, *ANNOTATIONS, "epilogue"])
    assert {name for name in e.__all__ if getattr(e, name) is not getattr(co, name)} == OF_TENSORS
    assert {name for name in dir(e) if not name.startswith("__")} == set(e.__all__)


def test_star_import_and_completion_offer_no_operation():
    names = {}
    exec("from cutlass_ops import *", names)
    for offered in (set(co.__all__), set(dir(co)), set(names)):
        assert offered & set(OPERATIONS) == OF_TENSORS
        assert {"e", "gemm", "Row", "epilogue", "tune"} <= offered
    assert {name for name in set(names) - {"__builtins__"} if hasattr(builtins, name)} == set()
    assert all(name in co.__all__ or name.startswith("__") for name in dir(co))


def test_the_old_names_keep_working():
    assert {name for name in OPERATIONS if getattr(co, name) is not getattr(functions, name)} == OF_TENSORS
    from cutlass_ops import relu

    assert relu is co.e.relu


def test_an_epilogue_may_use_either():
    @co.epilogue
    def old(acc, bias: co.Row):
        return co.relu(acc + bias)

    @e.epilogue
    def new(acc, bias: co.e.Row):
        return co.e.relu(acc + bias)

    assert old == new


def test_unknown_names_are_answered_as_helpfully():
    with pytest.raises(
        AttributeError, match=r"^module 'cutlass_ops.e' has no attribute 'qqq': docs/epilogues.md lists"
    ):
        co.e.qqq  # noqa: B018
    with pytest.raises(AttributeError, match="did you mean relu or"):
        co.e.relu6  # noqa: B018
    with pytest.raises(AttributeError, match="did you mean relu or"):
        co.relu6  # noqa: B018
    with pytest.raises(AttributeError, match=r"^module 'cutlass_ops.e' has no attribute '__wrapped__'$"):
        co.e.__wrapped__  # noqa: B018
    assert not hasattr(co.e, "qqq")
    assert getattr(co.e, "qqq", None) is None
    with pytest.raises(co.EpilogueError, match=r"return co\.e\.celu") as error:

        @co.epilogue
        def softened(acc):
            return co.e.celu(acc)

    assert str(error.value).startswith("softened: module 'cutlass_ops.e' has no attribute 'celu'")


@pytest.mark.parametrize("module", ["cutlass_ops", "cutlass_ops.e"])
def test_so_are_those_that_an_import_statement_names(module):
    with pytest.raises(
        ImportError, match=f"^cannot import name 'qqq' from '{module}': docs/epilogues.md lists"
    ) as error:
        exec(f"from {module} import qqq")
    assert error.value.name == module
    with pytest.raises(ImportError, match="did you mean relu or"):
        exec(f"from {module} import abs, relu6")
    with pytest.raises(ImportError, match=f"cannot import name '_log' from '{module}'"):
        exec(f"from {module} import _log")
    # However far the name stands in a long function.
    many = "\n".join(f"x{n} = {n}.5" for n in range(300))
    with pytest.raises(ImportError, match=r"docs/epilogues\.md lists"):
        exec(f"{many}\nfrom {module} import qqq")


def test_modules_are_imported_by_name_as_before():
    from cutlass_ops import shipping, tools

    assert (shipping.__name__, tools.__name__) == ("cutlass_ops.shipping", "cutlass_ops.tools")


# What the command line leaves for later is what others have at once.
_NAMES = """
import sys
sys.argv = [{script!r}]
import cutlass_ops as co
for x in [getattr(co, name) for name in co.__all__]:
    print(getattr(x, "__module__", ""), repr(x).partition(" at 0x")[0])
"""


def test_in_the_command_lines_process_names_are_the_same():
    command, script = (run_with_pytorch(_NAMES.format(script=name)).stdout for name in ("cutlass-ops", "script.py"))
    assert command == script
    assert len(command.splitlines()) == len(co.__all__)


_TYPED = """
import cutlass_ops as co
from cutlass_ops import e, relu
from cutlass_ops.e import abs, sum
x: co.Value = relu(1.0) + co.relu(1.0) + co.e.relu(1.0) + e.clamp(1.0, max=2.0) + abs(-1.0)
y: co.Reduction = co.e.sum(x, dim=1)
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
