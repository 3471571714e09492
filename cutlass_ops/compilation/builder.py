"""Build a declaration into an artifact in the store: look it up, fetch it from the remote store, or compile it."""

from __future__ import annotations

import contextlib
import functools
import logging
import reprlib
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Executor, Future, wait
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from cutlass_ops.artifacts.compiled import Compiled
from cutlass_ops.artifacts.entry import KEEP, LIBRARY, SOURCE, Artifact, identity_key
from cutlass_ops.artifacts.remote_store import Fetched, RemoteStore, RemoteStores
from cutlass_ops.artifacts.store import KernelStore
from cutlass_ops.base import arch, env, forks, linkage
from cutlass_ops.base.atomic import DELETIONS
from cutlass_ops.base.ending import Threads
from cutlass_ops.base.errors import CompileError, CutlassOpsError, MissingKernelError, StoreError, ToolchainError
from cutlass_ops.base.progress import Progress, progress
from cutlass_ops.base.whole import plain
from cutlass_ops.compilation import keys
from cutlass_ops.compilation.abi_check import prove_halves_agree
from cutlass_ops.compilation.compiler import LOG, compile_kernel
from cutlass_ops.compilation.identity import kernel_identity, source_identity
from cutlass_ops.compilation.remote import Elsewhere
from cutlass_ops.compilation.toolchain import Toolchain, find_toolchain
from cutlass_ops.declare.quantizing import Declaration
from cutlass_ops.declare.spec import KernelSpec
from cutlass_ops.kinds import legality, render
from cutlass_ops.kinds.proof import prove_tensor_cores

T = TypeVar("T")
_log = logging.getLogger("cutlass_ops")

# Maximum number of threads that wait for an executor.
_WAITING = 256


