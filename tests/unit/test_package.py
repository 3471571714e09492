"""What ``import cutlass_ops`` must not do, seen from a fresh interpreter."""

import os
import pickle
import platform
import re
import runpy
import subprocess
import sys
import types
from pathlib import Path

import pytest
from processes import run_with_pytorch

import cutlass_ops as co
from cutlass_ops.epilogue import builtin
from cutlass_ops.run.ops import PLAIN

ROOT = Path(__file__).resolve().parents[2]

# torch comes first: what it does itself is not ours to answer for.
_WATCH = """
import os, sys
import torch

seen = []
CHANGES = {"os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link", "os.symlink", "os.truncate", "os.chmod"}
STARTS = {"subprocess.Popen", "os.system", "os.exec", "os.fork", "os.posix_spawn", "os.spawn"}
REACHES = {"socket.connect", "ctypes.dlopen"}

def hook(event, args):
    if event in CHANGES | STARTS | REACHES:
        seen.append((event, args))
    if event == "open" and (set(args[1] or "") & set("wax+") or args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)):
        seen.append((event, args))

before = set(sys.modules)
sys.addaudithook(hook)
import cutlass_ops
new = {name.partition(".")[0] for name in set(sys.modules) - before}
print(seen, torch.cuda.is_initialized(), sorted(new - set(sys.stdlib_module_names)))
"""

# Processor time, because other programs run too; of several processes, because it only ever errs upwards.
_TIME = """
import os, sys, time, torch
for attempt in range(20):
    if (child := os.fork()) == 0:
        began = time.process_time()
        import cutlass_ops
        os._exit(time.process_time() - began >= 0.3)
    if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0:
        sys.exit(print("less"))
"""


def _run(code):
    done = run_with_pytorch(code)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.strip()


def _run_without_pytorch(code):
    done = subprocess.run([sys.executable, "-B", "-c", code], check=True, capture_output=True, text=True)
    assert done.stderr == ""
    return done.stdout.strip()


@pytest.mark.slow
def test_import_writes_starts_and_initialises_nothing_and_loads_no_other_package():
    assert _run(_WATCH) == "[] False ['cutlass_ops']"


# What compiles, renders, measures and predicts: not needed where a bundle has the kernels and has decided between them.
_LATER = """
import sys
import cutlass_ops
rooms = ("kinds", "compilation", "tuner", "ship", "tools")
# What has kernels compiled while the caller goes on imports the compiler's side when there is something to compile.
early = {"cutlass_ops.compilation", "cutlass_ops.compilation.background"}
names = {"cutlass_ops.choose." + name for name in ("knowledge", "policies", "pool", "space", "tables")}
names |= {name for name in sys.modules if name.startswith(tuple(f"cutlass_ops.{room}." for room in rooms))}
# Configurations are public, with the packages that they are in.
public = {name for name in names if name.startswith("cutlass_ops.kinds.") and name.endswith(".config")}
names -= public | {name.removesuffix(".config") for name in public}
# What not every program calls, and what reads bundles.
names |= {"cutlass_ops.run." + name for name in ("norms", "gated", "scaled", "fp8", "weights", "folding", "named")}
names |= {"cutlass_ops.run." + name for name in ("kernels", "backward", "launch", "quantizing", "fallbacks", "serving")}
names |= {"cutlass_ops.artifacts." + name for name in ("bundle", "manifest", "installed", "entry")}
print(sorted((names & set(sys.modules)) - early))
"""


@pytest.mark.slow
def test_import_leaves_what_a_call_may_not_need_for_later():
    assert _run(_LATER) == "[]"
    command = "import sys; sys.argv = ['cutlass-ops']; import cutlass_ops"
    assert (
        _run_without_pytorch(f"{command}; print({{'torch', 'numpy', 'cutlass_ops.run.ops'}} & set(sys.modules))")
        == "set()"
    )


@pytest.mark.slow
def test_an_argument_of_another_program_is_not_this_command(tmp_path):
    (tmp_path / "server").mkdir()
    (tmp_path / "server" / "__init__.py").write_text("import cutlass_ops\n")
    (tmp_path / "server" / "__main__.py").write_text("import sys; print('cutlass_ops.run.ops' in sys.modules)\n")
    around = {**os.environ, "PYTHONPATH": f"{tmp_path}:{Path(co.__file__).parents[1]}"}
    for words in (["-m", "server", "--backend", "cutlass_ops"], ["-mserver", "cutlass_ops"]):
        assert subprocess.run([sys.executable, *words], env=around, capture_output=True, text=True).stdout == "True\n"


@pytest.mark.slow
def test_what_comes_later_is_there_in_a_compiled_function_and_in_every_way_of_importing():
    script = """
import pickle, torch
import cutlass_ops as co

x, w, up = (torch.randn(8, 8).bfloat16() for _ in range(3))
gamma, one = torch.ones(8), torch.ones(())

def layer(x):
    y, statistic = co.gemm_residual_rms(x, w, x, eps=1e-6)
    gated = co.gemm_swiglu(co.rmsnorm_gemm(y, w, gamma, rstd=statistic), w, up)
    return co.gemm_residual(co.gemm(co.Scaled(gated, one), co.Scaled(w, one)), co.layernorm_gemm(x, w, eps=1e-6), x)

found = torch.compile(layer, backend="eager", fullgraph=True)(x)
assert torch.equal(found, layer(x))
assert pickle.loads(pickle.dumps(co.KernelSpec)) is co.KernelSpec
names = {}
exec("from cutlass_ops import *", names)
print(set(co.__all__) - set(names))
"""
    assert _run(script) == "set()"


