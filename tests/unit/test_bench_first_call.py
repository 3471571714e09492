"""The benchmark of the first call: the environment that it makes, and what it reads of the program that it runs."""

import importlib.util
import json
import statistics
import sys
from pathlib import Path

import pytest

from tests.scripts import script

ROOT = Path(__file__).resolve().parents[2]


def test_only_what_is_required_is_there(tmp_path):
    bench = script("bench_first_call")
    found = bench.required("torch", "apache-tvm-ffi")
    assert {"torch", "apache-tvm-ffi", "typing-extensions", "sympy", "mpmath"} <= found
    assert not {"pytest", "typer", "nvidia-cutlass", "cryptography"} & found
    bench.make_environment(tmp_path, found)
    names = {path.name for path in tmp_path.iterdir()}
    assert {"torch", "cutlass_ops", "tvm_ffi", "typing_extensions.py"} <= names
    assert not {"pytest", "typer", "cutlass_library"} & names
    # Byte code as an installer leaves it, and nothing of it in what is installed here.
    for module in ("cutlass_ops", "tvm_ffi"):
        assert not (tmp_path / module).is_symlink()
        assert list((tmp_path / module / "__pycache__").glob(f"__init__.*{sys.version_info[1]}.pyc"))


def test_what_the_program_says_is_read():
    bench = script("bench_first_call")
    spec = importlib.util.spec_from_file_location("serve", bench.SERVE)
    serve = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(serve)
    before = {"PyTorch's import": 1.3246, "the device's start": 0.1951}
    text = serve.said("cuda", before, {"import": 0.034, "bundle": 0.0021, "call": 0.0382})
    assert bench.read(f"4 kernels\n{text}\nlargest error") == {
        "on": "cuda", "torch": 1325, "device": 195, "first": 74, "import": 34, "bundle": 2, "call": 38
    }  # fmt: skip
    with pytest.raises(RuntimeError, match="did not say"):
        bench.read("4 kernels")


def test_the_document_has_the_measured_numbers():
    text = (ROOT / "docs" / "deployment.md").read_text()
    for name, kind in (("first_call_h100", "unsigned"), ("first_call_signed_h100", "signed")):
        result = json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())
        assert result["signed"] == (kind == "signed")
        words = {"collected": "before", "not_collected": "left to chance"}
        for how, s in result["summary"].items():
            word = words[how]
            numbers = [f"{s[part]:.0f}" for part in ("import", "bundle", "call", "torch", "device")]
            row = (kind, word, f"{s['first']:.0f}", f"{s['least']} to {s['most']}", *numbers)
            assert f"| {' | '.join(row)} |" in text
            firsts = [row["first"] for row in result["rows"] if row["collected"] == (how == "collected")]
            assert (s["first"], s["least"], s["most"]) == (statistics.median(firsts), min(firsts), max(firsts))