@dataclass(frozen=True)
class _Job:
    """One kernel to build, with its store and compilers.

    Its key is noted in a file if its source and its compilers are those that a look into the store supposes.
    """

    spec: Declaration
    source: str
    identity: Mapping[str, Any]
    key: str
    store: KernelStore
    toolchain: Toolchain
    elsewhere: Elsewhere | None = None
    noted: Path | None = None

    def lookup(self) -> Artifact | None:
        """Return the kernel if the store has it."""
        found = self.store.lookup(self.key)
        return None if found is None else self.lasting(found)

    def lasting(self, artifact: Artifact) -> Artifact:
        """Return the artifact with a way to rebuild it if it is removed from the store before it is read."""
        keys.note(self.noted, self.key)
        return replace(artifact, again=functools.partial(_again, replace(self, elsewhere=None)))


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

    If several processes or threads ask for the same kernel, one compiles and the others wait.

    Parameters
    ----------
    spec : KernelSpec or QuantizeSpec
        The declaration.
    source : str, optional
        Its rendered source, if already known.
    store : KernelStore, optional
        The default is the user's store.
    toolchain : Toolchain, optional
        The default is the result of :func:`cutlass_ops.compilation.toolchain.find_toolchain`.
    cancel : threading.Event, optional
        Set it to stop compiling or waiting.
    executor : concurrent.futures.Executor, optional
        Compiles the kernel with the same compilers; the default is this process. This process writes the store.

    Raises
    ------
    ConfigError
        If the declaration is not legal.
    MissingKernelError
        If compilation is off (``CUTLASS_OPS_JIT=0``) and the store does not have the kernel.
    ToolchainError
        If there is no usable compiler.
    CompileError
        If the compiler rejects the source, or the result does not use the Tensor Cores as declared.
    StoreError
        If the store is not private or cannot be written.
    CancelledError
        If ``cancel`` was set.
    """
    return _built(spec, source, store, toolchain, cancel, _elsewhere(executor))


def _built(
    spec: Declaration,
    source: str | None,
    store: KernelStore | None,
    toolchain: Toolchain | None,
    cancel: threading.Event | None,
    elsewhere: Elsewhere | None,
) -> Artifact:
    if not env.jit_enabled():
        return _stored(spec, source, store)
    store = store or KernelStore.default()
    job = _job(spec, source, store, toolchain, elsewhere)
    return job.lookup() or _build(job, cancel)


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


def stored(spec: Declaration) -> Artifact | None:
    """Return the compiled kernel for a declaration if the user's store has it; compile and fetch nothing.

    Raises
    ------
    ConfigError
        If the declaration is not legal.
    StoreError
        If the store is not private.
    """
    try:
        if not env.jit_enabled():
            return _stored(spec, None, None, ask=False)
        return _job(spec, None, KernelStore.default(), None, None).lookup()
    except (MissingKernelError, ToolchainError):
        return None


def built_again(spec: Declaration, use: Callable[[Artifact], T]) -> T:
    """Build a kernel again that was removed from the user's store, and use it before it can be removed once more.

    Where nothing may be compiled, it is looked for once more instead.
    """
    if not env.jit_enabled():
        return _stored_again(spec, None, None, use)
    return _again(_job(spec, None, KernelStore.default(), None, None), use)


def fetched(spec: Declaration) -> Artifact | None:
    """Return the compiled kernel for a declaration if the remote store has it; compile nothing.

    It is then in the user's store. It takes at most the time limit of the remote store. The errors are those of
    :func:`build_artifact`.
    """
    remote = RemoteStores.current().store()
    if remote is None:
        return None
    try:
        job = _job(spec, None, KernelStore.default(), None, None)
    except ToolchainError:
        return None
    found = remote.fetch(job.key)
    if found is None:
        return None

    def take() -> Artifact | None:
        if (here := job.lookup()) is not None:
            return here
        taken = _taken(found, spec, job.store)
        return None if taken is None else job.lasting(taken)

    return _locked(job.store, job.key, spec, take)


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

    Parameters
    ----------
    specs : iterable of KernelSpec or QuantizeSpec
        The declarations.
    jobs : int, optional
        Number of kernels compiled at the same time. The default is ``CUTLASS_OPS_JOBS``, or else the number of CPUs;
        with an executor, as many as it takes.
    store, toolchain, executor
        As for :func:`build_artifact`.

    Returns
    -------
    list of Artifact
        In the order of the declarations.

    Raises
    ------
    TypeError, ValueError
        If ``jobs`` is not a positive integer, or ``executor`` is not an executor.
    CompileError
        If any kernel failed. The message has the first failure and names the others.
    ConfigError, MissingKernelError, ToolchainError, StoreError
        As for :func:`build_artifact`.
    """
    specs = list(specs)
    if not env.jit_enabled():
        return [_stored(spec, None, store) for spec in specs]
    store = store or KernelStore.default()
    elsewhere, workers = _elsewhere(executor), _at_once(jobs, executor)
    with keys.one_situation():
        planned = {spec: _job(spec, None, store, toolchain, elsewhere) for spec in specs}
    found = {spec: job.lookup() for spec, job in planned.items()}
    missing = [job for spec, job in planned.items() if found[spec] is None]
    built = _build_all(missing, workers) if missing else {}
    return [found[spec] or built[spec] for spec in specs]


@contextlib.contextmanager
def building(
    specs: Iterable[Declaration], *, jobs: int | None = None, executor: Executor | None = None
) -> Iterator[dict[Declaration, Future[Artifact]]]:
    """Build kernels in the background, in this order, during the context.

    Yields a future for each. Unfinished kernels are cancelled at the end of the context.

    Parameters
    ----------
    specs : iterable of KernelSpec or QuantizeSpec
        The declarations.
    jobs, executor
        As for :func:`build_many`.
    """
    cancel, elsewhere = threading.Event(), _elsewhere(executor)
    pool = Threads(_at_once(jobs, executor), thread_name_prefix="cutlass_ops_build")
    try:
        yield {spec: pool.submit(_built, spec, None, None, None, cancel, elsewhere) for spec in specs}
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


def _job(
    spec: Declaration,
    source: str | None,
    store: KernelStore,
    toolchain: Toolchain | None,
    elsewhere: Elsewhere | None,
) -> _Job:
    noted = keys.place(store, spec) if source is None and toolchain is None else None
    source, toolchain = _source(spec, source), toolchain or find_toolchain()
    identity = kernel_identity(spec, source, toolchain)
    return _Job(spec, source, identity, identity_key(identity), store, toolchain, elsewhere, noted)


