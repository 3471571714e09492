"""Which kernels the GPU tests need, found without a GPU: they run on a device that is made up, on the CPU.

    python -m pytest -p tests.gpu.foreseen --foreseen kernels.json --gpu H100 tests/gpu/test_fp8.py
    python -m tests.gpu.foreseen kernels.json                   # compiles them
    python -m pytest -p tests.gpu.foreseen --compute tests/gpu/test_kernels.py -k grouped   # what tests say there

Kernels are only noted, and checks of results pass, so that this is cheap and a test goes on to its end. With --compute,
PyTorch computes what kernels would, and checks are as on a GPU: a test that fails there is wrong. Graphs replay kernels
alone.
"""

from __future__ import annotations

import collections
import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from cutlass_ops.compilation import apart
from cutlass_ops.compilation.builder import build_together
from cutlass_ops.declare.device import Device
from cutlass_ops.declare.gpus import gpu_named
from cutlass_ops.declare.quantizing import Declaration, declaration_from_json
from cutlass_ops.declare.spec import KernelSpec
from cutlass_ops.operand import call
from cutlass_ops.run import backward, little

sys.path.append(str(Path(__file__).parents[1] / "unit"))  # for the made-up device

USUAL = "NVIDIA H200"
_MEMORY = 140 << 30  # bytes
_LARGE = 3e6  # products that are left out where only kernels are noted
_PRODUCTS = ("matmul", "__matmul__", "mm", "linear", "addmm", "bmm", "_scaled_mm", "_int_mm")
_found: dict[Any, None] = {}
_capturing: list[_Graph] = []


def pretend(device: Device) -> None:
    """Have PyTorch say, in this process, that there is one GPU. Nothing can be computed on it."""
    major, minor = device.capability
    properties = SimpleNamespace(
        major=major,
        minor=minor,
        multi_processor_count=device.multiprocessors,
        name=device.name,
        gcnArchName="",  # what PyTorch's compiler asks for
        total_memory=_MEMORY,
    )
    answers = {
        "is_available": True,
        "device_count": 1,
        "current_device": 0,
        "get_device_name": device.name,
        "get_device_capability": device.capability,
        "get_device_properties": properties,
        "is_current_stream_capturing": False,
        "synchronize": None,
        "empty_cache": None,
        "mem_get_info": (0, _MEMORY),
        "memory_allocated": 0,
        "memory_stats": collections.Counter(),
        "reset_peak_memory_stats": None,
        "set_sync_debug_mode": None,
        "_sleep": None,
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, lambda *_, answer=answer: answer)


# ---- Streams and graphs, of which there is one at a time -------------------------------------------------------------


class _Graph:
    """What a captured function launched."""

    def __init__(self) -> None:
        self.launches: list[Callable[[], object]] = []

    def replay(self) -> None:
        """Launch it again."""
        for launch in self.launches:
            launch()


@contextlib.contextmanager
def _graph(graph: _Graph, **_: Any) -> Iterator[None]:
    _capturing.append(graph)
    try:
        yield
    finally:
        _capturing.pop()


class _Stream:
    """A stream or an event, with which nothing is ever late."""

    cuda_stream = 0

    def __init__(self, *_: Any, **__: Any) -> None:
        """Take what CUDA's take."""

    def synchronize(self, *_: Any) -> None:
        """Wait for nothing."""

    wait_stream = wait_event = record = synchronize

    def query(self) -> bool:
        """Whether all is done."""
        return False


def _one_stream() -> None:
    """Have streams, events and graphs without a GPU."""
    stand_ins = {"Stream": _Stream, "Event": _Stream, "CUDAGraph": _Graph, "graph": _graph}
    stand_ins |= {"stream": lambda _: contextlib.nullcontext(), "current_stream": lambda *_: _Stream()}
    stand_ins |= dict.fromkeys(("is_initialized", "is_current_stream_capturing"), lambda: bool(_capturing))
    for name, stand_in in stand_ins.items():
        setattr(torch.cuda, name, stand_in)
    torch.Generator = _Generator  # type: ignore[misc]
    torch.autocast = _Autocast  # type: ignore[misc]


