"""From a declaration to an artifact in the store: looked up, or rendered, compiled, proved and published."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from cutlass_ops.artifacts.compiled import Compiled
from cutlass_ops.artifacts.store import LIBRARY, SOURCE, Artifact, KernelStore, identity_key
from cutlass_ops.base import arch, env, forks, linkage
from cutlass_ops.base.errors import CompileError, MissingKernelError, StoreError
from cutlass_ops.base.progress import Progress, progress
from cutlass_ops.compilation.abi_check import prove_halves_agree
from cutlass_ops.compilation.compiler import LOG, compile_kernel
from cutlass_ops.compilation.identity import kernel_identity, source_identity
from cutlass_ops.compilation.remote import Elsewhere
from cutlass_ops.compilation.toolchain import Toolchain, find_toolchain
from cutlass_ops.declare.spec import KernelSpec
from cutlass_ops.kinds import legality, render
from cutlass_ops.kinds.proof import prove_tensor_cores

T = TypeVar("T")

# Threads that wait for an executor at the same time.
_WAITING = 256


@dataclass(frozen=True)
class _Job:
    """One kernel to build, with the place and the means."""

    spec: KernelSpec
    source: str
    identity: Mapping[str, Any]
    key: str
    store: KernelStore
    toolchain: Toolchain
    elsewhere: Elsewhere | None = None

    def lookup(self) -> Artifact | None:
        """Return the kernel if the store has it."""
        found = self.store.lookup(self.key)
        return None if found is None else self.lasting(found)

    def lasting(self, artifact: Artifact) -> Artifact:
        """Return the kernel such that it is built again if it is removed from the store before it is read."""
        return replace(artifact, again=functools.partial(_again, replace(self, elsewhere=None)))


def build_artifact(
    spec: KernelSpec,
    *,
    source: str | None = None,
    store: KernelStore | None = None,
    toolchain: Toolchain | None = None,
    cancel: threading.Event | None = None,
    executor: Executor | None = None,
) -> Artifact:
    """Return the compiled kernel for a declaration; compile it if the store has none.

    Of all processes and threads that ask for one kernel at a time, one compiles and the others wait.

    Parameters
    ----------
    spec : KernelSpec
        The declaration.
    source : str, optional
        Its rendering, if that is at hand.
    store : KernelStore, optional
        By default the user's own.
    toolchain : Toolchain, optional
        By default what :func:`cutlass_ops.compilation.toolchain.find_toolchain` finds.
    cancel : threading.Event, optional
        Ends a compilation, or the wait for one, when set.
    executor : concurrent.futures.Executor, optional
        Compiles, where it has the same compilers; by default this process does. The store stays here.

    Raises
    ------
    ConfigError
        If the declaration is not legal.
    MissingKernelError
        If compilation is switched off (``CUTLASS_OPS_JIT=0``) and the store has no such kernel.
    ToolchainError
        If there is no usable compiler.
    CompileError
        If the compiler refuses the source, or the result does not use the Tensor Cores as declared.
    StoreError
        If the store is not private or cannot be written.
    CancelledError
        If ``cancel`` was set.
    """
    return _built(spec, source, store, toolchain, cancel, _elsewhere(executor))


def _built(
    spec: KernelSpec,
    source: str | None,
    store: KernelStore | None,
    toolchain: Toolchain | None,
    cancel: threading.Event | None,
    elsewhere: Elsewhere | None,
) -> Artifact:
    if not env.jit_enabled():
        return _stored(spec, source, store)
    store = store or KernelStore.default()
    job = _job(spec, source, store, toolchain or find_toolchain(), elsewhere)
    return job.lookup() or _build(job, cancel)


def _elsewhere(executor: Executor | None) -> Elsewhere | None:
    return None if executor is None else Elsewhere(executor)


def build_many(
    specs: Iterable[KernelSpec],
    *,
    jobs: int | None = None,
    store: KernelStore | None = None,
    toolchain: Toolchain | None = None,
    executor: Executor | None = None,
) -> list[Artifact]:
    """Build several kernels, some at the same time, and show progress on standard error.

    A kernel that cannot be compiled does not stop the others. An interrupt ends all compilers; what was finished stays.
    What an executor loses or cancels is compiled here; if nothing comes back from it for half an hour, or for as many
    seconds as ``CUTLASS_OPS_EXECUTOR_TIMEOUT`` says, that is an error.

    Parameters
    ----------
    specs : iterable of KernelSpec
        The declarations.
    jobs : int, optional
        Kernels compiled at the same time; by default ``CUTLASS_OPS_JOBS``, else as many as there are CPUs, and with an
        executor all that it takes.
    store, toolchain, executor
        As for :func:`build_artifact`.

    Returns
    -------
    list of Artifact
        In the order of the declarations.

    Raises
    ------
    CompileError
        If any kernel failed; the message holds the first failure and names the others.
    ConfigError, MissingKernelError, ToolchainError, StoreError
        As for :func:`build_artifact`.
    """
    specs = list(specs)
    if not env.jit_enabled():
        return [_stored(spec, None, store) for spec in specs]
    store = store or KernelStore.default()
    toolchain = toolchain or find_toolchain()
    elsewhere = _elsewhere(executor)
    planned = {spec: _job(spec, None, store, toolchain, elsewhere) for spec in specs}
    found = {spec: job.lookup() for spec, job in planned.items()}
    missing = [job for spec, job in planned.items() if found[spec] is None]
    built = _build_all(missing, jobs or _at_once(executor)) if missing else {}
    return [found[spec] or built[spec] for spec in specs]


@contextlib.contextmanager
def building(
    specs: Iterable[KernelSpec], *, jobs: int | None = None, executor: Executor | None = None
) -> Iterator[dict[KernelSpec, Future[Artifact]]]:
    """Build kernels in the background, in this order, for as long as the context lasts.

    Yields a future for each; what is not finished at the end of the context is given up.

    Parameters
    ----------
    specs : iterable of KernelSpec
        The declarations.
    jobs, executor
        As for :func:`build_many`.
    """
    cancel, elsewhere = threading.Event(), _elsewhere(executor)
    pool = ThreadPoolExecutor(jobs or _at_once(executor), thread_name_prefix="cutlass_ops_build")
    try:
        yield {spec: pool.submit(_built, spec, None, None, None, cancel, elsewhere) for spec in specs}
    finally:
        cancel.set()
        pool.shutdown(wait=True, cancel_futures=True)


def _at_once(executor: Executor | None) -> int:
    # The threads of this process only wait for an executor, which knows how much it can do at once.
    return env.jobs() if executor is None else _WAITING


def _job(
    spec: KernelSpec, source: str | None, store: KernelStore, toolchain: Toolchain, elsewhere: Elsewhere | None
) -> _Job:
    source = _source(spec, source)
    identity = kernel_identity(spec, source, toolchain)
    return _Job(spec, source, identity, identity_key(identity), store, toolchain, elsewhere)


def _source(spec: KernelSpec, source: str | None) -> str:
    legality.require_legal(spec)
    return render.render(spec) if source is None else source


def _stored(spec: KernelSpec, source: str | None, store: KernelStore | None) -> Artifact:
    """Find a kernel without a compiler: any compiler's build of the same source will do."""
    identity = source_identity(spec, _source(spec, source))
    try:
        store = store or KernelStore.default()
        found, why = store.find(identity), f"{store.root} has no kernel {spec.slug}"
    except StoreError as exc:
        found, why = None, f"no kernel {spec.slug} can be looked for, as {exc}"
    if found is None:
        raise MissingKernelError(
            f"compilation is switched off ({env.JIT.name}=0) and {why}. "
            f"Build it where a compiler is, with `python -m cutlass_ops build SPEC.json`, where SPEC.json holds: "
            f"{spec.canonical()}"
        )
    return replace(found, again=functools.partial(_stored_again, spec, source, store))


