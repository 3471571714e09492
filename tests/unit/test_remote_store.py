"""Kernels that machines share by URL: fetched, verified, published, and claimed by one of many."""

import json
import logging
import os
import shutil
import sys
import threading
import time
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path

import pytest
from bundles import write_keys
from cryptography.hazmat.primitives.asymmetric import ed25519
from fake_toolkit import FFMA, HMMA, FakeToolkit, library, sm80_spec
from fleet import Server, name_store, seconds

from cutlass_ops.artifacts import remote_store as remote_module
from cutlass_ops.artifacts.bundle import open_bundle
from cutlass_ops.artifacts.remote_store import RemoteStores
from cutlass_ops.artifacts.store import KernelStore
from cutlass_ops.base import claims, env, remote_files
from cutlass_ops.base.errors import BundleError, CompileError, MissingKernelError, StoreError
from cutlass_ops.base.remote_files import RemoteFiles, TooLarge, Unreachable
from cutlass_ops.compilation import builder as build_module
from cutlass_ops.compilation.builder import build_artifact, build_many, fetched, stored
from cutlass_ops.kinds import render
from tests.sampling import in_turn

pytest.importorskip("fsspec")

SPEC, OTHER = sm80_spec(), sm80_spec(4)


@pytest.fixture(autouse=True)
def _surroundings(session, monkeypatch):
    monkeypatch.setattr(render, "render", lambda spec: f"// {spec.slug}\n")
    monkeypatch.setenv("CUTLASS_OPS_PROGRESS", "0")
    monkeypatch.delenv("CUTLASS_OPS_JIT", raising=False)


@pytest.fixture
def keys(tmp_path):
    return write_keys(tmp_path, "mine", ed25519.Ed25519PrivateKey.generate())


@pytest.fixture
def others(tmp_path):
    return write_keys(tmp_path, "others", ed25519.Ed25519PrivateKey.generate())


@pytest.fixture
def kit(tmp_path):
    return FakeToolkit(tmp_path / "toolkit")


@pytest.fixture
def shared(tmp_path):
    return tmp_path / "shared"


@pytest.fixture
def server(shared):
    shared.mkdir()
    found = Server(shared)
    yield found
    found.stop()


@pytest.fixture
def local(tmp_path):
    """A new machine's store, each time."""
    count = iter(range(1000))
    return lambda: KernelStore(tmp_path / f"machine{next(count)}")


@pytest.fixture
def publish(shared, keys, kit, local):
    """Have another machine compile and publish kernels."""

    def _publish(*specs, private=keys[0], public=keys[1]):
        with pytest.MonkeyPatch.context() as patch:
            name_store(patch, f"file://{shared}", public, private)
            made = build_many(specs or [SPEC], jobs=1, store=local(), toolchain=kit.find())
        (kit.root / "count").write_text("")
        return made

    return _publish


def objects(root: Path, folder: str = "") -> list[str]:
    return sorted(str(p.relative_to(root)) for p in (root / "v1" / folder).rglob("*") if p.is_file())


def said(caplog, level=logging.WARNING) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= level and r.name == "cutlass_ops"]


# ---- Fetching and publishing ----


def test_a_kernel_is_compiled_once_for_two_machines(shared, keys, kit, local, monkeypatch):
    name_store(monkeypatch, f"file://{shared}", keys[1], keys[0])
    first = build_artifact(SPEC, store=local(), toolchain=kit.find())
    second = build_artifact(SPEC, store=local(), toolchain=kit.find())
    assert kit.compilations == 1
    assert first.key == second.key
    assert first.read_library() == second.read_library()
    assert first.read_source() == second.read_source()
    assert (first.origin, second.origin) == ("compiled here", f"fetched from file://{shared}")
    assert first.manifest["sass"] == second.manifest["sass"]
    assert first.manifest["resources"] == second.manifest["resources"]
    names = objects(shared)
    assert f"v1/kernels/{first.key}.bundle" in names
    assert [name.partition("/")[0] for name in names] == ["v1", "v1"]
    assert not list((shared / "v1" / "claims").iterdir())


@pytest.mark.parametrize("damage", [None, b"", b"not a bundle"], ids=["missing", "empty", "another"])
def test_a_builder_completes_what_another_has_left_half_published(
    shared, keys, kit, local, publish, monkeypatch, damage
):
    publish()
    (source,) = (shared / "v1" / "sources").iterdir()
    good = source.read_bytes()
    source.unlink() if damage is None else source.write_bytes(damage)
    name_store(monkeypatch, f"file://{shared}", keys[1], keys[0])
    assert build_artifact(SPEC, store=local(), toolchain=kit.find()).origin == f"fetched from file://{shared}"
    assert source.read_bytes() == good


