"""The configurations that cuBLAS's kernels are raced against, by these kernels' names."""

import pytest
from signatures import H100

from cutlass_ops.choose import dispatch, policies, tables
from cutlass_ops.declare.problem import Problem
from cutlass_ops.tuner import tuning
from tests.scripts import script

RACE = script("race_twins")


def slugs(name):
    return {c.slug for c in RACE.twins(name)}


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        (
            "nvjet_sm90_tst_128x216_64x4_2x1_v_bz_coopA_relubias_TNT",
            {"sm90_128x216x64_2x1_coop_swap"},
        ),
        (
            "nvjet_sm90_hsh_192x88_64x6_2x1_v_bz_relubias_TNT",
            {"sm90_192x88x64_2x1_pp_swap"},
        ),
        (
            "nvjet_sm90_tst_256x128_64x4_2x1_v_bz_coopA_TNN",
            {"sm90_256x128x64_2x1_coop_swap", "sm90_128x256x64_1x2_coop"},
        ),
        (
            "nvjet_sm90_tst_64x120_64x9_4x1_v_bz_relubias_TNT",
            {"sm90_64x120x64_4x1_pp_swap", "sm90_64x120x64_4x1_ws_swap"},
        ),
        (
            "nvjet_sm90_tst_64x72_64x12_1x4_h_bz_TNT",
            {f"sm90_64x72x{k}_1x4_{schedule}_swap" for k in (64, 128) for schedule in ("pp", "ws")},
        ),
    ],
)
def test_the_tile_the_clusters_and_the_schedule_are_in_the_name(name, wanted):
    assert slugs(name) == wanted


@pytest.mark.parametrize(
    "name",
    [
        "nvjet_sm90_tst_64x8_64x16_4x1_v_bz_splitK_TNT",
        "sm80_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize64x64x64",
        "void at::native::vectorized_elementwise_kernel<8>",
        "nvjet_sm90_tst_384x96_64x3_2x1_v_bz_coopA_TNT",
    ],
)
def test_what_the_space_does_not_have_or_a_name_does_not_say_has_no_twin(name):
    assert not slugs(name)


def config(n):
    return next(c for c in RACE.twins(f"nvjet_sm90_tst_128x{n}_64x4_1x1_v_bz_TNT") if c.swap_ab)


def entry(at, usual, twins, raced=False):
    return RACE.Entry(Problem(at, at, at), tuple(usual), tuple(twins), raced)


def test_kernels_that_no_table_has_are_those_that_are_twins_most_often():
    known, rare, often = map(config, (128, 136, 144))
    found = [entry(at, [known], [often]) for at in (1, 2, 3)] + [entry(4, [known], [rare, often])]
    assert [e.twins for e in RACE.limited(found, [known], 1)] == [(often,)] * 4
    assert RACE.limited(found, [known], 2)[3].twins == (rare, often)
    assert RACE.limited(found, [known, rare], 0)[3].twins == (rare,)


def test_kernels_that_have_raced_do_not_race_again_alone():
    raced, new = (entry(3, [config(96), config(104)], [config(144)], raced) for raced in (True, False))
    assert RACE.limited([raced], raced.usual, 0) == []
    assert RACE.limited([raced], raced.usual, 1) == [raced]
    assert [e.twins for e in RACE.limited([new], new.usual, 0)] == [()]


def test_a_new_problem_has_the_first_by_the_model_and_what_is_chosen():
    graph = RACE.BENCHMARKS["bias_relu"].op.graph
    signature = tuning.signature_at(graph, Problem(1024, 1024, 1024), "bf16", "row", "col", None, H100)
    policy = policies.policy(signature, H100)
    new, known = Problem(418, 4864, 11776), RACE.near(policy.own.points)[0]
    found, tabled = RACE.entries(policy, dict.fromkeys((new, known), "nvjet_sm90_tst_192x88_64x6_2x1_v_bz_TNT"), 3)
    assert found.usual[0] == dispatch.choose(signature, H100, new)[0].config
    assert {c.config for c in policy.ranked(new)[:1]} <= {*found.usual}
    assert len(found.usual) in (3, 4)
    assert [c.slug for c in found.twins] == ["sm90_192x88x64_2x1_pp_swap"]
    assert (found.raced, tabled.raced) == (False, True)
    raced = {m.config for p in policy.own.points if p.problem == known for m in p.measured}
    assert not raced & {*tabled.twins}


def test_a_line_says_what_came_out():
    times = (tables.Measured(config(136), 9.0, 0.0), tables.Measured(config(128), 10.0, 0.0))
    point = tables.Point(Problem(3, 3, 3), "2026-11-25", times, (("cublaslt", 9.5),))
    said = RACE.line(entry(3, [config(128)], [config(136)]), "nvjet_sm90_tst_128x136_64x4_1x1_v_bz_TNT", point)
    ours = config(136).slug
    assert said.startswith("3x3x3: nvjet_sm90_tst_128x136_64x4_1x1_v_bz_TNT; cublaslt 9.5 us, ")
    assert said.endswith(f"chosen 10.0 us {config(128).slug}, twin 9.0 us {ours}, best 9.0 us {ours}")


def test_problems_race_again_where_a_peer_is_close_and_nothing_is_reported():
    def point(problem, peer):
        return tables.Point(
            Problem(*problem), "2026-11-25", (tables.Measured(config(128), 10.0, 0.0),), (("cublaslt", peer),)
        )

    reported = (RACE.shapes.GRID[-1], RACE.shapes.UNSEEN[-1], RACE.shapes.LAST[-1])
    points = [point((100, 1024, 1024), 10.2), point((100, 2048, 1024), 10.4), point((100, 4096, 1024), 9.0)]
    near = RACE.near([*points, *(point(problem, 9.0) for problem in reported)])
    assert near == [Problem(100, 1024, 1024), Problem(100, 4096, 1024)]
