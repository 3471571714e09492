"""Whatever other threads hold while a process forks, the child can go on."""

from processes import run_with_pytorch

# Every lock that outlives a call is found by following references from modules; then it is held by another thread.
_SCRIPT = """
import gc, importlib, os, pathlib, pkgutil, queue, sys, threading, types
import cutlass_ops
from cutlass_ops.artifacts import loader, store
from cutlass_ops.artifacts.bundles import Bundles
from cutlass_ops.artifacts.remote_store import RemoteStores
from cutlass_ops.base import locks as file_locks
from cutlass_ops.compilation import builder
from cutlass_ops.compilation.background import Background
from cutlass_ops.run.registry import Registry

LOCKS = (type(threading.Lock()), type(threading.RLock()))
# Three need packages that are not installed.
MODULES = [importlib.import_module(m.name) for m in pkgutil.walk_packages(cutlass_ops.__path__, "cutlass_ops.")
           if not m.name.endswith(("__main__", "cutlass_ops.cupy", "cutlass_ops.jax", "triton_gemm"))]
OURS = {m.__name__ for m in MODULES}

def followed(value):
    if isinstance(value, types.ModuleType):
        return value.__name__ in OURS
    if isinstance(value, types.FunctionType):
        return value.__module__ in OURS
    kind = value if isinstance(value, type) else type(value)
    plain = ("builtins", "collections", "functools", "queue", "threading", "_thread", "weakref")
    return kind.__module__ in OURS or kind.__module__ in plain and not isinstance(value, type)

def found():
    locks, seen, left = {}, set(), list(MODULES)
    while left:
        value = left.pop()
        if id(value) in seen or not followed(value):
            continue
        seen.add(id(value))
        if isinstance(value, LOCKS):
            locks[id(value)] = value
        children = list(gc.get_referents(value))
        for each in children:
            if isinstance(each, dict) and isinstance(value, (types.ModuleType, types.FunctionType)):
                # Globals of a module; those of a function are the module's.
                each = {k: v for k, v in each.items() if not k.startswith("__")}
                left += each.values() if isinstance(value, types.ModuleType) else ()
            else:
                left.append(each)
    return list(locks.values())

builder._turns()
store._index(pathlib.Path('/nowhere'))
PARTS = (Registry, Bundles, Background, RemoteStores)
for part in PARTS:
    part.current()
before = found()
for lock in (loader._lock, file_locks._gate, store._index(pathlib.Path('/nowhere'))._lock,
             *(part.current()._lock for part in PARTS)):
    assert any(lock is each for each in before), lock
semaphore = builder._turns()
assert any(semaphore._cond._lock is lock for lock in before)

ready, go = threading.Event(), threading.Event()
def hold(lock, entered):
    lock.acquire()
    entered.set()
    go.wait()
    lock.release()
for lock in before:
    # The gate is what a fork waits for, since it is held for a moment only.
    if lock is not file_locks._gate:
        entered = threading.Event()
        threading.Thread(target=hold, args=(lock, entered), daemon=True).start()
        entered.wait()
child = os.fork()
if child == 0:
    stuck = [lock for lock in found() if not lock.acquire(blocking=False)]
    print(len(before), "locks,", len(stuck), "stuck:", [gc.get_referrers(lock)[:1] for lock in stuck], flush=True)
    os._exit(bool(stuck))
status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
go.set()
sys.exit(status)
"""


def _run(script):
    return run_with_pytorch("import warnings; warnings.simplefilter('ignore')\n" + script)


def test_no_lock_that_another_thread_holds_is_held_in_a_forked_process():
    done = _run(_SCRIPT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(done.stdout.split()[0]) >= 6


def test_a_lock_that_is_not_reset_would_be_found():
    added = 'MODULES[0]._forgotten = {"of": [threading.Lock()]}\nbefore = found()'
    done = _run(_SCRIPT.replace("before = found()", added, 1))
    assert done.returncode == 1, done.stdout + done.stderr
    assert "1 stuck" in done.stdout


def test_turns_that_other_threads_took_are_free_in_a_forked_process():
    script = """
import os, sys, threading
from cutlass_ops.compilation import builder
taken = builder._turns()
while taken.acquire(blocking=False):
    pass
child = os.fork()
if child == 0:
    os._exit(not builder._turns().acquire(blocking=False))
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    assert _run(script).returncode == 0


def test_an_object_is_not_kept_alive():
    script = """
import gc, os, sys, weakref
from cutlass_ops.base.session import Session
from cutlass_ops.run.registry import Registry
reference = weakref.ref(Session().part(Registry))
gc.collect()
assert reference() is None
if (child := os.fork()) == 0:
    os._exit(0)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    done = _run(script)
    assert done.returncode == 0, done.stderr