@pytest.mark.parametrize("url", ["file://relative/kernels", "local://kernels"])
def test_a_folder_is_named_absolutely(keys, monkeypatch, url):
    name_store(monkeypatch, url, keys[1])
    with pytest.raises(ValueError, match=r"must name an absolute folder, such as (file|local):///mnt/kernels"):
        env.remote_store()


def test_what_is_published_is_a_signed_bundle(shared, keys, others, publish):
    (made,) = publish()
    path = shared / "v1" / "kernels" / f"{made.key}.bundle"
    bundle = open_bundle(path, keys[1])
    assert bundle.find(SPEC).read_library() == made.read_library()
    with pytest.raises(BundleError, match="the signature is not from the key"):
        open_bundle(path, others[1])


def test_a_second_look_asks_nothing(shared, keys, kit, local, server, publish, monkeypatch):
    publish()
    name_store(monkeypatch, server.url, keys[1])
    store = local()
    build_artifact(SPEC, store=store, toolchain=kit.find())
    asked = list(server.asked)
    assert build_artifact(SPEC, store=store, toolchain=kit.find()).origin == f"fetched from {server.url}"
    assert server.asked == asked
    assert kit.compilations == 0


def test_a_reader_compiles_what_is_not_there_and_publishes_nothing(shared, keys, kit, local, monkeypatch):
    name_store(monkeypatch, f"file://{shared}", keys[1])
    assert build_artifact(SPEC, store=local(), toolchain=kit.find()).origin == "compiled here"
    assert not shared.exists()


def test_many_kernels_of_which_some_are_there(keys, kit, local, server, publish, monkeypatch):
    publish(SPEC)
    name_store(monkeypatch, server.url, keys[1])
    made = build_many([SPEC, OTHER, SPEC], jobs=2, store=local(), toolchain=kit.find())
    assert [a.origin for a in made] == [f"fetched from {server.url}", "compiled here", f"fetched from {server.url}"]
    assert kit.compilations == 1


def test_what_was_removed_is_fetched_again(keys, kit, local, server, publish, monkeypatch):
    publish()
    name_store(monkeypatch, server.url, keys[1])
    store = local()
    artifact = build_artifact(SPEC, store=store, toolchain=kit.find())
    store.clean()
    assert artifact.read_library()
    assert kit.compilations == 0


def test_without_a_compiler_the_store_serves(keys, kit, local, server, publish, monkeypatch):
    (made,) = publish()
    name_store(monkeypatch, server.url, keys[1])
    monkeypatch.setenv("CUTLASS_OPS_JIT", "0")
    monkeypatch.setattr(build_module, "find_toolchain", None)
    store = local()
    artifact = build_artifact(SPEC, store=store)
    assert artifact.key == made.key
    assert artifact.read_library() == made.read_library()
    asked = list(server.asked)
    assert build_many([SPEC], store=store) == [artifact]
    assert server.asked == asked
    store.clean()
    assert artifact.read_library()
    with pytest.raises(MissingKernelError, match=f"has no kernel {OTHER.slug}, nor has {server.url}"):
        build_artifact(OTHER, store=store)


def test_a_look_that_compiles_nothing_asks_nothing_either(keys, kit, local, server, publish, monkeypatch):
    """A call looks for stand-ins among dozens of kernels."""
    publish()
    monkeypatch.setattr(build_module, "find_toolchain", kit.find)
    monkeypatch.setenv("CUTLASS_OPS_CACHE_DIR", str(local().root))
    name_store(monkeypatch, server.url, keys[1])
    for jit in "10":
        monkeypatch.setenv("CUTLASS_OPS_JIT", jit)
        assert stored(SPEC) is None
    monkeypatch.setenv("CUTLASS_OPS_JIT", "1")
    assert server.asked == []
    assert fetched(OTHER) is None
    assert fetched(SPEC).origin == f"fetched from {server.url}"
    assert stored(SPEC) == fetched(SPEC)
    assert kit.compilations == 0


def test_a_store_in_memory(keys, kit, local, monkeypatch):
    name_store(monkeypatch, "memory://kernels/fleet", keys[1], keys[0])
    for _ in range(2):
        build_artifact(SPEC, store=local(), toolchain=kit.find())
    assert kit.compilations == 1


# ---- What must not be believed ----


def rewritten(path: Path, change):
    path.write_bytes(change(path.read_bytes()))


WRONG = {
    "empty": lambda data: b"",
    "garbage": lambda data: b"\0garbage" * 1000,
    "truncated": lambda data: data[: len(data) // 2],
    "longer": lambda data: data + b"x",
    "one bit": lambda data: data.replace(b"// sm80", b"// sm81") if b"// sm80" in data else data[:-30] + data[-29:],
    "library": lambda data: data.replace(library(HMMA, FFMA, HMMA)[-40:], bytes(40)),
    "signature": lambda data: _resigned(data, bytes(64)),
    "no signature": lambda data: _resigned(data, None),
}


def _resigned(data: bytes, signature: bytes | None) -> bytes:
    import tempfile

    from cutlass_ops.artifacts import container

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "a")
        path.write_bytes(data)
        path.chmod(0o600)
        found = container.open_container(path)
        files = {name: found.read(name) for name in found.sizes if name != "manifest.sig"}
        if signature is not None:
            files["manifest.sig"] = signature
        container.write(path, files)
        return path.read_bytes()


