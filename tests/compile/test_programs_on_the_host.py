"""Headers by the host's compiler: each program checks what it finds, and says ok."""

import subprocess
from pathlib import Path

import pytest

from tests.compile import host

pytestmark = pytest.mark.compile

SANITIZED = ("-O1", "-DNDEBUG", "-w", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
PROGRAMS = {
    # Which GPCs thread block clusters land on, with a runtime that places them itself.
    "placement": lambda: (*SANITIZED, *host.tvm_ffi()),
    # The memory that launches share, with a runtime that only keeps count.
    "standing": lambda: ("-Wall", "-Werror", "-pthread"),
    # Copies of operands along K: every element, and zeros at the end. A read beyond a matrix ends the program.
    "copies": lambda: (*host.UNRESOLVED, "-DNDEBUG", "-fsanitize=address", "-no-pie"),
    # Groups of rows: what TMA loads and stores, where it cuts off, and which tiles there are.
    "groups": lambda: ("-O1", "-DNDEBUG", *host.LENIENT),
}
SLOW = {"copies", "groups"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in PROGRAMS]
)
def test_a_program_finds_what_it_should(name, tmp_path):
    path = host.program(tmp_path, Path(__file__).with_name(f"{name}_on_the_host.cpp"), *PROGRAMS[name]())
    done = subprocess.run([path], capture_output=True, text=True, check=False, env={"ASAN_OPTIONS": "detect_leaks=0"})
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stdout + done.stderr[-2000:]
