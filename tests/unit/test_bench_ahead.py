"""The benchmarks compile what their cases need before the first of them, all kernels together."""

from itertools import product

import pytest

from cutlass_ops.kinds import legality
from tests.scripts import script
from tests.unit.signatures import H100

FP8, QUANTIZE, BATCHED, GROUPED = map(script, ("bench_fp8", "bench_quantize", "bench_batched", "bench_grouped"))
GROUPS = [(GROUPED.Case(8, 64, "zipf"), "none"), (GROUPED.Case(64, 8192, "zipf"), "none")]
CALLS = {
    "fp8": (FP8, [("rows", "fast", (16, 6144, 4096)), ("blocks", "promoted", (4096, 6144, 4096))]),
    "quantize": (QUANTIZE, [("fast", 64, 1024, 512), ("promoted", 64, 1024, 512)], 1),
    "batched": (BATCHED, [*product(("small", "large"), BATCHED.EPILOGUES)]),
    **{f"grouped {form}": (GROUPED, GROUPS, form) for form in ("rows", "wgrad", "fp8", "promoted")},
}


@pytest.mark.usefixtures("session")
@pytest.mark.parametrize("name", CALLS)
def test_kernels_are_compiled_before_the_first_case(monkeypatch, name):
    bench, *arguments = CALLS[name]
    compiled = []
    for module in (bench, bench.harness):
        monkeypatch.setattr(module, "device_of", lambda _: H100, raising=False)
        monkeypatch.setattr(module, "build_many", compiled.extend, raising=False)
    bench.build_ahead(*arguments)
    assert len(compiled) == len(set(compiled)) >= 2
    for spec in compiled:
        assert legality.check(spec) == ()
