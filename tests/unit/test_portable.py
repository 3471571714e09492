"""Strings that name ops in programs: any name, and strings that are damaged."""

import contextlib
import json
import pickle
import random

import pytest
import torch

import cutlass_ops as co
from cutlass_ops.base.errors import CutlassOpsError
from cutlass_ops.epilogue import Epilogue, composed
from cutlass_ops.run import gated, gemm, kernels, norms, ops, portable

A, B, BIAS = torch.ones(2, 8).bfloat16(), torch.ones(8, 3).bfloat16(), torch.zeros(3)


@co.epilogue
def first(acc, bias: co.Row):
    return co.e.relu(acc * 0.1 + bias)


@co.epilogue
def several(acc, s: co.Scalar):
    return {"d": acc * s, "row": co.e.sum(acc, 1)}


NAMES = ["my name", "a;b", "a:b", "größe", "x {y", 'x {"epilogue":1}', "", "\udc80", "a%20b", "a\nb"]


@pytest.mark.parametrize("name", NAMES)
def test_ops_of_any_name_are_loaded_again(name):
    graph = co.epilogue(lambda acc: acc * 3 + len(name)).graph
    op = ops.op(Epilogue(name, "", graph))
    text = op.about.split(";", 4)[4]
    assert portable.find(text) is op
    again = portable._made.__wrapped__(text)
    assert (again.name, again.graph, again.about) == (name, graph, op.about)
    program = torch.fx.symbolic_trace(lambda a: op(a, B))
    assert torch.equal(pickle.loads(pickle.dumps(program))(A), op(A, B))


# ---- Damaged strings -------------------------------------------------------------------------------------------------

SPEC = co.KernelSpec(
    a="bf16.row", b="bf16.col", d="bf16.row", epilogue=first,
    config=co.Sm90Config(co.ThreadblockShape(64, 64, 64), schedule="pingpong"),
)  # fmt: skip
OBJECTS = [
    co.gemm_bias_relu, ops.op(first), ops.op(several).in_math("tf32"), norms.rmsnorm_op(first),
    gated.swiglu_op(None), gated.swiglu_op(composed.rms_norm), gated.swiglu_op(None, (True, True, False), "rows", True),
    gated.gated_op("gelu", biased=True), gemm.op_for(first, "grouped"), gemm.op_for(first, "masked", None, 64),
    gemm.op_for(None, "ragged_k"), gemm.op_for(None, "grouped").in_math("fast"), kernels.Kernel(SPEC, loaded=None),
]  # fmt: skip
STRINGS = [each.about.split(";", 4)[4] for each in OBJECTS]
VALUES = [None, True, 0, -1, 1e309, "", [], {}, "x", [[]], {"a": 1}, 10**30, "\ud800", 1.5, [None], ["d", 0], "acc"]


def places(x, at=()):
    yield at
    for key, value in x.items() if isinstance(x, dict) else enumerate(x) if isinstance(x, list) else ():
        yield from places(value, (*at, key))


def changed(text, rng):
    """Change, leave out, add or rename one value of a string's JSON."""
    name, _, whole = text.partition(" ")
    found = json.loads(whole)
    *path, last = rng.choice(list(places(found))[1:])
    within = found
    for key in path:
        within = within[key]
    match rng.randrange(4):
        case 0:
            within[last] = rng.choice(VALUES)
        case 1:
            del within[last]
        case 2:
            if isinstance(within, dict):
                within[rng.choice(["x", "math", "norm", ""])] = rng.choice(VALUES)
            else:
                within.append(rng.choice(VALUES))
        case 3:
            if isinstance(within, dict):
                within[f"{last}z"] = within.pop(last)
            else:
                within.insert(0, within[last])
    return f"{name} {json.dumps(found)}"


def mutated(text, rng):
    low, high = sorted((rng.randrange(len(text)), rng.randrange(len(text))))
    return rng.choice(
        [
            text[:low] + text[low + 1 :],
            text[:low] + rng.choice('{}[]":,0 -\\\xe9\x00%') + text[low:],
            text[:low],
            text[:low] + text[high:],
            *(changed(text, rng) for _ in range(4)),
        ]
    )


@pytest.mark.slow
def test_damaged_strings_are_refused_in_words(monkeypatch):
    monkeypatch.setattr(kernels, "build", lambda spec: OBJECTS[-1])  # compiles nothing
    rng, refused = random.Random(0), []
    for _ in range(2000):
        with contextlib.suppress(CutlassOpsError):
            refused.append(mutated(rng.choice(STRINGS), rng))
            portable.find(refused[-1])
            refused.pop()
    assert len(refused) > 1000


@pytest.mark.parametrize(
    "text",
    [
        "", " ", "x", "x ", "x {}", "x []", "x 1", 'x {"kernel":null}', 'x {"math":5}', 'x {"math":{"math":"tf32"}}',
        'x {"math":{"math":["tf32"],"epilogue":{}}}', 'x {"math":{"math":"tf64","epilogue":{}}}',
        'x {"gated":["add",false]}',
        'x {"gated":["gelu",1]}', 'x {"gemm_swiglu":{"norm":null,"scales":[1,2],"amax":false,"quantise":null}}',
        'x {"gemm_swiglu":{"norm":null,"scales":null,"amax":false,"quantise":"all"}}', 'x {"masked":["64",{}]}',
        'x {"epilogue":' + "[" * 100_000, 'x {"epilogue":' + '{"a":' * 100_000, 'x {"epilogue":' + "1" * 5000 + "}",
        "%ff {}", 'x {"epilogue":{"inputs":[],"nodes":[["acc",[],null]],"outputs":[["d",0,"tile",null]],"rounded":1}}',
    ],
)  # fmt: skip
def test_what_names_nothing_is_refused_in_words(text):
    with pytest.raises(CutlassOpsError):
        portable.find(text)


@pytest.mark.parametrize(
    ("tensors", "numbers", "places"),
    [([], [], []), ([BIAS, BIAS], [], []), ([BIAS], [1.0], [0]), ([BIAS], [1.0], []), ([], [1.0], [])],
)
def test_a_program_that_gives_other_inputs_is_refused_in_words(tensors, numbers, places):
    text = ops.op(first).about.split(";", 4)[4]
    operator, into = torch.ops.cutlass_ops.fused_gemm, torch.ops.cutlass_ops.fused_gemm_out
    for call in (
        lambda: operator(text, A, B, tensors, numbers, places, None),
        lambda: operator(text, A.clone().requires_grad_(), B, tensors, numbers, places, None),
        lambda: operator(text, A.to("meta"), B.to("meta"), [x.to("meta") for x in tensors], numbers, places, None),
        lambda: into(text, A, B, tensors, numbers, places, [A @ B]),
    ):
        with pytest.raises(
            co.errors.ConfigError, match=r"the program gives <op first\(a, b, bias\)> .* are \(bias\): export"
        ):
            call()


def test_a_program_that_gives_other_outputs_is_refused_in_words():
    text = ops.op(first).about.split(";", 4)[4]
    with pytest.raises(co.errors.ConfigError, match=r"<op first\(a, b, bias\)> 2 outputs, and it has d"):
        torch.ops.cutlass_ops.fused_gemm_out(text, A, B, [BIAS], [], [], [A @ B, A @ B])
