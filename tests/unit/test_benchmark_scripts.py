"""Each script of benchmarks/ starts with this library, and documents say what the committed results say."""

import re
import sys

import pytest

from cutlass_ops.choose import dispatch, policies, space
from cutlass_ops.declare.gpus import gpu_named
from cutlass_ops.kinds.table import kind_of
from tests.scripts import BENCHMARKS, script

pytest.importorskip("tomllib", reason="the reports need Python 3.11")

ROOT = BENCHMARKS.parent
RESULTS = BENCHMARKS / "results"
SCRIPTS = sorted(path.stem for path in BENCHMARKS.glob("*.py"))
# Scripts whose dependencies the tests do not install.
NEEDS = {"contract_triton": "triton", "bench_fleet": "moto", "bench_fp8_layer": "transformers"}
NEEDS |= dict.fromkeys(("bench_layer", "bench_moe", "gates", "profile_layer"), "transformers")


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_prints_its_help(name, monkeypatch, capsys):
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
    monkeypatch.setattr(sys, "path", list(sys.path))  # some scripts add the examples' folder
    module = script(name)
    text = (BENCHMARKS / f"{name}.py").read_text()
    if "ArgumentParser" not in text or "\n    main()\n" not in text:
        return  # a module of other scripts, or one without options
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit) as ended:
        module.main()
    assert ended.value.code == 0
    assert "usage:" in capsys.readouterr().out


# Each script that writes a document, and a function from its module to paths and what they should hold.
WRITTEN = {
    "types_contract": lambda contract: [(contract.DOCUMENT, contract.written())],
    **dict.fromkeys(
        ("accuracy_fp8", "accuracy_types", "bench_instructions"),
        lambda module: [(ROOT / module.REPORT.document, module.REPORT.written())],
    ),
}


@pytest.mark.parametrize("name", [pytest.param("types_contract", marks=pytest.mark.slow), *list(WRITTEN)[1:]])
def test_a_document_is_what_its_script_writes(name):
    for path, text in WRITTEN[name](script(name)):
        assert path.read_text() == text, f"run python benchmarks/{name}.py, with --write where it has that option"


def test_jobs_of_the_campaign_name_scripts_of_this_repository():
    campaign = script("campaign")
    for job in campaign.jobs(campaign.PLAN):
        for path in re.findall(r"\S+\.py\b", job.command):
            assert (ROOT / path).exists(), job.name


@pytest.mark.slow
def test_what_a_call_takes_races_the_first_of_the_space():
    regret = script("regret")
    h200, (problem, *others) = gpu_named("H200"), regret.drawn(7, 5)
    assert len({problem, *others}) == 5
    for family, signature_of in regret.FAMILIES.items():
        signature = signature_of(problem, h200)
        chosen, raced = regret.entrants(signature, problem, 12, (), h200)
        assert chosen.config == dispatch.decide(signature, h200, problem).config, family
        assert next(iter(raced)) == chosen
        assert len(raced) in (12, 13), family
        every = policies.policy(signature, h200).with_further(space.usual(signature, h200).configs).every(problem)
        general = [c.config for c in every if kind_of(c.config).general]
        assert {each.config for each in raced} == {chosen.config, *general[:12]}, family
        assert all(0 < us < float("inf") for us in raced.values())
