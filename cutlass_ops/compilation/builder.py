"""Build a declaration into an artifact in the store: look it up, fetch it from the remote store, or compile it."""

from __future__ import annotations

import contextlib
import functools
import logging
import reprlib
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, wait
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from cutlass_ops.artifacts.bundle import BundledKernel
from cutlass_ops.artifacts.entry import KEEP, LIBRARY, SOURCE, Artifact, Compiled
from cutlass_ops.artifacts.remote_store import RemoteStores
from cutlass_ops.artifacts.store import KernelStore, Temporary
from cutlass_ops.base import arch, elf, env, forks
from cutlass_ops.base.disk import DELETIONS
from cutlass_ops.base.errors import CompileError, CutlassOpsError, MissingKernelError, StoreError, ToolchainError
from cutlass_ops.base.executors import Threads
from cutlass_ops.base.frozen import plain
from cutlass_ops.base.terminal import Progress, progress
from cutlass_ops.compilation import memo
from cutlass_ops.compilation.abi_check import prove_halves_agree
from cutlass_ops.compilation.compiler import LOG, Together, compile_kernel, compile_ptx
from cutlass_ops.compilation.identity import Identity, identify
from cutlass_ops.compilation.remote import Elsewhere
from cutlass_ops.compilation.toolchain import Toolchain
from cutlass_ops.declare.quantizing import Declaration
from cutlass_ops.kinds.proof import prove_tensor_cores

T = TypeVar("T")
_log = logging.getLogger("cutlass_ops")

# Maximum number of threads that wait for an executor.
_WAITING = 256


@dataclass(frozen=True)
class _Job:
    """One kernel to build, and where. Its key is noted if source and compilers are those that a look supposes."""

    what: Identity
    store: KernelStore
    elsewhere: Elsewhere | None = None
    noted: Path | None = None
    together: Together | None = None

    @classmethod
    def of(
        cls,
        spec: Declaration,
        store: KernelStore | None = None,
        *,
        source: str | None = None,
        toolchain: Toolchain | None = None,
        elsewhere: Elsewhere | None = None,
        stamp: str | None = None,
    ) -> _Job:
        store = store or KernelStore.default()
        # Before the key is computed: a header or a compiler may change meanwhile.
        noted = memo.place_of_key(spec, store, stamp) if source is None and toolchain is None else None
        return cls(identify(spec, source, toolchain), store, elsewhere, noted)

    @property
    def spec(self) -> Declaration:
        return self.what.spec

    @property
    def toolchain(self) -> Toolchain:
        assert self.what.toolchain is not None, "a job to compile is made only where kernels may be compiled"
        return self.what.toolchain

    def lookup(self) -> Artifact | None:
        """Return the kernel if the store has it. If nothing may be compiled, any compiler's will do."""
        what = self.what
        found = self.store.find(what.parts) if what.toolchain is None else self.store.lookup(what.key)
        return None if found is None else self.lasting(found)

    def lasting(self, artifact: Artifact) -> Artifact:
        """Return the artifact with a way to rebuild it if it is removed from the store before it is read."""
        if memo.recall(self.noted) != artifact.key:
            memo.keep(self.noted, artifact.key)
        return replace(artifact, again=replace(self, elsewhere=None).use)

    def get(self, cancel: threading.Event | None = None) -> Artifact:
        """Look the kernel up, or build it."""
        found = None if self.what.toolchain is None else self.lookup()
        return found or self.build(cancel)

    def build(self, cancel: threading.Event | None) -> Artifact:
        """Build the kernel unless somebody has built it meanwhile."""
        return self.use(lambda artifact: artifact, cancel)

    def use(self, use: Callable[[Artifact], T], cancel: threading.Event | None = None) -> T:
        """Build the kernel unless it is there, and use it while the lock protects it from removal."""
        if self.what.toolchain is None:
            return use(_found(self))
        store = self.store.to_build_in()
        job = self if store is self.store else replace(self, store=store, noted=None)
        # The previous holder of the lock may have built it.
        return _locked(
            store, self.what.key, self.spec, lambda: use(job.lookup() or job.lasting(_made(job, cancel))), cancel
        )


def build_artifact(
    spec: Declaration,
    *,
    source: str | None = None,
    store: KernelStore | None = None,
    toolchain: Toolchain | None = None,
    cancel: threading.Event | None = None,
    executor: Executor | None = None,
) -> Artifact:
    """Return the compiled kernel for a declaration; compile it if neither the store nor the remote store has it.

    If several processes or threads ask for the same kernel, one compiles and the others wait. Defaults are the rendered
    source, the user's store and the compilers that are found. Set ``cancel`` to stop compiling or waiting. An executor
    compiles with the same compilers; this process writes the store.
    """
    return _Job.of(spec, store, source=source, toolchain=toolchain, elsewhere=_elsewhere(executor)).get(cancel)


