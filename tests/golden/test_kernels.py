"""Templates and lowering render kernels as they did: of each kind, form of operand and way of an epilogue."""

import pytest

import cutlass_ops as co
from cutlass_ops.kinds.table import shared_memory
from tests.golden import kernels

# Bytes that a thread block takes. Tests that compile find the same in machine code.
SHARED_MEMORY = {
    "gemv": 0,
    "pointwise": 16384,
    "sm80_fp64_share_k": 49152,
    "sm80_layernorm": 49152,
    "sm80_pairs": 49152,
    "sm80_places_and_reductions": 49152,
    "sm90_batched": 214016,
    "sm90_fp8_gate_quantised": 213760,
    "sm90_fp8_tile_by_threads": 207872,
    "sm90_further_tile": 213504,
    "sm90_grouped_fp8_blocks": 227328,
    "sm90_means_ahead": 205824,
    "sm90_misaligned_tiles": 205824,
    "sm90_normed_gate_beside": 219136,
    "sm90_realigned_pairs": 214016,
    "sm90_reductions": 229888,
    "sm90_reductions_of_several_values": 220160,
    "sm90_tf32_copied_along_k": 215040,
    "small_batched": 36352,
}


@pytest.mark.parametrize("path", kernels.paths(), ids=lambda path: path.stem)
def test_a_kernel_is_rendered_as_it_was(path):
    rendered = co.source(kernels.declaration(path))
    assert rendered.splitlines() == path.read_text().splitlines(), "run python -m tests.golden.kernels, and look"


def test_the_kept_kernels_are_of_every_kind():
    kinds = {type(kernels.declaration(path).config).__name__ for path in kernels.paths()}
    assert kinds == {"Sm90Config", "Sm80Config", "GemvConfig", "SmallConfig", "PointwiseConfig"}


@pytest.mark.parametrize("path", kernels.paths(), ids=lambda path: path.stem)
def test_a_kernel_takes_as_much_shared_memory_as_it_did(path):
    assert shared_memory(kernels.declaration(path)) == SHARED_MEMORY[path.stem]