@pytest.mark.parametrize(("how", "signs"), in_turn(WRONG, (True, False)))
def test_a_wrong_object_is_ignored_and_replaced(shared, keys, kit, local, publish, monkeypatch, caplog, how, signs):
    (made,) = publish()
    path = shared / "v1" / "kernels" / f"{made.key}.bundle"
    good = path.read_bytes()
    rewritten(path, WRONG[how])
    assert path.read_bytes() != good
    name_store(monkeypatch, f"file://{shared}", keys[1], keys[0] if signs else None)
    artifact = build_artifact(SPEC, store=local(), toolchain=kit.find())
    assert artifact.origin == "compiled here"
    assert artifact.read_library() == made.read_library()
    (warning,) = said(caplog)
    assert f"file://{shared}/v1/kernels/{made.key}.bundle is ignored: " in warning
    assert "/tmp/cutlass_ops." not in warning
    assert (path.read_bytes() == good) is signs


def test_another_signer_is_nobody(shared, keys, others, kit, local, publish, monkeypatch, caplog):
    publish(private=others[0], public=others[1])
    name_store(monkeypatch, f"file://{shared}", keys[1])
    assert build_artifact(SPEC, store=local(), toolchain=kit.find()).origin == "compiled here"
    assert "the signature is not from the key" in caplog.text
    monkeypatch.setenv("CUTLASS_OPS_JIT", "0")
    with pytest.raises(MissingKernelError):
        build_artifact(SPEC, store=local())
    # During a change of keys both are trusted.
    monkeypatch.setenv(env.REMOTE_STORE_KEY.name, f"{keys[1]}:{others[1]}")
    assert build_artifact(SPEC, store=local()).origin == f"fetched from file://{shared}"


def test_a_signed_kernel_in_the_place_of_another_is_ignored(shared, keys, kit, local, publish, monkeypatch, caplog):
    ours, other = publish(SPEC, OTHER)
    for folder in ("kernels", "sources"):
        a, b = sorted((shared / "v1" / folder).iterdir())
        data = a.read_bytes()
        a.write_bytes(b.read_bytes())
        b.write_bytes(data)
    name_store(monkeypatch, f"file://{shared}", keys[1])
    assert build_artifact(SPEC, store=local(), toolchain=kit.find()).origin == "compiled here"
    assert f"it is the kernel {other.key}" in caplog.text
    monkeypatch.setenv("CUTLASS_OPS_JIT", "0")
    with pytest.raises(MissingKernelError, match=ours.spec.slug):
        build_artifact(SPEC, store=local())


@pytest.mark.parametrize("made", [library(FFMA), library(HMMA, search={29: "/opt/lib"}), library(HMMA, host=8)])
def test_what_is_signed_is_still_proved(shared, keys, kit, local, publish, monkeypatch, caplog, made):
    with monkeypatch.context() as patch:
        patch.setattr(build_module, "_proved", lambda *_: {"HMMA": 1})
        kit.makes(made)
        publish()
    kit.makes(library(HMMA))
    name_store(monkeypatch, f"file://{shared}", keys[1])
    store = local()
    assert build_artifact(SPEC, store=store, toolchain=kit.find()).origin == "compiled here"
    assert f"{SPEC.slug} from file://{shared} is ignored: " in caplog.text
    assert not list((store.root / "tmp").iterdir())


def test_a_bundle_of_several_kernels_is_none_of_them(shared, keys, kit, local, publish, monkeypatch, caplog):
    from cutlass_ops.artifacts.bundle import manifest_of, write_bundle

    made = publish(SPEC, OTHER)
    manifest = manifest_of(made, {}, ())
    files = {r.library_name: a.read_library() for r in manifest.kernels for a in made if a.key == r.key}
    files |= {r.source_name: a.read_source() for r in manifest.kernels for a in made if a.key == r.key}
    path = shared / "v1" / "kernels" / f"{made[0].key}.bundle"
    write_bundle(path, manifest, files, private_key=keys[0])
    name_store(monkeypatch, f"file://{shared}", keys[1])
    assert build_artifact(SPEC, store=local(), toolchain=kit.find()).origin == "compiled here"
    assert "it must have one kernel and nothing else" in caplog.text


def test_whatever_the_umask_a_kernel_is_fetched(shared, keys, kit, local, publish, monkeypatch):
    publish()
    name_store(monkeypatch, f"file://{shared}", keys[1])
    before = os.umask(0)
    try:
        assert build_artifact(SPEC, store=local(), toolchain=kit.find()).origin != "compiled here"
    finally:
        os.umask(before)


