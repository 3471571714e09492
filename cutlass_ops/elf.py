"""The sections of ELF64 images: shared libraries, and the machine code for GPUs inside them."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

_MAGIC = b"\x7fELF"
_EM_CUDA = 190
_ABI_MOVED = 8
_DT_NEEDED = 1
_BINDINGS = (1, 2)  # global and weak
_SYMBOL = struct.Struct("<IBBHQQ")  # name, binding and type, visibility, section, value, size
_DYNAMIC = struct.Struct("<QQ")
_SHF_EXECINSTR = 4
_SHT_NOBITS = 8  # takes no room in the file
_MAX_IMAGES = 64
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
    """Yield the machine-code images inside a shared library, each followed by whatever comes after it there.

    Raises
    ------
    struct.error
        If there are more than any kernel's library holds.
    """
    # The first header is the library's own.
    at, images = library.find(_MAGIC, len(_MAGIC)), 0
    while at != -1:
        if library[at + 18 : at + 20] == _EM_CUDA.to_bytes(2, "little"):
            images += 1
            if images > _MAX_IMAGES:
                raise struct.error(f"it holds more than {_MAX_IMAGES} images")
            yield library[at:]
        at = library.find(_MAGIC, at + len(_MAGIC))


def sm_version(image: bytes) -> int:
    """Return the compute capability that a machine-code image is for, as two digits: 90 for sm_90 and sm_90a.

    Raises
    ------
    struct.error
        If the image ends before it says so.
    """
    (flags,) = _unpack(struct.Struct("<I"), image, 0x30)
    # From this version of the format on, which CUDA 13 writes, the number has moved.
    return flags >> 8 & 0xFF if image[8] >= _ABI_MOVED else flags & 0xFF


def exports(library: bytes) -> set[str]:
    """Return the names that a shared library defines for others.

    Raises
    ------
    struct.error
        If it ends before its sections do.
    """
    found = {section.name: section.data for section in sections(library)}
    symbols, names = found.get(".dynsym", b""), found.get(".dynstr", b"")
    rows = _SYMBOL.iter_unpack(symbols[: len(symbols) // _SYMBOL.size * _SYMBOL.size])
    return {_name(names, name) for name, info, _, where, _, _ in rows if where and info >> 4 in _BINDINGS}


def needed(library: bytes) -> list[str]:
    """Return the libraries that a shared library has the dynamic linker load.

    Raises
    ------
    struct.error
        If it ends before its sections do.
    """
    found = {section.name: section.data for section in sections(library)}
    dynamic, names = found.get(".dynamic", b""), found.get(".dynstr", b"")
    rows = _DYNAMIC.iter_unpack(dynamic[: len(dynamic) // _DYNAMIC.size * _DYNAMIC.size])
    return [_name(names, value) for tag, value in rows if tag == _DT_NEEDED]


def _name(names: bytes, at: int) -> str:
    return names[at:].partition(b"\0")[0].decode(errors="replace")


def sections(image: bytes) -> Iterator[Section]:
    """Yield the sections of an image.

    Raises
    ------
    struct.error
        If the image ends before its sections do.
    """
    (table,) = _unpack(struct.Struct("<Q"), image, 0x28)
    entry_size, entries, names_at = _unpack(struct.Struct("<HHH"), image, 0x3A)
    headers = [_unpack(_SECTION, image, table + index * entry_size) for index in range(entries)]
    # Sections of a real image do not overlap; those of a hostile one could be as large as the file, each.
    if sum(size for _, kind, _, _, _, size in headers if kind != _SHT_NOBITS) > len(image):
        raise struct.error("its sections overlap")
    names = _contents(image, headers[names_at]) if names_at < entries else b""
    for header in headers:
        yield Section(_name(names, header[0]), bool(header[2] & _SHF_EXECINSTR), _contents(image, header))


def _unpack(form: struct.Struct, data: bytes, at: int) -> tuple[int, ...]:
    # Not unpack_from: it raises OverflowError for what no file is as long as.
    return form.unpack(data[at : at + form.size])


def _contents(image: bytes, header: tuple[int, ...]) -> bytes:
    _, kind, _, _, offset, size = header
    if kind == _SHT_NOBITS:
        return b""
    data = image[offset : offset + size]
    if len(data) != size:
        raise struct.error("a section ends beyond the file")
    return data
