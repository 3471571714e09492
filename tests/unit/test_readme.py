"""README.md, as far as it can be tested without installing anything; CI runs its two commands as they stand there."""

import math
import re
from pathlib import Path

import pytest

import cutlass_ops as co
from cutlass_ops.base import env, errors
from cutlass_ops.run import named

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
USAGE = (ROOT / "docs/usage.md").read_text()
ERRORS = (ROOT / "docs/errors.md").read_text()


def _blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def test_it_opens_with_two_commands():
    commands = _blocks("sh")
    assert len(commands) == 2
    assert all(len(command.splitlines()) == 1 for command in commands)
    assert README.index(commands[1]) < README.index("\n## ")
    assert commands[0].endswith("python examples/quickstart.py\n")
    assert commands[1].endswith("&& pytest -n 2 --dist worksteal\n")


def test_it_says_how_long_the_tests_take_and_which_are_quick():
    contributing = (ROOT / "CONTRIBUTING.md").read_text()
    (seconds,) = re.findall(r"^\| tests \| \d+ \| (\d+) \|$", contributing, re.MULTILINE)
    (quick,) = re.findall(r"(\d+) seconds for [\d,]+ quick tests", contributing)
    after = README[README.index(_blocks("sh")[1]) : README.index("\n## ")]
    minutes = [math.ceil(int(found) / 60) for found in (seconds, quick)]
    assert [int(found) for found in re.findall(r"about (\d+)", after)] == minutes
    (command,) = re.findall(r"`(pytest .*?)`", after)
    assert f"the quick tests: no compiler, no GPU, a sample of similar cases | `{command}` |" in contributing


def test_the_commands_name_what_is_there():
    project = (ROOT / "pyproject.toml").read_text()
    for command in _blocks("sh"):
        for extra in re.search(r'"\.\[(.*?)\]"', command)[1].split(","):
            assert f"\n{extra} = [" in project
        for script in re.findall(r"python (\S+\.py)", command):
            assert (ROOT / script).is_file()


def test_five_minutes_are_enough():
    assert len(README.splitlines()) <= 120


def test_it_names_every_op():
    assert [op.name for op in named.NAMED if f"`{op.name}`" not in README] == []


def test_every_error_is_documented():
    ours = [e for e in vars(errors).values() if isinstance(e, type) and e is not co.CutlassOpsError]
    assert [e.__name__ for e in ours if f"`{e.__name__}`" not in ERRORS] == []


@pytest.mark.parametrize("name", sorted(set(re.findall(r"CUTLASS_OPS_\w+", README + USAGE))))
def test_variables_exist(name):
    assert name in {variable.name for variable in env.VARIABLES}
