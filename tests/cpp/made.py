"""Bundles and libraries for tests of the C++ interface."""

import hashlib
import struct
from dataclasses import replace

from cutlass_ops.artifacts.bundle import write_bundle
from cutlass_ops.artifacts.manifest import File


def write_one(path, contents, data=None, **options):
    """Write a bundle with the first kernel alone, and another library for it."""
    found, files = contents
    group = found.groups[0]
    record = group.kernels[0]
    if data is not None:
        record = replace(record, library=file_of(data))
    found = replace(found, groups=(replace(group, kernels=(record,), choices=()),), tables=())
    found = replace(found, flags={"sm_90a": found.flags["sm_90a"]})
    chosen = {name: files[name] for name in found.files} | ({record.library_name: data} if data is not None else {})
    write_bundle(path, found, chosen, **options)
    return path


def file_of(data):
    return File(hashlib.sha256(data).hexdigest(), len(data))


def flip(path, at):
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def with_tag(library, tag, value=1):
    """A library with one tag more in its dynamic section, of the spare ones that the linker leaves."""
    (table,) = struct.unpack_from("<Q", library, 0x20)
    (count,) = struct.unpack_from("<H", library, 0x38)
    (part,) = (p for i in range(count) if (p := struct.unpack_from("<IIQQQQQQ", library, table + 56 * i))[0] == 2)
    at = next(at for at in range(part[2], part[2] + part[5], 16) if struct.unpack_from("<q", library, at)[0] == 0)
    assert at + 32 <= part[2] + part[5], "the linker left no spare tag"
    return library[:at] + struct.pack("<qQ", tag, value) + library[at + 16 :]
