"""Counts how often a fleet of cold machines compiles its kernels, with an S3 server on loopback.

    python benchmarks/bench_fleet.py --clients 64 --out benchmarks/results/fleet.json   # no compiler and no GPU

Each client is a process with a store of its own; all have connected before, and begin at once. The server is moto's, in
a process. The compiler is made up: it sleeps for a second and writes a library that ends with its source, so that a
wrong kernel is seen. Each row: a scenario, with the number of compilations, fetched and wrong kernels, warnings, and
the longest time that a client took for one kernel beyond a compilation of its own. That must stay below
"limit_seconds".
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import logging
import multiprocessing
import os
import platform
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "unit")]

from bundles import write_keys  # noqa: E402
from cryptography.hazmat.primitives.asymmetric import ed25519  # noqa: E402
from fake_toolkit import HMMA, FakeToolkit, library, sm80_spec  # noqa: E402

from cutlass_ops.artifacts.remote_store import RemoteStores  # noqa: E402
from cutlass_ops.artifacts.store import KernelStore  # noqa: E402
from cutlass_ops.base import claims, env  # noqa: E402
from cutlass_ops.base.session import Session  # noqa: E402
from cutlass_ops.compilation.builder import build_artifact  # noqa: E402
from cutlass_ops.compilation.toolchain import Toolchain  # noqa: E402
from cutlass_ops.declare.spec import KernelSpec  # noqa: E402

BUCKET = "kernels"
COMPILE_SECONDS = 1.0
_PATIENCE = 300.0  # seconds for a scenario


@dataclass(frozen=True)
class Fleet:
    """What all clients share."""

    root: Path
    url: str
    public_key: Path
    private_key: Path
    toolchain: Toolchain
    specs: tuple[KernelSpec, ...]
    timeout: float
    wait: float


class Server:
    """An S3 server in a process."""

    def __init__(self) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        command = [sys.executable, "-m", "moto.server", f"-p{self.port}"]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def ready(self, files: Any) -> None:
        """Wait until it answers, and make the bucket."""
        for _ in range(600):
            with contextlib.suppress(OSError):
                socket.create_connection(("127.0.0.1", self.port), 1).close()
                files.mkdir(BUCKET)
                return
            time.sleep(0.1)
        raise RuntimeError("the server does not start")

    def stop(self) -> None:
        """Kill it."""
        self.process.kill()
        self.process.wait()


class Warnings(logging.Handler):
    """Keeps the library's warnings."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep one."""
        self.said.append(record.getMessage())


def client(fleet: Fleet, number: int, signs: bool, begin: Any, results: Any) -> None:
    """Build every kernel in a new store, and report."""
    kept = Warnings()
    logging.getLogger("cutlass_ops").addHandler(kept)
    logging.getLogger("cutlass_ops").propagate = False
    os.environ |= {
        env.REMOTE_STORE.name: fleet.url,
        env.REMOTE_STORE_KEY.name: str(fleet.public_key),
        env.REMOTE_STORE_TIMEOUT.name: str(fleet.timeout),
        env.REMOTE_STORE_WAIT.name: str(fleet.wait),
    }
    if signs:
        os.environ[env.REMOTE_STORE_SIGNING_KEY.name] = str(fleet.private_key)
    store = KernelStore(fleet.root / f"client{number}")
    kernels = []
    with Session().active():
        # Many clients share few processors here: what each needs for its first connection is not what is measured.
        remote = RemoteStores.current().store()
        while remote is not None and not remote.reachable():
            time.sleep(1)
        kept.said.clear()
        begin.wait()
        for spec in fleet.specs:
            began = time.monotonic()
            source = f"// {spec.slug}\n"
            try:
                artifact = build_artifact(spec, source=source, store=store, toolchain=fleet.toolchain)
                right = artifact.read_library().endswith(source.encode()) and artifact.spec == spec
                origin, error = artifact.origin, None
                compiled = float(artifact.manifest["compile_seconds"])
            except Exception as exc:
                right, origin, error, compiled = False, "", repr(exc), 0.0
            waited = time.monotonic() - began - compiled
            kernels.append({"origin": origin, "right": right, "error": error, "waited": waited, "slug": spec.slug})
    results.put({"number": number, "kernels": kernels, "warnings": kept.said})


