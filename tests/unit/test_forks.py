"""Whatever other threads hold while a process forks, the child can go on."""

import pytest
from processes import run_with_pytorch

# Every lock that outlives a call is found by following references from modules; then it is held by another thread.
_SCRIPT = """
import gc, importlib, os, pkgutil, queue, sys, threading, types
import cutlass_ops
from cutlass_ops.artifacts import loader
from cutlass_ops.artifacts.bundles import Bundles
from cutlass_ops.base import forks
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
PARTS = (Registry, Bundles)
for part in (*PARTS, Background):
    part.current()
before = found()
for lock in (loader._lock, forks._gate, Background.current()._changed._lock, *(part.current()._lock for part in PARTS)):
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
    if lock is not forks._gate:
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


@pytest.mark.slow
def test_no_lock_that_another_thread_holds_is_held_in_a_forked_process():
    done = _run(_SCRIPT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(done.stdout.split()[0]) >= 6


_IMPORTING = """
import os, sys, threading, time
import cutlass_ops as co
from cutlass_ops.epilogue import builtin

assert "jinja2" not in sys.modules
entered, threads = threading.Event(), []

class Slow:
    def find_spec(self, name, path=None, target=None):
        if name == "jinja2.lexer" and threading.current_thread() in threads:
            entered.set()
            time.sleep(0.5)

sys.meta_path.insert(0, Slow())
tile = co.ThreadblockShape(128, 128, 64)
spec = co.KernelSpec(a="bf16.row", b="bf16.col", d="bf16.row", epilogue=builtin.identity, config=co.Sm90Config(tile))
threads.append(threading.Thread(target=lambda: (WORK), daemon=True))
threads[0].start()
assert entered.wait(300)
began = time.monotonic()
child = os.fork()
if child == 0:
    import signal
    signal.alarm(300)
    os._exit("#include" not in co.source(spec))
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
threads[0].join(300)
sys.exit(threads[0].is_alive())
"""


@pytest.mark.slow
@pytest.mark.parametrize("work", ["co.source(spec)", "__import__('jinja2')", "__import__('jinja2.sandbox')"])
def test_a_child_of_a_fork_while_another_thread_imports_a_module_can_import_it(work):
    done = _run(_IMPORTING.replace("WORK", work))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_a_fork_does_not_wait_forever_for_an_import():
    script = """
import importlib.util, os, sys, threading
from cutlass_ops.base import forks
forks._PATIENCE = 0.2
go, entered = threading.Event(), threading.Event()

class Never:
    def find_spec(self, name, path=None, target=None):
        return importlib.util.spec_from_loader(name, self) if name == "endless_module" else None

    def create_module(self, spec):
        return None

    def exec_module(self, module):
        entered.set()
        go.wait(300)

sys.meta_path.insert(0, Never())
def try_it():
    import endless_module
thread = threading.Thread(target=try_it, daemon=True)
thread.start()
assert entered.wait(300)
if (child := os.fork()) == 0:
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert thread.is_alive()
go.set()
thread.join(300)
sys.exit(thread.is_alive())
"""
    done = _run(script)
    assert done.returncode == 0, done.stderr