def _elsewhere(executor: Executor | None) -> Elsewhere | None:
    if executor is None:
        return None
    # What cannot take a job would look like an executor that has been shut down: all would be compiled here.
    if not callable(getattr(executor, "submit", None)):
        raise TypeError(
            f"executor must be a concurrent.futures.Executor, not {reprlib.repr(executor)}: the context manager "
            "cutlass_ops.base.executors.named makes one of a name such as 'processes:8'"
        )
    return Elsewhere(executor)


def build_together(
    specs: Sequence[Declaration], *, cancel: threading.Event | None = None
) -> Iterator[Artifact | Exception]:
    """Build kernels whose sources begin alike, with their device code in one file, into the user's store.

    It takes little more than half of the time that they take alone, and gives the same bytes. What cannot be compiled
    so is compiled alone. So is what other processes are building, and everything if there is a remote store. For each
    declaration, in order, it yields what :func:`build_artifact` returns or raises.
    """
    if len(specs) > 1 and env.jit_enabled() and RemoteStores.current().store() is None:
        with contextlib.suppress(Exception):  # each alone has the error again
            _prepare_together(specs, cancel)
    for spec in specs:
        try:
            built: Artifact | Exception = build_artifact(spec, cancel=cancel)
        except Exception as exc:
            built = exc
        yield built


def _prepare_together(specs: Sequence[Declaration], cancel: threading.Event | None) -> None:
    """Build those kernels together that the store lacks, and that nobody else is building."""
    store = KernelStore.default()
    with contextlib.ExitStack() as held:
        jobs = [job for spec in specs if (job := _Job.of(spec, store)).lookup() is None]
        # The previous holder of a lock may have built its kernel.
        free = (job for job in jobs if held.enter_context(store.lock_if_free(job.what.key, job.spec.slug)))
        jobs = [job for job in free if job.lookup() is None]
        if len(jobs) < 2:
            return
        folder = Path(held.enter_context(tempfile.TemporaryDirectory(prefix="cutlass_ops.")))
        pool = held.enter_context(Threads(len(jobs) + 1, thread_name_prefix="cutlass_ops_together"))
        sources, toolchain, target = (
            [job.what.source for job in jobs],
            jobs[0].toolchain,
            arch.target(jobs[0].spec.target),
        )
        together = Together(pool.submit(compile_ptx, folder, sources, target, toolchain, cancel))
        for job in jobs:
            pool.submit(_compile, replace(job, together=together), cancel)


def stored(spec: Declaration) -> Artifact | None:
    """Return the compiled kernel for a declaration if the user's store has it; compile and fetch nothing."""
    try:
        return _Job.of(spec).lookup()
    except (ToolchainError, StoreError):
        return None


def built_again(spec: Declaration, use: Callable[[Artifact], T]) -> T:
    """Build a kernel again that was removed from the user's store, and use it before it can be removed once more."""
    return _Job.of(spec).use(use)


def build_many(
    specs: Iterable[Declaration],
    *,
    jobs: int | None = None,
    store: KernelStore | None = None,
    toolchain: Toolchain | None = None,
    executor: Executor | None = None,
) -> list[Artifact]:
    """Build several kernels in parallel, and show progress on standard error.

    A kernel that cannot be compiled does not stop the others. An interrupt ends all compilers; finished kernels stay.
    Kernels that an executor loses or cancels are compiled in this process. It is an error if the executor returns
    nothing for half an hour, or for ``CUTLASS_OPS_EXECUTOR_TIMEOUT`` seconds.

    At most ``jobs`` kernels are compiled at the same time: by default ``CUTLASS_OPS_JOBS``, or else the number of CPUs;
    with an executor, as many as it takes. The artifacts are in the order of the declarations.
    """
    specs, elsewhere, workers, stamp = list(specs), _elsewhere(executor), _at_once(jobs, executor), memo.stamp()
    store = store or KernelStore.default()
    planned = {s: _Job.of(s, store, toolchain=toolchain, elsewhere=elsewhere, stamp=stamp) for s in specs}
    if not env.jit_enabled():
        return [_found(planned[spec]) for spec in specs]
    found = {spec: job.lookup() for spec, job in planned.items()}
    missing = [job for spec, job in planned.items() if found[spec] is None]
    built = _build_all(missing, workers) if missing else {}
    return [found[spec] or built[spec] for spec in specs]


