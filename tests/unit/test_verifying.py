import hashlib
import random
import struct
import subprocess

import pytest
from bundles import SPECS, changed, packed
from fake_toolkit import EXPORTS, HGMMA, HMMA, NEEDED, elf, library, sm80_spec

from cutlass_ops.artifacts import container
from cutlass_ops.base import checked_json
from cutlass_ops.base.elf import exports, gpu_images, needed, search_paths, sections, sm_version
from cutlass_ops.ship.verifying import verify


def _hidden(data):
    """A library whose sections say nothing of what the dynamic linker finds by its segments."""
    return data.replace(b"\0.dynamic\0", b"\0.comment\0")


def _exchanged(tmp_path, contents, data):
    """A bundle whose libraries are all these bytes, with a manifest that goes along."""
    files = {name: bytes(data) if name.endswith(".so") else text for name, text in contents.files.items()}
    about = {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data)}
    text = changed(contents.manifest, lambda d: d["signatures"][0]["kernels"][0].update(library=about))
    container.write(tmp_path / "a", {**files, "manifest.json": text})


def test_a_good_bundle(tmp_path):
    packed(tmp_path).write(tmp_path / "a")
    found = verify(tmp_path / "a")
    assert found.problems == ()
    assert (found.kernels, found.tables, found.targets, found.signed) == (3, 0, ("sm_80",), False)
    assert checked_json.canonical(found.to_json())


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("data", "why"),
    [
        (library(HMMA, sm=90), "its machine code is for sm_90, but the manifest says sm_80"),
        (library(HMMA, exports=EXPORTS[:2]), "it does not export __tvm_ffi_describe"),
        (library(HMMA, exports=("launch", "main")), "it does not export __tvm_ffi_launch, "),
        (library(HMMA, needed=(*NEEDED, "libevil.so")), "it needs libevil.so, which kernels must not load"),
        (library(HMMA, needed=("libc.so.6", "libc.so.6/../evil.so")), "it needs libc.so.6/../evil.so, which"),
        (library(HMMA, needed=("libm.so.evil",)), "it needs libm.so.evil, which"),
        (library(HMMA, search={0x7FFFFFFF: "libfilter.so"}), "it needs libfilter.so, which"),
        (library(HMMA, search={15: "$ORIGIN"}), "makes the dynamic linker search '$ORIGIN' (RPATH or RUNPATH)"),
        (library(HMMA, search={29: "/tmp/evil:/opt"}), "makes the dynamic linker search '/tmp/evil:/opt'"),
        (library(HMMA, search={29: ""}), "makes the dynamic linker search ''"),
        (_hidden(library(HMMA, search={29: "/tmp/evil"})), "makes the dynamic linker search '/tmp/evil'"),
        (library(HMMA) + elf(190, {".text": b""}, flags=90), "its machine code is for sm_80, sm_90"),
    ],
)
def test_a_library_that_is_no_kernel_for_the_target(tmp_path, data, why):
    _exchanged(tmp_path, packed(tmp_path, [sm80_spec()], library(HMMA)), data)
    (problem,) = verify(tmp_path / "a").problems
    assert why in problem
    assert problem.startswith("kernels/")


def _changed(tmp_path, change):
    """A bundle whose files were changed, with a manifest that goes along."""
    contents = packed(tmp_path, SPECS[:1])
    files = dict(contents.files)
    text = changed(contents.manifest, lambda data: change(data["signatures"][0]["kernels"][0], files))
    container.write(tmp_path / "a", {**files, "manifest.json": text})
    return verify(tmp_path / "a").problems


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"headers": "0" * 64}, "its key does not match its identity in the manifest"),
        ({"sass": {"HMMA": 7}}, "instruction counts"),
    ],
)
def test_a_kernel_that_is_not_what_the_manifest_says(tmp_path, change, why):
    (problem,) = _changed(tmp_path, lambda kernel, _: kernel.update(change))
    assert why in problem


def test_contents_that_were_changed(tmp_path):
    def change(_, files):
        for name, data in files.items():
            files[name] = data[:-1] + bytes([data[-1] ^ 1])

    problems = _changed(tmp_path, change)
    assert len(problems) == 2
    assert all("does not match the manifest: its SHA-256 differs" in p for p in problems)


def test_an_illegal_declaration(tmp_path):
    problems = _changed(tmp_path, lambda kernel, _: kernel["config"].update(stages=90))
    assert any("stages" in p for p in problems)


