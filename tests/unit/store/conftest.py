"""What tests of the kernel store share."""

import pytest
from fake_toolkit import HMMA, FakeToolkit, library, sm80_spec

from cutlass_ops.artifacts.entry import Compiled, identity_key
from cutlass_ops.artifacts.store import KernelStore
from cutlass_ops.compilation.identity import kernel_identity

SPEC = sm80_spec()
COMPILED = Compiled(1.5, ({"function": "f", "registers": 1},))


@pytest.fixture(scope="module")
def toolchain(tmp_path_factory):
    return FakeToolkit(tmp_path_factory.mktemp("kit") / "toolkit").find()


@pytest.fixture
def store(tmp_path):
    return KernelStore(tmp_path / "store")


@pytest.fixture
def put(store, toolchain):
    """Publish a kernel as a build would."""

    def _put(spec=SPEC, source="source", data=None):
        identity = kernel_identity(spec, source, toolchain)
        key = identity_key(identity)
        with store.lock(key):
            folder = store.workspace(key, source)
            (folder / "kernel.so").write_bytes(library(HMMA) if data is None else data)
            (folder / "compile.log").touch()
            (folder / "tmp").mkdir()
            return store.publish(folder, identity, {"HMMA": 1}, COMPILED)

    return _put
