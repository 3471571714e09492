"""If the user's store cannot be used, calls are served all the same, with one warning, and nothing unsafe is loaded."""

import errno
import fcntl
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from fake_device import Everything, fake_device
from fake_toolkit import FakeToolkit, sm80_spec
from processes import WITHOUT_PYTORCH

import cutlass_ops as co
from cutlass_ops.artifacts import store as store_module
from cutlass_ops.artifacts.store import KernelStore, Temporary
from cutlass_ops.base import env
from cutlass_ops.base.errors import StoreError, ToolchainError
from cutlass_ops.base.session import Session
from cutlass_ops.compilation import lookup
from cutlass_ops.compilation.apart import Apart
from cutlass_ops.compilation.builder import build_artifact, build_many
from cutlass_ops.tools.cli import kernels as commands

SPEC, OTHER = sm80_spec(), sm80_spec(4)


@pytest.fixture(autouse=True)
def toolkit(tmp_path, monkeypatch, session):
    found = FakeToolkit(tmp_path / "kit")
    monkeypatch.setenv(env.NVCC.name, str(found.nvcc))
    monkeypatch.setenv(env.NVCC_CCBIN.name, str(found.host))
    monkeypatch.setenv(env.PROGRESS.name, "0")
    monkeypatch.setenv(env.CHOICES.name, "1")
    for variable in (env.TUNING_DIR, env.CACHE_DIR, env.XDG_CACHE_HOME, env.JIT):
        monkeypatch.delenv(variable.name, raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    return found


# ---- What is wrong ---------------------------------------------------------------------------------------------------


def refusing(monkeypatch, number, place):
    """Have nothing be created in a folder, as on a read-only file system."""
    makes_file, makes_folder = tempfile.TemporaryFile, os.mkdir

    def require(path):
        if Path(path).is_relative_to(place):
            raise OSError(number, os.strerror(number), str(path))

    def file(*given, dir=None, **named):
        require(dir or "/")
        return makes_file(*given, dir=dir, **named)

    def folder(path, *given, **named):
        if not os.path.isdir(path):
            require(path)
        makes_folder(path, *given, **named)

    monkeypatch.setattr(store_module.tempfile, "TemporaryFile", file)
    monkeypatch.setattr(os, "mkdir", folder)


def variable(name, value):
    return lambda monkeypatch, home: monkeypatch.setenv(name, value)


def no_home(monkeypatch, home):
    monkeypatch.delenv("HOME")

    def unknown():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", unknown)


def closed_home(monkeypatch, home):
    stat = Path.stat

    def refuse(self, **named):
        if home in self.parents:
            raise PermissionError(errno.EACCES, "Permission denied", str(self))
        return stat(self, **named)

    monkeypatch.setattr(Path, "stat", refuse)


def another_users(monkeypatch, home):
    if os.geteuid():
        pytest.skip("only root can give files away")
    store = home / ".cache" / "cutlass_ops"
    store.mkdir(parents=True)
    os.chown(store, 12345, 12345)
    store.chmod(0o755)


def open_to(mode):
    def make(monkeypatch, home):
        KernelStore.of_user().folder("v2")
        KernelStore.of_user().root.chmod(mode)

    return make


def in_the_cache(make):
    """Have something stand where the store would be."""

    def broken(monkeypatch, home):
        (home / ".cache").mkdir()
        make(home / ".cache" / "cutlass_ops", home)

    return broken


def without_locks(monkeypatch, home):
    flock = fcntl.flock

    def refuse(file, operation):
        if str(home) in os.readlink(f"/proc/self/fd/{file if isinstance(file, int) else file.fileno()}"):
            raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))
        flock(file, operation)

    monkeypatch.setattr("fcntl.flock", refuse)


def named_variable(monkeypatch, home):
    monkeypatch.setenv(env.CACHE_DIR.name, str(home / "named"))
    (home / "named").mkdir()
    (home / "named").chmod(0o777)