@pytest.mark.slow
def test_no_changed_library_is_more_than_a_problem(tmp_path):
    """Whoever changes a library and goes along with its hashes gets an answer, and no traceback."""
    rng = random.Random(5)
    contents, good = packed(tmp_path, SPECS[:1]), library(HMMA)
    wrong = 0
    for number in range(400):
        data = bytearray(good)
        for _ in range(rng.randrange(1, 4)):
            at = rng.randrange(0x28, 0x40) if number % 2 else rng.randrange(len(data))  # half of them: the header
            data[at : at + 8] = rng.choice([b"\xff" * 8, rng.randbytes(8), (1 << 62).to_bytes(8, "little"), bytes(8)])
        del data[len(good) - rng.choice([0, 0, 0, 1, 40]) :]
        _exchanged(tmp_path, contents, data)
        problems = verify(tmp_path / "a").problems
        assert all(p.startswith("kernels/") for p in problems)
        wrong += bool(problems)
    assert wrong > 200


def test_machine_code_says_for_which_device_it_is():
    (image,) = gpu_images(library(HGMMA, sm=90))
    assert sm_version(image) == 90
    # As CUDA 13 writes it for sm_90a.
    moved = bytearray(image)
    moved[8], moved[0x30:0x34] = 8, (0x6005A04).to_bytes(4, "little")
    assert sm_version(bytes(moved)) == 90
    assert exports(library(HMMA), [*EXPORTS, "main", EXPORTS[0][:-1], EXPORTS[0][1:]]) == set(EXPORTS)
    assert needed(library(HMMA)) == list(NEEDED)
    assert search_paths(library(HMMA)) == []


def test_what_the_real_linker_writes(tmp_path):
    """The reader of segments agrees with what g++ and ld made of a request."""
    (tmp_path / "a.cpp").write_text("int f() { return 1; }\n")
    command = ["g++", "-shared", "-fPIC", "-o", tmp_path / "a.so", tmp_path / "a.cpp", "-Wl,--no-as-needed", "-lm"]
    for flags, expected in (
        ((), []),
        (("-Wl,-rpath,/x/y", "-Wl,--enable-new-dtags"), ["/x/y"]),
        (("-Wl,-rpath,/z", "-Wl,--disable-new-dtags", "-Wl,-z,noseparate-code", "-Wl,-s"), ["/z"]),
    ):
        subprocess.run([*command, *flags], check=True)
        data = (tmp_path / "a.so").read_bytes()
        assert search_paths(data) == expected
        assert {"libm.so.6", "libc.so.6"} <= set(needed(data))


@pytest.mark.parametrize(
    ("at", "value", "why"),
    [
        (0x20, 1 << 62, "requires a buffer"),  # where the segments' headers lie
        (0x36, 8, "not an ELF64"),  # the size of one
        (64 + 64 * 6 + 56 + 16, 1 << 60, "nothing is loaded"),  # the address of the dynamic section
        (64 + 64 * 6 + 32, 1 << 40, "beyond the file"),  # the size of what is loaded
        (64 + 64 * 6 + 16, 100, "pages"),  # its address
        (64 + 64 * 6 + 56, 1, "overlap"),  # a second segment over the first
        (64 + 64 * 6, 2, "2 dynamic sections"),
    ],
)
def test_segments_that_no_library_has(at, value, why):
    data = bytearray(library(HMMA))
    size = 2 if at == 0x36 else 4 if value < 3 else 8
    data[at : at + size] = value.to_bytes(size, "little")
    with pytest.raises(struct.error, match=why):
        search_paths(bytes(data))


def _named(exports, names, needed=()):
    """A library with so many symbols and needed libraries, whose names begin at these places of a table."""
    symbols = b"".join(struct.pack("<IBBHQQ", at, 0x12, 0, 1, 0, 0) for at in exports)
    entries = b"".join(struct.pack("<QQ", 1, at) for at in needed)
    return elf(62, {".dynsym": symbols, ".dynstr": names, ".dynamic": entries})


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (_named([0] * ((1 << 16) + 1), b"x\0"), "more than 65536 symbols"),
        (_named([], b"x\0", [0] * 65), "for 65 libraries"),
        (_named([], b"x" * 256 + b"\0", [0]), "does not end within 255 bytes"),
        (_named([], b"x\0", [1 << 62]), "does not end within 255 bytes"),
        (elf(62, {f".{at}": b"" for at in range(9)} | {"." * 5000: b""}), None),
    ],
)
def test_more_than_a_library_has_is_refused(data, why):
    if why is None:  # sections may have long names: those of instructions have their kernel's
        assert len(list(sections(data))) == 11
        return
    with pytest.raises(struct.error, match=why):
        exports(data, []), needed(data)
