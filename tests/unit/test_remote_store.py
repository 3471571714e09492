"""Kernels that machines share by URL: fetched, verified, published, and claimed by one of many."""

import json
import logging
import os
import shutil
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest
from bundles import write_keys
from cryptography.hazmat.primitives.asymmetric import ed25519
from fake_toolkit import FFMA, HMMA, FakeToolkit, library, sm80_spec
from fleet import Server, name_store, seconds

from cutlass_ops.artifacts import remote_store as remote_module
from cutlass_ops.artifacts.remote_store import RemoteStores
from cutlass_ops.artifacts.store import KernelStore
from cutlass_ops.base import claims, env, remote_files
from cutlass_ops.base.errors import BundleError, CompileError, MissingKernelError, StoreError
from cutlass_ops.base.remote_files import RemoteFiles, TooLarge, Unreachable
from cutlass_ops.compilation import builder as build_module
from cutlass_ops.compilation import identity
from cutlass_ops.compilation.builder import build_artifact, build_many
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


@pytest.mark.sample(2)
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


def test_a_reader_compiles_what_is_not_there_and_publishes_nothing(shared, keys, kit, local, monkeypatch):
    name_store(monkeypatch, f"file://{shared}", keys[1])
    assert build_artifact(SPEC, store=local(), toolchain=kit.find()).origin == "compiled here"
    assert not shared.exists()


def test_without_a_compiler_the_store_serves(keys, kit, local, server, publish, monkeypatch):
    (made,) = publish()
    name_store(monkeypatch, server.url, keys[1])
    monkeypatch.setenv("CUTLASS_OPS_JIT", "0")
    monkeypatch.setattr(identity, "find_toolchain", None)
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


@pytest.mark.sample(6)
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


@pytest.mark.sample(2)
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


# ---- Servers that are down, slow or wrong ----


BAD = ("silent", "trickling", "endless", "failing", "garbage", "truncated")


@pytest.mark.sample(6)
@pytest.mark.parametrize(("how", "jit"), in_turn(BAD, ("1", "0")))
def test_a_bad_server_costs_no_kernel_and_no_more_than_the_limit(
    keys, kit, local, server, publish, monkeypatch, caplog, how, jit
):
    publish(SPEC, OTHER)
    server.how = how
    # What these send never ends.
    endless = how in ("silent", "trickling", "endless")
    name_store(monkeypatch, server.url, keys[1], timeout=0.2 if endless else 60)
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
    name_store(monkeypatch, server.url, keys[1], timeout=300)
    assert build_artifact(SPEC, store=local(), toolchain=kit.find()).origin == "compiled here"
    assert "is ignored: it has more than 1048576 bytes" in caplog.text
    assert server.sent < 64 << 20  # what lies in buffers


# ---- Turns ----


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(claims, "_BEAT", 0.05)
    monkeypatch.setattr(claims, "_EXPIRES", 3.0)  # on a busy machine a builder's sign of life comes late
    monkeypatch.setattr(claims, "_LAST_POLL", 0.1)


@pytest.fixture(autouse=True)
def _no_grace(monkeypatch):
    monkeypatch.setattr(claims, "_GRACE", 0.0)


def test_a_reader_waits_for_a_builder_that_begins_with_it(shared, keys, kit, local, monkeypatch, quick):
    monkeypatch.setattr(claims, "_GRACE", 600.0)
    toolchain = kit.find()
    name_store(monkeypatch, f"file://{shared}", keys[1], timeout=1200)
    began = threading.Event()
    look = claims.Turns._read

    def read(self, number):
        began.set()
        return look(self, number)

    monkeypatch.setattr(claims.Turns, "_read", read)
    made = []
    reader = threading.Thread(
        target=lambda: made.append(build_artifact(SPEC, store=local(), toolchain=toolchain)), daemon=True
    )
    reader.start()
    began.wait()
    monkeypatch.setenv(env.REMOTE_STORE_SIGNING_KEY.name, str(keys[0]))
    kit.makes(library(HMMA), before="sleep 0.2\n")
    build_artifact(SPEC, store=local(), toolchain=toolchain)
    reader.join(600)
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


@pytest.mark.slow
@pytest.mark.parametrize("url", ["file", "memory"])
def test_of_many_machines_one_compiles(shared, keys, kit, local, monkeypatch, quick, url):
    name_store(monkeypatch, f"file://{shared}" if url == "file" else "memory://many", keys[1], keys[0])
    kit.makes(library(HMMA), before="sleep 0.5\n")
    made = machines(8, local, kit)
    assert kit.compilations == 1
    assert len({artifact.sha256 for artifact in made}) == 1
    assert [artifact.origin for artifact in made].count("compiled here") == 1


def dead_claim(shared, key, number=0, text=b'{"host": "gone", "pid": 1, "count": 0, "state": "working"}'):
    path = shared / "v1" / "claims" / f"{key}.{number}"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text)
    return path


@pytest.fixture
def key(kit, local, keys):
    """The kernel's key."""
    return build_artifact(SPEC, store=local(), toolchain=kit.find()).key


