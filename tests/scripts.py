"""The scripts of benchmarks/ and examples/ as modules, for tests that call their parts."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
EXAMPLES = Path(__file__).parents[1] / "examples"


def script(name: str, folder: Path = BENCHMARKS) -> ModuleType:
    """Return a script as a module; what it imports from beside itself is found as when it is run."""
    spec = importlib.util.spec_from_file_location(name, folder / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    sys.path.insert(0, str(folder))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(folder))
    return module