BROKEN = {
    "no home": no_home,
    "empty home": variable("HOME", ""),
    "relative home": variable("HOME", "here"),
    "a device as home": variable("HOME", "/dev/null"),
    "closed home": closed_home,
    "another user's": another_users,
    "open to all": open_to(0o777),
    "open to a group": open_to(0o770),
    "a file": in_the_cache(lambda path, home: path.touch()),
    "a file above": lambda monkeypatch, home: (home / ".cache").touch(),
    "a dangling link": in_the_cache(lambda path, home: path.symlink_to(home / "unmounted")),
    "a loop": lambda monkeypatch, home: (home / ".cache").symlink_to(home / ".cache"),
    "a long name": variable(env.CACHE_DIR.name, f"/tmp/{'x' * 300}"),
    "read-only": lambda monkeypatch, home: refusing(monkeypatch, errno.EROFS, home),
    "unwritable": lambda monkeypatch, home: refusing(monkeypatch, errno.EACCES, home),
    "a folder open to all": lambda monkeypatch, home: KernelStore.of_user().folder("v2").chmod(0o777),
    "a named folder": named_variable,
    "no locks": without_locks,
}


@pytest.fixture(params=BROKEN)
def broken(request, monkeypatch, tmp_path):
    """The user's store cannot be used, or cannot be written."""
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    BROKEN[request.param](monkeypatch, home)
    return home


# ---- What calls find -------------------------------------------------------------------------------------------------


@pytest.mark.sample(10)
@pytest.mark.filterwarnings("ignore:.*:RuntimeWarning")
def test_pytorch_serves_and_an_explanation_needs_no_store(broken, monkeypatch):
    with fake_device(monkeypatch) as fake:
        fake.absent = Everything()
        x, w, bias = (torch.randn(shape).bfloat16() for shape in ((24, 64), (32, 64), (32,)))
        for _ in range(3):
            found = co.gemm_bias_relu(x, w.t(), bias)
            exact = torch.relu(x.double() @ w.double().t() + bias.double())
            assert (found.double() - exact).norm() <= 0.01 * exact.norm()
        assert co.explain(co.gemm_bias_relu, x, w.t(), bias).candidates


@pytest.mark.sample(10)
def test_a_kernel_is_built_once_into_a_private_temporary_folder(broken, toolkit, tmp_path):
    with pytest.warns(RuntimeWarning, match=r"CUTLASS_OPS_CACHE_DIR|Remove it|chown") as said:
        built = build_artifact(SPEC)
    for _ in range(2):
        assert build_artifact(SPEC).key == lookup.stored(SPEC).key == built.key
        assert build_many([SPEC, OTHER])[0].key == built.key
    assert toolkit.compilations == 2
    assert len(said) == 1
    assert "anew" in str(said[0].message)
    root = Temporary.current().store.root
    assert built.folder.is_relative_to(root)
    assert root.parent == tmp_path / "temporary"
    assert root.stat().st_mode & 0o777 == 0o700
    assert built.read_library() == (toolkit.root / "library").read_bytes()
    assert list(broken.rglob("kernel.*")) == []


@pytest.mark.sample(3)
def test_a_look_finds_nothing_and_makes_nothing(broken, recwarn, tmp_path):
    assert lookup.stored(SPEC) is None
    assert lookup.recalled(SPEC) is None
    assert KernelStore.default().is_empty()
    assert len(recwarn) <= 1
    assert list((tmp_path / "temporary").iterdir()) == []


