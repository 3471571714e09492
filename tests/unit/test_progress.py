import errno
import io
import os
import pty
import re
import subprocess
import sys

import pytest
from processes import WITHOUT_PYTORCH

from cutlass_ops.base import progress as progress_module
from cutlass_ops.base.progress import progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


def run(total=3, **options):
    with progress(total, "kernels compiled", **options) as steps:
        for number in range(total):
            steps.finished(f"kernel{number}", failed=number == 1)


@pytest.fixture
def shown(monkeypatch):
    """Say what is written to standard error for a kind of stream and a setting."""

    def shown(stream, setting, run=run):
        monkeypatch.setenv("CUTLASS_OPS_PROGRESS", setting)
        monkeypatch.setenv("TERM", "xterm")
        with monkeypatch.context() as patch:
            patch.setattr("sys.stderr", stream)
            run()
        return stream.getvalue()

    return shown


@pytest.mark.parametrize(
    ("stream", "setting", "kind"),
    [
        (io.StringIO, "auto", "lines"),
        (io.StringIO, "1", "bar"),
        (io.StringIO, "0", "nothing"),
        (Terminal, "auto", "bar"),
        (Terminal, "1", "bar"),
        (Terminal, "0", "nothing"),
    ],
)
def test_what_suits_a_stream(shown, stream, setting, kind):
    text = shown(stream(), setting)
    assert ("\x1b[" in text) is (kind == "bar")
    assert ("━" in text) is (kind == "bar")
    assert ("2 of 3 kernels compiled, 1 failed" in text) is (kind != "nothing")
    assert text.count("\n") == {"lines": 3, "bar": 2, "nothing": 0}[kind]  # a failure, and the bar's last state
    assert shown(stream(), setting, lambda: run(0)) == ""


def test_lines_say_how_long_the_rest_takes(shown):
    first, second, third = shown(io.StringIO(), "auto").splitlines()
    assert re.fullmatch(r"cutlass_ops: 1 of 3 kernels compiled, \d+ s, about \d+ s left: kernel0", first)
    assert re.fullmatch(r"cutlass_ops: 1 of 3 kernels compiled, 1 failed, \d+ s, about \d+ s left: .* failed", second)
    assert re.fullmatch(r"cutlass_ops: 2 of 3 kernels compiled, 1 failed, \d+ s: kernel2", third)


def test_the_rest_is_foreseen_at_the_pace_so_far(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(progress_module.time, "monotonic", lambda: now[0])
    steps = progress_module.Progress(10, "kernels compiled")
    now[0] = 105.0
    assert steps.state() == "0 of 10 kernels compiled, 5 s"
    steps.finished("one")
    steps.finished("two", failed=True)
    now[0] = 120.0
    assert steps.state() == "1 of 10 kernels compiled, 1 failed, 20 s, about 80 s left"


def test_a_terminal_without_rich_or_without_a_cursor_gets_lines(shown, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "rich.live", None)
        assert shown(Terminal(), "auto").count("cutlass_ops: ") == 3
    monkeypatch.setattr(progress_module, "_is_terminal", lambda _: False)
    assert shown(Terminal(), "auto").count("cutlass_ops: ") == 3


def test_a_dumb_terminal_is_none(monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    assert not progress_module._is_terminal(Terminal())
    monkeypatch.setenv("TERM", "xterm")
    assert progress_module._is_terminal(Terminal())


def test_results_stay_above_the_bar(shown):
    def measure():
        with progress(2, "problems measured") as steps:
            steps.finished("1x2x3: [bold]8.5 us[/bold]", keep=True)
            steps.finished("swallowed")

    text = shown(Terminal(), "auto", measure)
    assert "1x2x3: [bold]8.5 us[/bold]\n" in text
    assert "swallowed" not in text


class Full(io.StringIO):
    def write(self, text):
        raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("setting", ["auto", "1"])
def test_a_closed_or_full_stream_costs_nothing(monkeypatch, setting):
    monkeypatch.setenv("CUTLASS_OPS_PROGRESS", setting)
    closed = io.StringIO()
    closed.close()
    for stream in (closed, Full()):
        with monkeypatch.context() as patch:
            patch.setattr("sys.stderr", stream)
            run()


def test_the_cursor_comes_back_after_an_interrupt(shown):
    def interrupted():
        with pytest.raises(KeyboardInterrupt), progress(2, "kernels compiled"):
            raise KeyboardInterrupt

    text = shown(Terminal(), "auto", interrupted)
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")


_SCRIPT = """
import time
from cutlass_ops.base.progress import progress
with progress(2, "kernels compiled") as steps:
    steps.finished("one")
    time.sleep(1.2)
    steps.finished("two")
"""


def test_on_a_terminal_the_bar_moves_while_nothing_ends():
    leader, follower = pty.openpty()
    environment = {name: value for name, value in os.environ.items() if name != "CUTLASS_OPS_PROGRESS"}
    command = [sys.executable, "-c", WITHOUT_PYTORCH + _SCRIPT]
    process = subprocess.Popen(
        command, env=environment | {"TERM": "xterm", "COLUMNS": "100"}, stderr=follower, stdout=subprocess.PIPE
    )
    os.close(follower)
    text = b""
    try:
        while part := os.read(leader, 4096):
            text += part
    except OSError:  # how the end of a terminal is told
        pass
    os.close(leader)
    out, _ = process.communicate()
    assert (process.returncode, out) == (0, b"")
    states = re.findall(r"\d of 2 kernels compiled, \d+ s(?:, about \d+ s left)?", text.decode())
    # Seconds went by between two steps, however many.
    assert any(re.fullmatch(r"1 of 2 kernels compiled, [1-9]\d* s, about [1-9]\d* s left", state) for state in states)
    assert re.fullmatch(r"2 of 2 kernels compiled, [1-9]\d* s", states[-1])
