"""``contract``."""

import json

import pytest

import cutlass_ops as co


def test_the_command_prints_what_the_function_returns(kit, run):
    code, out, _ = run("contract", "4096x4096x4096,4100", "--arch", "sm_90")
    found = [co.contract("bf16", "bf16", m=4096, n=4096, k=k, arch="sm_90") for k in (4096, 4100)]
    assert (code, out) == (1, "\n\n".join(map(str, found)) + "\n")
    code, out, _ = run("contract", "4096x4096x4096", "--json")
    assert (code, json.loads(out)) == (0, [found[0].to_json()])


def test_a_triton_kernel(kit, run):
    code, out, _ = run(
        *("contract", "4096x4096x4096", "--a", "f16", "--b", "f16", "--arch", "sm_90"),
        *("--block", "32x128x64", "--num-warps", "2", "--num-stages", "4"),
    )
    assert code == 1
    assert "runs      mma.sync m16n8k16 (HMMA in machine code), at most 63%" in out
    assert "-> num_warps=4" in out
    assert "-> BLOCK_M=64" in out


def test_wrong_values(kit, run):
    for option, value, says in (
        ("--arch", "sm_12", "architecture 'sm_12' is not known"),
        ("--a", "foo", "unknown dtype 'foo'"),
        ("--program", "nope", "use one of library, triton, wmma"),
        ("--precision", "nope", "use one of ieee, tf32, tf32x3"),
    ):
        code, _, err = run("contract", "4096x4096x4096", option, value)
        assert (code, f"'{option}': " in err, says in err) == (2, True, True)
    code, _, err = run("contract", "4096x4096", "--block", "128x128")
    assert code == 2


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("--num-warps 8", "--num-warps has no effect without --block"),
        ("--num-warps 4 --num-stages 2", "--num-warps and --num-stages have no effect without --block"),
        ("--block 64x64x64 --program wmma", "--block and the program wmma exclude each other"),
        ("--precision tf32", "precision 'tf32' has no effect on 'bf16.row'"),
        ("--precision tf32 --a f32 --b f16", "precision 'tf32' has no effect on 'f16'"),
        ("--precision ieee --a tf32 --b tf32", "precision 'ieee' contradicts 'tf32'"),
    ],
)
def test_an_option_without_effect_is_refused(kit, run, options, says):
    code, _, err = run("contract", "64x64x64", *options.split())
    assert (code, says in err) == (2, True), err
