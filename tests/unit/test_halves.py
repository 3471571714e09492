import pytest
from fake_toolkit import HMMA, FakeToolkit, library, sm80_spec

from cutlass_ops import elf
from cutlass_ops.builder import build_artifact
from cutlass_ops.errors import CompileError
from cutlass_ops.halves import prove_halves_agree
from cutlass_ops.store import KernelStore


def test_halves_that_agree(write):
    prove_halves_agree(write(library(HMMA)))


@pytest.mark.parametrize(
    "data",
    [
        library(HMMA, host=520),
        library(HMMA, device=520),
        library(HMMA).replace(b".cutlass_ops.kernel", b".cutlass_ops.hernel"),
        library(HMMA).replace(b".nv.info.kernel", b".nv.info.hernel"),
        library(HMMA).replace(b".cutlass_ops.kernel", b".something.kernel"),
        library(HMMA).replace(b".nv.info.", b".nv.inof.").replace(b".cutlass_ops.", b".cutlass_spo."),
    ],
)
def test_halves_that_do_not(write, data):
    with pytest.raises(CompileError, match=r"the two halves of .* do not belong together"):
        prove_halves_agree(write(data))


def test_a_truncated_library(write):
    whole = library(HMMA)
    for size in range(64, len(whole) - 4, 7):
        with pytest.raises(CompileError):
            prove_halves_agree(write(whole[:size]))


def test_no_kernel_is_published_whose_halves_disagree(tmp_path):
    toolkit = FakeToolkit(tmp_path / "toolkit")
    toolkit.makes(library(HMMA, host=520))
    store = KernelStore(tmp_path / "store")
    with pytest.raises(CompileError, match=r"on the host: \{'kernel': 520\}; on the device: \{'kernel': 528\}"):
        build_artifact(sm80_spec(), source="source", store=store, toolchain=toolkit.find())
    assert not list(store.entries())


def test_sections_have_their_names():
    data = library(HMMA)
    assert [(s.name, s.executable) for s in elf.sections(data)] == [
        (".text", True),
        (".cutlass_ops.kernel", False),
        (".dynsym", False),
        (".dynstr", False),
        (".dynamic", False),
        (".names", False),
    ]
    (image,) = elf.gpu_images(data)
    assert [s.name for s in elf.sections(image)] == [".text.kernel", ".nv.info.kernel", ".names"]
