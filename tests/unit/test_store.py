import contextlib
import errno
import json
import logging
import os
import shutil
import threading
import time
from concurrent.futures import CancelledError
from dataclasses import replace
from pathlib import Path

import pytest
from fake_toolkit import HMMA, FakeToolkit, library, sm80_spec

from cutlass_ops.artifacts import store as store_module
from cutlass_ops.artifacts.compiled import Compiled
from cutlass_ops.artifacts.store import Artifact, KernelStore, identity_key, open_entry
from cutlass_ops.base import locks, recency, resources
from cutlass_ops.base.errors import LoadError, StoreError
from cutlass_ops.compilation import identity
from cutlass_ops.compilation.identity import kernel_identity, kernel_key

SPEC = sm80_spec()
COMPILED = Compiled(1.5, ({"function": "f", "registers": 1},))


@pytest.fixture(scope="module")
def toolchain(tmp_path_factory):
    return FakeToolkit(tmp_path_factory.mktemp("kit") / "toolkit").find()


@pytest.fixture
def store(tmp_path):
    return KernelStore(tmp_path / "store")


@pytest.fixture
def put(store, toolchain):
    """Publish a kernel as a build would."""

    def _put(spec=SPEC, source="source", data=None):
        identity = kernel_identity(spec, source, toolchain)
        key = identity_key(identity)
        with store.lock(key):
            folder = store.workspace(key, source)
            (folder / "kernel.so").write_bytes(library(HMMA) if data is None else data)
            (folder / "compile.log").touch()
            (folder / "tmp").mkdir()
            return store.publish(folder, identity, {"HMMA": 1}, COMPILED)

    return _put


# ---- Identity ----


def test_the_key_is_the_same_wherever_things_lie(toolchain, tmp_path):
    elsewhere = FakeToolkit(tmp_path / "elsewhere").find()
    assert elsewhere.nvcc != toolchain.nvcc
    assert kernel_key(SPEC, "source", elsewhere) == kernel_key(sm80_spec(), "source", toolchain)


def test_the_key_changes_with_everything_that_changes_the_binary(toolchain, tmp_path, monkeypatch):
    keys = [kernel_key(SPEC, "source", toolchain)]
    keys.append(kernel_key(sm80_spec(stages=4), "source", toolchain))
    keys.append(kernel_key(SPEC, "source2", toolchain))
    parts = ("nvcc_version", "host_version", "cutlass_version", "tvm_ffi_version")
    keys += [kernel_key(SPEC, "source", replace(toolchain, **{part: "other"})) for part in parts]
    with monkeypatch.context() as patch:
        patch.setattr(identity, "compile_flags", lambda target: {"device": ("-O1",)})
        keys.append(kernel_key(SPEC, "source", toolchain))
    with monkeypatch.context() as patch:
        patch.setattr(identity, "TEMPLATE_VERSION", identity.TEMPLATE_VERSION + 1)
        keys.append(kernel_key(SPEC, "source", toolchain))
    assert len(set(keys)) == len(keys)


def test_the_key_changes_with_the_headers_that_a_source_includes(toolchain, tmp_path, monkeypatch):
    monkeypatch.setattr(resources, "include", lambda: tmp_path)
    (tmp_path / "cutlass_ops").mkdir()

    def key(**headers):
        for name, text in headers.items():
            (tmp_path / "cutlass_ops" / f"{name}.h").write_text(text)
        return kernel_key(SPEC, '#include "cutlass_ops/a.h"\nint x;', toolchain)

    nested = "#pragma once\n#  include <cutlass_ops/b.h>\n"
    keys = [key(), key(a="1"), key(a="2"), key(a=nested, b="1"), key(b="2")]
    assert len(set(keys)) == len(keys)
    # Kernels of the other architecture stay what they are.
    assert key(unrelated="1") == keys[-1]
    assert key(b='#include "cutlass_ops/a.h"') != keys[-1]
    # What every library is linked with is named by none of them.
    before = key()
    (tmp_path / "cutlass_ops" / "image.S").write_text("changed")
    assert key() != before