# ---- Servers that are down, slow or wrong ----


BAD = ("silent", "trickling", "endless", "failing", "garbage", "truncated")


@pytest.mark.parametrize(("how", "jit"), in_turn(BAD, ("1", "0")))
def test_a_bad_server_costs_no_kernel_and_no_more_than_the_limit(
    keys, kit, local, server, publish, monkeypatch, caplog, how, jit
):
    publish(SPEC, OTHER)
    server.how = how
    # What these send never ends.
    endless = how in ("silent", "trickling", "endless")
    name_store(monkeypatch, server.url, keys[1], timeout=0.2 if endless else 5)
    monkeypatch.setattr(remote_module, "_MAX_OBJECT", 1 << 30 if how == "endless" else 1 << 20)
    monkeypatch.setenv("CUTLASS_OPS_JIT", jit)
    store, toolchain = local(), kit.find()

    def build(spec):
        if jit == "1":
            assert build_artifact(spec, store=store, toolchain=toolchain).origin == "compiled here"
            return
        with pytest.raises(MissingKernelError):
            build_artifact(spec, store=store)

    for spec in (SPEC, OTHER):
        build(spec)
    ignored = how == "garbage"
    assert len(said(caplog)) == (2 if ignored else 1), said(caplog)
    assert ("is ignored" if ignored else "cannot be used") in said(caplog)[0]
    if not ignored:
        assert len(server.asked) == 1  # it is not asked again soon


def test_a_dead_server_is_said_once(keys, kit, local, server, monkeypatch, caplog):
    server.stop()
    name_store(monkeypatch, server.url, keys[1], timeout=5)
    monkeypatch.setattr(remote_files, "_PAUSE", 0.0)
    build_many([sm80_spec(n) for n in (2, 3, 4)], jobs=1, store=local(), toolchain=kit.find())
    assert kit.compilations == 3
    (warning,) = said(caplog)
    assert warning.startswith(f"the remote store {server.url} cannot be used: ")


def test_it_is_asked_again_after_a_while(keys, kit, local, server, publish, monkeypatch):
    publish(SPEC, OTHER)
    name_store(monkeypatch, server.url, keys[1])
    server.how = "failing"
    store, toolchain = local(), kit.find()
    assert build_artifact(SPEC, store=store, toolchain=toolchain).origin == "compiled here"
    server.how = "well"
    assert build_artifact(OTHER, store=local(), toolchain=toolchain).origin == "compiled here"
    monkeypatch.setattr(remote_files.time, "monotonic", lambda now=time.monotonic: now() + 61)
    assert build_artifact(OTHER, store=local(), toolchain=toolchain).origin == f"fetched from {server.url}"


def test_an_object_that_is_too_large_is_not_read_to_its_end(keys, kit, local, server, monkeypatch, caplog):
    server.how = "endless"
    monkeypatch.setattr(remote_module, "_MAX_OBJECT", 1 << 20)
    name_store(monkeypatch, server.url, keys[1], timeout=30)
    assert build_artifact(SPEC, store=local(), toolchain=kit.find()).origin == "compiled here"
    assert "is ignored: it has more than 1048576 bytes" in caplog.text
    assert server.sent < 64 << 20  # what lies in buffers


def test_a_server_that_refuses_writes_costs_no_kernel(shared, keys, kit, local, monkeypatch, caplog):
    name_store(monkeypatch, f"file://{shared}", keys[1], keys[0])
    shared.write_text("a file where the folder should be")
    assert build_artifact(SPEC, store=local(), toolchain=kit.find()).origin == "compiled here"
    assert len(said(caplog)) == 1


# ---- Turns ----


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(claims, "_BEAT", 0.05)
    monkeypatch.setattr(claims, "_EXPIRES", 0.6)
    monkeypatch.setattr(claims, "_LAST_POLL", 0.1)


@pytest.fixture(autouse=True)
def _no_grace(monkeypatch):
    monkeypatch.setattr(claims, "_GRACE", 0.0)


def test_a_reader_waits_for_a_builder_that_begins_with_it(shared, keys, kit, local, monkeypatch, quick):
    monkeypatch.setattr(claims, "_GRACE", 600.0)
    toolchain = kit.find()
    name_store(monkeypatch, f"file://{shared}", keys[1], timeout=1200)
    began = threading.Event()
    look = claims._Turns._read

    def read(self, number):
        began.set()
        return look(self, number)

    monkeypatch.setattr(claims._Turns, "_read", read)
    made = []
    reader = threading.Thread(
        target=lambda: made.append(build_artifact(SPEC, store=local(), toolchain=toolchain)), daemon=True
    )
    reader.start()
    began.wait()
    monkeypatch.setenv(env.REMOTE_STORE_SIGNING_KEY.name, str(keys[0]))
    kit.makes(library(HMMA), before="sleep 0.2\n")
    build_artifact(SPEC, store=local(), toolchain=toolchain)
    reader.join(60)
    assert [artifact.origin for artifact in made] == [f"fetched from file://{shared}"]
    assert kit.compilations == 1


