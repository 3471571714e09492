"""Proof that the two halves of a library agree: the host's, and the device's that another compiler made.

A launch copies as many bytes of parameters as the machine code says. Were the host's structure another, the kernel
would run on garbage. So ``templates/include/cutlass_ops/halves.h`` writes the size that the host reckons with into a
section of the library for each kernel, and here it is compared with that in the machine code.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

from cutlass_ops.base import elf
from cutlass_ops.base.errors import CompileError

_HOST = ".cutlass_ops."
_DEVICE = ".nv.info."
# Attributes of a kernel: form, attribute, and a value or, in one form, the length of what follows.
_ATTRIBUTE = struct.Struct("<BBH")
_FOLLOWED = 4
_PARAMETER, _SIZE = 0x17, struct.Struct("<8xI")  # EIATTR_KPARAM_INFO: after the parameter's number and place
_SIZE_SHIFT = 18
# EIATTR_KPARAM_INFO_V2, which nvcc writes instead where a kernel's parameters have more than 4096 bytes.
_WIDE_PARAMETER, _WIDE_SIZE = 0x45, struct.Struct("<8xH")


def prove_halves_agree(library: Path) -> None:
    """Compare the size of every kernel's parameters in the host's code with that in the machine code.

    Raises
    ------
    CompileError
        If a kernel is in one half only, or its parameters have two sizes.
    """
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
            f"the two halves of {library} do not belong together. Bytes of parameters on the host: {host}; on the "
            f"device: {device}. nvcc and the host compiler lay structures out differently: use another pair of them"
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