@contextlib.contextmanager
def building(
    specs: Iterable[Declaration], *, jobs: int | None = None, executor: Executor | None = None
) -> Iterator[dict[Declaration, Future[Artifact]]]:
    """Build kernels in the background, in this order, during the context; yield a future for each.

    Unfinished kernels are cancelled at its end. ``jobs`` and ``executor`` are those of :func:`build_many`.
    """
    cancel, elsewhere = threading.Event(), _elsewhere(executor)
    pool = Threads(_at_once(jobs, executor), thread_name_prefix="cutlass_ops_build")

    def build(spec: Declaration) -> Artifact:
        return _Job.of(spec, elsewhere=elsewhere).get(cancel)

    try:
        yield {spec: pool.submit(build, spec) for spec in specs}
    finally:
        cancel.set()
        pool.shutdown(wait=True, cancel_futures=True)


def _at_once(jobs: int | None, executor: Executor | None) -> int:
    """Return how many kernels are built at the same time."""
    if jobs is not None:
        jobs = plain(jobs)
        if type(jobs) is not int:
            raise TypeError(f"jobs must be an integer, not {reprlib.repr(jobs)}")
        if jobs < 1:
            raise ValueError(f"jobs must be 1 or more, not {reprlib.repr(jobs)}")
        return jobs
    # With an executor, the threads only wait; the executor limits the number of jobs itself.
    return env.jobs() if executor is None else _WAITING


def _found(job: _Job) -> Artifact:
    """Find a kernel without a compiler, or ask the remote store. Any compiler's build of the same source will do."""
    spec, remote = job.spec, RemoteStores.current().store()
    asked = "" if remote is None else f", nor has {remote.where}"
    try:
        found = job.lookup()
        if found is None and remote is not None and (fetched := remote.fetch_source(job.what.parts)) is not None:
            store, take = job.store.to_build_in(), functools.partial(_taken, fetched, remote.where, spec)
            taken = _locked(store, fetched.key, spec, lambda: store.lookup(fetched.key) or take(store))
            found = None if taken is None else job.lasting(taken)
        if found is None and job.store is Temporary.current().store:
            KernelStore.of_user().require_private()  # says why it was not looked into
        why = f"{job.store.root} has no kernel {spec.slug}{asked}"
    except StoreError as exc:
        found, why = None, f"kernel {spec.slug} cannot be looked up: {exc}"
    if found is None:
        raise MissingKernelError(
            f"compilation is off ({env.JIT.name}=0) and {why}. "
            f"Build it on a machine with a compiler: `python -m cutlass_ops build SPEC.json`, with SPEC.json: "
            f"{spec.canonical()}"
        )
    return found


class _DeletedError(StoreError):
    """The store was deleted while a kernel was being compiled or fetched into it, perhaps to free disk space."""


def _locked(
    store: KernelStore, key: str, spec: Declaration, do: Callable[[], T], cancel: threading.Event | None = None
) -> T:
    """Do something while the kernel's lock is held, and again if the store is deleted meanwhile.

    The lock goes with the store: others may hold a new one by then, and be building the same kernel.
    """
    attempts = 0
    while True:
        attempts += 1
        try:
            with store.lock(key, cancel, spec.slug):
                return do()
        except _DeletedError as exc:
            if attempts > DELETIONS:
                raise StoreError(f"{exc}, {attempts} times in a row. {KEEP}") from exc
            _log.warning("%s: adding it again", exc)


@contextlib.contextmanager
def _adding(store: KernelStore, key: str, spec: Declaration, source: str = "", *, keep: bool = False) -> Iterator[Path]:
    """Yield a folder to build a kernel in. It is removed after an error, or kept if the kernel cannot be compiled."""
    folder = None
    try:
        folder = store.workspace(key, source)
        with store.writing():
            yield folder
    except BaseException as exc:
        # Any error may come of a folder that is gone: no compiler can be started there, and no kernel opened. The
        # source may be the last file to be removed.
        gone = isinstance(exc.__cause__, FileNotFoundError) or (folder is not None and not (folder / SOURCE).exists())
        if isinstance(exc, CutlassOpsError) and gone:
            raise _DeletedError(f"the kernel store {store.root} was deleted while {spec.slug} was being added") from exc
        if folder is not None and keep and isinstance(exc, CompileError):
            kept = store.keep_failed(folder)
            # The message has paths in the folder that was just moved.
            reason = exc.args[0].replace(str(folder), str(kept))
            log = f"\n  log: {kept / LOG}" if (kept / LOG).exists() else ""
            raise CompileError(f"{spec.slug}: {reason}\n  source: {kept / SOURCE}{log}") from None
        if folder is not None:
            with contextlib.suppress(OSError):
                store.discard(folder)
        raise