def machines(count, local, kit, spec=SPEC):
    """Build on several machines at once, each with its own store; return their artifacts or errors."""
    toolchain = kit.find()

    def build(_):
        try:
            return build_artifact(spec, store=local(), toolchain=toolchain)
        except CompileError as exc:
            return exc

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(build, range(count)))


@pytest.mark.parametrize("url", ["file", "memory"])
def test_of_many_machines_one_compiles(shared, keys, kit, local, monkeypatch, quick, url):
    name_store(monkeypatch, f"file://{shared}" if url == "file" else "memory://many", keys[1], keys[0])
    kit.makes(library(HMMA), before="sleep 0.5\n")
    made = machines(8, local, kit)
    assert kit.compilations == 1
    assert len({artifact.sha256 for artifact in made}) == 1
    assert [artifact.origin for artifact in made].count("compiled here") == 1


def test_readers_wait_for_a_builder_too(shared, keys, kit, local, monkeypatch, quick):
    toolchain = kit.find()
    name_store(monkeypatch, f"file://{shared}", keys[1], keys[0])
    kit.makes(library(HMMA), before=f"while [ ! -e {kit.root}/go ]; do sleep 0.02; done\n")
    builder = threading.Thread(target=build_artifact, args=(SPEC,), kwargs={"store": local(), "toolchain": toolchain})
    builder.start()
    while not kit.compilations:
        time.sleep(0.01)
    monkeypatch.delenv(env.REMOTE_STORE_SIGNING_KEY.name)
    threading.Timer(0.2, (kit.root / "go").touch).start()
    assert build_artifact(SPEC, store=local(), toolchain=toolchain).origin == f"fetched from file://{shared}"
    builder.join()
    assert kit.compilations == 1


def dead_claim(shared, key, number=0, text=b'{"host": "gone", "pid": 1, "count": 0, "state": "working"}'):
    path = shared / "v1" / "claims" / f"{key}.{number}"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text)
    return path


@pytest.fixture
def key(kit, local, keys):
    """The kernel's key."""
    return build_artifact(SPEC, store=local(), toolchain=kit.find()).key


@pytest.mark.parametrize(
    "texts",
    [(b"", b"garbage"), (b"[" * 4000, bytes(1 << 20)), (b'{"state": "working"}', b"{}")],
    ids=["no text", "long ones", "too little"],
)
def test_a_dead_claim_is_taken_over_by_one(shared, keys, kit, local, key, monkeypatch, quick, texts):
    (kit.root / "count").write_text("")
    for number, text in enumerate(texts):
        dead_claim(shared, key, number, text)
    name_store(monkeypatch, f"file://{shared}", keys[1], keys[0])
    kit.makes(library(HMMA), before="sleep 0.3\n")
    made = machines(4, local, kit)
    assert kit.compilations == 1
    assert [artifact.origin for artifact in made].count("compiled here") == 1
    assert not list((shared / "v1" / "claims").iterdir())


@pytest.mark.parametrize("signs", [True, False])
def test_a_claim_that_lives_too_long_blocks_nobody_beyond_the_limit(
    shared, keys, kit, local, key, monkeypatch, quick, signs
):
    path = dead_claim(shared, key)
    stop = threading.Event()

    def live():
        count = 0
        while not stop.wait(0.02):
            count += 1
            aside = path.with_suffix(".new")
            aside.write_text(json.dumps({"host": "\x1b[31mloud", "pid": [], "count": count, "state": "working"}))
            aside.rename(path)

    thread = threading.Thread(target=live)
    thread.start()
    name_store(monkeypatch, f"file://{shared}", keys[1], keys[0] if signs else None, wait=0.5)
    taken = seconds(lambda: build_artifact(SPEC, store=local(), toolchain=kit.find()))
    stop.set()
    thread.join()
    assert 0.4 < taken < 15
    assert kit.compilations == 2


def test_who_does_not_wait_compiles_at_once(shared, keys, kit, local, key, monkeypatch):
    dead_claim(shared, key)
    name_store(monkeypatch, f"file://{shared}", keys[1], keys[0], timeout=60, wait=0)
    assert seconds(lambda: build_artifact(SPEC, store=local(), toolchain=kit.find())) < 15
    assert kit.compilations == 2


def test_waiting_ends_when_it_is_cancelled(shared, keys, kit, local, key, monkeypatch):
    dead_claim(shared, key)
    name_store(monkeypatch, f"file://{shared}", keys[1], keys[0], wait=600)
    cancel = threading.Event()
    threading.Timer(0.1, cancel.set).start()
    with pytest.raises(CancelledError):
        build_artifact(SPEC, store=local(), toolchain=kit.find(), cancel=cancel)


