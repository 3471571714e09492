"""Every small file that the library keeps: whatever happens to it, what it has is computed again and written again."""

import hashlib
import os
import random
from pathlib import Path

import pytest
from fake_toolkit import FakeToolkit, sm80_spec
from signatures import H100, signature

from cutlass_ops.artifacts.store import KernelStore
from cutlass_ops.base import env
from cutlass_ops.choose import dispatch, policies
from cutlass_ops.compilation import builder, lookup, memo
from cutlass_ops.declare.problem import Problem

SPECS = (sm80_spec(), sm80_spec(4))
N, K, ROWS = 4096, 1024, (1, 17, 1000)


@pytest.fixture(autouse=True)
def toolkit(tmp_path, monkeypatch, session):
    found = FakeToolkit(tmp_path / "kit")
    monkeypatch.setenv(env.CACHE_DIR.name, str(tmp_path / "store"))
    monkeypatch.setenv(env.NVCC.name, str(found.nvcc))
    monkeypatch.setenv(env.NVCC_CCBIN.name, str(found.host))
    monkeypatch.setenv(env.CHOICES.name, "1")
    monkeypatch.setenv(env.PROGRESS.name, "0")
    policies.forget(shipped=True)
    yield found
    policies.forget(shipped=True)


def decided():
    policies.forget(shipped=True)
    found = [dispatch.decide(signature(), H100, Problem(m, N, K)) for m in ROWS]
    return [(d.config, d.order, d.kept, d.peer, d.spec, d.specs) for d in found]


def looked_up():
    return [(lookup.stored(spec) or builder.build_artifact(spec)).key for spec in SPECS]


@pytest.fixture
def store():
    """Return a store with kernels, and every kept file with what it holds."""
    decided(), looked_up()
    root = KernelStore.default().root
    paths = [*root.glob("memo/*/*")]
    files = {each: each.read_bytes() for each in paths}
    assert len(files) == len(SPECS) + 1
    assert {each for each in root.rglob("*") if each.is_file()} - set(files) == {
        each for folder in (root / "v2").glob("*/*") for each in folder.iterdir()
    }
    return root, files


def mutations(good: bytes, others: list[bytes]):
    """Yield changed contents of a file."""
    draw = random.Random(5)
    yield from (b"", b"\0", b"{}", b"[]", b"null", b"[" * 5000, b"\xff" * 100, good + b"\n", good * 2, bytes(4 << 20))
    yield from others
    digest, text = good[:64], good[65:]
    values = [b'{"kept":[]}', b'{"kept":{},"starts":"1","kernels":[],"measured":{},"peers":1}', b"1" * 64, text[::-1]]
    for value in values:
        yield digest + b"\n" + value  # the digest of what was there
        yield hashlib.sha256(value).hexdigest().encode() + b"\n" + value  # without the file's place
        yield value
    yield text
    yield from (other[:64] + b"\n" + text for other in others)
    yield from (digest + b"\n" + other[65:] for other in others)
    for at in sorted({draw.randrange(len(good)) for _ in range(150)} | {*range(70), len(good) - 1}):
        yield good[:at] + bytes([good[at] ^ 1 << draw.randrange(8)]) + good[at + 1 :]
        yield good[:at]
        yield good[:at] + good[at + 1 :]
        yield good[:at] + str(draw.randrange(10)).encode() + good[at:]


@pytest.mark.slow
def test_no_changed_file_is_read(store):
    _, files = store
    count = 0
    for path, good in files.items():
        wanted = memo.recall(path)
        assert wanted is not None
        others = [text for other, text in files.items() if other != path]
        for changed in mutations(good, others):
            if changed == good:
                continue
            count += 1
            path.write_bytes(changed)
            assert memo.recall(path) is None
        path.write_bytes(good)
        assert memo.recall(path) == wanted
    assert count > 1500


def digits_swapped(path: Path, others):
    text = path.read_text()
    at = next(i for i in range(70, len(text) - 1) if text[i].isdigit() and text[i + 1].isdigit() != text[i].isdigit())
    path.write_text(f"{text[:at]}{(int(text[at], 16) + 1) % 10}{text[at + 1 :]}")


@pytest.mark.slow
@pytest.mark.parametrize(
    "spoil",
    [
        digits_swapped,
        lambda path, others: path.write_bytes(path.read_bytes()[:-1]),
        lambda path, others: path.write_bytes(others[0]),
        lambda path, others: path.write_bytes(b""),
        lambda path, others: path.chmod(0o620),
        lambda path, others: (path.unlink(), os.mkfifo(path)),
        lambda path, others: (path.rename(path.with_name("aside")), path.symlink_to("aside")),
    ],
    ids=["a digit", "truncated", "another's", "empty", "open to others", "pipe", "link"],
)
def test_what_a_damaged_file_had_is_computed_and_written_again(store, spoil):
    _, files = store
    wanted = decided(), looked_up()
    for path in files:
        spoil(path, [text for other, text in files.items() if other != path])
    assert (decided(), looked_up()) == wanted
    assert {path: path.read_bytes() for path in files} == files
    assert all(path.stat().st_mode & 0o777 == 0o600 and not path.is_symlink() for path in files)


@pytest.mark.slow
@pytest.mark.parametrize("above", [0, 1, 2])
@pytest.mark.parametrize("mode", [0o777, 0o720, 0o1777])
def test_no_file_is_read_in_a_folder_that_others_may_write(store, above, mode):
    _, files = store
    for path in files:
        folder = path.parents[above]
        folder.chmod(mode)
        assert memo.recall(path) is None
        folder.chmod(0o755)
        assert memo.recall(path) is not None
