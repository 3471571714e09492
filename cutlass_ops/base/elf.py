"""Read ELF64 images: shared libraries, and the GPU machine code inside them."""

from __future__ import annotations

import re
import struct
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from cutlass_ops.base.errors import CutlassOpsError, LoadError

_MAGIC = b"\x7fELF"
_EM_CUDA = 190
_ABI_MOVED = 8
_PT_LOAD, _PT_DYNAMIC = 1, 2
_DT_NULL, _DT_NEEDED, _DT_STRTAB = 0, 1, 5
_LOADED = (_DT_NEEDED, 0x7FFFFFFD, 0x7FFFFFFF)  # the last two: DT_AUXILIARY and DT_FILTER
_SEARCHED = (15, 29)  # DT_RPATH, DT_RUNPATH
_BINDINGS = (1, 2)  # global and weak
_SYMBOL = struct.Struct("<IBBHQQ")  # name, binding and type, visibility, section, value, size
_DYNAMIC = struct.Struct("<QQ")
_SEGMENT = struct.Struct(
    "<IIQQQQQQ"
)  # type, flags, offset, address, physical address, size in the file, in memory, align
_PAGE = 4096
_SHF_EXECINSTR = 4
_SHT_NOBITS = 8  # takes no space in the file
# A kernel's library has one image, a few hundred symbols, and needs about six libraries.
_MAX_IMAGES = 8
_MAX_SYMBOLS = 1 << 16
_MAX_LIBRARIES = 64
_MAX_FILE_NAME, _MAX_PATH = 255, 4096  # bytes, Linux's limits
# Section names may share their ends. In a real image their total length is no more than a few times the table's.
_SHARED = 4
_SECTION = struct.Struct("<IIQQQQ")  # name, type, flags, address, offset, size: the head of a section's header


@dataclass(frozen=True)
class Section:
    """One section of an image."""

    name: str  # for example ``".text.kernel"``
    executable: bool  # whether it contains instructions
    data: bytes  # its contents


def gpu_images(library: bytes) -> Iterator[bytes]:
    """Yield a library's GPU images, each with all bytes after it. Raises struct.error if there are too many."""
    # The first ELF header is the library's own.
    at, images = library.find(_MAGIC, len(_MAGIC)), 0
    while at != -1:
        if library[at + 18 : at + 20] == _EM_CUDA.to_bytes(2, "little"):
            images += 1
            if images > _MAX_IMAGES:
                raise struct.error(f"it holds more than {_MAX_IMAGES} images")
            yield library[at:]
        at = library.find(_MAGIC, at + len(_MAGIC))


def gpu_code(library: bytes) -> Iterator[bytes]:
    """Yield the code sections of a library's GPU images. Raises struct.error if one is truncated, or for too many."""
    for image in gpu_images(library):
        yield from (section.data for section in sections(image) if section.executable)


def sm_version(image: bytes) -> int:
    """Return a GPU image's compute capability: 90 for sm_90 and sm_90a. Raises struct.error if it is truncated."""
    (flags,) = _unpack(struct.Struct("<I"), image, 0x30)
    # CUDA 13 writes a newer ABI version, in which the number has moved.
    return flags >> 8 & 0xFF if image[8] >= _ABI_MOVED else flags & 0xFF


def exports(library: bytes, names: Collection[str]) -> set[str]:
    """Return which of ``names`` a library exports. Raises struct.error if it is truncated or has too many symbols."""
    found = {section.name: section.data for section in sections(library)}
    symbols, table = found.get(".dynsym", b""), found.get(".dynstr", b"")
    if len(symbols) > _MAX_SYMBOLS * _SYMBOL.size:
        raise struct.error(f"it has more than {_MAX_SYMBOLS} symbols")
    rows = _SYMBOL.iter_unpack(_whole(symbols, _SYMBOL.size))
    defined = [name for name, info, _, where, _, _ in rows if where and info >> 4 in _BINDINGS]
    # Compare names in place: in a hostile file, thousands of symbols may share one name of millions of characters.
    texts = {name: name.encode() + b"\0" for name in names}
    return {name for name, text in texts.items() if any(table.startswith(text, at) for at in defined)}


def needed(library: bytes) -> list[str]:
    """Return the libraries that a library links to. Raises struct.error if its dynamic section is invalid."""
    return _dynamic_texts(library, _LOADED, _MAX_FILE_NAME)


def search_paths(library: bytes) -> list[str]:
    """Return the RPATH and RUNPATH of a shared library. Raises struct.error as :func:`needed` does."""
    return _dynamic_texts(library, _SEARCHED, _MAX_PATH)


def _dynamic_texts(library: bytes, tags: tuple[int, ...], most: int) -> list[str]:
    """Return strings of the dynamic section. Use segments, as the dynamic linker does: section headers may lie."""
    loads, dynamic = _segments(library)
    entries: list[tuple[int, ...]] = []
    for entry in _DYNAMIC.iter_unpack(_whole(_loaded_at(library, loads, dynamic), _DYNAMIC.size)):
        if entry[0] == _DT_NULL:
            break
        entries.append(entry)
    else:
        raise struct.error("its dynamic section has no end")
    wanted = [value for tag, value in entries if tag in tags]
    tables = [value for tag, value in entries if tag == _DT_STRTAB]
    if not wanted:
        return []
    if len(tables) != 1 or len(wanted) > _MAX_LIBRARIES:
        raise struct.error(f"it has {len(tables)} string tables, for {len(wanted)} libraries")
    names = _loaded_at(library, loads, tables[0])
    return [_name(names, at, most) for at in wanted]


