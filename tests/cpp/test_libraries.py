"""What libraries may ask of the dynamic linker."""

import random
import re
from pathlib import Path

import pytest

from tests.cpp.made import with_tag, write_one
from tests.faults.fuzz import seeds

# To build the program takes fifteen seconds.
pytestmark = pytest.mark.slow
HERE = Path(__file__).resolve().parent


@pytest.mark.parametrize(
    ("tag", "name"),
    [
        (15, "DT_RPATH"),
        (29, "DT_RUNPATH"),
        (0x6FFFFEFC, "DT_AUDIT"),
        (0x6FFFFEFB, "DT_DEPAUDIT"),
        (0x7FFFFFFD, "DT_AUXILIARY"),
        (0x7FFFFFFF, "DT_FILTER"),
    ],
)
def test_a_kernel_with_a_path_of_its_own_is_refused_before_it_is_mapped(probe, contents, tmp_path, tag, name):
    library = with_tag(contents[1][contents[0].kernels[0].library_name], tag)
    code, out = probe("load", write_one(tmp_path / "a", contents, library), "")
    assert code == 1
    assert "mapped" not in out
    assert out.startswith(f"LoadError: bundle {tmp_path / 'a'}: kernels/")
    assert f"cannot be loaded: it has {name}" in out


def test_a_real_run_path_is_refused(probe, built, contents, tmp_path):
    """As CMake gives it to what it builds."""
    library = (built / "with_run_path.so").read_bytes()
    code, out = probe("load", write_one(tmp_path / "a", contents, library), "")
    assert code == 1
    assert re.search("it has DT_R(UN)?PATH", out)


@pytest.mark.parametrize(
    ("name", "good"),
    [
        ("libcudart.so.13", True),
        ("libtvm_ffi.so", True),
        ("libstdc++.so.6", True),
        ("libcudart.so.13/../../tmp/x", False),
        ("libcudart.so.$ORIGIN", False),
        ("libcudart.so.", False),
        ("/tmp/libcudart.so.13", False),
        ("libtvm_ffi.so.1", False),
        ("libevil.so", False),
        ("x" * 1000, False),
        ("", False),
    ],
)
def test_a_kernel_needs_what_kernels_need(probe, tmp_path, name, good):
    (tmp_path / "a").write_bytes(seeds.shared((1, name)))
    out = probe("linkage", tmp_path / "a")[1]
    assert (out == "\n") == good
    if not good:
        assert out.startswith("it needs ")
        assert len(out) < 200


def test_no_changed_byte_and_no_end_of_a_library_upsets_it(probe, tmp_path):
    """Whatever the headers say: a reason, or none, and nothing beyond the file is read (the fuzzer has sanitizers)."""
    rng = random.Random(3)
    good = seeds.shared((1, "libcudart.so.13"), (14, "kernel.so"))
    wrong = [good[:size] for size in range(len(good))]
    for _ in range(600):
        data, at = bytearray(good), rng.randrange(len(good))
        data[at : at + 8] = rng.choice(
            [b"\xff" * 8, bytes(8), b"\0" * 7 + b"\x80", rng.randbytes(8), b"\xff" * 7 + b"\x7f"]
        )
        wrong.append(bytes(data[: len(good)]))
    for number, data in enumerate([good, *wrong]):
        (tmp_path / str(number)).write_bytes(data)
    code, out = probe("linkage", *(tmp_path / str(number) for number in range(1 + len(wrong))))
    reasons = out.split("\n")[:-1]
    assert (code, len(reasons), reasons[0]) == (0, 1 + len(wrong), "")
    assert all(reasons[1 : 1 + len(good) - 1])  # what is cut off is refused, but for the last zero