def test_a_kernel_that_does_not_compile_frees_all_who_wait(shared, keys, kit, local, monkeypatch, quick):
    name_store(monkeypatch, f"file://{shared}", keys[1], keys[0], wait=600)
    kit.does('sleep 0.2; echo "kernel.cu(7): error: something"; exit 1')
    assert seconds(lambda: machines(4, local, kit)) < 60
    assert all(isinstance(error, CompileError) for error in machines(2, local, kit))
    # One whose compiler can do it puts all in order.
    kit.makes(library(HMMA))
    machines(1, local, kit)
    assert [artifact.origin for artifact in machines(2, local, kit)] == [f"fetched from file://{shared}"] * 2


def test_a_cancelled_builder_lets_the_next_go_on(shared, keys, kit, local, monkeypatch, quick):
    name_store(monkeypatch, f"file://{shared}", keys[1], keys[0], wait=600)
    kit.does("sleep 600")
    toolchain, cancel = kit.find(), threading.Event()

    def build():
        with pytest.raises(CancelledError):
            build_artifact(SPEC, store=local(), toolchain=toolchain, cancel=cancel)

    thread = threading.Thread(target=build)
    thread.start()
    while not kit.compilations:
        time.sleep(0.01)
    kit.makes(library(HMMA))
    cancel.set()
    thread.join()
    assert build_artifact(SPEC, store=local(), toolchain=toolchain).origin == "compiled here"
    assert kit.compilations == 2


def test_the_server_goes_away_while_a_kernel_is_compiled(shared, keys, kit, local, monkeypatch, caplog, quick):
    name_store(monkeypatch, f"file://{shared}", keys[1], keys[0])
    # Again where a builder's sign of life came in between, and made the folder anew.
    kit.makes(library(HMMA), before=f"until rm -rf {shared} && echo > {shared}; do sleep 0.01; done\n")
    assert build_artifact(SPEC, store=local(), toolchain=kit.find()).origin == "compiled here"
    assert len(said(caplog)) == 1


# ---- Settings: closed where in doubt ----


def remote():
    return RemoteStores.current().store()


def test_no_variable_no_store(monkeypatch):
    assert remote() is None
    monkeypatch.setenv(env.REMOTE_STORE.name, "")
    assert remote() is None


@pytest.mark.parametrize("key", [None, "", ":", "relative.pub"])
def test_no_key_no_store(monkeypatch, kit, local, tmp_path, key):
    name_store(monkeypatch, f"file://{tmp_path}/shared", key)
    for use in (remote, lambda: build_artifact(SPEC, store=local(), toolchain=kit.find())):
        with pytest.raises(ValueError, match="CUTLASS_OPS_REMOTE_STORE_KEY"):
            use()
    assert kit.compilations == 0


@pytest.mark.parametrize(
    "url", ["kernels", "/srv/kernels", "s3:bucket", "s3://", "s3://a?b", "s3://a#b", "simplecache::s3://a", "s3://a b"]
)
def test_what_is_no_url_of_a_folder(monkeypatch, keys, url):
    name_store(monkeypatch, url, keys[1])
    with pytest.raises(ValueError, match="CUTLASS_OPS_REMOTE_STORE must be the URL of a folder"):
        remote()


@pytest.mark.parametrize(
    ("variable", "text"),
    [(env.REMOTE_STORE_TIMEOUT, t) for t in ("0", "-1", "soon", "nan")]
    + [(env.REMOTE_STORE_WAIT, t) for t in ("-1", "nan", "x")],
)
def test_what_is_no_time(monkeypatch, keys, shared, variable, text):
    name_store(monkeypatch, f"file://{shared}", keys[1])
    monkeypatch.setenv(variable.name, text)
    with pytest.raises(ValueError, match=f"{variable.name} must be a positive number of seconds"):
        remote()


def test_an_unlimited_time_is_a_day(monkeypatch, keys, shared):
    name_store(monkeypatch, f"file://{shared}/", keys[1], timeout=float("inf"), wait=float("inf"))
    assert remote().settings[0::3] == (f"file://{shared}", 86400.0)
    assert remote().settings.wait == 86400.0


def test_keys_must_fit(monkeypatch, keys, others, shared, tmp_path):
    name_store(monkeypatch, f"file://{shared}", keys[1], others[0])
    with pytest.raises(ValueError, match="signs for none of the public keys"):
        remote()
    name_store(monkeypatch, f"file://{shared}", tmp_path / "missing.pub")
    with pytest.raises(ValueError, match="CUTLASS_OPS_REMOTE_STORE_KEY names"):
        remote()
    keys[1].chmod(0o646)
    name_store(monkeypatch, f"file://{shared}", keys[1])
    with pytest.raises(BundleError, match="is not safe"):
        remote()


