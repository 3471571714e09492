"""Edits of machine code, without a compiler: what is found, what is written, what is planned and reported."""

import json
import struct

import pytest
from fake_toolkit import library
from signatures import H100

from cutlass_ops.artifacts import loader
from cutlass_ops.compilation import builder
from cutlass_ops.run import kernels
from tests.gpu import edits, perturb

NOP, BAR, EXIT = (0x7918, 0x000FC00000000000), (0x7B1D, 0x000FEC0000010000), (0x794D, 0x000FEA0003800000)
FLAGGED = (0x7210, 0x042FE200078E0000)  # keeps a register for the next instruction
TRY, BRANCH = (0xFF0075A7, 0x000E640008000144), (0xB8708947, 0x002FEA0003800000)
BACK = (0xF08947, 0x008FEA000383FFFF)
CODE = (FLAGGED, BAR, TRY, BRANCH, BAR, TRY, BACK, EXIT)


def built(*code, room=8):
    return library(more=b"".join(struct.pack("<QQ", *each) for each in (*code, *[NOP] * room)))


def changes(before, after):
    """Return the instructions that differ, by their distance from the first one."""
    first = before.find(struct.pack("<QQ", *CODE[0]))
    pairs = {at: (before[at : at + 16], after[at : at + 16]) for at in range(first % 16, len(before), 16)}
    return {(at - first) // 16: struct.unpack("<QQ", new) for at, (old, new) in pairs.items() if old != new}


def test_waits_and_their_branches_are_found():
    found = list(edits.sites(built(*CODE)))
    assert [(site.name, (site.at - site.start) // 16) for site in found] == [
        ("BAR", 1), ("SYNCS", 2), ("branch", 3), ("BAR", 4), ("SYNCS", 5),
    ]  # fmt: skip
    assert {(site.room - site.start) // 16 for site in found} == {len(CODE)}
    assert list(edits.sites(built(*CODE, room=4))) == []


def test_a_delay_moves_one_instruction_and_clears_flags_before_it():
    before = built(*CODE)
    site = next(edits.sites(before))
    found = changes(before, edits.delayed(before, site, 0xFFF))
    end = len(CODE)
    assert list(found) == [0, 1, *range(end, end + 5)]
    assert found[0] == (FLAGGED[0], FLAGGED[1] & ~(0xF << 58))
    assert found[end + 3] == BAR
    assert [hex(found[at][0] & 0xFFF) for at in (1, *range(end, end + 5))] == [
        "0x947", "0x9c3", "0x892", "0xd5d", "0xb1d", "0x947",
    ]  # fmt: skip
    assert found[end + 1][0] >> 32 == 0xFFF


def test_what_is_taken_away_leaves_its_scoreboards():
    before = built(*CODE)
    site = next(site for site in edits.sites(before) if site.name == "branch")
    assert changes(before, edits.without(before, site)) == {3: (0x7918, BRANCH[1] >> 41 << 41)}


def test_code_that_is_there_twice_is_refused():
    with pytest.raises(ValueError, match="the same code"):
        list(edits.sites(built(*CODE) * 2))


# ---- What is tried ---------------------------------------------------------------------------------------------------


def test_delays_are_of_each_name_and_planted_waits_have_some_around_them():
    code = built(*[BAR, TRY, BRANCH] * 12, EXIT)
    plain = list(perturb.planned(code, plant=False))
    assert plain[0] == (None, None, 0)
    assert [site.name for _, site, _ in plain[1::2]] == ["BAR"] * 4 + ["SYNCS"] * 4
    planted = list(perturb.planned(code, plant=True))
    waits = [wait for wait, site, _ in planted if site is None]
    assert [wait.name for wait in waits] == ["BAR"] * 3 + ["branch"] * 3
    assert all(wait.at != site.at and site.name != "branch" for wait, site, _ in planted if site is not None)
    assert edits.without(code, waits[0]) == perturb.edited(code, waits[0], None, 0)
    assert len({perturb.edited(code, *step) for step in planted}) == len(planted)


class Kernel:
    """Computes as PyTorch does, and a race shows if the edited code says so."""

    racy = staticmethod(lambda library: False)

    def __init__(self, spec, library):
        self.library = library

    def __call__(self, a, b, out=None, **_):
        out.copy_((a.float() @ b.float()).to(out.dtype))
        if self.racy(self.library):
            out[3, 5] = 0.5
        return out


@pytest.fixture
def family(monkeypatch):
    """A family whose kernel is made up, and runs in this process on the CPU."""
    family = perturb.exact.BACKWARD[4]
    assert family.name == "of B"
    code = built(*CODE)
    artifact = type("Artifact", (), {"key": "k", "read_library": lambda self: code})()
    usual = perturb.problems
    monkeypatch.setattr(builder, "build_many", lambda specs: [artifact for _ in specs])
    monkeypatch.setattr(loader, "load", lambda library: library)
    monkeypatch.setattr(kernels, "Kernel", Kernel)
    monkeypatch.setattr(edits, "written", lambda artifact, library, folder: library)
    monkeypatch.setattr(perturb, "gpu", lambda: H100)
    monkeypatch.setattr(perturb, "problems", lambda family, _: usual(family, "cpu")[1:])
    monkeypatch.setattr(perturb, "FAMILIES", [family])
    monkeypatch.setattr(perturb.faulthandler, "dump_traceback_later", lambda *_, **__: None)
    return family, code


def lines_of(capsys):
    return list(perturb.last(capsys.readouterr().out).values())


@pytest.mark.usefixtures("session")
def test_a_race_that_only_delays_show_is_found(family, capsys, monkeypatch):
    """Without the second BAR, results are wrong if something is delayed; without the first one, they are right."""
    family, code = family
    bars = [site for site in edits.sites(code) if site.name == "BAR"]
    branch = next(site for site in edits.sites(code) if site.name == "branch")

    def racy(library):
        is_nop = {site: library[site.at : site.at + 2] == b"\x18\x79" for site in (*bars, branch)}
        return is_nop[branch] or (is_nop[bars[1]] and library[bars[1].room : bars[1].room + 2] == b"\xc3\x79")

    monkeypatch.setattr(Kernel, "racy", staticmethod(racy))
    perturb.run(family.name, 0, 0, plant=False, seconds=60)
    plain = lines_of(capsys)
    assert len(plain) > 5
    assert not any(line["why"] for line in plain)
    assert perturb.report(plain) == 0
    capsys.readouterr()
    perturb.run(family.name, 0, 0, plant=True, seconds=60)
    planted = lines_of(capsys)
    assert perturb.report(planted) == 0
    said = capsys.readouterr().out
    assert "without BAR at 0x10: never wrong" in said
    assert "without BAR at 0x40: found by delays of {" in said
    assert "without branch at 0x30: wrong at once" in said
    assert not any(line["without"] and line["without"][0] == "branch" and line["delayed"] for line in planted)


@pytest.mark.usefixtures("session")
def test_a_process_that_ended_is_kept_and_the_next_one_goes_on(family, capsys, monkeypatch, tmp_path):
    family, _ = family
    state = tmp_path / "perturb.jsonl"
    skipped = []

    def piece(name, number, first, *, plant, seconds):
        skipped.append(first)
        line = {"family": name, "number": number, "slug": "s", "plant": plant, "without": None, "most": 1}
        ended = {**line, "at": first, "delayed": ["BAR", "0x10"], "why": perturb._ENDED}
        return [ended] if first == 0 else [{**ended, "why": None}]

    monkeypatch.setattr(perturb, "piece", piece)
    monkeypatch.setattr(perturb, "about", lambda: {"commit": "c", "chip": "a GPU"})
    monkeypatch.setattr("sys.argv", ["perturb", "--state", str(state), "--kernels", "1"])
    assert perturb.main() == 1
    assert skipped == [0, 1]
    assert [json.loads(line)["at"] for line in state.read_text().splitlines()] == [0, 1]
    assert "BAR" in capsys.readouterr().out
    monkeypatch.setattr("sys.argv", ["perturb", "--state", str(state), "--report"])
    assert perturb.main() == 1
