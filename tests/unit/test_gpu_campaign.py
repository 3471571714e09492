"""The campaign of GPU tests keeps what failed tests said."""

import pytest

from tests.gpu import campaign

TESTS = """
import os

def test_a():
    print("x" * 9000)
    assert 1 + 1 == 3, "a sum"

def test_b():
    pass

def test_c():
    os._exit(3)
"""


@pytest.mark.slow
def test_what_failed_tests_said_is_kept_and_printed(tmp_path, capsys):
    path = tmp_path / "test_it.py"
    path.write_text(TESTS)
    found = campaign.run(str(path), 0, 60.0)
    assert (found["ran"], found["passed"], found["failed"], found["done"], found["status"]) == (3, 1, 2, False, 3)
    (first, text), (last, of_last) = found["failures"].items()
    assert first.endswith("::test_a")
    assert "AssertionError: a sum" in text
    assert len(text) <= 1500
    assert last.endswith("::test_c")
    assert "it did not end" in of_last
    assert campaign.report([found]) == 3
    printed = capsys.readouterr().out
    assert "AssertionError: a sum" in printed
    assert "it did not end" in printed