@pytest.mark.slow
def test_a_named_op_is_the_same_object_whichever_comes_first():
    pickles = pickle.dumps((co.gemm_bias_relu, co.gemm))
    script = f"""
import pickle, torch
import cutlass_ops as co
first, plain = pickle.loads({pickles!r})
print(first is co.gemm_bias_relu, first.name, plain is co.gemm)
"""
    assert _run(script) == "True gemm_bias_relu True"
    assert PLAIN.epilogue == builtin.identity
    assert PLAIN.epilogue.doc == builtin.identity.doc


# What other systems lack of Linux.
_ELSEWHERE = """
import fcntl, os, sys, types, torch
for name in [name for name in vars(fcntl) if "SEAL" in name]:
    delattr(fcntl, name)
del os.memfd_create, os.sched_getaffinity
sys.platform = "darwin"
os.uname = lambda: types.SimpleNamespace(machine="arm64")
import cutlass_ops as co
from cutlass_ops.artifacts import loader
from cutlass_ops.compilation import toolchain
a = torch.ones(2, 8, dtype=torch.bfloat16)
assert co.gemm(a, a.t()).tolist() == [[8, 8], [8, 8]]
for needs in (toolchain.find_toolchain, lambda: loader.load(types.SimpleNamespace(key="", sha256=""))):
    try:
        needs()
    except (co.errors.ToolchainError, co.errors.LoadError) as exc:
        print(exc)
"""


def test_elsewhere_the_reference_computes_and_kernels_say_what_they_need():
    first, second = _run(_ELSEWHERE).splitlines()
    assert first == second
    assert first.startswith("kernels need Linux on x86-64, and this is darwin on arm64: ")


def test_windows_is_told_so():
    script = """
import sys
sys.platform = "win32"
try:
    import cutlass_ops
except ImportError as exc:
    print(exc)
"""
    assert _run_without_pytorch(script) == "cutlass_ops runs on Linux on x86-64, and this is Windows: use it in WSL 2"


@pytest.fixture
def hook(monkeypatch):
    """The wheel's build hook, without the package that calls it."""
    return hooks(monkeypatch)["PlatformHook"]()


def hooks(monkeypatch):
    """What hatch_build.py has."""
    for name, of in (("builders.hooks", "BuildHookInterface"), ("metadata", "MetadataHookInterface")):
        interface = types.ModuleType(f"hatchling.{name}.plugin.interface")
        setattr(interface, of, object)
        monkeypatch.setitem(sys.modules, interface.__name__, interface)
    return runpy.run_path(str(ROOT / "hatch_build.py"))


def test_the_wheel_is_for_linux_on_x86_64(hook):
    data = {}
    hook.initialize("standard", data)
    assert data == {"pure_python": False, "tag": "py3-none-manylinux_2_28_x86_64"}
    assert data["tag"] in (ROOT / "docs" / "deployment.md").read_text()
    assert 'path = "hatch_build.py"' in (ROOT / "pyproject.toml").read_text()


@pytest.mark.parametrize(("system", "machine"), [("linux", "aarch64"), ("darwin", "arm64"), ("win32", "AMD64")])
def test_a_wheel_for_another_platform_is_refused_in_words(hook, monkeypatch, system, machine):
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr(platform, "machine", lambda: machine)
    with pytest.raises(RuntimeError, match=f"needs Linux on x86-64, and this is {system} on {machine}"):
        hook.initialize("standard", {})


def test_the_long_description_has_no_relative_link(monkeypatch):
    reader = hooks(monkeypatch)["ReadmeHook"]()
    reader.root = str(ROOT)
    metadata = {"urls": {"Repository": "https://a.example/b"}}
    reader.update(metadata)
    links = re.findall(r"\]\(([^)]+)\)", metadata["readme"]["text"])
    assert [link for link in links if not link.startswith("https://")] == []
    assert "https://a.example/b/blob/main/docs/install.md" in links
    assert metadata["readme"]["content-type"] == "text/markdown"


def test_the_repository_is_named_in_one_place():
    (address,) = re.findall(r'^Repository = "https://([^/"]+).*"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    files = subprocess.run(["git", "grep", "-lF", address], cwd=ROOT, capture_output=True, text=True).stdout.split()
    assert files in ([], ["pyproject.toml"])  # none in a copy without git


def test_import_takes_less_than_300_ms_beyond_torch():
    assert _run(_TIME) == "less"


def test_every_public_name_is_there():
    assert sorted(co.__all__) == sorted(set(co.__all__))
    assert [name for name in co.__all__ if not hasattr(co, name)] == []
    assert set(co.__all__) <= set(dir(co))
    assert set(co._LATER) <= set(co.__all__)
    assert re.fullmatch(r"\d+\.\d+\.\d+", co.__version__)
    assert (Path(co.__file__).parent / "py.typed").is_file()


@pytest.mark.parametrize("spec", [{"a": "bf16.row"}, [], "spec", None])
def test_only_declarations_can_be_built(spec):
    with pytest.raises(TypeError, match="spec must be a KernelSpec, not"):
        co.build(spec)