class _Autocast(torch.autocast):
    """Casts on the CPU, whatever device is asked for."""

    def __init__(self, device_type: str, *given: Any, **named: Any) -> None:
        super().__init__("cpu" if device_type == "cuda" else device_type, *given, **named)


class _Generator(torch.Generator):
    """A generator of the CPU, whatever device is asked for."""

    def __new__(cls, *_: Any, **__: Any) -> _Generator:
        return super().__new__(cls)


class _OnCpu(TorchFunctionMode):
    """Has what is asked of a GPU done on the CPU, large products only where they are to be computed."""

    def __init__(self, *, computes: bool) -> None:
        super().__init__()
        self.computes = computes

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = getattr(func, "__name__", ""), dict(kwargs or {})
        if name == "cuda":
            return args[0]
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = "cpu"
        if name == "to":
            args = tuple("cpu" if _is_cuda(each) else each for each in args)
        if not self.computes and name in _PRODUCTS and sum(getattr(x, "nbytes", 0) for x in args) > _LARGE:
            without = [x.to("meta") if isinstance(x, torch.Tensor) else x for x in args]
            found = func(*without, **{k: v for k, v in kwargs.items() if not isinstance(v, torch.Tensor)})
            return torch.zeros(found.shape, dtype=found.dtype)
        return func(*args, **kwargs)


def _is_cuda(device: object) -> bool:
    return isinstance(device, str | torch.device) and str(device).startswith("cuda")


# ---- The plugin ------------------------------------------------------------------------------------------------------


def pytest_addoption(parser: pytest.Parser) -> None:
    """Take the names of the file and of the GPU."""
    parser.addoption("--foreseen", type=Path, help="file that the kernels are written to")
    parser.addoption("--gpu", type=gpu_named, default=USUAL, help="GPU to make up, as the driver names it")
    parser.addoption("--compute", action="store_true", help="have PyTorch compute, and checks count")


def pytest_configure(config: pytest.Config) -> None:
    """Have tests find a GPU."""
    device = config.getoption("--gpu")
    pretend(device)
    _one_stream()
    call.device_of = lambda _: device


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave out tests with an empty store of their own: they would wait minutes for compilers, for nobody."""
    items[:] = [item for item in items if "cold" not in getattr(item, "fixturenames", ())]


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write what was noted."""
    path = session.config.getoption("--foreseen")
    if path is not None:
        path.write_text(json.dumps([json.loads(spec.canonical()) for spec in _found]))
        print(f"\n{len(_found)} kernels in {path}")


@pytest.fixture(scope="session", autouse=True)
def _made_up(request: pytest.FixtureRequest) -> Iterator[None]:
    from fake_device import FakeDevice, fake_device

    device, computes = request.config.getoption("--gpu"), request.config.getoption("--compute")
    make = FakeDevice._kernel
    with pytest.MonkeyPatch.context() as patch, fake_device(patch, device) as fake, _OnCpu(computes=computes):
        patch.setattr(FakeDevice, "_kernel", lambda self, spec: _noted(make(self, spec), computes=computes))
        patch.setattr(backward, "has_kernels", lambda a: True)
        patch.setattr(little, "on_gpu", lambda x: True)
        # As on a GPU, where PyTorch computes what has no elements.
        patch.setattr(call.Call, "is_reference", property(lambda made: 0 in made.problem))
        if computes:
            _let_compile(patch)
        else:
            _let_all_pass(patch)
        yield
    if request.config.getoption("--foreseen") is not None:
        _found.update(dict.fromkeys(fake.loaded))
        if any(item.path.stem == "test_parallel" for item in request.session.items):
            _found.update(dict.fromkeys(spread(device)))


