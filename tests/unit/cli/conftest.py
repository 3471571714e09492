"""What tests of the command line share."""

import json
import sys
from functools import lru_cache

import pytest
import torch
import typer.main
from fake_toolkit import FakeToolkit

from cutlass_ops.base import env
from cutlass_ops.tools import cli


@pytest.fixture
def kit(tmp_path, monkeypatch):
    """A machine with a compiler that takes no time, an empty store and no GPU."""
    for variable in env.VARIABLES:
        monkeypatch.delenv(variable.name, raising=False)
    kit = FakeToolkit(tmp_path / "toolkit")
    monkeypatch.setenv("CUTLASS_OPS_NVCC", str(kit.nvcc))
    monkeypatch.setenv("NVCC_CCBIN", str(kit.host))
    monkeypatch.setenv("CUTLASS_OPS_CACHE_DIR", str(tmp_path / "store"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    return kit


# Typer makes all commands anew, in 50 ms, whenever one runs.
_command = lru_cache(maxsize=None)(typer.main.get_command)


@pytest.fixture
def run(monkeypatch, capsys):
    """Run a command; return its exit code, and what it wrote to standard output and to standard error."""
    monkeypatch.setattr(typer.main, "get_command", _command)

    def run(*args):
        monkeypatch.setattr(sys, "argv", ["cutlass-ops", *map(str, args)])
        with pytest.raises(SystemExit) as exit_:
            cli.main()
        out, err = capsys.readouterr()
        return exit_.value.code or 0, out, err

    return run


@pytest.fixture
def spec_file(tmp_path):
    def write(spec, name="spec.json"):
        path = tmp_path / name
        path.write_text(json.dumps(spec.to_json()))
        return path

    return write


CATALOGUE = """
format = 1
[[kernels]]
ops = ["gemm_bias_relu", "gemm"]
archs = ["sm_80"]
shapes = ["16,512x4096x4096"]
"""


@pytest.fixture
def catalogue(tmp_path):
    (tmp_path / "catalogue.toml").write_text(CATALOGUE)
    return tmp_path / "catalogue.toml"