def run(
    fleet: Fleet, numbers: range, signers: int, kit: FakeToolkit, meanwhile: Callable[[Mapping[int, Any]], int]
) -> dict[str, Any]:
    """Run one scenario. ``meanwhile`` is called once all have begun; it returns how many clients it killed."""
    clients = len(numbers)
    context = multiprocessing.get_context("fork")
    begin, results = context.Barrier(clients + 1), context.SimpleQueue()
    (kit.root / "count").write_text("")
    processes = {
        number: context.Process(target=client, args=(fleet, number, place < signers, begin, results))
        for place, number in enumerate(numbers)
    }
    for process in processes.values():
        process.start()
    begin.wait()
    began = time.monotonic()
    killed = meanwhile(processes)
    found = []
    while len(found) < clients - killed:
        if results.empty():
            if time.monotonic() - began > _PATIENCE:
                raise RuntimeError(f"{clients - killed - len(found)} clients do not end")
            time.sleep(0.02)
        else:
            found.append(results.get())
    seconds = time.monotonic() - began
    for process in processes.values():
        process.join()
    kernels = [kernel for each in found for kernel in each["kernels"]]
    warnings = [len(each["warnings"]) for each in found]
    return {
        "clients": clients,
        "signers": signers,
        "killed": killed,
        "kernels": len(fleet.specs),
        "compilations": kit.compilations,
        "compiled": sum(kernel["origin"] == "compiled here" for kernel in kernels),
        "fetched": sum(kernel["origin"].startswith("fetched") for kernel in kernels),
        "wrong_or_missing": sum(not kernel["right"] for kernel in kernels),
        "errors": sorted({kernel["error"] for kernel in kernels if kernel["error"]}),
        "longest_wait_seconds": round(max(kernel["waited"] for kernel in kernels), 2),
        "most_warnings_of_a_client": max(warnings),
        "warnings": sorted({w for each in found for w in each["warnings"]})[:5],
        "seconds": round(seconds, 1),
    }


def until_compiling(kit: FakeToolkit, count: int) -> None:
    """Wait until so many compilations have begun."""
    while kit.compilations < count:
        time.sleep(0.01)


def compiler(seconds: float) -> str:
    """Return a script that takes so long to compile, and ends the library with its source."""
    return f'sleep {seconds}; cat "$here/library" kernel.cu > "$out"; cat "$here/log"\n'


def spoil(files: Any, change: Callable[[bytes], bytes]) -> None:
    """Change every kernel of the bucket."""
    for path in files.find(f"{BUCKET}/fleet/v1/kernels"):
        files.pipe_file(path, change(files.cat_file(path)))


