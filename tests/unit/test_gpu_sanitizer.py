"""Tools of compute-sanitizer see each kernel once, and what they report is kept."""

import json
import struct

import pytest
from fake_toolkit import library

from tests.gpu import sanitizer

TOOL = """#!/bin/sh
echo "$@" >> {log}
case "$*" in
  *initcheck*) echo "========= ERROR SUMMARY: 3 errors"; exit 99;;
  *racecheck*) echo "========= Error: Race reported between Write access at kernel+0x10 and Read access at kernel+0x0"
    echo "========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)"; exit 99;;
  *) echo "========= ERROR SUMMARY: 0 errors";;
esac
"""
# LDS, a bulk copy, and something else.
CODE = b"".join(struct.pack("<QQ", low, 0) for low in (0x7984, 0x73BA, 0x7210))


@pytest.fixture
def log(tmp_path, monkeypatch):
    """Have a program stand for compute-sanitizer; return the file of its calls."""
    tool, log = tmp_path / "bin" / "compute-sanitizer", tmp_path / "log.txt"
    tool.parent.mkdir()
    tool.write_text(TOOL.format(log=log))
    tool.chmod(0o755)
    monkeypatch.setenv("CUTLASS_OPS_STAND_IN", "")  # which a piece sets
    monkeypatch.setenv("PATH", f"{tool.parent}:/usr/bin:/bin")
    monkeypatch.setattr(sanitizer, "compiled", lambda names: [library(more=CODE)])
    monkeypatch.setattr(
        sanitizer, "targets", lambda: {f"{x}-{at}": [] for x in ("dense", "grouped") for at in range(30)}
    )
    monkeypatch.setattr(sanitizer, "about", lambda: {"commit": "c", "chip": "a GPU"})
    return log


def test_each_tool_sees_each_kernel_once_and_errors_are_kept(log, tmp_path, monkeypatch, capsys):
    state = tmp_path / "state.jsonl"
    arguments = ["sanitizer", "--state", str(state), "--tools", "memcheck", "initcheck", "--only", "grouped-"]
    monkeypatch.setattr("sys.argv", arguments)
    assert sanitizer.main() == 1
    names = [name for name in sanitizer.targets() if "grouped" in name]
    lines = [json.loads(line) for line in state.read_text().splitlines()]
    for tool, status, errors in (("memcheck", 0, 0), ("initcheck", 99, 3)):
        mine = [line for line in lines if line["tool"] == tool]
        assert [name for line in mine for name in line["kernels"]] == names
        assert {(line["status"], line["errors"], line["commit"]) for line in mine} == {(status, errors, "c")}
    assert "initcheck" in capsys.readouterr().out
    before = log.read_text()
    assert all(name in before for name in names)
    # What initcheck does not see written counts as not initialised: it sees all kernels.
    assert ["kns" in line for line in before.splitlines()] == ["memcheck" in line for line in before.splitlines()]
    assert sanitizer.main() == 1  # nothing is left, and the errors stay
    assert log.read_text() == before


def test_reports_have_their_instructions_and_those_known_to_be_false_do_not_count(log, monkeypatch, capsys):
    line = sanitizer.run("racecheck", ["dense-0"])
    assert "kernel+0x10 (UBLKCP) and Read access at kernel+0x0 (LDS)" in line["text"]
    (cause,) = line["known"]
    assert "mbarrier" in cause
    assert sanitizer.report([line]) == 0
    assert "1 known to be false" in capsys.readouterr().out
    code = struct.pack("<QQ", 0x7984, 0) * 2
    monkeypatch.setattr(sanitizer, "compiled", lambda names: [library(more=code)])
    other = sanitizer.run("racecheck", ["dense-0"])
    assert (other["errors"], other["known"]) == (1, {})
    assert sanitizer.report([other]) == 1
    assert sanitizer.with_instructions("at kernel+0x20 and kernel+0x30 and f+0x0", [library(more=CODE)]) == (
        "at kernel+0x20 (another) and kernel+0x30 and f+0x0"
    )


def test_kernels_whose_process_was_ended_are_seen_again_in_halves():
    names = ["a", "b", "c", "d"]
    late = {"tool": "memcheck", "kernels": names, "status": 124}
    halves = [("memcheck", ["a", "b"]), ("memcheck", ["c", "d"])]
    assert list(sanitizer.left(["memcheck"], names, [late])) == halves
    assert list(sanitizer.left(["memcheck"], names, [late | {"status": 0}])) == []
    assert list(sanitizer.left(["memcheck"], ["a"], [late | {"kernels": ["a"]}])) == []
    assert list(sanitizer.left(["racecheck"], names, [late])) == [("racecheck", names)]


def test_kernels_are_of_every_form_kind_and_type():
    specs = [spec for specs in sanitizer.targets().values() for spec in specs]
    assert {spec.form.name for spec in specs} == {"dense", "batched", "grouped", "ragged_k"}
    assert {spec.config.arch for spec in specs} == {"sm90", "sm80", "gemv", "small"}
    assert len({sanitizer.sort(spec) for spec in specs}) == len(specs) < 120
    assert sum(name.startswith("exact_fp8") for name in sanitizer.families()) == 8


def test_calls_of_several_kernels_are_made_before_a_tool_watches_them(monkeypatch):
    made = []
    monkeypatch.setattr(sanitizer.exact_calls, "check", lambda name, seed: made.append(name))
    assert sanitizer.compiled(["gated"]) == []
    sanitizer.calls(["gated"])
    assert made == ["gated"] * 2
