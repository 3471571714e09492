import errno
import io
import re
import sys

import pytest

from cutlass_ops.base import terminal as progress_module
from cutlass_ops.base.terminal import progress


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


def test_a_terminal_without_rich_or_without_a_cursor_gets_lines(shown, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "rich.live", None)
        assert shown(Terminal(), "auto").count("cutlass_ops: ") == 3
    monkeypatch.setattr(progress_module, "_is_terminal", lambda _: False)
    assert shown(Terminal(), "auto").count("cutlass_ops: ") == 3


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