def _stored_again(spec: KernelSpec, source: str | None, store: KernelStore | None, use: Callable[[Artifact], T]) -> T:
    return use(_stored(spec, source, store))


def _build(job: _Job, cancel: threading.Event | None) -> Artifact:
    with job.store.lock(job.key, cancel, job.spec.slug):
        # Whoever held the lock before may have built it.
        return job.lookup() or job.lasting(_compile(job, cancel))


def _again(job: _Job, use: Callable[[Artifact], T]) -> T:
    """Build a kernel again that was removed, and use it while nobody can remove it."""
    with job.store.lock(job.key, None, job.spec.slug):
        return use(job.lookup() or job.lasting(_compile(job, None)))


def _compile(job: _Job, cancel: threading.Event | None) -> Artifact:
    folder = job.store.workspace(job.key, job.source)
    try:
        target = arch.target(job.spec.target)
        with job.store.writing():
            compiled = _compiled_elsewhere(job, folder, cancel)
            if compiled is None:
                with _turns() if job.elsewhere else contextlib.nullcontext():
                    compiled = compile_kernel(folder, SOURCE, LIBRARY, target, job.toolchain, cancel=cancel)
            prove_halves_agree(folder / LIBRARY)
            linkage.require_own_libraries((folder / LIBRARY).read_bytes(), str(folder / LIBRARY), CompileError)
            sass = prove_tensor_cores(folder / LIBRARY, job.spec)
        return job.store.publish(folder, job.identity, sass, compiled)
    except CompileError as exc:
        raise _explained(job, folder, exc) from None
    except BaseException:
        with contextlib.suppress(OSError):
            job.store.discard(folder)
        raise