@pytest.mark.parametrize("template", ["sm80_gemm.cu.j2", "sm90_gemm.cu.j2"])
def test_templates_include_headers_in_the_form_that_the_key_reads(template):
    text = (resources.templates() / template).read_text()
    found = identity._INCLUDE.findall(text)
    assert found
    assert all((resources.include() / name).is_file() for name in found)
    assert len(found) == text.count("cutlass_ops/") - text.count("python -m cutlass_ops")


def test_what_cannot_be_hashed_is_an_error(toolchain):
    with pytest.raises(TypeError):
        identity_key({"flags": {1, 2}})
    with pytest.raises(ValueError, match="JSON"):
        identity_key({"scale": float("nan")})


# ---- Publishing and finding ----


def test_nothing_is_created_by_looking(store):
    assert store.lookup("0" * 64) is None
    assert list(store.entries()) == []
    assert store.clean() == 0
    assert not store.root.exists()


def test_publish_and_lookup(store, put):
    artifact = put()
    assert artifact == store.lookup(artifact.key)
    assert list(store.entries()) == [artifact]
    assert artifact.folder == store.root / "v1" / artifact.key[:2] / artifact.key
    assert sorted(p.name for p in artifact.folder.iterdir()) == ["kernel.cu", "kernel.so", "manifest.json"]
    assert artifact.library.read_bytes() == library(HMMA)
    assert artifact.source.read_text() == "source"
    assert artifact.spec == SPEC
    assert artifact.target == "sm_80"
    assert artifact.manifest["sass"] == {"HMMA": 1}
    assert artifact.manifest["compile_seconds"] == 1.5
    assert list((store.root / "tmp").iterdir()) == []


def test_what_is_made_is_private_whatever_the_umask(store, put):
    previous = os.umask(0)
    try:
        artifact = put()
    finally:
        os.umask(previous)
    for path in (store.root, *store.root.rglob("*")):
        assert path.stat().st_mode & 0o077 == 0, path
    assert store.lookup(artifact.key)


def test_a_key_is_a_hash_and_no_path(store):
    for key in ("../../etc", "A" * 64, "", "0" * 63):
        with pytest.raises(ValueError, match="SHA-256"):
            store.lookup(key)


def test_find_by_source_identity(store, put):
    artifact = put()
    put(sm80_spec(stages=4))
    assert store.find(identity.source_identity(SPEC, "source")) == artifact
    assert store.find(identity.source_identity(SPEC, "other source")) is None


def test_clean(store, put):
    artifact = put()
    failed = store.keep_failed(store.workspace("a" * 64, "source"))
    assert (failed / "kernel.cu").exists()
    abandoned = store.workspace("b" * 64, "source")
    with store.lock("c" * 64):
        in_progress = store.workspace("c" * 64, "source")
        assert not abandoned.exists()  # nobody holds its lock
        assert store.clean() == 1
        assert in_progress.exists()
    assert not artifact.folder.exists()
    assert not failed.exists()


def test_a_new_failure_takes_the_place_of_the_last(store):
    for text in ("one", "two"):
        kept = store.keep_failed(store.workspace("a" * 64, text))
    assert (kept / "kernel.cu").read_text() == "two"


def test_default_store(monkeypatch, tmp_path):
    monkeypatch.setenv("CUTLASS_OPS_CACHE_DIR", str(tmp_path / "kernels"))
    assert KernelStore.default().root == tmp_path / "kernels"


# ---- Corruption: a miss, never a crash and never loaded ----


def edit_manifest(artifact: Artifact, **changes):
    path = artifact.folder / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def replace_by_link(path: Path):
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


def replace_by_pipe(path: Path):
    path.unlink()
    os.mkfifo(path)


def replace_entry_by_file(a: Artifact):
    shutil.rmtree(a.folder)
    a.folder.touch()


