"""What a kernel's key is made of."""

from dataclasses import replace

import pytest
from fake_toolkit import FakeToolkit, sm80_spec, sm90_spec

from cutlass_ops.artifacts.entry import identity_key
from cutlass_ops.base import resources
from cutlass_ops.compilation import identity
from cutlass_ops.compilation.identity import kernel_identity
from cutlass_ops.kinds import render

SPEC = sm80_spec()


def kernel_key(spec, source, toolchain):
    return identity_key(kernel_identity(spec, source, toolchain))


def test_the_key_is_the_same_wherever_things_lie(toolchain, tmp_path):
    elsewhere = FakeToolkit(tmp_path / "elsewhere").find()
    assert elsewhere.nvcc != toolchain.nvcc
    assert kernel_key(SPEC, "source", elsewhere) == kernel_key(sm80_spec(), "source", toolchain)


def test_the_key_changes_with_everything_that_changes_the_binary(toolchain, tmp_path, monkeypatch):
    keys = [kernel_key(SPEC, "source", toolchain)]
    keys.append(kernel_key(sm80_spec(stages=4), "source", toolchain))
    keys.append(kernel_key(SPEC, "source2", toolchain))
    parts = ("nvcc_version", "host_version", "cutlass_version", "tvm_ffi_version")
    keys += [kernel_key(SPEC, "source", replace(toolchain, **{part: "other"})) for part in parts]
    with monkeypatch.context() as patch:
        patch.setattr(identity, "compile_flags", lambda target: {"device": ("-O1",)})
        keys.append(kernel_key(SPEC, "source", toolchain))
    with monkeypatch.context() as patch:
        patch.setattr(identity, "TEMPLATE_VERSION", identity.TEMPLATE_VERSION + 1)
        keys.append(kernel_key(SPEC, "source", toolchain))
    assert len(set(keys)) == len(keys)


def test_the_key_changes_with_the_headers_that_a_source_includes(toolchain, tmp_path, monkeypatch):
    monkeypatch.setattr(resources, "include", lambda: tmp_path)
    (tmp_path / "cutlass_ops").mkdir()

    def key(**headers):
        for name, text in headers.items():
            (tmp_path / "cutlass_ops" / f"{name}.h").write_text(text)
        return kernel_key(SPEC, '#include "cutlass_ops/a.h"\nint x;', toolchain)

    nested = "#pragma once\n#  include <cutlass_ops/b.h>\n"
    keys = [key(), key(a="1"), key(a="2"), key(a=nested, b="1"), key(b="2")]
    assert len(set(keys)) == len(keys)
    # Kernels of the other architecture stay what they are.
    assert key(unrelated="1") == keys[-1]
    assert key(b='#include "cutlass_ops/a.h"') != keys[-1]
    # What every library is linked with is named by none of them.
    before = key()
    (tmp_path / "cutlass_ops" / "image.S").write_text("changed")
    assert key() != before


@pytest.mark.parametrize("spec", [sm80_spec(), sm90_spec()], ids=["sm80", "sm90"])
def test_sources_include_headers_in_the_form_that_the_key_reads(spec):
    text = render.source(spec)
    found = identity._INCLUDE.findall(text)
    assert found
    assert all((resources.include() / name).is_file() for name in found)
    assert len(found) == text.count('#include "cutlass_ops/')
