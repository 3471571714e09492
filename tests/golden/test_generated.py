import hashlib
import json

from cutlass_ops.base import resources
from cutlass_ops.declare.spec import KernelSpec
from cutlass_ops.ship import catalog


def test_the_catalogue_is_up_to_date():
    stale = catalog.stale(resources.generated())
    assert not stale, f"run `python -m cutlass_ops generate` and look at the diff: {stale}"


def test_nothing_else_lies_there():
    folder = resources.generated()
    there = {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()}
    assert there == {catalog.MANIFEST, *(entry.file for entry in catalog.default())}


def test_the_manifest_describes_the_files():
    folder = resources.generated()
    kernels = json.loads((folder / catalog.MANIFEST).read_text())["kernels"]
    for kernel, entry in zip(kernels, catalog.default(), strict=True):
        assert kernel["sha256"] == hashlib.sha256((folder / kernel["file"]).read_bytes()).hexdigest()
        assert KernelSpec.from_json(kernel["spec"]) == entry.spec
