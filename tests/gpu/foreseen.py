"""Which kernels the GPU tests need, found without a GPU: they run on a device that is made up, on the CPU.

    python -m pytest -p tests.gpu.foreseen --foreseen kernels.json --gpu H100 tests/gpu/test_fp8.py
    python -m tests.gpu.foreseen kernels.json                   # compiles them

Whether tests pass there says nothing. A test that fails early may need more kernels than are noted.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from cutlass_ops.compilation.builder import build_many
from cutlass_ops.declare.device import Device
from cutlass_ops.declare.gpus import gpu_named
from cutlass_ops.declare.quantizing import declaration_from_json
from cutlass_ops.run import backward, call

USUAL = "NVIDIA H200"
_MEMORY = 140 << 30  # bytes
_found: dict[Any, None] = {}


def pretend(device: Device) -> None:
    """Have PyTorch say, in this process, that there is one GPU. Nothing can be computed on it."""
    major, minor = device.capability
    properties = SimpleNamespace(
        major=major,
        minor=minor,
        multi_processor_count=device.multiprocessors,
        name=device.name,
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
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, lambda *_, answer=answer: answer)


class _OnCpu(TorchFunctionMode):
    """Has what is asked of a GPU done on the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = getattr(func, "__name__", ""), dict(kwargs or {})
        if name == "cuda":
            return args[0]
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = "cpu"
        if name == "to":
            args = tuple("cpu" if _is_cuda(each) else each for each in args)
        return func(*args, **kwargs)


def _is_cuda(device: object) -> bool:
    return isinstance(device, str | torch.device) and str(device).startswith("cuda")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Take the names of the file and of the GPU."""
    parser.addoption("--foreseen", type=Path, required=True, help="file that the kernels are written to")
    parser.addoption("--gpu", type=gpu_named, default=USUAL, help="GPU to make up, as the driver names it")


def pytest_configure(config: pytest.Config) -> None:
    """Have tests find a GPU."""
    device = config.getoption("--gpu")
    pretend(device)
    call.device_of = lambda _: device


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write what was noted."""
    path = session.config.getoption("--foreseen")
    path.write_text(json.dumps([json.loads(spec.canonical()) for spec in _found]))
    print(f"\n{len(_found)} kernels in {path}")


@pytest.fixture(scope="session", autouse=True)
def _made_up(request: pytest.FixtureRequest) -> Iterator[None]:
    sys.path.append(str(Path(__file__).parents[1] / "unit"))
    from fake_device import fake_device

    device = request.config.getoption("--gpu")
    with pytest.MonkeyPatch.context() as patch, fake_device(patch, device) as fake, _OnCpu():
        patch.setattr(backward, "has_kernels", lambda a: True)
        yield
    from tests.gpu import steps

    trained = steps.specs(device, {item.path.stem for item in request.session.items})
    _found.update(dict.fromkeys((*fake.loaded, *trained)))


def main() -> None:
    """Compile the kernels of files."""
    found = [declaration_from_json(each) for name in sys.argv[1:] for each in json.loads(Path(name).read_text())]
    build_many(list(dict.fromkeys(found)))


if __name__ == "__main__":
    main()