def test_nothing_is_published_by_http(monkeypatch, keys):
    name_store(monkeypatch, "http://localhost/kernels", keys[1], keys[0])
    with pytest.raises(ValueError, match="can only be read"):
        remote()


@pytest.mark.parametrize(
    ("missing", "url", "extra"),
    [("fsspec", "file:///srv", "remote"), ("aiohttp", "http://localhost/a", "remote"), ("s3fs", "s3://a", "s3")],
)
def test_a_missing_package_is_named(monkeypatch, keys, missing, url, extra):
    def refuse(_protocol):
        raise ImportError(f"install {missing}")

    if missing == "fsspec":
        monkeypatch.setitem(sys.modules, missing, None)
    else:
        monkeypatch.setattr("fsspec.get_filesystem_class", refuse)
    name_store(monkeypatch, url, keys[1])
    with pytest.raises(StoreError, match=rf'pip install "cutlass_ops\[{extra}\]"'):
        remote()


@pytest.mark.parametrize(("scheme", "meant"), [("nowhere", "$"), ("htps", r"\. Did you mean https://\?$")])
def test_a_url_that_nobody_knows(monkeypatch, keys, scheme, meant):
    name_store(monkeypatch, f"{scheme}://a", keys[1])
    why = f"{scheme}:// is not a kind of URL that fsspec knows: set CUTLASS_OPS_REMOTE_STORE to a folder such as s3://b"
    with pytest.raises(StoreError, match=rf"^{why}.*file:///mnt/kernels{meant}"):
        remote()


@pytest.mark.parametrize("url", ["s3:///kernels", "gs:///", "https:///kernels", "http://:80/kernels"])
def test_a_bucket_or_a_server_is_named(keys, monkeypatch, url):
    name_store(monkeypatch, url, keys[1])
    scheme = url.partition(":")[0]
    with pytest.raises(
        ValueError, match=f"must name a bucket or a server behind {scheme}://, such as {scheme}://name/ker"
    ):
        env.remote_store()
    name_store(monkeypatch, "hdfs:///kernels", keys[1])
    assert env.remote_store().url == "hdfs:///kernels"


def test_a_scheme_is_in_lower_case(monkeypatch, keys):
    name_store(monkeypatch, "S3://a", keys[1])
    with pytest.raises(ValueError, match=r"its scheme in lower case, .*, not 'S3://a'"):
        env.remote_store()


def test_a_missing_package_that_is_none_of_ours_is_named_by_fsspec(monkeypatch, keys):
    def refuse(_protocol):
        raise ImportError("Install adlfs to access Azure")

    monkeypatch.setattr("fsspec.get_filesystem_class", refuse)
    name_store(monkeypatch, "az://a", keys[1])
    why = r"^a remote store at az:// needs another package: Install adlfs to access Azure\. Or set CUTLASS_OPS_REMOTE_S"
    with pytest.raises(StoreError, match=why):
        remote()


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("zip://a/b", "fsspec does not open zip:// by a URL alone ("),
        ("github://a/b", "fsspec does not open github:// by a URL alone (TypeError: "),
        ("cached://a", "fsspec does not open cached:// by a URL alone (ValueError: "),
        (
            "memory://a",
            "a remote store at memory:// needs another package: No module named 'some'. Or set CUTLASS_OPS_R",
        ),
    ],
)
def test_a_url_that_alone_opens_nothing_is_one_warning(monkeypatch, keys, caplog, url, why):
    def refuse(*_, **__):
        raise ImportError("No module named 'some'")

    if url.startswith("memory"):
        monkeypatch.setattr("fsspec.core.url_to_fs", refuse)
    monkeypatch.setattr(remote_files, "_PAUSE", 0.0)
    name_store(monkeypatch, url, keys[1])
    for _ in range(2):
        assert not remote().reachable()
    (warned,) = said(caplog)
    assert f"{url} cannot be used: {why}" in warned
    assert "set CUTLASS_OPS_REMOTE_STORE to a folder such as s3://bucket/kernels" in warned


def test_names_and_passwords_are_not_shown(monkeypatch, keys, kit, local, server, publish):
    publish()
    name_store(monkeypatch, server.url.replace("://", "://user:secret@"), keys[1])
    artifact = build_artifact(SPEC, store=local(), toolchain=kit.find())
    assert artifact.origin == f"fetched from {server.url}"
    assert remote().where == server.url
    assert "secret" not in repr(remote()._files)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("s3:///x", "s3:///x"),
        ("memory:///x/y", "memory:///x/y"),
        ("s3://me:secret@bucket/x@y?z#w", "s3://bucket/x@y?z#w"),
        ("https://me@secret@host:80/x", "https://host:80/x"),
        ("s3://[x/y", "s3://[x/y"),
    ],
)
def test_a_url_is_shown_as_it_is_but_for_names_and_passwords(url, shown):
    assert env.without_user(url) == shown