CORRUPTIONS = {
    "library truncated": lambda a: os.truncate(a.library, 100),
    "library empty": lambda a: os.truncate(a.library, 0),
    "library longer": lambda a: a.library.write_bytes(a.library.read_bytes() + b"x"),
    "library bit flipped": lambda a: a.library.write_bytes(b"\x7eELF" + a.library.read_bytes()[4:]),
    "library missing": lambda a: a.library.unlink(),
    "library a link": lambda a: replace_by_link(a.library),
    "library a pipe": lambda a: replace_by_pipe(a.library),
    "library a folder": lambda a: (a.library.unlink(), a.library.mkdir()),
    "library writable by others": lambda a: a.library.chmod(0o602),
    "source changed": lambda a: a.source.write_text("sourcf"),
    "entry a link": lambda a: replace_by_link(a.folder),
    "entry a file": replace_entry_by_file,
    "entry a dangling link": lambda a: (shutil.rmtree(a.folder), a.folder.symlink_to("nowhere")),
    "entry writable by others": lambda a: a.folder.chmod(0o770),
    "entry empty": lambda a: [p.unlink() for p in a.folder.iterdir()],
    "manifest missing": lambda a: (a.folder / "manifest.json").unlink(),
    "manifest empty": lambda a: os.truncate(a.folder / "manifest.json", 0),
    "manifest truncated": lambda a: os.truncate(a.folder / "manifest.json", 200),
    "manifest no text": lambda a: (a.folder / "manifest.json").write_bytes(b"\xff\xfe\x00"),
    "manifest no object": lambda a: (a.folder / "manifest.json").write_text("[1]"),
    "manifest deep": lambda a: (a.folder / "manifest.json").write_text("[" * 100_000),
    "manifest huge": lambda a: os.truncate(a.folder / "manifest.json", 1 << 30),
    "manifest of a later format": lambda a: edit_manifest(a, format=2),
    "manifest with another key": lambda a: edit_manifest(a, key="0" * 64),
    "manifest with another identity": lambda a: edit_manifest(a, identity=dict(a.manifest["identity"], flags=[])),
    "manifest without files": lambda a: edit_manifest(a, files={}),
    "manifest with other files": lambda a: edit_manifest(a, files=dict(a.manifest["files"], x={"size": 0})),
    "manifest files no object": lambda a: edit_manifest(a, files=["kernel.so", "kernel.cu"]),
    "manifest size no number": lambda a: edit_manifest(
        a, files={n: dict(f, size=str(f["size"])) for n, f in a.manifest["files"].items()}
    ),
    "manifest size negative": lambda a: edit_manifest(
        a, files={n: dict(f, size=-1) for n, f in a.manifest["files"].items()}
    ),
}


@pytest.mark.parametrize("corrupt", CORRUPTIONS.values(), ids=CORRUPTIONS.keys())
def test_what_is_not_whole_is_a_miss_and_is_replaced(store, put, corrupt, caplog):
    artifact = put()
    corrupt(artifact)
    assert store.lookup(artifact.key) is None
    assert "ignored" in caplog.text
    assert list(store.entries()) == []
    assert put() == store.lookup(artifact.key)
    assert list((store.root / "tmp").iterdir()) == []


def test_another_kernels_entry_is_a_miss(store, put):
    artifact, other = put(), put(sm80_spec(stages=4))
    shutil.rmtree(artifact.folder)
    shutil.copytree(other.folder, artifact.folder)
    assert store.lookup(artifact.key) is None


def test_every_truncation_of_a_manifest_is_a_miss(store, put):
    artifact = put()
    manifest = artifact.folder / "manifest.json"
    whole = manifest.read_bytes()
    for size in range(0, len(whole) - 2, 7):
        manifest.write_bytes(whole[:size])
        with pytest.raises(LoadError):
            open_entry(artifact.folder)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
@pytest.mark.parametrize("which", ["folder", "library"])
def test_what_belongs_to_another_user_is_a_miss(store, put, which):
    artifact = put()
    os.chown(getattr(artifact, which), 12345, 12345)
    assert store.lookup(artifact.key) is None


# ---- The root ----


@pytest.mark.parametrize("mode", [0o777, 0o720, 0o1777])
def test_a_store_that_others_can_write_is_refused(store, put, mode):
    key = put().key
    store.root.chmod(mode)
    for use in (lambda: store.lookup(key), put, store.clean, lambda: list(store.entries())):
        with pytest.raises(StoreError, match=r"not private.*can be written by others.*CUTLASS_OPS_CACHE_DIR"):
            use()


def test_a_store_that_others_can_read_is_fine(store, put):
    key = put().key
    store.root.chmod(0o755)
    assert store.lookup(key)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_a_store_of_another_user_is_refused(store, put):
    key = put().key
    os.chown(store.root, 12345, 12345)
    with pytest.raises(StoreError, match="belongs to user 12345"):
        store.lookup(key)


