"""The sections of ELF64 images: shared libraries, and the machine code for GPUs inside them."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

_MAGIC = b"\x7fELF"
_EM_CUDA = 190
_SHF_EXECINSTR = 4
_SECTION = struct.Struct("<IIQQQQ")  # name, type, flags, address, offset, size: the head of a section's header


@dataclass(frozen=True)
class Section:
    """One section of an image.

    Attributes
    ----------
    name : str
        Such as ``".text.kernel"``.
    executable : bool
        Whether it holds instructions.
    data : bytes
        What it holds.
    """

    name: str
    executable: bool
    data: bytes


def gpu_images(library: bytes) -> Iterator[bytes]:
    """Yield the machine-code images inside a shared library, each followed by whatever comes after it there."""
    # The first header is the library's own.
    at = library.find(_MAGIC, len(_MAGIC))
    while at != -1:
        if library[at + 18 : at + 20] == _EM_CUDA.to_bytes(2, "little"):
            yield library[at:]
        at = library.find(_MAGIC, at + len(_MAGIC))


def sections(image: bytes) -> Iterator[Section]:
    """Yield the sections of an image.

    Raises
    ------
    struct.error
        If the image ends before its sections do.
    """
    (table,) = struct.unpack_from("<Q", image, 0x28)
    entry_size, entries, names_at = struct.unpack_from("<HHH", image, 0x3A)
    headers = [_SECTION.unpack_from(image, table + index * entry_size) for index in range(entries)]
    names = _contents(image, headers[names_at]) if names_at < entries else b""
    for header in headers:
        name = names[header[0] :].partition(b"\0")[0].decode(errors="replace")
        yield Section(name, bool(header[2] & _SHF_EXECINSTR), _contents(image, header))


def _contents(image: bytes, header: tuple[int, ...]) -> bytes:
    _, kind, _, _, offset, size = header
    if kind == 8:  # SHT_NOBITS: takes no room in the file
        return b""
    data = image[offset : offset + size]
    if len(data) != size:
        raise struct.error("a section ends beyond the file")
    return data
