"""The epilogues that the GPU's tests draw, in PyTorch on the CPU: FP32 as a kernel computes them, against float64."""

import math
import re
from pathlib import Path

import pytest
import torch

import cutlass_ops as co
from cutlass_ops.epilogue.operations import OPS
from cutlass_ops.kinds.legality import check
from cutlass_ops.operand import reference
from tests.gpu import edges, language

ROOT = Path(__file__).parents[2]


@pytest.mark.sample(3)
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


# Those of the table of docs/epilogues.md.
POINTS = [float("nan"), -float("inf"), -3e38, -3.0, -0.0, 0.0, 1e-40, 3e38, float("inf")]
SIGNS = str.maketrans({"-": "−", **dict(zip("⁻⁰¹²³⁴⁵⁶⁷⁸⁹", "-0123456789", strict=True))})


def _number(text):
    """Read a number as the documentation writes it."""
    text = text.replace("−", "-").replace("∞", "inf")
    factor, ten, power = text.partition("10") if re.search("10[⁻⁰-⁹¹²³]", text) else (text, "", "")
    scale = 10.0 ** int(power.translate(SIGNS)) if ten else 1.0
    return float({"": "1", "-": "-1"}.get(factor.rstrip("·"), factor.rstrip("·"))) * scale


def test_special_values_are_those_of_the_documentation():
    text = (ROOT / "docs/epilogues.md").read_text(encoding="utf-8")
    section = text.partition("### Special values")[2].partition("###")[0]
    header, _, *rows = (line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("|"))
    assert [_number(x) for x in header[1:]] == pytest.approx(POINTS, nan_ok=True)
    assert {name.strip("`").removeprefix("co.e.") for name, *_ in rows} == {
        name
        for name, info in OPS.items()
        if info.arity == 1 and not info.typed and info.header.endswith(("functions.h", "normal.h")) and name != "gelu"
    }
    for name, *written in rows:

        @co.epilogue
        def applied(acc):
            return getattr(co.e, name.strip("`").removeprefix("co.e."))(acc)  # noqa: B023

        found = reference.evaluate(applied.graph, torch.tensor([POINTS]), {})["d"][0].tolist()
        wanted = list(map(_number, written))
        assert found == pytest.approx(wanted, rel=5e-3, abs=0, nan_ok=True), name
        signs = [math.copysign(1, x) for x, y in zip(found, wanted, strict=True) if y == 0]
        assert signs == [math.copysign(1, y) for y in wanted if y == 0], name


def test_all_of_these_kernels_are_legal():
    found = language.specs() | edges.functions_specs()
    assert {name: check(spec) for name, spec in found.items() if check(spec)} == {}
    assert sum(len(programs) for programs in language.drawn().values()) == language.DRAWN == 300