def _source(spec: Declaration, source: str | None) -> str:
    if isinstance(spec, KernelSpec):  # another one is legal if it is there
        legality.require_legal(spec)
    return render.render(spec) if source is None else source


def _stored(spec: Declaration, source: str | None, store: KernelStore | None, *, ask: bool = True) -> Artifact:
    """Find a kernel without a compiler, or ask the remote store. Any compiler's build of the same source will do."""
    noted = keys.place(store, spec) if source is None else None
    identity = source_identity(spec, _source(spec, source))
    remote = RemoteStores.current().store() if ask else None
    asked = "" if remote is None else f", nor has {remote.where}"
    try:
        store = store or KernelStore.default()
        found, why = store.find(identity), f"{store.root} has no kernel {spec.slug}{asked}"
        if found is None and remote is not None:
            found = _stored_remotely(spec, identity, store, remote)
    except StoreError as exc:
        found, why = None, f"kernel {spec.slug} cannot be looked up: {exc}"
    if found is None:
        raise MissingKernelError(
            f"compilation is off ({env.JIT.name}=0) and {why}. "
            f"Build it on a machine with a compiler: `python -m cutlass_ops build SPEC.json`, with SPEC.json: "
            f"{spec.canonical()}"
        )
    keys.note(noted, found.key)
    return replace(found, again=functools.partial(_stored_again, spec, source, store))


def _stored_remotely(
    spec: Declaration, identity: Mapping[str, Any], store: KernelStore, remote: RemoteStore
) -> Artifact | None:
    found = remote.fetch_source(identity)
    if found is None:
        return None
    return _locked(store, found.key, spec, lambda: store.lookup(found.key) or _taken(found, spec, store))


def _stored_again(spec: Declaration, source: str | None, store: KernelStore | None, use: Callable[[Artifact], T]) -> T:
    return use(_stored(spec, source, store))


def _build(job: _Job, cancel: threading.Event | None) -> Artifact:
    # The previous holder of the lock may have built it.
    return _locked(job.store, job.key, job.spec, lambda: job.lookup() or job.lasting(_made(job, cancel)), cancel)


def _again(job: _Job, use: Callable[[Artifact], T]) -> T:
    """Rebuild a kernel that was removed, and use it while the lock protects it from removal."""
    return _locked(job.store, job.key, job.spec, lambda: use(job.lookup() or job.lasting(_made(job, None))))


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


def _made(job: _Job, cancel: threading.Event | None) -> Artifact:
    """Fetch a kernel from the remote store, or compile and publish it. The caller holds the kernel's lock."""
    remote = RemoteStores.current().store()
    if remote is None:
        return _compile(job, cancel)
    with remote.turn(job.key, job.spec.slug, cancel) as turn:
        taken = None if turn.fetched is None else _taken(turn.fetched, job.spec, job.store)
        if taken is not None:
            return taken
        compiled = _compile(job, cancel)
        turn.publish(compiled)
        return compiled


def _taken(found: Fetched, spec: Declaration, store: KernelStore) -> Artifact | None:
    """Put a fetched kernel into the store; return None if it fails the proofs. The caller holds the kernel's lock."""
    folder = _workspace(store, found.key, spec, "")
    try:
        with store.writing():
            (folder / SOURCE).write_bytes(found.source)
            (folder / LIBRARY).write_bytes(found.library)
            sass = _proved(folder / LIBRARY, spec)
        published = store.publish(folder, found.identity, sass, Compiled(0.0, found.resources), found.url)
    except CompileError as exc:
        _log.warning("%s from %s is ignored: %s", spec.slug, found.url, exc)
        store.discard(folder)
        return None
    except BaseException as exc:
        if isinstance(exc, CutlassOpsError) and _is_gone(folder, exc):
            raise _deleted(store, spec) from exc
        with contextlib.suppress(OSError):
            store.discard(folder)
        raise
    _log.info("fetched %s from %s", spec.slug, found.url)
    return published


