"""What is compiled where there is no GPU: the kernels that jobs need, and those of another machine's store."""

import json
import subprocess
import sys

import pytest

from cutlass_ops.artifacts.compiled import Compiled
from cutlass_ops.artifacts.entry import identity_key
from cutlass_ops.artifacts.store import KernelStore
from cutlass_ops.compilation.toolchain import find_toolchain
from cutlass_ops.declare.quantizing import declaration_from_json
from cutlass_ops.kinds import legality
from tests.scripts import script

AHEAD = script("ahead")


def published(store, **toolchain):
    identity = {"target": "sm_90a", "spec": {}, "toolchain": {**find_toolchain().identity, **toolchain}}
    with store.lock(key := identity_key(identity)):
        folder = store.workspace(key, "the source")
        (folder / "kernel.so").write_bytes(b"a library")
        store.publish(folder, identity, {"HGMMA": 4}, Compiled(2.5, ({"function": "f"},)))
    return identity


@pytest.mark.usefixtures("session")
def test_kernels_of_another_machine_are_found_by_this_one_s_keys(tmp_path, monkeypatch):
    monkeypatch.setenv("CUTLASS_OPS_CACHE_DIR", str(tmp_path / "mine"))
    mine, other = find_toolchain().identity, KernelStore(tmp_path / "other")
    theirs = published(other, nvcc=mine["nvcc"].partition("+")[0] + "+another", host_compiler="g++ 99")
    published(other, nvcc="1.0.0+older")
    assert AHEAD.adopt(other.root) == (1, 1)
    found = KernelStore.default().lookup(identity_key({**theirs, "toolchain": mine}))
    assert (found.read_library(), found.read_source()) == (b"a library", b"the source")
    assert (found.manifest["sass"], found.manifest["compile_seconds"]) == ({"HGMMA": 4}, 2.5)
    assert AHEAD.adopt(other.root) == (0, 1)


@pytest.mark.slow
def test_what_a_benchmark_compiles_is_noted(tmp_path):
    path = tmp_path / "kernels.json"
    command = [sys.executable, str(AHEAD.ROOT / "benchmarks/ahead.py"), "--only", "wgrad", "--list", str(path)]
    said = subprocess.run(command, cwd=AHEAD.ROOT, check=True, capture_output=True, text=True, env=AHEAD.environment())
    found = [declaration_from_json(each) for each in json.loads(path.read_text())]
    assert f"wgrad: {len(found)} kernels" in said.stdout
    assert len(found) >= 3
    assert all(legality.check(spec) == () and spec.config.wgmma for spec in found)