def _segments(library: bytes) -> tuple[list[tuple[int, int, int]], int]:
    """Return the loaded segments as (address, offset, size), and the dynamic section's address."""
    (table,) = _unpack(struct.Struct("<Q"), library, 0x20)
    entry_size, entries = _unpack(struct.Struct("<HH"), library, 0x36)
    if library[: len(_MAGIC)] != _MAGIC or entry_size != _SEGMENT.size:
        raise struct.error("it is not an ELF64 library")
    headers = [_unpack(_SEGMENT, library, table + index * entry_size) for index in range(entries)]
    loads = [(address, offset, size) for kind, _, offset, address, _, size, _, _ in headers if kind == _PT_LOAD]
    dynamic = [address for kind, _, _, address, *_ in headers if kind == _PT_DYNAMIC]
    free = 0
    for address, offset, size in loads:
        # Whole pages are mapped: if two segments shared a page, the later one would win.
        if address // _PAGE * _PAGE < free or (address - offset) % _PAGE:
            raise struct.error("its segments overlap or are not aligned to pages")
        free = -(-(address + size) // _PAGE) * _PAGE
    if len(dynamic) != 1:
        raise struct.error(f"it has {len(dynamic)} dynamic sections")
    return loads, dynamic[0]


def _loaded_at(library: bytes, loads: list[tuple[int, int, int]], at: int) -> bytes:
    """Return the bytes from an address of the loaded library to the end of that segment in the file."""
    for address, offset, size in loads:
        if address <= at < address + size:
            if offset + size > len(library):
                raise struct.error("a segment ends beyond the file")
            return library[offset + at - address : offset + size]
    raise struct.error(f"nothing is loaded at {at:#x}")


def _whole(data: bytes, size: int) -> bytes:
    return data[: len(data) // size * size]


def _name(table: bytes, at: int, most: int) -> str:
    end = table.find(b"\0", at, at + most + 1)
    if end < 0:
        raise struct.error(f"a name at {at} does not end within {most} bytes")
    return table[at:end].decode(errors="replace")


def sections(image: bytes) -> Iterator[Section]:
    """Yield the sections of an image. Raises struct.error if the image is truncated."""
    (table,) = _unpack(struct.Struct("<Q"), image, 0x28)
    entry_size, entries, names_at = _unpack(struct.Struct("<HHH"), image, 0x3A)
    headers = [_unpack(_SECTION, image, table + index * entry_size) for index in range(entries)]
    # Sections of a real image do not overlap. In a hostile one, each could be as large as the file.
    if sum(size for _, kind, _, _, _, size in headers if kind != _SHT_NOBITS) > len(image):
        raise struct.error("its sections overlap")
    names = _contents(image, headers[names_at]) if names_at < entries else b"\0"
    left = _SHARED * len(names)
    for header in headers:
        name = _name(names, header[0], left)
        left -= len(name)
        yield Section(name, bool(header[2] & _SHF_EXECINSTR), _contents(image, header))


def _unpack(form: struct.Struct, data: bytes, at: int) -> tuple[int, ...]:
    # Not unpack_from: it raises OverflowError for huge offsets.
    return form.unpack(data[at : at + form.size])


def _contents(image: bytes, header: tuple[int, ...]) -> bytes:
    _, kind, _, _, offset, size = header
    if kind == _SHT_NOBITS:
        return b""
    data = image[offset : offset + size]
    if len(data) != size:
        raise struct.error("a section ends beyond the file")
    return data


# ---- Which libraries the dynamic linker loads ------------------------------------------------------------------------


# The C and C++ runtimes, tvm-ffi and the CUDA runtime. A slash would make the name a path.
_LIBRARY = re.compile(r"libtvm_ffi\.so|(libcudart|libstdc\+\+|libgcc_s|libm|libc|ld-linux-x86-64)\.so\.[0-9]+")


def require_own_libraries(library: bytes, where: str, error: type[CutlassOpsError] = LoadError) -> None:
    """Refuse a library with its own search paths, or that needs others than the kernel runtime's. Raises ``error``."""
    try:
        paths, libraries = search_paths(library), needed(library)
    except (struct.error, IndexError) as exc:
        raise error(f"{where} is not a shared library: {exc}") from None
    if paths:
        raise error(
            f"{where} makes the dynamic linker search {', '.join(map(repr, paths))} (RPATH or RUNPATH) for unchecked "
            f"libraries: compile it with a g++ that adds no -rpath"
        )
    foreign = [name for name in libraries if not _LIBRARY.fullmatch(name)]
    if foreign:
        raise error(f"{where} needs {', '.join(foreign)}, which kernels must not load")