@pytest.mark.slow
@pytest.mark.parametrize(
    "texts", [(b"", bytes(1 << 20)), (b"[" * 4000, b'{"state": "working"}')], ids=["no text", "too deep"]
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


@pytest.mark.slow
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
    assert 0.4 < taken < 120
    assert kit.compilations == 2


@pytest.mark.slow
def test_a_kernel_that_does_not_compile_frees_all_who_wait(shared, keys, kit, local, monkeypatch, quick):
    name_store(monkeypatch, f"file://{shared}", keys[1], keys[0], wait=600)
    kit.does('sleep 0.2; echo "kernel.cu(7): error: something"; exit 1')
    assert seconds(lambda: machines(4, local, kit)) < 500
    assert all(isinstance(error, CompileError) for error in machines(2, local, kit))
    # One whose compiler can do it puts all in order.
    kit.makes(library(HMMA))
    machines(1, local, kit)
    assert [artifact.origin for artifact in machines(2, local, kit)] == [f"fetched from file://{shared}"] * 2


def test_the_server_goes_away_while_a_kernel_is_compiled(shared, keys, kit, local, monkeypatch, caplog, quick):
    name_store(monkeypatch, f"file://{shared}", keys[1], keys[0])
    # Again where a builder's sign of life came in between, and made the folder anew.
    kit.makes(library(HMMA), before=f"until rm -rf {shared} && echo > {shared}; do sleep 0.01; done\n")
    assert build_artifact(SPEC, store=local(), toolchain=kit.find()).origin == "compiled here"
    assert len(said(caplog)) == 1


# ---- Settings: closed where in doubt ----


def remote():
    return RemoteStores.current().store()


SETTINGS = [
    *(("KEY", key, "CUTLASS_OPS_REMOTE_STORE_KEY") for key in (None, "", ":", "relative.pub", "/no/such.pub")),
    *(("TIMEOUT", text, "TIMEOUT must be a positive number of seconds") for text in ("0", "-1", "soon", "nan")),
    *(("WAIT", text, "WAIT must be a positive number of seconds") for text in ("-1", "nan", "x")),
    *(
        ("", url, "CUTLASS_OPS_REMOTE_STORE must be the URL of a folder")
        for url in (
            "kernels",
            "/srv/kernels",
            "s3:bucket",
            "s3://",
            "s3://a?b",
            "simplecache::s3://a",
            "s3://a b",
            "S3://a",
        )
    ),
    *(("", url, "must name an absolute folder") for url in ("file://relative/kernels", "local://kernels")),
    *(("", url, "must name a bucket or a server") for url in ("s3:///kernels", "gs:///", "http://:80/kernels")),
    ("", "nowhere://a", "nowhere:// is not a kind of URL that fsspec knows: set CUTLASS_OPS_REMOTE_STORE"),
    ("", "htps://a", r"Did you mean https://\?$"),
    ("SIGNING_KEY", "http://localhost/kernels", "can only be read"),
]


@pytest.mark.parametrize(("variable", "value", "why"), SETTINGS)
def test_a_wrong_setting_is_an_error(monkeypatch, keys, shared, variable, value, why):
    if variable == "SIGNING_KEY":
        name_store(monkeypatch, value, keys[1], keys[0])
    else:
        name_store(monkeypatch, f"file://{shared}", keys[1])
        name = f"CUTLASS_OPS_REMOTE_STORE_{variable}".rstrip("_")
        monkeypatch.delenv(name) if value is None else monkeypatch.setenv(name, value)
    with pytest.raises((ValueError, StoreError), match=why):
        remote()


def test_keys_must_fit(monkeypatch, keys, others, shared):
    name_store(monkeypatch, f"file://{shared}", keys[1], others[0])
    with pytest.raises(ValueError, match="signs for none of the public keys"):
        remote()
    keys[1].chmod(0o646)
    name_store(monkeypatch, f"file://{shared}", keys[1])
    with pytest.raises(BundleError, match="is not safe"):
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


def test_names_and_passwords_are_not_shown(monkeypatch, keys, kit, local, server, publish):
    publish()
    name_store(monkeypatch, server.url.replace("://", "://user:secret@"), keys[1])
    artifact = build_artifact(SPEC, store=local(), toolchain=kit.find())
    assert artifact.origin == f"fetched from {server.url}"
    assert remote().where == server.url
    assert "secret" not in repr(remote().files)


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


# ---- Redirects -------------------------------------------------------------------------------------------------------


@pytest.fixture
def web():
    """Return a function that starts a web server, given what each path leads to: bytes, or a URL to go to."""
    servers = []

    def start(**pages):
        class Handler(BaseHTTPRequestHandler):
            asked: ClassVar[list[str]] = []

            def do_GET(self):
                self.asked.append(self.path)
                found = pages.get(self.path.strip("/"), b"")
                self.send_response(200 if isinstance(found, bytes) else 302)
                if isinstance(found, str):
                    self.send_header("Location", found)
                data = found if isinstance(found, bytes) else b""
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            do_HEAD = do_GET  # noqa: N815

            def log_message(self, *_):
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        servers.append(server)
        return f"http://127.0.0.1:{server.server_port}", Handler.asked

    pytest.importorskip("aiohttp")
    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.mark.sample(3)
@pytest.mark.parametrize("form", ["{}/file", "//{host}/file", "http://localhost:{port}/file", "http://me@{host}/file"])
def test_a_redirect_to_another_server_is_not_followed(web, caplog, form):
    other, asked = web(file=b"secret")
    host = other.removeprefix("http://")
    url, _ = web(file=form.format(other, host=host, port=host.rpartition(":")[2]))
    files = RemoteFiles(url, 10)
    with pytest.raises(Unreachable, match="redirects to another server"):
        files.read("file", 100, 10)
    assert asked == []
    (line,) = said(caplog)
    assert "if you trust that one, name its URL in CUTLASS_OPS_REMOTE_STORE" in line
    assert "me@" not in line
