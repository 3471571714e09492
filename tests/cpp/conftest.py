"""The C++ interface, built once by CMake with a small program that calls it."""

import fcntl
import os
import resource
import subprocess
from pathlib import Path

import pytest

from cutlass_ops.artifacts.bundle import write_bundle
from tests import cmake
from tests.cpp.made import write_one
from tests.faults.fuzz import seeds


@pytest.fixture(scope="session")
def built(tmp_path_factory):
    """Folder of the programs and the library that stands in for a kernel: built once, whichever worker comes first."""
    own = tmp_path_factory.getbasetemp()
    shared = own.parent if "PYTEST_XDIST_WORKER" in os.environ else own
    folder, done = shared / "built", shared / "built.done"
    with (shared / "built.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists():
            cmake.build(Path(__file__).resolve().parent, folder, "-DCMAKE_BUILD_TYPE=")
            done.touch()
    return folder


@pytest.fixture(scope="session")
def probe(built):
    """Call the program; return its exit code and what it wrote."""

    def _probe(*words, program="probe", memory=None):
        limit = memory and (lambda: resource.setrlimit(resource.RLIMIT_AS, (memory, memory)))
        command = [built / program, *map(str, words)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, preexec_fn=limit)
        assert done.returncode in (0, 1), done
        assert done.stderr == ""
        return done.returncode, done.stdout

    return _probe


@pytest.fixture(scope="session")
def contents(built):
    """Manifest and files of a bundle with the library for every kernel."""
    library = (built / "fake_kernel.so").read_bytes()
    return seeds.made(lambda _: library)


@pytest.fixture(scope="module")
def keys(contents):
    """Keys of the first signature's kernels."""
    return {record.spec.config: record.key for record in contents[0].groups[0].kernels}


@pytest.fixture(params=[False, True], ids=["archive", "folder"])
def bundle(request, contents, tmp_path):
    path = tmp_path / "made.bundle"
    write_bundle(path, *contents, folder=request.param)
    return path


@pytest.fixture
def single(contents, tmp_path):
    """Archive with one kernel."""
    return write_one(tmp_path / "single.bundle", contents)