def test_a_store_that_is_a_file(tmp_path, put, store):
    store.root.touch(mode=0o600)
    with pytest.raises(StoreError, match="cannot be used"):
        put()


@pytest.mark.parametrize("call", ["mkdir", "rename", "_sync"])
@pytest.mark.parametrize(
    ("number", "message"),
    [
        (errno.ENOSPC, "no space is left.*CUTLASS_OPS_CACHE_DIR"),
        (errno.EDQUOT, "no space is left"),
        (errno.EROFS, "cannot be written.*to build new ones, set"),
        (errno.EIO, "cannot be used"),
    ],
)
def test_a_disk_that_fails(store, put, monkeypatch, call, number, message):
    def fail(*_args, **_more):
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(store_module if call == "_sync" else Path, call, fail)
        with pytest.raises(StoreError, match=message):
            put()
    assert list(store.entries()) == []
    assert store.lookup(put().key)


def test_a_store_that_vanishes_is_made_again(store, put):
    first = put()
    shutil.rmtree(store.root)
    assert store.lookup(first.key) is None
    assert store.lookup(put().key)


# ---- The lock ----


def test_one_holder_at_a_time_among_threads(store):
    inside, most = 0, 0

    def work():
        nonlocal inside, most
        with store.lock("a" * 64):
            inside += 1
            most = max(most, inside)
            time.sleep(0.01)
            inside -= 1

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 1


def test_keys_do_not_wait_for_each_other(store):
    with store.lock("a" * 64), store.lock("b" * 64):
        pass


