"""Read and write a bundle's files, as an archive or a folder. Reading trusts nothing.

An archive is an uncompressed ZIP file in one canonical form: entries sorted by name, without gaps, times or attributes.
Reading compares the file with what :func:`write` would have written. So links, duplicates, overlaps and hidden parts
need no separate checks. Any unzip program can open an archive.
"""

from __future__ import annotations

import os
import re
import stat
import struct
import weakref
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import BinaryIO, NamedTuple

from cutlass_ops.base.disk import NotPrivateError, open_private, read_private, replacing, require_private
from cutlass_ops.base.errors import BundleError, LoadError

MANIFEST = "manifest.json"
SIGNATURE = "manifest.sig"

# Names are made from digests and file types; a manifest cannot choose them.
_NAME = re.compile(
    r"manifest\.json|manifest\.sig|kernels/[0-9a-f]{64}\.so|sources/[0-9a-f]{64}\.cu|tables/[0-9a-f]{64}\.json"
)
_FOLDERS = ("kernels", "sources", "tables")

MAX_FILES = 20_000
MAX_FILE = 64 << 20  # bytes; a kernel has about 200 KB
_MAX_ARCHIVE = (1 << 32) - 1  # bytes; more needs ZIP64
_MAX_NAME = 100

_LOCAL = struct.Struct("<4s5H3I2H")
_CENTRAL = struct.Struct("<4s6H3I5H2I")
_END = struct.Struct("<4s4H2IH")
_VERSION = 20
_DATE = 0x21  # 1980-01-01, ZIP's first day


class _Entry(NamedTuple):
    """One file of an archive."""

    name: str
    crc: int
    size: int
    offset: int

    @property
    def local(self) -> bytes:
        """The local header, before the file's bytes."""
        name = self.name.encode()
        return _LOCAL.pack(b"PK\3\4", _VERSION, 0, 0, 0, _DATE, self.crc, self.size, self.size, len(name), 0) + name

    @property
    def central(self) -> bytes:
        """The entry in the central directory."""
        name = self.name.encode()
        fixed = (b"PK\1\2", _VERSION, _VERSION, 0, 0, 0, _DATE, self.crc, self.size, self.size, len(name))
        return _CENTRAL.pack(*fixed, 0, 0, 0, 0, 0, self.offset) + name

    @property
    def end(self) -> int:
        return self.offset + _LOCAL.size + len(self.name) + self.size


def _end(count: int, size: int, offset: int) -> bytes:
    return _END.pack(b"PK\5\6", 0, 0, count, count, size, offset, 0)


# ---- Reading -----------------------------------------------------------------------------------------------------


class Container(ABC):
    """A bundle's files. They are opened once, so a later rename over the bundle changes nothing."""

    path: Path  # path of the bundle
    sizes: Mapping[str, int]  # size of each file in bytes

    @abstractmethod
    def read(self, name: str) -> bytes:
        """Return a file's contents, ``sizes[name]`` bytes."""


def open_container(path: str | os.PathLike[str], beside: Path | None = None) -> Container:
    """Open an archive or a folder."""
    given = Path(path).absolute()
    try:
        # The user may link to a bundle. Links inside a bundle are rejected.
        real = given.resolve(strict=True)
        return _Folder(real) if real.is_dir() else _Archive(real, beside)
    except OSError as exc:
        raise BundleError(f"bundle {given} cannot be read: {exc.strerror or exc}") from None
    except (RuntimeError, ValueError) as exc:  # a link loop, before Python 3.13; a name with a zero byte
        raise BundleError(f"bundle {str(given)!r} cannot be read: {exc}") from None
    except BundleError:
        raise
    except NotPrivateError as exc:
        raise BundleError(
            f"bundle {given} is not safe: {exc}. Compiled code would be loaded from it: fix it with chown and "
            f"chmod -R go-w"
        ) from None
    except LoadError as exc:
        raise BundleError(f"bundle {given} cannot be read: {exc}") from None


