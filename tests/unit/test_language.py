"""The epilogues that the GPU's tests draw, in PyTorch on the CPU: FP32 as a kernel computes them, against float64."""

import pytest
import torch

from cutlass_ops.kinds.legality import check
from cutlass_ops.run import reference
from tests.gpu import edges, language


@pytest.mark.parametrize("name", list(language.drawn()))
def test_drawn_epilogues_against_float64(name):
    graph, programs = language.drawn_specs()[name].epilogue, language.drawn()[name]
    m, n = 13, 68
    generator = torch.Generator().manual_seed(0)
    acc = torch.randint(-20, 21, (m, n), generator=generator).float()
    draw = {"bias": (n,), "scale": (m,), "residual": (m, n)}
    inputs = {key: torch.randn(shape, generator=generator).bfloat16() for key, shape in draw.items()}
    found = reference.evaluate(graph, acc, inputs | {"gate": 0.625})
    leaves = {key: x.double() for key, x in inputs.items()} | {"acc": acc.double()}
    leaves |= {"scale": leaves["scale"][:, None], "gate": torch.tensor(0.625, dtype=torch.float64)}
    for at, program in enumerate(programs):
        exact = language.value_of(program, leaves, (m, n)).double().expand(m, n)
        value = found[f"v{at}"].double()
        assert ((value - exact).abs() <= 2e-5 * (exact.abs() + 1 + acc.abs())).all(), program.steps


@pytest.mark.parametrize("group", list(edges.function_groups()))
def test_functions_of_special_values(group):
    graph = edges.functions_specs()[group].epilogue
    special = [0.0, -0.0, float("nan"), float("inf"), -float("inf"), 3.4e38, -3.4e38, 1e-40, -1e-40, 1e-45, 0.5, -0.5]
    special += [1.5, -1.5, 2.5, -2.5, 20.0, 20.5, 88.8, -104.0, 128.0, -150.0, 8388609.0, -8388607.5, 1.0, -1.0]
    value = torch.tensor([special])
    found = reference.evaluate(graph, torch.zeros_like(value), {"value": value})
    for name in edges.function_groups()[group]:
        if name == "gelu":
            continue  # on the CPU PyTorch's is NaN at infinity; see test_reference.py
        own = edges.FUNCTIONS[name][1](value)
        torch.testing.assert_close(found[name], own, rtol=2e-6, atol=1e-6, equal_nan=True, msg=name)
        if name not in edges.EITHER_ZERO:
            zero = own == 0
            assert torch.equal(found[name][zero].signbit(), own[zero].signbit()), name


def test_all_of_these_kernels_are_legal():
    found = language.specs() | edges.functions_specs()
    assert {name: check(spec) for name, spec in found.items() if check(spec)} == {}
    assert sum(len(programs) for programs in language.drawn().values()) == language.DRAWN == 300
