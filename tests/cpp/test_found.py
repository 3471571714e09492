"""What a program finds in a bundle, as Python finds it; no GPU is needed."""

import hashlib
import random
from pathlib import Path

import pytest

from cutlass_ops.artifacts.bundle import open_bundle

# To build the program takes fifteen seconds.
pytestmark = pytest.mark.slow
HERE = Path(__file__).resolve().parent


def test_sha256_of_every_length_around_blocks(probe, tmp_path):
    data = random.Random(0).randbytes(200)
    (tmp_path / "data").write_bytes(data)
    code, out = probe("hash", tmp_path / "data")
    assert code == 0
    assert out.split() == [hashlib.sha256(data[:size]).hexdigest() for size in range(201)]


PLACED = (
    "where(logical_and(le(sub(column_index, 3), row_index), logical_not(isnan(acc))), pow(acc, lambda_), "
    "uniform(seed, -9223372036854775808))"
)


def test_it_lists_what_is_there(probe, bundle, keys, contents):
    code, out = probe("list", bundle)
    assert code == 0
    assert out.splitlines() == [
        "d = relu(add(mul(acc, scale), bias)); top = max for each col of relu(add(mul(acc, scale), bias))",
        "a bf16.row",
        "b bf16.col",
        "out f16.row",
        "bias f32.row.align1",
        "scale f32.row.align1",
        "top f32.row.align1",
        *(f"{key} {config.default_target}" for config, key in keys.items()),
        "d = mul(sub(add(mul(swap_pairs(mul(acc, silu(gate))), 0x1.0000000000000p-2), cast(tile, bf16)), column), "
        "rsqrt(add(mean_square_of_a, 0x1.4f8b580000000p-17))); total = sum for each row of sub(add(mul("
        "swap_pairs(mul(acc, silu(gate))), 0x1.0000000000000p-2), cast(tile, bf16)), column)",
        "a f16.row.align2",
        "b f16.col",
        "out f32.row",
        "gate f16.col",
        "column f32.row.align1",
        "tile f32.row",
        "total f32.row.align1",
        *(f"{record.key} {record.spec.target}" for record in contents[0].groups[1].kernels),
        f"d = {PLACED}; at = argmax for each col of to_float(gt({PLACED}, 0x1.0000000000000p-1))",
        "a f16.row",
        "b f16.col",
        "out f16.row",
        "lambda_ f16.row",
        "seed i64.row.align1",
        "at i32.row.align1",
        *(f"{record.key} {record.spec.target}" for record in contents[0].groups[2].kernels),
        "d = acc",
        "a e4m3.row.blocks1x128",
        "b e5m2.col.blocks128x128",
        "out bf16.row",
        "scale_a f32.row.align1",
        "scale_b f32.row.align1",
        *(f"{record.key} {record.spec.target}" for record in contents[0].groups[3].kernels),
        "d = relu(acc); d_scale = scale of each 1x128 in e4m3 of relu(acc)",
        "a bf16.row",
        "b bf16.col",
        "out e4m3.row",
        "d_scale f32.row.align1",
        *(f"{record.key} {record.spec.target}" for record in contents[0].groups[4].kernels),
        "d = acc",
        "a e4m3.row.promoted",
        "b e5m2.col.promoted",
        "out f16.row",
        *(f"{record.key} {record.spec.target}" for record in contents[0].groups[5].kernels),
    ]


def test_choices_and_orders_are_python_s(probe, bundle, keys):
    signature = open_bundle(bundle).manifest.groups[0].signature
    rows = [1, 15, 16, 17, 64, 65, 512, 513, 1024, 1025, 10**6]
    for capability, n, k in (((9, 0), 256, 512), ((9, 0), 512, 256), ((8, 0), 256, 512)):
        choice = open_bundle(bundle).choice(signature, capability, n, k)
        wanted = [(keys[chosen.config], *chosen.order.numbers) for chosen in map(choice.at, rows)]
        code, out = probe("choose", bundle, *capability, n, k, *rows)
        assert code == 0
        assert [tuple(line.split()) for line in out.splitlines()] == [tuple(map(str, row)) for row in wanted]


def test_a_weight_that_was_not_named_and_a_device_without_kernels_are_said(probe, bundle):
    code, out = probe("choose", bundle, 9, 0, 1024, 512, 16)
    assert code == 1
    assert out.startswith("LoadError: the bundle's catalogue does not name the weight 1024x512 (N x K)")
    assert "it names 256x512 512x256." in out
    code, out = probe("choose", bundle, 8, 9, 256, 512, 16)
    assert code == 1
    assert "has no kernel of d = relu(add(mul(acc, scale), bias))" in out
    assert "for compute capability 8.9" in out


def test_signatures_are_found_by_epilogue_and_types(probe, bundle, keys):
    epilogue = "d = relu(add(mul(acc, scale), bias)); top = max for each col of relu(add(mul(acc, scale), bias))"
    key = next(iter(keys.values()))
    assert probe("find", bundle, epilogue, "bf16.row", "bf16.col") == (0, f"{key}\n")
    for words in (["d = relu(acc)"], [epilogue, "f16.row"]):
        code, out = probe("find", bundle, *words)
        assert code == 1
        assert out.startswith(f"LoadError: bundle {bundle} has no dense signature {words[0]}")
        assert f"\n  {epilogue} with a bf16.row, b bf16.col, out f16.row, bias f32.row.align1, scale" in out


def test_a_kernel_is_mapped_once(probe, bundle, keys):
    key = next(iter(keys.values()))
    assert probe("load", bundle, key[:9], key) == (0, "mapped\n" + 2 * "loaded, workspace 123145\n")


@pytest.mark.parametrize(("key", "found"), [("x", "no kernel"), ("", "10 kernels")])
def test_a_key_that_names_no_kernel_is_said(probe, bundle, key, found):
    code, out = probe("load", bundle, key)
    assert (code, out.splitlines()) == (
        1,
        [
            f'LoadError: bundle {bundle} has {found} whose key begins with "{key}": `cutlass-ops list --bundle` shows '
            "what is there"
        ],
    )