@pytest.mark.sample(2)
def test_a_command_that_is_to_keep_kernels_fails(broken, monkeypatch, tmp_path):
    declaration = tmp_path / "spec.json"
    declaration.write_text(SPEC.canonical())
    with pytest.raises(StoreError):
        commands.build([str(declaration)], 1, None, False)
    assert list((tmp_path / "temporary").iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "broken", ["empty home", "a device as home", "open to all", "a file", "a folder open to all"], indirect=True
)
def test_the_process_that_compiles_uses_the_folder_of_this_one(broken):
    apart = Apart(Session())
    apart.session._parts[Temporary] = Temporary.current()
    try:
        with pytest.warns(RuntimeWarning) as said:
            key = apart.submit(SPEC, urgent=True).result(120)
        found = lookup.with_key(SPEC, key)
        assert found.folder.is_relative_to(Temporary.current().store.root)
        assert len(said) == 1
    finally:
        apart.close()


# ---- What is not trusted ---------------------------------------------------------------------------------------------


def test_a_kernel_in_a_store_that_others_may_write_is_not_loaded(monkeypatch, tmp_path, toolkit):
    monkeypatch.setenv(env.CACHE_DIR.name, str(tmp_path / "store"))
    planted = build_artifact(SPEC)
    (tmp_path / "store").chmod(0o777)
    with pytest.warns(RuntimeWarning, match="not private.*can be written by others"):
        built = build_artifact(SPEC)
    assert built.key == planted.key
    assert built.folder != planted.folder
    assert toolkit.compilations == 2


def test_a_kernel_in_a_store_that_cannot_be_written_is_used(monkeypatch, tmp_path, toolkit, recwarn):
    monkeypatch.setenv(env.CACHE_DIR.name, str(tmp_path / "store"))
    there = build_artifact(SPEC)
    refusing(monkeypatch, errno.EROFS, tmp_path / "store")
    assert build_artifact(SPEC) == lookup.stored(SPEC) == there
    assert len(recwarn) == 0
    built = build_artifact(OTHER)
    assert len(recwarn) == 1
    assert built.folder.is_relative_to(tmp_path / "temporary")
    assert lookup.stored(OTHER) == built
    assert lookup.stored(SPEC) == there


@pytest.mark.parametrize("kind", ["open", "link", "another's"])
def test_a_temporary_folder_that_somebody_else_made_is_refused(monkeypatch, tmp_path, kind):
    monkeypatch.setenv("HOME", "")
    root = Temporary.current().store.root
    (tmp_path / "elsewhere").mkdir(mode=0o777)
    if kind == "link":
        root.symlink_to(tmp_path / "elsewhere")
        (tmp_path / "elsewhere").chmod(0o700)
    else:
        root.mkdir()
        root.chmod(0o777)
        if kind == "another's":
            if os.geteuid():
                pytest.skip("only root can give files away")
            root.chmod(0o700)
            os.chown(root, 12345, 12345)
    with pytest.warns(RuntimeWarning), pytest.raises(StoreError, match=r"not private|is a link|not a folder"):
        build_artifact(SPEC)
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_without_any_folder_that_can_be_written_it_is_an_error_in_words(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", "")
    monkeypatch.setattr(tempfile, "tempdir", "/proc/none")
    with Session().active():
        with pytest.warns(RuntimeWarning):
            assert lookup.stored(SPEC) is None
        with pytest.raises(ToolchainError, match="/proc/none"):
            build_artifact(SPEC)


def test_the_temporary_folder_is_gone_at_the_end_and_outlives_a_fork(tmp_path):
    script = f"""{WITHOUT_PYTORCH}
import os, warnings
warnings.simplefilter("ignore")
from cutlass_ops.artifacts.store import KernelStore, Temporary
store = KernelStore.default()
assert store is Temporary.current().store
folder = store.folder("v2")
if (child := os.fork()) == 0:
    raise SystemExit  # with all that the interpreter does at its end
os.waitpid(child, 0)
print(folder, folder.is_dir())
"""
    environment = {name: value for name, value in os.environ.items() if name not in ("HOME", "CUTLASS_OPS_CACHE_DIR")}
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=environment | {"HOME": "", "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    folder, there = done.stdout.split()
    assert there == "True"
    assert not Path(folder).parent.exists()
