"""Pools of kernels: near enough to the tables everywhere, and as few as that takes."""

import itertools
import json
import zipfile
from pathlib import Path

import numpy as np
import pytest
from fake_toolkit import HGMMA, HMMA, UTMALDG, library
from signatures import A100, signature

from cutlass_ops.artifacts import installed
from cutlass_ops.artifacts.bundle import open_bundle
from cutlass_ops.base import resources
from cutlass_ops.choose import policies, tables
from cutlass_ops.declare.signature import OpSignature
from cutlass_ops.ship import distributing, pools

TABLES = [tables.load_ours(path) for path in sorted(resources.tuned().glob("*.json"))]
pytestmark = pytest.mark.usefixtures("session")


@pytest.fixture(scope="module")
def parts():
    return {(part.op, part.dtype): part for part in distributing.parts("sm_90a")}


# ---- Cover ---------------------------------------------------------------------------------------------------------


def test_each_problem_has_a_kernel_and_none_is_needless():
    near = np.array([[1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 0, 1], [0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]], bool)
    # The first helps most, and is needless beside those that must come after it.
    assert pools.cover(near) == [1, 2, 3]
    assert pools.cover(near, most=2) == [0, 1]


# ---- By the tables -------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_no_problem_of_a_table_is_further_behind_than_three_percent(parts):
    """By the numbers of the files, and not by what the choice was made of."""
    checked = 0
    for part, table in ((p, t) for p in parts.values() for t in TABLES if t.signature == p.pool.signature):
        checked += 1
        for point in table.points:
            fastest = min(m.behind for m in point.measured)
            reached = min((m.behind for m in point.measured if m.config in part.pool.kernels), default=np.inf)
            assert (1 + reached) / (1 + fastest) <= 1.03 + 1e-9, (part.op, point.problem)
    assert checked >= 10


@pytest.mark.slow
def test_every_op_and_dtype_is_there_and_within_the_limit(parts):
    assert set(parts) == set(itertools.product(distributing.OPS, distributing.DTYPES))
    for part in parts.values():
        assert part.pool.beyond == 0
        assert part.pool.worst <= 0.03 + 1e-9
        assert part.pool.measured == part.pool.problems > 1000  # on both devices
        assert {spec.target for spec in part.specs} <= {"sm_90a", "sm_90"}
        assert {OpSignature.of(spec) for spec in part.specs} == {part.pool.signature}


def test_a_target_without_tables_has_what_the_model_finds_fastest():
    found = pools.pool(signature(), [A100], 0.03)
    assert found.measured == 0
    problems = [point.problem for point in policies.reference().points]
    assert found.problems == len(problems)
    policy = policies.policy(signature(), A100)
    times = policy.expected(problems).times
    mine = times[:, [policy.kernels.index(c) for c in found.kernels]].min(1)
    assert (mine <= times.min(1) * (1.03 + 1e-9)).all()


# ---- Choices -------------------------------------------------------------------------------------------------------


# ---- The command ---------------------------------------------------------------------------------------------------

SOME = ("--op", "gemm", "--op", "gemm_bias", "--dtype", "bf16", "--json")


@pytest.mark.slow
def test_a_distribution_is_built_in_parts_and_twice_the_same(kit, run, tmp_path):
    kit.makes(library(HMMA))
    code, out, _ = run("distribution", "sm_80", *SOME, "--plan")
    planned = json.loads(out)
    count = planned["kernels"]
    assert (code, planned["missing"], planned["wheel"], planned["expected_bytes"]) == (0, count, None, None)
    assert not (tmp_path / "a").exists()

    code, out, _ = run("distribution", "sm_80", *SOME, "--out", tmp_path / "a", "--only", 3)
    assert (json.loads(out)["missing"], json.loads(out)["wheel"], kit.compilations) == (count - 3, None, 3)
    assert json.loads(out)["expected_bytes"] > 0
    wheels = []
    for folder in "ab":
        code, out, _ = run("distribution", "sm_80", *SOME, "--out", tmp_path / folder)
        assert code == 0
        wheels.append(json.loads(out)["wheel"])
        assert kit.compilations == count
    first, second = (Path(wheel).read_bytes() for wheel in wheels)
    assert first == second
    assert wheels[0].endswith(f"/cutlass_ops_kernels_sm80-{resources.library_version()}-py3-none-linux_x86_64.whl")
    with zipfile.ZipFile(wheels[0]) as archive:
        names = [name for name in archive.namelist() if name.endswith(".bundle")]
        archive.extractall(tmp_path / "site")
    expected = {
        installed.file_name(part.pool.signature)
        for part in distributing.parts("sm_80", ["gemm", "gemm_bias"], ["bf16"])
    }
    assert {name.rpartition("/")[2] for name in names} == expected
    for name in names:
        found = open_bundle(tmp_path / "site" / name)
        assert len(found.manifest.groups) == 1
        assert found.manifest.groups[0].choices


def test_a_distribution_may_be_signed_and_has_few_kernels_if_asked(kit, run, tmp_path):
    from bundles import write_keys
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    kit.makes(library(HGMMA, UTMALDG))
    private, public = write_keys(tmp_path, "mine", Ed25519PrivateKey.generate())
    arguments = ("--op", "gemm_bias_relu", "--dtype", "f16", "--most", 2, "--sign", private, "--version", "0.1.0.post2")
    code, out, _ = run("distribution", "sm_90a", *arguments, "--out", tmp_path)
    assert code == 0, out
    assert "cutlass_ops_kernels_sm90a-0.1.0.post2-py3-none-linux_x86_64.whl: 2 kernels" in out
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".bundle"))
        archive.extract(name, tmp_path)
    assert open_bundle(tmp_path / name, public).signed_by == public


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (("sm_70",), 2, "'sm_70' is not an architecture: use sm_80"),
        (("sm_80", "--op", "gemm_tanh"), 2, "'gemm_tanh' is not an op of distributions: use gemm"),
        (("sm_80", "--dtype", "f128"), 2, "f128"),
        (("sm_80", "--dtype", "f64", "--plan"), 2, "rmsnorm_gemm does not take f64: use bf16 or f16. Name ops that"),
        (("sm_80", "--op", "gemm", "--dtype", "e4m3", "--plan"), 2, "no kernel serves gemm in e4m3 on NVIDIA A100"),
        (("sm_80", "--op", "gemm_swiglu", "--dtype", "e4m3", "--plan"), 2, "no kernel serves gemm_swiglu in e4m3"),
        (("sm_80", "--plan", "--only", "3"), 2, "exclude each other"),
    ],
)
def test_wrong_usage(kit, run, arguments, code, says):
    found, out, err = run("distribution", *arguments)
    assert (found, says in out + err) == (code, True), out + err
