"""Check that a library's host code and device code, from two compilers, agree on the kernels' parameters.

A launch copies as many bytes of parameters as the machine code declares. If the host's structure had another layout,
the kernel would read garbage. So ``templates/include/cutlass_ops/halves.h`` writes the host's size of each kernel's
parameters into a section of the library. This module compares it with the size in the machine code.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

from cutlass_ops.base import elf
from cutlass_ops.base.errors import CompileError

_HOST = ".cutlass_ops."
_DEVICE = ".nv.info."
# A kernel attribute: form, attribute, and a value or, for form 4, the length of the data that follows.
_ATTRIBUTE = struct.Struct("<BBH")
_FOLLOWED = 4
_PARAMETER, _SIZE = 0x17, struct.Struct("<8xI")  # EIATTR_KPARAM_INFO: the size follows the parameter's index and offset
_SIZE_SHIFT = 18
# EIATTR_KPARAM_INFO_V2: nvcc writes it instead if a kernel's parameters have more than 4096 bytes.
_WIDE_PARAMETER, _WIDE_SIZE = 0x45, struct.Struct("<8xH")


def prove_halves_agree(library: Path) -> None:
    """Compare the sizes of every kernel's parameters in the host code and in the device code."""
    data = library.read_bytes()
    try:
        host = {
            s.name.removeprefix(_HOST): int.from_bytes(s.data, "little")
            for s in elf.sections(data)
            if s.name.startswith(_HOST)
        }
        device = {
            s.name.removeprefix(_DEVICE): size
            for image in elf.gpu_images(data)
            for s in elf.sections(image)
            if s.name.startswith(_DEVICE)
            for size in _parameter_bytes(s.data)
        }
    except struct.error as exc:
        raise CompileError(f"the kernels in {library} cannot be read: {exc}") from None
    if not host or host != device:
        raise CompileError(
            f"host code and device code in {library} disagree. Bytes of parameters on the host: {host}; on the "
            f"device: {device}. nvcc and the host compiler lay out structures differently: use another pair of them"
        )


def _parameter_bytes(attributes: bytes) -> Iterator[int]:
    at = 0
    while at + _ATTRIBUTE.size <= len(attributes):
        form, attribute, value = _ATTRIBUTE.unpack_from(attributes, at)
        at += _ATTRIBUTE.size
        if form == _FOLLOWED:
            if attribute == _PARAMETER:
                (size,) = _SIZE.unpack(attributes[at : at + _SIZE.size])
                yield size >> _SIZE_SHIFT
            elif attribute == _WIDE_PARAMETER:
                yield from _WIDE_SIZE.unpack(attributes[at : at + _WIDE_SIZE.size])
            at += value