def scenarios(
    clients: int, kernels: int, make: Callable[[str], tuple[Fleet, FakeToolkit, Server, Any]]
) -> Iterator[dict[str, Any]]:
    """Yield the result of each scenario. Each has a server of its own."""

    def scenario(
        name: str,
        signers: int = clients,
        meanwhile: Callable[[FakeToolkit, Server, Any, Mapping[int, Any]], int] | None = None,
        prepare: Callable[[Any], None] | None = None,
        seconds: float = COMPILE_SECONDS,
    ) -> dict[str, Any]:
        fleet, kit, server, files = make(name)
        try:
            if prepare is not None:
                run(fleet, range(1000, 1001), 1, kit, lambda _: 0)
                prepare(files)
            kit.does(compiler(seconds))
            does = (lambda _: 0) if meanwhile is None else lambda found: meanwhile(kit, server, files, found)
            result = run(fleet, range(clients), signers, kit, does)
        finally:
            server.stop()
        row = {"scenario": name, **result, "limit_seconds": 2 * fleet.timeout + fleet.wait}
        print(json.dumps(row), flush=True)
        return row

    def kill_a_builder(kit: FakeToolkit, _server: Server, files: Any, processes: Mapping[int, Any]) -> int:
        until_compiling(kit, 1)
        (claim,) = files.find(f"{BUCKET}/fleet/v1/claims")
        holder = json.loads(files.cat_file(claim))["pid"]
        next(process for process in processes.values() if process.pid == holder).kill()
        kit.does(compiler(COMPILE_SECONDS))
        return 1

    def kill_the_server(kit: FakeToolkit, server: Server, _files: Any, _processes: Mapping[int, Any]) -> int:
        until_compiling(kit, kernels // 2 + 1)
        server.stop()
        return 0

    def stop_the_server(kit: FakeToolkit, server: Server, _files: Any, _processes: Mapping[int, Any]) -> int:
        until_compiling(kit, kernels // 2 + 1)
        server.process.send_signal(signal.SIGSTOP)
        return 0

    yield scenario("all clients sign")
    yield scenario("a quarter of the clients sign", max(clients // 4, 1))
    yield scenario("every kernel is there", prepare=lambda files: None)
    yield scenario("the first builder is killed", meanwhile=kill_a_builder, seconds=30)
    yield scenario("the server is killed half-way", meanwhile=kill_the_server)
    yield scenario("the server stops answering half-way", meanwhile=stop_the_server)
    yield scenario("garbage", prepare=lambda files: spoil(files, lambda data: b"\0garbage" * 1000))
    yield scenario("truncated kernels", prepare=lambda files: spoil(files, lambda data: data[: len(data) // 2]))
    yield scenario("another signature", prepare=lambda files: spoil(files, _other_signature))


def _other_signature(data: bytes) -> bytes:
    """Change a bit of the signature, which is a file of the archive, and nothing else."""
    from cutlass_ops.artifacts import container

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "bundle")
        path.write_bytes(data)
        path.chmod(0o600)
        found = container.open_container(path)
        files = {name: found.read(name) for name in found.sizes}
        files["manifest.sig"] = bytes([files["manifest.sig"][0] ^ 1]) + files["manifest.sig"][1:]
        container.write(path, files)
        return path.read_bytes()


def main() -> None:
    """Run every scenario and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--kernels", type=int, default=8)
    parser.add_argument("--timeout", type=float, default=60)
    parser.add_argument("--wait", type=float, default=120)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    os.environ |= {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_DEFAULT_REGION": "us-east-1"}
    import s3fs

    dtypes = [(stages, dtype) for stages in range(2, 2 + -(-args.kernels // 2)) for dtype in ("bf16", "f16")]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        root = Path(folder)
        keys = write_keys(root, "fleet", ed25519.Ed25519PrivateKey.generate())

        def make(name: str) -> tuple[Fleet, FakeToolkit, Server, Any]:
            server = Server()
            os.environ["AWS_ENDPOINT_URL"] = server.url
            place = root / name.replace(" ", "_")
            kit = FakeToolkit(place / "toolkit")
            (kit.root / "library").write_bytes(library(HMMA))
            kit.does(compiler(COMPILE_SECONDS))
            specs = tuple(sm80_spec(*each) for each in dtypes[: args.kernels])
            url, (private, public) = f"s3://{BUCKET}/fleet", keys
            fleet = Fleet(place, url, public, private, kit.find(), specs, args.timeout, args.wait)
            context = multiprocessing.get_context("fork")
            # This process opens no connection, since its children would share it.
            files = _Apart(context, s3fs)
            server.ready(files)
            return fleet, kit, server, files

        rows = list(scenarios(args.clients, args.kernels, make))
    head = {
        "date": datetime.date.today().isoformat(),
        "machine": platform.machine(),
        "processors": len(os.sched_getaffinity(0)),
        "compile_seconds": COMPILE_SECONDS,
        "claim_expires_seconds": claims._EXPIRES,
    }
    args.out.write_text(json.dumps({**head, "rows": rows}, indent=1) + "\n")


class _Apart:
    """A file system whose calls each run in a process of its own."""

    def __init__(self, context: Any, s3fs: Any) -> None:
        self._context = context
        self._s3fs = s3fs

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            receiver, sender = self._context.Pipe(duplex=False)

            def work() -> None:
                try:
                    sender.send(getattr(self._s3fs.S3FileSystem(skip_instance_cache=True), name)(*args))
                except Exception as exc:
                    sender.send(OSError(repr(exc)))
                os._exit(0)

            process = self._context.Process(target=work)
            process.start()
            answer = receiver.recv()
            process.join()
            if isinstance(answer, Exception):
                raise answer
            return answer

        return call


if __name__ == "__main__":
    main()