def test_waiting_can_be_cancelled(store):
    cancel = threading.Event()
    cancel.set()
    with store.lock("a" * 64), pytest.raises(CancelledError), store.lock("a" * 64, cancel):
        pass


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_process_does_not_keep_the_lock(store):
    read, write = os.pipe()
    with store.lock("a" * 64):
        pid = os.fork()
        if pid == 0:
            os.close(write)
            os.read(read, 1)
            os._exit(0)
    try:
        with store.lock("a" * 64):
            pass
    finally:
        with contextlib.suppress(OSError):
            os.close(write)
        os.close(read)
        os.waitpid(pid, 0)


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL])
def test_a_file_system_without_locks_is_one_error_and_serves_what_it_has(store, put, monkeypatch, number):
    artifact = put()

    def refuse(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("fcntl.flock", refuse)
    before = sorted(os.listdir("/proc/self/fd"))
    with pytest.raises(StoreError, match=r"has no file locks.*CUTLASS_OPS_CACHE_DIR to a folder on a local disk"):
        put(sm80_spec(stages=4))
    assert sorted(os.listdir("/proc/self/fd")) == before
    assert store.lookup(artifact.key).read_library()
    assert store.clean() == 1
    assert not artifact.folder.exists()


def test_no_file_of_a_lock_stays(store, put):
    put()
    assert list((store.root / "locks").iterdir()) == []
    (store.root / "locks" / ("a" * 64)).touch()  # a builder was killed
    (store.root / "locks" / ("d" * 64)).symlink_to(store.root / "victim")
    with store.lock("b" * 64):
        assert store.clean() == 1
        assert [path.name for path in (store.root / "locks").iterdir()] == ["b" * 64]
    assert list((store.root / "locks").iterdir()) == []


def test_who_waits_while_the_store_is_deleted_goes_on(store, monkeypatch, caplog):
    monkeypatch.setattr(locks, "_PATIENCE", -1.0)  # who waits says so at once
    entered = threading.Event()

    def work():
        with store.lock("a" * 64):
            entered.set()

    with store.lock("a" * 64):
        thread = threading.Thread(target=work)
        thread.start()
        while "waiting" not in caplog.text:
            time.sleep(0.01)
        shutil.rmtree(store.root)
    thread.join()
    assert entered.is_set()


# ---- Links that somebody planted -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["tmp", "locks", "v1", "failed"])
@pytest.mark.parametrize("kind", ["link", "open to others"])
def test_a_folder_in_which_others_can_plant_anything_is_refused(store, put, tmp_path, name, kind):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    store.root.mkdir(mode=0o700)
    if kind == "link":
        (store.root / name).symlink_to(elsewhere)
    else:
        (store.root / name).mkdir()
        (store.root / name).chmod(0o777)

    def use():
        put()
        store.keep_failed(store.workspace("a" * 64, "source"))

    with pytest.raises(StoreError, match=f"{name}.*(is a link|can be written by others)"):
        use()
    assert list(elsewhere.iterdir()) == []


# ---- Size ----------------------------------------------------------------------------------------------------------


def bytes_of(folder):
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def used(artifact, seconds):
    """Have a kernel be last used so long ago."""
    then = time.time_ns() - seconds * 1_000_000_000
    os.utime(artifact.folder, ns=(then, then))
    return artifact


def test_the_least_recently_used_go(store, put, monkeypatch):
    first, second, third = (used(put(sm80_spec(stages)), 100 - stages) for stages in (2, 3, 4))
    size = bytes_of(store.root / "v1")
    assert store.size() == size
    monkeypatch.setenv("CUTLASS_OPS_CACHE_SIZE", str(size + 40))
    assert store.lookup(first.key)  # used again
    assert list(store.entries()) == sorted((first, second, third), key=lambda a: a.key)  # to list them is no use
    fourth = put(sm80_spec(5))
    assert {a.key for a in store.entries()} == {first.key, third.key, fourth.key}
    assert bytes_of(store.root / "v1") <= size + 40
    assert store.lookup(second.key) is None
    assert list((store.root / "tmp").iterdir()) == []


def test_a_store_stays_within_its_limit(store, put, monkeypatch):
    size = bytes_of(put(sm80_spec(2), "s" * 100).folder)
    monkeypatch.setenv("CUTLASS_OPS_CACHE_SIZE", str(3 * size + size // 2))
    for number in range(20):
        made = put(sm80_spec(2), f"{number:0100}")
        assert store.lookup(made.key) == made
        assert bytes_of(store.root / "v1") <= 3 * size + size // 2
    assert len(list(store.entries())) == 3


def test_a_kernel_that_alone_is_too_large_stays(store, put, monkeypatch):
    monkeypatch.setenv("CUTLASS_OPS_CACHE_SIZE", "1B")
    first, second = put(sm80_spec(2)), put(sm80_spec(3))
    assert list(store.entries()) == [second]
    assert store.lookup(first.key) is None


def test_a_store_may_be_without_limit(store, put, monkeypatch):
    monkeypatch.setenv("CUTLASS_OPS_CACHE_SIZE", "none")
    made = {put(sm80_spec(stages)).key for stages in (2, 3, 4)}
    assert {a.key for a in store.entries()} == made


def test_a_large_store_is_not_measured_for_every_kernel(store, put, monkeypatch):
    looks = []
    monkeypatch.setattr(recency, "uses", lambda folders: looks.append(1) or [])
    for number in range(10):
        put(source=str(number))
    assert len(looks) == 1
    monkeypatch.setenv("CUTLASS_OPS_CACHE_SIZE", "1kB")
    for number in range(10, 20):
        put(source=str(number))
    assert len(looks) == 11


def test_a_wrong_limit_is_said_before_anything_is_compiled(store, monkeypatch):
    monkeypatch.setenv("CUTLASS_OPS_CACHE_SIZE", "much")
    with pytest.raises(ValueError, match=r"CUTLASS_OPS_CACHE_SIZE is 'much': a size such as 2GB.*or none"):
        store.workspace("a" * 64, "source")


def test_what_cannot_be_removed_costs_no_kernel(store, put, monkeypatch, caplog):
    put(sm80_spec(2))
    monkeypatch.setenv("CUTLASS_OPS_CACHE_SIZE", "1B")

    def fail(*_):
        raise PermissionError(errno.EACCES, "not yours")

    monkeypatch.setattr(recency, "excess", fail)
    assert store.lookup(put(sm80_spec(3)).key)
    assert "cannot limit the size" in caplog.text


def test_a_use_that_cannot_be_noted_is_a_use(store, put, monkeypatch):
    key = put().key

    def fail(*_, **__):
        raise OSError(errno.EROFS, "read-only")

    monkeypatch.setattr(os, "utime", fail)
    assert store.lookup(key)


def test_a_kernel_used_since_it_was_looked_at_stays(store, put, monkeypatch):
    first = used(put(sm80_spec(2)), 100)
    monkeypatch.setenv("CUTLASS_OPS_CACHE_SIZE", "1B")
    look = recency.uses

    def late(folders):
        found = look(folders)
        assert store.lookup(first.key)
        return found

    monkeypatch.setattr(recency, "uses", late)
    put(sm80_spec(3))
    assert first.folder.exists()


def test_a_kernel_that_is_removed_while_it_is_looked_up_is_a_miss(store, put, monkeypatch, caplog):
    artifact = put()
    whole = store_module._read_manifest

    def read(folder):
        monkeypatch.setattr(store_module, "_read_manifest", whole)
        found = whole(folder)
        store.discard(folder)
        return found

    monkeypatch.setattr(store_module, "_read_manifest", read)
    with caplog.at_level(logging.DEBUG):
        assert store.lookup(artifact.key) is None
    assert caplog.text == ""


def test_a_kernel_that_is_removed_and_made_again_while_it_is_looked_up_is_found(store, put, monkeypatch):
    artifact = put()
    whole = store_module._read_manifest

    def read(folder):
        monkeypatch.setattr(store_module, "_read_manifest", whole)
        found = whole(folder)
        # Two of them, so that its inode is another one.
        kept = folder.with_name("kept")
        shutil.copytree(folder, kept)
        store.discard(folder)
        kept.rename(folder)
        (folder / "kernel.so").chmod(0o600)
        return found | {"files": {"kernel.so": {"size": 1, "sha256": ""}, "kernel.cu": {"size": 1, "sha256": ""}}}

    monkeypatch.setattr(store_module, "_read_manifest", read)
    assert store.lookup(artifact.key) == artifact


def test_what_is_removed_right_after_it_was_published_is_no_error(store, put, monkeypatch):
    sync = store_module._sync

    def remove(path):
        sync(path)
        if path.parent.name == "v1":
            for folder in path.iterdir():
                store.discard(folder)

    monkeypatch.setattr(store_module, "_sync", remove)
    artifact = put()
    assert not artifact.folder.exists()
    with pytest.raises(LoadError, match="cannot be read"):
        artifact.read_library()
    again = replace(artifact, again=lambda use: use(put()))
    monkeypatch.setattr(store_module, "_sync", sync)
    assert again.read_library() == library(HMMA)
    assert again.read_source() == b"source"
    assert again.present() == artifact


def test_what_was_changed_is_not_built_again_behind_the_callers_back(store, put):
    artifact = replace(put(), again=lambda use: use(put()))
    artifact.library.write_bytes(b"changed")
    with pytest.raises(LoadError, match="changed since"):
        artifact.read_library()
    artifact.library.unlink()
    assert artifact.read_library() == library(HMMA)


def test_what_somebody_is_about_to_read_is_not_removed(store, put, monkeypatch):
    artifact = put(sm80_spec(2))
    with store.lock(artifact.key):
        assert store.clean() == 0
        monkeypatch.setenv("CUTLASS_OPS_CACHE_SIZE", "1B")
        other = put(sm80_spec(3))
        assert artifact.read_library()
    put(sm80_spec(4))
    assert not artifact.folder.exists()
    assert not other.folder.exists()


def test_failures_are_bounded(store, monkeypatch):
    monkeypatch.setattr(store_module, "_MOST_FAILED", 3)
    for number in range(6):
        last = store.keep_failed(store.workspace(f"{number}" * 64, "source"))
        then = time.time_ns() - (10 - number) * 1_000_000_000
        os.utime(last, ns=(then, then))
    assert sorted(path.name[0] for path in (store.root / "failed").iterdir()) == ["3", "4", "5"]
    monkeypatch.setattr(store_module, "_MAX_FAILED", 10)
    last = store.keep_failed(store.workspace("6" * 64, "s" * 100))
    assert [path.name[0] for path in (store.root / "failed").iterdir()] == ["5", "6"]
    assert (last / "kernel.cu").exists()


def test_clean_what_was_not_used_for_long(store, put):
    old, new = used(put(sm80_spec(2)), 1000), put(sm80_spec(3))
    failed = store.keep_failed(store.workspace("a" * 64, "source"))
    abandoned = store.workspace("b" * 64, "source")
    assert store.clean(unused_for=5000) == 0
    assert failed.exists()
    assert not abandoned.exists()
    assert store.clean(unused_for=500) == 1
    assert list(store.entries()) == [new]
    assert failed.exists()
    os.utime(failed, ns=(0, 0))
    assert store.clean(unused_for=500) == 0
    assert not failed.exists()
    assert not old.folder.exists()


def test_clean_down_to_a_size(store, put):
    made = [used(put(sm80_spec(stages)), 100 - stages) for stages in (2, 3, 4)]
    one = bytes_of(made[0].folder)
    assert store.clean(keep=3 * one + 9) == 0
    assert store.clean(keep=2 * one + 9) == 1
    assert {a.key for a in store.entries()} == {a.key for a in made[1:]}
    used(made[2], 1000)
    assert store.clean(keep=one + 9, unused_for=500) == 1
    assert list(store.entries()) == [made[1]]
    assert store.clean(keep=1) == 1


# ---- Look-ups without a compiler -----------------------------------------------------------------------------------


@pytest.fixture
def reads(monkeypatch):
    """Count the files that are read."""
    found = []
    read = store_module.read_private

    def count(path, **more):
        found.append(path)
        return read(path, **more)

    monkeypatch.setattr(store_module, "read_private", count)
    return found


def test_a_store_is_read_once_whatever_is_missing(store, put, reads):
    made = {source: put(source=source) for source in "abcdef"}
    reads.clear()
    for number in range(10):
        assert store.find(identity.source_identity(SPEC, f"missing {number}")) is None
        assert KernelStore(store.root).find(identity.source_identity(SPEC, f"{number}")) is None
    assert sorted(reads) == sorted(a.folder / "manifest.json" for a in made.values())
    reads.clear()
    for source, artifact in made.items():
        assert store.find(identity.source_identity(SPEC, source)) == artifact
    assert len(reads) == 3 * len(made)  # each kernel that is found is checked


def test_what_others_publish_or_remove_is_noticed(store, put, reads):
    first = put(source="a")
    assert store.find(identity.source_identity(SPEC, "b")) is None
    second = put(source="b")
    assert store.find(identity.source_identity(SPEC, "b")) == second
    store.discard(second.folder)
    assert store.find(identity.source_identity(SPEC, "b")) is None
    again = put(source="b")
    assert store.find(identity.source_identity(SPEC, "b")) == again
    assert store.find(identity.source_identity(SPEC, "a")) == first
    store.clean()
    assert store.find(identity.source_identity(SPEC, "a")) is None
    shutil.rmtree(store.root)
    assert store.find(identity.source_identity(SPEC, "a")) is None
    assert put(source="a") == store.find(identity.source_identity(SPEC, "a"))


def test_folders_that_do_not_change_are_not_looked_at_again(store, put, monkeypatch):
    put(source="a")
    for folder in (store.root / "v1").iterdir():
        os.utime(folder, (1000, 1000))
    store.find(identity.source_identity(SPEC, "b"))
    looked = []
    scan = os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: looked.append(path) or scan(path))
    assert store.find(identity.source_identity(SPEC, "a"))
    assert store.find(identity.source_identity(SPEC, "b")) is None
    assert looked == [store.root / "v1"] * 2


@pytest.mark.parametrize("corrupt", CORRUPTIONS.values(), ids=CORRUPTIONS.keys())
def test_what_is_not_whole_is_not_found_and_hides_nothing(store, put, corrupt):
    artifact, other = put(), put(source="other")
    (store.root / "v1" / artifact.key[:2] / "stray").touch()
    corrupt(artifact)
    assert store.find(identity.source_identity(SPEC, "source")) is None
    assert store.find(identity.source_identity(SPEC, "other")) == other
    assert put() == store.find(identity.source_identity(SPEC, "source"))


def test_any_compilers_kernel_of_a_source_that_is_whole_is_found(store, put, toolchain):
    first = put()
    changed = kernel_identity(SPEC, "source", replace(toolchain, nvcc_version="99"))
    with store.lock(identity_key(changed)):
        folder = store.workspace(identity_key(changed), "source")
        (folder / "kernel.so").write_bytes(library(HMMA))
        second = store.publish(folder, changed, {"HMMA": 1}, COMPILED)
    wanted = identity.source_identity(SPEC, "source")
    found = store.find(wanted)
    assert found in (first, second)
    os.truncate(found.library, 1)
    assert store.find(wanted) == (second if found == first else first)