def _made(job: _Job, cancel: threading.Event | None) -> Artifact:
    """Fetch a kernel from the remote store, or compile and publish it. The caller holds the kernel's lock."""
    remote = RemoteStores.current().store()
    if remote is None:
        return _compile(job, cancel)
    with remote.turn(job.what.key, job.spec.slug, cancel) as turn:
        taken = None if turn.fetched is None else _taken(turn.fetched, remote.where, job.spec, job.store)
        if taken is not None:
            return taken
        compiled = _compile(job, cancel)
        turn.publish(compiled)
        return compiled


def _taken(found: BundledKernel, url: str, spec: Declaration, store: KernelStore) -> Artifact | None:
    """Put a fetched kernel into the store; return None if it fails the proofs. The caller holds the kernel's lock."""
    try:
        with _adding(store, found.key, spec) as folder:
            (folder / SOURCE).write_bytes(found.read_source())
            (folder / LIBRARY).write_bytes(found.read_library())
            sass = _proved(folder / LIBRARY, spec)
            compiled = Compiled(0.0, tuple(found.manifest["resources"]))
            published = store.publish(folder, found.manifest["identity"], sass, compiled, url)
    except CompileError as exc:
        _log.warning("%s from %s is ignored: %s", spec.slug, url, exc)
        return None
    _log.info("fetched %s from %s", spec.slug, url)
    return published


def _compile(job: _Job, cancel: threading.Event | None) -> Artifact:
    what, toolchain = job.what, job.toolchain
    with _adding(job.store, what.key, what.spec, what.source, keep=job.together is None) as folder:
        product = None if job.elsewhere is None else job.elsewhere.compile(what, cancel)
        if product is not None:
            library, compiled = product
            (folder / LIBRARY).write_bytes(library)
        else:
            with _turns() if job.elsewhere else contextlib.nullcontext():
                compiled = compile_kernel(
                    folder,
                    SOURCE,
                    LIBRARY,
                    arch.target(what.spec.target),
                    toolchain,
                    cancel=cancel,
                    together=job.together,
                )
        published = job.store.publish(folder, what.parts, _proved(folder / LIBRARY, what.spec), compiled)
    _log.info("compiled %s in %.1f s", what.spec.slug, compiled.seconds)
    return published


def _proved(library: Path, spec: Declaration) -> dict[str, int]:
    """Check a library before it is published, and return its opcode counts."""
    prove_halves_agree(library)
    elf.require_own_libraries(library.read_bytes(), str(library), CompileError)
    return prove_tensor_cores(library, spec)


@functools.cache
def _turns() -> threading.Semaphore:
    """Return the limit on local compilations if an executor is lost: up to 256 threads may have waited for it."""
    return threading.Semaphore(env.jobs())


# The threads that hold the semaphore do not exist in a forked process.
forks.reset_in_child(_turns.cache_clear)


def _build_all(jobs: list[_Job], workers: int) -> dict[Declaration, Artifact]:
    cancel = threading.Event()
    with (
        Threads(workers, thread_name_prefix="cutlass_ops_build") as pool,
        progress(len(jobs), "kernels compiled") as steps,
    ):
        # Submit inside the try block: an interrupt may come between submissions and must end the running builds.
        try:
            futures = {pool.submit(job.build, cancel): job for job in jobs}
            _watch(futures, steps)
        except BaseException:
            cancel.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return _results(futures)


def _watch(futures: Mapping[Future[Artifact], _Job], steps: Progress) -> None:
    """Wait for all kernels. Stop at an error that is not a CompileError, since it would affect every kernel."""
    pending = set(futures)
    while pending:
        done, pending = wait(pending, return_when=FIRST_COMPLETED)
        for future in done:
            error = future.exception()
            if error is not None and not isinstance(error, CompileError):
                raise error
            steps.finished(futures[future].spec.slug, failed=error is not None)


def _results(futures: Mapping[Future[Artifact], _Job]) -> dict[Declaration, Artifact]:
    failed = {job.spec.slug: error for future, job in futures.items() if (error := future.exception()) is not None}
    if len(failed) == 1:
        raise next(iter(failed.values()))
    if failed:
        first, *others = failed
        raise CompileError(
            f"{len(failed)} of {len(futures)} kernels cannot be compiled. First: {failed[first]}\n"
            f"Others: {', '.join(others)}"
        )
    return {job.spec: future.result() for future, job in futures.items()}
