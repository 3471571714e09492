"""Tools of compute-sanitizer see each kernel once, and what they report is kept."""

import json

import pytest

from tests.gpu import kernels, sanitizer

TOOL = """#!/bin/sh
echo "$@" >> {log}
case "$*" in
  *initcheck*) echo "========= ERROR SUMMARY: 3 errors"; exit 99;;
  *) echo "========= ERROR SUMMARY: 0 errors";;
esac
"""


@pytest.fixture
def log(tmp_path, monkeypatch):
    """Have a program stand for compute-sanitizer; return the file of its calls."""
    tool, log = tmp_path / "bin" / "compute-sanitizer", tmp_path / "log.txt"
    tool.parent.mkdir()
    tool.write_text(TOOL.format(log=log))
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}:/usr/bin:/bin")
    monkeypatch.setattr(sanitizer, "compiled", lambda names: None)
    monkeypatch.setattr(
        kernels, "named", lambda: {f"{form}-{at}": [] for form in ("dense", "grouped") for at in range(30)}
    )
    monkeypatch.setattr(sanitizer, "about", lambda: {"commit": "c", "chip": "a GPU"})
    return log


def test_each_tool_sees_each_kernel_once_and_errors_are_kept(log, tmp_path, monkeypatch, capsys):
    state = tmp_path / "state.jsonl"
    arguments = ["sanitizer", "--state", str(state), "--tools", "memcheck", "initcheck", "--only", "grouped"]
    monkeypatch.setattr("sys.argv", arguments)
    assert sanitizer.main() == 1
    names = [name for name in kernels.named() if "grouped" in name]
    lines = [json.loads(line) for line in state.read_text().splitlines()]
    for tool, status, errors in (("memcheck", 0, 0), ("initcheck", 99, 3)):
        mine = [line for line in lines if line["tool"] == tool]
        assert [name for line in mine for name in line["kernels"]] == names
        assert {(line["status"], line["errors"], line["commit"]) for line in mine} == {(status, errors, "c")}
    assert "initcheck" in capsys.readouterr().out
    before = log.read_text()
    assert all(name in before for name in names)
    assert sanitizer.main() == 1  # nothing is left, and the errors stay
    assert log.read_text() == before


def test_kernels_whose_process_was_ended_are_seen_again():
    line = {"tool": "memcheck", "kernels": ["a", "b"], "status": 124}
    assert list(sanitizer.left(["memcheck"], ["a", "b"], [line])) == [("memcheck", ["a", "b"])]
    assert list(sanitizer.left(["memcheck"], ["a", "b"], [line | {"status": 0}])) == []
