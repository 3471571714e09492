"""Commands, options, files and numbers that documents name are those that there are."""

import json
import re
from pathlib import Path

import pytest
import typer.main
from fake_toolkit import sm80_spec
from signatures import H100, signature

from cutlass_ops.choose import policies
from cutlass_ops.choose.tables import Table
from cutlass_ops.ship import shipping
from cutlass_ops.tools import cli
from cutlass_ops.tools.cli import options

pytestmark = pytest.mark.usefixtures("session")

ROOT = Path(__file__).resolve().parents[2]
DEPLOYMENT = (ROOT / "docs" / "deployment.md").read_text()
DOCUMENTS = sorted(
    path
    for pattern in ("*.md", "docs/**/*.md", "examples/**/*.md", "examples/**/*.toml", ".ci/run")
    for path in ROOT.glob(pattern)
)
COMMANDS = typer.main.get_command(cli.app).commands

_USE = re.compile(r"(?:cutlass-ops|-m cutlass_ops) ([a-z]\w*)([^\n`&|;]*)")


def _block(language, number=0):
    return re.findall(rf"^```{language}\n(.*?)^```$", DEPLOYMENT, re.MULTILINE | re.DOTALL)[number]


def _options(command):
    return {name for parameter in COMMANDS[command].params for name in parameter.opts}


def test_documents_name_commands_and_options_that_there_are():
    uses = [(path.name, *use) for path in DOCUMENTS for use in _USE.findall(path.read_text())]
    assert len(uses) > 20
    assert [use for use in uses if use[1] not in COMMANDS] == []
    wrong = [
        (name, command, option)
        for name, command, rest in uses
        for option in re.findall(r"(?<!\S)--[a-z-]+", rest)
        if option not in _options(command)
    ]
    assert wrong == []


def test_every_command_is_in_the_table_with_its_own_options():
    section = DEPLOYMENT.partition("\n## Commands\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `([a-z]+)(.*?) \| (.*) \|$", section, re.MULTILINE)
    assert {command for command, _, _ in rows} == set(COMMANDS)
    for command, form, text in rows:
        assert set(re.findall(r"--[a-z-]+", form + text)) <= _options(command)
    assert all("--json" in _options(command) for command in COMMANDS)


def test_exit_codes_are_those_of_the_command_line():
    documented = {int(code) for code in re.findall(r"^\| (\d+) \|", DEPLOYMENT, re.MULTILINE)}
    assert documented == {0, 1, *options.EXIT_CODES.values(), options.WRONG_USAGE, options.INTERRUPTED}
    for code in documented:
        assert re.search(rf"\b{code} [a-z]", cli.__doc__)


def test_the_catalogues_are_read_as_they_stand_there(tmp_path):
    epilogue = "import cutlass_ops as co\n@co.epilogue\ndef swish_residual(acc, bias: co.Row, residual: co.Tile):\n"
    (tmp_path / "my_package").mkdir()
    (tmp_path / "my_package" / "epilogues.py").write_text(f"{epilogue}    return co.silu(acc + bias) + residual\n")
    (tmp_path / "exact.json").write_text(json.dumps(sm80_spec().to_json()))
    table = Table(H100.name, 132, signature(), kernels=policies.policy(signature(), H100).kernels[:1])
    (tmp_path / "tuned").mkdir()
    for name in re.findall(r'path = "(tuned/\S+)"', DEPLOYMENT):
        (tmp_path / name).write_text(json.dumps(table.to_json()))
    (tmp_path / "catalogue.toml").write_text(_block("toml"))
    found = shipping.load(str(tmp_path / "catalogue.toml"))
    assert (len(found.kernels), len(found.tuned), len(found.specs)) == (1, 1, 1)
    (tmp_path / "catalogue.py").write_text(_block("python"))
    found = shipping.load(str(tmp_path / "catalogue.py"))
    assert found.kernels[0].weights == ("6144x4096",)
