"""Publishing, finding, and look-ups without a compiler; what is not whole is a miss, never a crash and never loaded."""

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from fake_toolkit import HMMA, library, sm80_spec

from cutlass_ops.artifacts import entry as entry_module
from cutlass_ops.artifacts.entry import FORMAT, Artifact, Compiled, identity_key
from cutlass_ops.base.errors import StoreError
from cutlass_ops.compilation import identity
from cutlass_ops.compilation.identity import kernel_identity

SPEC = sm80_spec()


@pytest.mark.parametrize("look", [lambda store: list(store.entries()), lambda store: store.is_empty()])
def test_a_store_that_this_user_cannot_read_is_said_to_be_one(store, put, monkeypatch, look):
    put(SPEC)

    def refused(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "glob", refused)
    with pytest.raises(StoreError, match=r"cannot be read by this user .*its owner can run chmod -R a\+rX on it"):
        look(store)


def test_publish_and_lookup(store, put):
    artifact = put()
    assert artifact == store.lookup(artifact.key)
    assert list(store.entries()) == [artifact]
    assert artifact.folder == store.root / f"v{FORMAT}" / artifact.key[:2] / artifact.key
    assert sorted(p.name for p in artifact.folder.iterdir()) == ["kernel.cu", "kernel.so", "manifest.json"]
    assert artifact.library.read_bytes() == library(HMMA)
    assert artifact.source.read_text() == "source"
    assert artifact.spec == SPEC
    assert artifact.target == "sm_80"
    assert artifact.manifest["sass"] == {"HMMA": 1}
    assert artifact.manifest["compile_seconds"] == 1.5
    assert list((store.root / "tmp").iterdir()) == []


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
    "manifest of a later format": lambda a: edit_manifest(a, format=FORMAT + 1),
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


@pytest.mark.sample(3)
@pytest.mark.parametrize("corrupt", CORRUPTIONS.values(), ids=CORRUPTIONS.keys())
def test_what_is_not_whole_is_a_miss_and_is_replaced(store, put, corrupt, caplog):
    artifact = put()
    corrupt(artifact)
    assert store.lookup(artifact.key) is None
    assert "ignored" in caplog.text
    assert list(store.entries()) == []
    assert put() == store.lookup(artifact.key)
    assert list((store.root / "tmp").iterdir()) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
@pytest.mark.parametrize("which", ["folder", "library"])
def test_what_belongs_to_another_user_is_a_miss(store, put, which):
    artifact = put()
    os.chown(getattr(artifact, which), 12345, 12345)
    assert store.lookup(artifact.key) is None


@pytest.fixture
def reads(monkeypatch):
    """Count the files that are read."""
    found = []
    read = entry_module.read_private

    def count(path, **more):
        found.append(path)
        return read(path, **more)

    monkeypatch.setattr(entry_module, "read_private", count)
    return found


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


def test_any_compilers_kernel_of_a_source_that_is_whole_is_found(store, put, toolchain):
    first = put()
    changed = kernel_identity(SPEC, "source", replace(toolchain, nvcc_version="99"))
    with store.lock(identity_key(changed)):
        folder = store.workspace(identity_key(changed), "source")
        (folder / "kernel.so").write_bytes(library(HMMA))
        second = store.publish(folder, changed, {"HMMA": 1}, Compiled(1.5, ()))
    wanted = identity.source_identity(SPEC, "source")
    found = store.find(wanted)
    assert found in (first, second)
    os.truncate(found.library, 1)
    assert store.find(wanted) == (second if found == first else first)
