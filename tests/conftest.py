import gc
import os
import signal
from collections import Counter

import pytest
from hypothesis import settings

from tests import own_store

# PyTorch and this library are imported by what uses them: workers wait for the process that hands out tests, and it
# needs neither.

# A case may take as long as it takes. Where the slow tests are left out, tests of properties try fewer cases.
settings.register_profile("all", deadline=None)
settings.register_profile("quick", deadline=None, max_examples=15)


own_store.use()
# Tests change what decisions follow from.
os.environ["CUTLASS_OPS_CHOICES"] = "0"


def pytest_configure(config):
    config.addinivalue_line(
        "markers", "sample(n): the quick tests take each n-th case of this test; the others are slow"
    )
    settings.load_profile("quick" if "not slow" in config.option.markexpr else "all")
    if getattr(config.option, "numprocesses", None):
        # Workers, which are started after this, compute with one thread each: more threads than cores wait for each
        # other busily.
        for library in ("OMP", "OPENBLAS", "MKL"):
            os.environ.setdefault(f"{library}_NUM_THREADS", "1")
    # Little of what imports and collecting make is garbage. Looking for it took a third of their time.
    gc.set_threshold(50_000, 20, 20)


def pytest_collection_finish():
    """Have the garbage collector pass over what lives to the end: PyTorch's millions of objects, and all tests.

    A third of the time of the tests of choices was spent in looking through these.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture
def write(tmp_path):
    """Write bytes as a kernel's library; return its path."""

    def _write(data):
        path = tmp_path / "kernel.so"
        path.write_bytes(data)
        return path

    return _write


@pytest.fixture(scope="module")
def _of_this_file():
    from cutlass_ops.base.session import Session

    return Session()


@pytest.fixture
def session(request, tmp_path):
    """A session of the test's own, which finds no bundle and no user's table but those that the test makes.

    The first choices of a session take a second. Where a whole file is marked to use this, those of its tests that
    patch nothing have one in common.
    """
    from cutlass_ops.artifacts import installed
    from cutlass_ops.base import env
    from cutlass_ops.base.session import Session
    from cutlass_ops.choose import policies

    mark = request.node.getparent(pytest.Module).get_closest_marker("usefixtures")
    shared = mark is not None and "session" in mark.args and "monkeypatch" not in request.fixturenames
    own = request.getfixturevalue("_of_this_file") if shared else Session()
    patch = request.getfixturevalue("monkeypatch")
    for variable in (env.BUNDLES, env.BUNDLE_KEY, env.BUNDLE_VERSION, env.REMOTE_STORE):
        patch.delenv(variable.name, raising=False)
    patch.setattr(installed, "distributions", list)
    patch.setenv(env.TUNING_DIR.name, str(tmp_path / "tuning"))
    with own.active():
        yield own
        if shared and (tmp_path / "tuning").exists():
            policies.forget()


@pytest.fixture
def interruptible():
    """Have SIGINT interrupt this process and its children: in the background of a shell they ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.hookimpl(tryfirst=True)  # before those that are slow are left out
def pytest_collection_modifyitems(items):
    import torch

    cases = Counter()
    for item in items:
        sample = item.get_closest_marker("sample")
        if sample is not None and "slow" not in item.keywords:
            test = item.nodeid.partition("[")[0]
            if cases[test] % sample.args[0]:
                item.add_marker(pytest.mark.slow)
            cases[test] += 1

    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):  # the keywords have names of folders as well
            # Pytest looks only for the fixtures of tests that run.
            unknown = set(item.fixturenames) - {*item._fixtureinfo.name2fixturedefs, "request"}
            assert not unknown, f"{item.nodeid} uses unknown fixtures: {', '.join(unknown)}"
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