@pytest.mark.parametrize(
    "url",
    [
        "https://me:secret@host/x?y",
        "http://me:secret@host/a::b",
        "https://me:?secret@host/x",
        "https://me:secret#1@host/x",
        "https://me:a/secret?@host/x",
        "https://me:a@secret?@host/x",
        "https://me:secret://?@host/x",
        "https:/me:secret@host/x",
        "me:secret@host/x",
        "https://me:secret\n@host/x",
        "simplecache::https://me:secret@host/x",
    ],
)
def test_a_wrong_url_is_shown_without_the_password(keys, monkeypatch, url):
    name_store(monkeypatch, url, keys[1])
    with pytest.raises(ValueError, match=r"must be the URL .*host/") as error:
        env.remote_store()
    assert "secret" not in str(error.value)


def test_settings_are_read_anew(monkeypatch, keys, shared):
    name_store(monkeypatch, f"file://{shared}", keys[1])
    first = remote()
    assert remote() is first
    monkeypatch.setenv(env.REMOTE_STORE.name, f"file://{shared}/b")
    assert remote() is not first


# ---- Files ----


@pytest.mark.parametrize("url", ["file", "memory"])
def test_files(tmp_path, url):
    files = RemoteFiles(f"file://{tmp_path}/a" if url == "file" else f"memory://{tmp_path.name}", 10)
    assert files.read("b/c", 10, 10) is None
    assert files.create("b/c", b"one", 10)
    assert not files.create("b/c", b"two", 10)
    assert files.read("b/c", 3, 10) == b"one"
    with pytest.raises(TooLarge):
        files.read("b/c", 2, 10)
    files.write("b/c", b"three", 10)
    assert files.read("b/c", 10, 10) == b"three"
    files.remove("b/c", 10)
    files.remove("b/c", 10)
    assert files.read("b/c", 10, 10) is None


def test_a_short_limit_does_not_make_a_server_bad(server, caplog):
    server.how = "silent"
    files = RemoteFiles(server.url, 60)
    with pytest.raises(Unreachable):
        files.read("a", 10, 0.2)
    server.how = "well"
    assert files.read("a", 10, 30) is None
    assert said(caplog) == []


@pytest.mark.slow
def test_a_forked_process_connects_anew(server):
    files = RemoteFiles(server.url, 30)
    assert files.read("a", 10, 30) is None
    child = os.fork()
    if child == 0:
        code = 1
        try:
            code = 0 if files.read("a", 10, 30) is None else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert files.read("a", 10, 30) is None


def test_the_store_may_be_deleted_at_any_time(shared, keys, kit, local, publish, monkeypatch):
    publish()
    shutil.rmtree(shared)
    name_store(monkeypatch, f"file://{shared}", keys[1], keys[0])
    assert build_artifact(SPEC, store=local(), toolchain=kit.find()).origin == "compiled here"
    assert build_artifact(SPEC, store=local(), toolchain=kit.find()).origin != "compiled here"


@pytest.fixture
def deleting(monkeypatch):
    """Delete a store so many times, each time while a fetched kernel is proved in it."""

    def _deleting(store, times):
        deleted, proves = [], build_module._proved

        def proved(library, spec):
            found = proves(library, spec)
            if len(deleted) < times:
                deleted.append(shutil.rmtree(store.root))
            return found

        monkeypatch.setattr(build_module, "_proved", proved)
        return deleted

    return _deleting


@pytest.mark.parametrize("times", [1, 4])
def test_a_local_store_that_is_deleted_while_a_kernel_is_fetched(
    keys, kit, local, server, publish, monkeypatch, deleting, times
):
    publish()
    name_store(monkeypatch, server.url, keys[1])
    store = local()
    deleted = deleting(store, times)
    monkeypatch.setattr(KernelStore, "default", lambda: store)
    monkeypatch.setattr(build_module, "find_toolchain", kit.find)
    for get in (fetched, build_artifact):
        deleted.clear()
        with nullcontext() if times < 4 else pytest.raises(StoreError, match="4 times in a row"):
            assert get(SPEC).origin.startswith("fetched from")
        store.clean()


@pytest.mark.parametrize("times", [1, 3, 4])
def test_a_local_store_that_is_deleted_while_a_kernel_is_fetched_where_nothing_compiles(
    keys, local, server, publish, monkeypatch, deleting, times
):
    publish()
    name_store(monkeypatch, server.url, keys[1])
    monkeypatch.setenv("CUTLASS_OPS_JIT", "0")
    store = local()
    deleting(store, times)
    with nullcontext() if times < 4 else pytest.raises(MissingKernelError, match="4 times in a row"):
        artifact = build_artifact(SPEC, store=store)
        assert artifact.origin.startswith("fetched from")
        assert store.lookup(artifact.key).read_library() == artifact.read_library()