@functools.cache
def _turns() -> threading.Semaphore:
    """Return what holds back the many threads that waited for an executor, once that is lost."""
    return threading.Semaphore(env.jobs())


# A forked process has none of the threads that took their turn.
forks.reset_in_child(_turns.cache_clear)


def _compiled_elsewhere(job: _Job, folder: Path, cancel: threading.Event | None) -> Compiled | None:
    """Have the job's executor compile into a folder; None if there is none, or it can compile nothing any more."""
    if job.elsewhere is None:
        return None
    product = job.elsewhere.compile(job.spec, job.source, job.identity, cancel)
    if product is None:
        return None
    (folder / LIBRARY).write_bytes(product.library)
    return product.compiled


def _explained(job: _Job, folder: Path, exc: CompileError) -> CompileError:
    kept = job.store.keep_failed(folder)
    # The message names files and the command in the folder that was just moved.
    reason = exc.args[0].replace(str(folder), str(kept))
    log = f"\n  log: {kept / LOG}" if (kept / LOG).exists() else ""
    return CompileError(f"{job.spec.slug}: {reason}\n  source: {kept / SOURCE}{log}")


def _build_all(jobs: list[_Job], workers: int) -> dict[KernelSpec, Artifact]:
    cancel = threading.Event()
    with (
        ThreadPoolExecutor(workers, thread_name_prefix="cutlass_ops_build") as pool,
        progress(len(jobs), "kernels compiled") as steps,
    ):
        # An interrupt may come while kernels are handed out: what has begun ends then, too.
        try:
            futures = {pool.submit(_build, job, cancel): job for job in jobs}
            _watch(futures, steps)
        except BaseException:
            cancel.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return _results(futures)


def _watch(futures: Mapping[Future[Artifact], _Job], steps: Progress) -> None:
    """Wait for all; stop at an error that would befall every kernel."""
    pending = set(futures)
    while pending:
        done, pending = wait(pending, return_when=FIRST_COMPLETED)
        for future in done:
            error = future.exception()
            if error is not None and not isinstance(error, CompileError):
                raise error
            steps.finished(futures[future].spec.slug, failed=error is not None)


def _results(futures: Mapping[Future[Artifact], _Job]) -> dict[KernelSpec, Artifact]:
    failed = {job.spec.slug: error for future, job in futures.items() if (error := future.exception()) is not None}
    if len(failed) == 1:
        raise next(iter(failed.values()))
    if failed:
        first, *others = failed
        raise CompileError(
            f"{len(failed)} of {len(futures)} kernels cannot be compiled. The first: {failed[first]}\n"
            f"The others: {', '.join(others)}"
        )
    return {job.spec: future.result() for future, job in futures.items()}