class _Archive(Container):
    def __init__(self, path: Path, beside: Path | None) -> None:
        self.path = path
        self._descriptor = _owned(self, open_private(path, beside=beside))
        self._entries = {entry.name: entry for entry in self._directory()}
        self.sizes = {name: entry.size for name, entry in self._entries.items()}

    def read(self, name: str) -> bytes:
        entry = self._entries.get(name)
        if entry is None:
            raise BundleError(f"{self.path} has no file {name}")
        head = entry.local
        data = self._bytes(entry.offset, len(head) + entry.size)
        if not data.startswith(head):
            raise BundleError(f"{self.path}: the header of {name} does not match the directory")
        return data[len(head) :]

    def _directory(self) -> Iterator[_Entry]:
        size = os.fstat(self._descriptor).st_size
        if not _END.size <= size <= _MAX_ARCHIVE:
            raise self._foreign(f"it has {size} bytes")
        tail = self._bytes(size - _END.size, _END.size)
        magic, _, _, _, count, length, offset, _ = _END.unpack(tail)
        if magic != b"PK\5\6" or tail != _end(count, length, offset):
            raise self._foreign("it does not end like a ZIP file without a comment; it may be truncated")
        if offset + length + _END.size != size or count > MAX_FILES or length > count * (_CENTRAL.size + _MAX_NAME):
            raise self._foreign(f"its directory of {count} files and {length} bytes is impossible")
        directory, read, at, last = self._bytes(offset, length), 0, 0, ""
        for _ in range(count):
            entry = self._entry(directory[read : read + _CENTRAL.size + _MAX_NAME], at)
            if entry.name <= last:
                raise self._foreign(f"{entry.name} is a duplicate or not in order")
            read, at, last = read + len(entry.central), entry.end, entry.name
            yield entry
        if read != length or at != offset:
            raise self._foreign("it has more contents than its directory lists")

    def _entry(self, directory: bytes, offset: int) -> _Entry:
        """Return the first entry of a part of the directory. It must be in canonical form."""
        if len(directory) < _CENTRAL.size:
            raise self._foreign("its directory is cut off")
        fields = _CENTRAL.unpack_from(directory)
        name = directory[_CENTRAL.size :][: min(fields[10], _MAX_NAME)]
        if not _NAME.fullmatch(text := name.decode("ascii", "replace")):
            raise self._foreign(f"a bundle cannot have a file named {text!r}")
        entry = _Entry(text, fields[7], fields[9], offset)
        if not directory.startswith(entry.central):
            raise self._foreign(f"the entry of {text} is compressed, linked, overlapping, or has extra fields")
        if entry.size > MAX_FILE:
            raise self._foreign(f"{text} has {entry.size} bytes: at most {MAX_FILE} are allowed")
        return entry

    def _bytes(self, offset: int, count: int) -> bytes:
        # pread: after a fork, processes share the file position.
        try:
            data = os.pread(self._descriptor, count, offset)
        except OSError as exc:
            raise BundleError(f"{self.path} cannot be read: {exc.strerror or exc}") from None
        if len(data) != count:
            raise BundleError(f"{self.path} is truncated: it has {len(data)} of {count} bytes at {offset}")
        return data

    def _foreign(self, why: str) -> BundleError:
        return BundleError(f"{self.path} is not a bundle of this library: {why}")


