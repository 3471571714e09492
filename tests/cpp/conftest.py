"""The C++ interface, built once by CMake with a small program that calls it."""

import resource
import subprocess
from pathlib import Path

import pytest

from tests import cmake
from tests.faults.fuzz import seeds


@pytest.fixture(scope="session")
def built(tmp_path_factory):
    """Folder of the programs and the library that stands in for a kernel."""
    folder = tmp_path_factory.mktemp("built")
    cmake.build(Path(__file__).resolve().parent, folder, "-DCMAKE_BUILD_TYPE=")
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