def _noted(kernel: Any, *, computes: bool) -> Any:
    """Return a kernel of the made-up device whose launches graphs keep, and which may compute nothing."""
    run, ready = kernel.launch if computes else lambda *_: 0, kernel.prepare

    def launch(*arguments: Any) -> int:
        if _capturing:
            _capturing[-1].launches.append(lambda: run(*arguments))
            return 0
        return int(run(*arguments))

    def prepare(*arguments: Any) -> Any:
        prepared = ready(*arguments)
        return prepared if isinstance(prepared, int) else lambda: launch(*arguments[:-1]) and None

    kernel.launch, kernel.prepare = launch, prepare
    kernel.artifact = SimpleNamespace(manifest={"sass": collections.Counter()}, folder=Path())
    return kernel


def _let_compile(patch: pytest.MonkeyPatch) -> None:
    """Have PyTorch compile programs without gradients, for the CPU."""
    patch.setattr(torch.cuda, "get_rng_state", lambda *_: torch.empty(0, dtype=torch.uint8))
    patch.setattr(torch.cuda, "set_rng_state", lambda *_: None)


def _let_all_pass(patch: pytest.MonkeyPatch) -> None:
    """Have no check of a result end a test before all of its kernels are noted."""
    from tests.gpu import cases, memory, oracle

    patch.setattr(cases.Case, "wanted", lambda _: {})
    patch.setattr(cases.Case, "assert_right", lambda *_: None)
    for drawn in ("values", "whole"):
        patch.setattr(cases, drawn, lambda *_, **__: torch.zeros(()))
    patch.setattr(memory.Placed, "refill", lambda _: None)
    for name, answer in {"why_not": None, "assert_close": None, "assert_within": None, "error": 0.0}.items():
        patch.setattr(oracle, name, lambda *_, answer=answer, **__: answer)
    patch.setattr(memory.Placed, "assert_only", lambda *_, **__: None)
    patch.setattr(torch, "equal", lambda *_: True)
    # A compiled program launches the kernels that its function does, and takes long to compile.
    patch.setattr(torch, "compile", lambda function=None, **_: (lambda f: f) if function is None else function)
    patch.setattr(torch.testing, "assert_close", lambda *_, **__: None)


def noted(device: Device, run: Callable[[], object]) -> list[KernelSpec]:
    """Return the kernels that something launches on a device, which it takes the CPU for."""
    from fake_device import fake_device

    with pytest.MonkeyPatch.context() as patch, fake_device(patch, device) as fake:
        patch.setattr(backward, "has_kernels", lambda a: True)
        run()
        return list(fake.loaded)


def spread(device: Device) -> list[KernelSpec]:
    """Return the kernels of processes that have a GPU each, found by as many that have none."""
    from tests import parallel

    with tempfile.TemporaryDirectory() as folder:
        return [
            spec
            for name in parallel.CASES
            for spec in parallel.together(name, 2, "gloo", Path(folder, name), pretended=device)
        ]


def _read(name: str) -> list[Any]:
    return list(json.loads(Path(name).read_text()))


def main() -> None:
    """Compile the kernels of files, those of one kind together: that takes half the time."""
    files = {declaration_from_json(each): name for name in reversed(sys.argv[1:]) for each in _read(name)}
    kinds = collections.defaultdict[Any, list[Declaration]](list)
    for spec, file in files.items():
        kinds[file, apart.alike(spec)].append(spec)
    in_turn = sorted(kinds, key=lambda kind: sys.argv.index(kind[0]))
    groups = [kinds[kind][i : i + apart.MOST] for kind in in_turn for i in range(0, len(kinds[kind]), apart.MOST)]
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        built = [each for group in pool.map(lambda group: list(build_together(group)), groups) for each in group]
    failed = [each for each in built if isinstance(each, Exception)]
    print(f"{len(built) - len(failed)} kernels are there, {len(failed)} are not", *failed[:3], sep="\n")


if __name__ == "__main__":
    main()