class _Folder(Container):
    def __init__(self, path: Path) -> None:
        self.path = path
        self._folders = {"": self._open(path, None)}
        present = set(os.listdir(self._folders[""]))
        for name in sorted(present & set(_FOLDERS)):
            self._folders[name] = self._open(path / name, self._folders[""])
        self.sizes = dict(self._files())

    def read(self, name: str) -> bytes:
        if name not in self.sizes:
            raise BundleError(f"{self.path} has no file {name}")
        folder, _, _ = name.rpartition("/")
        try:
            data = read_private(self.path / name, self.sizes[name], folder=self._folders[folder])
        except OSError as exc:
            raise BundleError(f"{self.path / name} cannot be read: {exc.strerror or exc}") from None
        except LoadError as exc:
            raise BundleError(str(exc)) from None
        if len(data) != self.sizes[name]:
            raise BundleError(f"{self.path / name} changed its size since the bundle was opened")
        return data

    def _open(self, path: Path, parent: int | None) -> int:
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = _owned(self, os.open(path if parent is None else path.name, flags, dir_fd=parent))
        require_private(os.fstat(descriptor), path)
        return descriptor

    def _files(self) -> Iterator[tuple[str, int]]:
        count = 0
        for folder, descriptor in self._folders.items():
            with os.scandir(descriptor) as found:
                for entry in found:
                    name = f"{folder}/{entry.name}" if folder else entry.name
                    if name in self._folders:
                        continue
                    count += 1
                    if count > MAX_FILES:
                        raise BundleError(f"{self.path} has more than {MAX_FILES} files")
                    yield name, self._size(name, entry.stat(follow_symlinks=False))

    def _size(self, name: str, info: os.stat_result) -> int:
        if not _NAME.fullmatch(name):
            raise BundleError(f"{self.path}: a bundle cannot have a file named {name!r}")
        if not stat.S_ISREG(info.st_mode):
            raise BundleError(f"{self.path / name} is not a regular file")
        if info.st_size > MAX_FILE:
            raise BundleError(f"{self.path / name} has {info.st_size} bytes: at most {MAX_FILE} are allowed")
        return info.st_size


def _owned(owner: Container, descriptor: int) -> int:
    weakref.finalize(owner, os.close, descriptor)
    return descriptor


# ---- Writing -----------------------------------------------------------------------------------------------------


def write(path: Path, files: Mapping[str, bytes], *, folder: bool = False) -> None:
    """Write files atomically, as an archive or a folder. The same files give the same bytes."""
    _require_bounds(files)
    if folder and os.path.lexists(path):
        raise ValueError(f"{path} already exists: remove it, or name another folder")
    with replacing(path) as aside:
        (_write_folder if folder else _write_archive)(aside, files)


def _require_bounds(files: Mapping[str, bytes]) -> None:
    wrong = [name for name in files if not _NAME.fullmatch(name)]
    if wrong:
        raise ValueError(f"a bundle cannot have a file named {wrong[0]!r}")
    large = [name for name, data in files.items() if len(data) > MAX_FILE]
    if large:
        raise ValueError(f"{large[0]} has {len(files[large[0]])} bytes: at most {MAX_FILE} are allowed")
    if len(files) > MAX_FILES or sum(map(len, files.values())) > _MAX_ARCHIVE - (MAX_FILES << 8):
        raise ValueError(f"{len(files)} files are too many or too large for one bundle: make several bundles")


def _write_archive(path: Path, files: Mapping[str, bytes]) -> None:
    entries: list[_Entry] = []
    with path.open("xb") as file:
        for name in sorted(files):
            entry = _Entry(name, zlib.crc32(files[name]), len(files[name]), file.tell())
            file.write(entry.local + files[name])
            entries.append(entry)
        offset, directory = file.tell(), b"".join(entry.central for entry in entries)
        file.write(directory + _end(len(entries), len(directory), offset))
        _finish(file)


def _write_folder(path: Path, files: Mapping[str, bytes]) -> None:
    path.mkdir(mode=0o755)
    for name in sorted(files):
        place = path / name
        place.parent.mkdir(mode=0o755, exist_ok=True)
        with place.open("xb") as file:
            file.write(files[name])
            _finish(file)
    for folder in (*(path / name for name in _FOLDERS if (path / name).is_dir()), path):
        folder.chmod(0o755)


def _finish(file: BinaryIO) -> None:
    file.flush()
    # Regardless of the umask, others may read the file, and only the owner may write it.
    os.fchmod(file.fileno(), 0o644)
    os.fsync(file.fileno())