def _proved(library: Path, spec: Declaration) -> dict[str, int]:
    """Check a library before it is published, and return its opcode counts."""
    prove_halves_agree(library)
    linkage.require_own_libraries(library.read_bytes(), str(library), CompileError)
    return prove_tensor_cores(library, spec)


class _DeletedError(StoreError):
    """The store was deleted while a kernel was being compiled or fetched into it, perhaps to free disk space."""


def _deleted(store: KernelStore, spec: Declaration) -> _DeletedError:
    return _DeletedError(f"the kernel store {store.root} was deleted while {spec.slug} was being added")


def _is_gone(folder: Path, exc: CutlassOpsError) -> bool:
    """Whether an error comes of a folder that was deleted.

    Any may: a compiler cannot be started in a folder that is gone, nor a kernel opened there.
    """
    # The source may be the last file to be removed.
    return isinstance(exc.__cause__, FileNotFoundError) or not (folder / SOURCE).exists()


def _workspace(store: KernelStore, key: str, spec: Declaration, source: str) -> Path:
    """Create a folder to build a kernel in, as :meth:`KernelStore.workspace`."""
    try:
        return store.workspace(key, source)
    except StoreError as exc:
        if not isinstance(exc.__cause__, FileNotFoundError):
            raise
        raise _deleted(store, spec) from exc


def _compile(job: _Job, cancel: threading.Event | None) -> Artifact:
    folder = _workspace(job.store, job.key, job.spec, job.source)
    try:
        target = arch.target(job.spec.target)
        with job.store.writing():
            compiled = _compiled_elsewhere(job, folder, cancel)
            if compiled is None:
                with _turns() if job.elsewhere else contextlib.nullcontext():
                    compiled = compile_kernel(folder, SOURCE, LIBRARY, target, job.toolchain, cancel=cancel)
            sass = _proved(folder / LIBRARY, job.spec)
        published = job.store.publish(folder, job.identity, sass, compiled)
        _log.info("compiled %s in %.1f s", job.spec.slug, compiled.seconds)
        return published
    except BaseException as exc:
        if isinstance(exc, CutlassOpsError) and _is_gone(folder, exc):
            raise _deleted(job.store, job.spec) from exc
        if isinstance(exc, CompileError):
            raise _explained(job, folder, exc) from None
        with contextlib.suppress(OSError):
            job.store.discard(folder)
        raise


@functools.cache
def _turns() -> threading.Semaphore:
    """Return the limit on local compilations if an executor is lost: up to 256 threads may have waited for it."""
    return threading.Semaphore(env.jobs())


# The threads that hold the semaphore do not exist in a forked process.
forks.reset_in_child(_turns.cache_clear)


def _compiled_elsewhere(job: _Job, folder: Path, cancel: threading.Event | None) -> Compiled | None:
    """Compile into a folder with the job's executor; return None if there is none, or it lost the kernel."""
    if job.elsewhere is None:
        return None
    product = job.elsewhere.compile(job.spec, job.source, job.identity, cancel)
    if product is None:
        return None
    (folder / LIBRARY).write_bytes(product.library)
    return product.compiled


def _explained(job: _Job, folder: Path, exc: CompileError) -> CompileError:
    kept = job.store.keep_failed(folder)
    # The message has paths in the folder that was just moved.
    reason = exc.args[0].replace(str(folder), str(kept))
    log = f"\n  log: {kept / LOG}" if (kept / LOG).exists() else ""
    return CompileError(f"{job.spec.slug}: {reason}\n  source: {kept / SOURCE}{log}")


def _build_all(jobs: list[_Job], workers: int) -> dict[Declaration, Artifact]:
    cancel = threading.Event()
    with (
        Threads(workers, thread_name_prefix="cutlass_ops_build") as pool,
        progress(len(jobs), "kernels compiled") as steps,
    ):
        # Submit inside the try block: an interrupt may come between submissions and must end the running builds.
        try:
            futures = {pool.submit(_build, job, cancel): job for job in jobs}
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
