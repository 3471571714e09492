"""Declarations as values: equality, JSON both ways, names, and what untrusted JSON can do."""

import copy
import json
import pickle
import re
from dataclasses import fields, replace
from typing import get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import cutlass_ops as co
from cutlass_ops.base import arch
from cutlass_ops.base.dtypes import bf16, f16, f32
from cutlass_ops.base.errors import ConfigError
from cutlass_ops.declare.config import (
    ClusterShape,
    InstructionShape,
    Means,
    ThreadblockShape,
    WarpShape,
    config_from_json,
    config_to_json,
)
from cutlass_ops.declare.order import SWIZZLES, Raster, TileOrder
from cutlass_ops.declare.spec import KernelSpec, Operand
from cutlass_ops.epilogue.graph import MAX_TITLE
from cutlass_ops.kinds.gemv.config import GemvConfig
from cutlass_ops.kinds.legality import check
from cutlass_ops.kinds.sm80.config import Sm80Config
from cutlass_ops.kinds.sm90.config import Sm90Config
from cutlass_ops.kinds.small.config import SmallConfig
from tests.strategies import PATIENT, epilogues

SIDES = st.sampled_from((1, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384))


def shapes(cls):
    return st.builds(cls, *(SIDES for _ in fields(cls)))


SM80 = st.builds(
    Sm80Config,
    threadblock=shapes(ThreadblockShape),
    warp=shapes(WarpShape),
    instruction=st.sampled_from((InstructionShape(16, 8, 16), InstructionShape(16, 8, 8), InstructionShape(8, 8, 4))),
    stages=st.integers(0, 12),
    stream_k=st.booleans(),
)
SM90 = st.builds(
    Sm90Config,
    threadblock=shapes(ThreadblockShape),
    cluster=st.builds(ClusterShape, st.integers(1, 8), st.integers(1, 8)),
    schedule=st.sampled_from(("pingpong", "cooperative", "warp_specialized")),
    scheduler=st.sampled_from(("persistent", "stream_k")),
    stages=st.none() | st.integers(0, 12),
    swap_ab=st.booleans(),
    split_k=st.sampled_from((1, 2, 4)),
    resident=st.sampled_from((1, 2)),
    means=st.sampled_from(get_args(Means)),
)
CONFIGS = SM80 | SM90
OPERANDS = st.builds(
    lambda t, major, alignment: f"{t}.{major}" + (f".align{alignment}" if alignment else ""),
    st.sampled_from(("f16", "bf16", "f32")),
    st.sampled_from(("row", "col")),
    st.sampled_from((None, 1, 2, 4)),
)


@st.composite
def specs(draw):
    epilogue = draw(epilogues(max_steps=4))
    inputs = {i.name: draw(OPERANDS) for i in epilogue.graph.inputs if draw(st.booleans())}
    further = [o for o in epilogue.graph.outputs[1:] if draw(st.booleans())]
    outputs = {o.name: "i32" if o.reduce in ("argmax", "argmin") else draw(OPERANDS) for o in further}
    return KernelSpec(
        a=draw(OPERANDS),
        b=draw(OPERANDS),
        d=draw(OPERANDS),
        epilogue=epilogue,
        config=draw(CONFIGS),
        inputs=inputs,
        outputs=outputs,
        target=draw(st.sampled_from((None, "sm_80", "sm_86", "sm_89", "sm_90", "sm_90a"))),
    )


@co.epilogue
def bias_relu(acc, bias: co.Row):
    return co.relu(acc + bias)


@co.epilogue
def saved(acc, bias: co.Row, residual: co.Tile, scale: co.Scalar):
    x = acc + bias
    return {"d": co.relu(x) * scale + residual, "pre": x, "total": co.sum(x, dim=1)}


@co.epilogue
def placed(acc, bias: co.Row, seed: co.Integer):
    x = acc + bias * co.uniform(seed)
    return {"d": x, "at": co.argmax(x, dim=1), "most": co.max(x, dim=1)}


@pytest.mark.parametrize(
    ("types", "message"),
    [
        ({"outputs": {"at": "f32"}}, r"outputs\['at'\] is f32: use i32"),
        ({"outputs": {"at": "i64"}}, r"outputs\['at'\] is i64: use i32"),
        ({"outputs": {"most": "i32"}}, r"outputs\['most'\] is i32: use f16, bf16, f32"),
        ({"a": "i32.row"}, "a is i32: use one of f16, bf16, f32"),
        ({"d": "i64.row"}, "d is i64: use one of f16, bf16, f32"),
        ({"inputs": {"bias": "i32"}}, r"inputs\['bias'\] is i32: use f16, bf16, f32"),
        ({"inputs": {"seed": "f32"}}, r"inputs\['seed'\] is f32: use i64"),
        ({"inputs": {"seed": "i32"}}, r"inputs\['seed'\] is i32: use i64"),
    ],
)
def test_what_counts_has_one_type(types, message):
    with pytest.raises(ValueError, match=message):
        spec(epilogue=placed, **types)
    found = spec(epilogue=placed, inputs={"seed": "i64"}, outputs={"at": "i32"})
    assert found == spec(epilogue=placed)
    assert (found.to_json()["inputs"]["seed"], found.to_json()["outputs"]["at"]) == ("i64.row.align1", "i32.row.align1")
    assert KernelSpec.from_json(found.to_json()) == found


def spec(**changes):
    values = {
        "a": "bf16.row",
        "b": "bf16.col",
        "d": "bf16.row",
        "epilogue": bias_relu,
        "config": Sm90Config(ThreadblockShape(128, 128, 64)),
    }
    return KernelSpec(**values | changes)


# ---- JSON ----------------------------------------------------------------------------------------------------------


@PATIENT
@given(CONFIGS)
def test_a_config_survives_json(config):
    data = json.loads(json.dumps(config_to_json(config)))
    assert config_from_json(data) == config
    assert config_to_json(config_from_json(data)) == data


@pytest.mark.slow
@PATIENT
@given(specs())
def test_a_spec_survives_json(drawn):
    text = drawn.canonical()
    back = KernelSpec.from_json(json.loads(text))
    assert back == drawn
    assert hash(back) == hash(drawn)
    assert back.canonical() == text
    assert back.slug == drawn.slug


@PATIENT
@given(specs())
def test_canonical_text_is_canonical(drawn):
    shuffled = json.loads(drawn.canonical(), object_pairs_hook=lambda pairs: dict(reversed(pairs)))
    assert KernelSpec.from_json(shuffled).canonical() == drawn.canonical()
    assert "\n" not in drawn.canonical()
    assert drawn.canonical().isascii()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


def places(value, path=()):
    """Yield the path to every part of a JSON value but the whole."""
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in children:
        yield (*path, key)
        yield from places(child, (*path, key))


@PATIENT
@given(st.data())
def test_damaged_json_is_refused_or_a_declaration_that_check_can_judge(data):
    value = json.loads(spec(epilogue=saved).canonical())
    for _ in range(data.draw(st.integers(1, 2))):
        *path, last = data.draw(st.sampled_from(list(places(value))))
        parent = value
        for key in path:
            parent = parent[key]
        if data.draw(st.booleans()):
            parent[last] = data.draw(JSON)
        elif isinstance(parent, dict):
            parent[data.draw(st.text(max_size=8))] = parent.pop(last)
        else:
            del parent[last]
    try:
        found = KernelSpec.from_json(value)
    except ConfigError:
        return
    check(found)


def test_an_unknown_field_is_refused_by_name():
    data = spec().to_json()
    with pytest.raises(ConfigError, match="colour"):
        KernelSpec.from_json(data | {"colour": "red"})
    with pytest.raises(ConfigError, match=r"'warp'.*sm90 configuration"):
        KernelSpec.from_json(data | {"config": data["config"] | {"warp": {"m": 64, "n": 64, "k": 32}}})
    with pytest.raises(ConfigError, match="threadblock"):
        config_from_json(config_to_json(spec().config) | {"threadblock": {"m": 128, "n": 128, "k": 64, "l": 1}})


# ---- Values --------------------------------------------------------------------------------------------------------


def test_declarations_are_keys_and_survive_copies():
    table = {spec(): 1, spec(d="f32.row"): 2, spec(config=Sm90Config(ThreadblockShape(128, 256, 64))): 3}
    assert table[spec()] == 1
    assert table[copy.deepcopy(spec())] == 1
    assert table[pickle.loads(pickle.dumps(spec()))] == 1
    assert len(table) == 3


@co.epilogue
def scaled_bias(acc, bias: co.Row, factor: co.Scalar):
    return {"d": acc * factor + bias, "total": co.e.sum(acc, dim=1)}


@co.epilogue
def of_a_tile(acc, bias: co.Tile):
    return acc + bias


def test_replace_keeps_what_it_does_not_name():
    config = Sm90Config(ThreadblockShape(128, 128, 64))
    types = {"a": "bf16.row", "b": "bf16.col", "d": "bf16.row", "epilogue": scaled_bias, "inputs": {"bias": "f32"}}
    order = co.TileOrder("along_n")
    spec = co.KernelSpec(**types, config=config, target="sm_90a", order=order)
    assert replace(spec) == spec == replace(pickle.loads(pickle.dumps(spec)))
    larger = replace(config, stages=3)
    assert replace(spec, config=larger) == spec.with_config(larger, order=order)
    other = replace(spec, d="f32.row", inputs={}, form="batched")
    assert other == co.KernelSpec(
        **types | {"d": "f32.row", "inputs": None}, config=config, order=order, form="batched"
    )
    assert other.order == order
    # Of the same name, but another kind: the usual type.
    plain = replace(spec, epilogue=of_a_tile, outputs={}, inputs=None)
    assert [str(x) for x in plain.inputs] == ["bf16.row"]
    bias = replace(plain, epilogue=co.gemm_bias.epilogue)
    assert str(replace(bias, epilogue=of_a_tile).inputs[0]) == "bf16.row"
    with pytest.raises(
        ValueError, match=r"inputs names factor, .*: it has bias\. Pass inputs to dataclasses\.replace as"
    ):
        replace(spec, epilogue=of_a_tile)
    with pytest.raises(TypeError, match="config must be one of"):
        replace(spec, config="SM90")
    with pytest.raises(TypeError, match=r"inputs must be a mapping from names to types such as 'bf16\.row', not \("):
        replace(spec, inputs=tuple(spec.inputs))


ORDERED = Sm90Config(ThreadblockShape(128, 128, 64))


@pytest.mark.parametrize(
    ("config", "order", "why"),
    [
        (replace(ORDERED, schedule="warp_specialized"), TileOrder(by_gpc=True), "by_gpc needs a persistent kernel"),
        (replace(ORDERED, scheduler="stream_k"), TileOrder(by_gpc=True), "does not split K"),
        (Sm80Config(ThreadblockShape(64, 64, 32), WarpShape(32, 32, 32)), TileOrder("along_m"), "only swizzle"),
        (GemvConfig(), TileOrder(swizzle=2), "one order"),
    ],
)
def test_an_order_that_a_kernel_does_not_take_is_refused(config, order, why):
    with pytest.raises(ConfigError, match=why):
        spec(config=config, order=order)


def test_an_order_is_a_tile_order():
    with pytest.raises(TypeError, match="order must be a TileOrder, not 'along_m'"):
        spec(order="along_m")


@pytest.mark.parametrize("raster", get_args(Raster))
@pytest.mark.parametrize("swizzle", SWIZZLES)
@pytest.mark.parametrize("by_gpc", [False, True])
def test_an_order_survives_json(raster, swizzle, by_gpc):
    order = TileOrder(raster, swizzle, by_gpc)
    assert TileOrder.from_json(json.loads(json.dumps(order.to_json()))) == order


def test_json_of_what_is_usual_is_empty():
    assert TileOrder().to_json() == {}
    assert config_to_json(GemvConfig()) == {"arch": "gemv"}
    assert config_to_json(ORDERED) == {"arch": "sm90", "threadblock": {"m": 128, "n": 128, "k": 64}}


def test_the_default_types_follow_d():
    s = spec(epilogue=saved, d="f16.col")
    bias, residual, scale = s.inputs
    pre, total = s.outputs
    assert (bias.dtype, residual, scale.dtype) == (f16, Operand.of("f16.col"), f32)
    assert (pre, total.dtype) == (Operand.of("f16.col"), f32)


def test_a_name_that_the_epilogue_lacks_is_refused():
    with pytest.raises(ValueError, match="inputs names gate"):
        spec(inputs={"gate": "bf16"})
    with pytest.raises(ValueError, match="outputs names d"):
        spec(outputs={"d": "bf16.row"})


# ---- Names ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@PATIENT
@given(st.lists(specs(), min_size=2, max_size=4))
def test_a_slug_is_a_file_name_and_an_identifier_of_one_kernel(drawn):
    for s in drawn:
        assert re.fullmatch(r"[A-Za-z][A-Za-z0-9_]*", s.slug)
        assert len(s.slug) < 200
    assert len({s.slug for s in drawn}) == len(set(drawn))


@PATIENT
@given(st.lists(CONFIGS, min_size=2, max_size=8))
def test_a_config_slug_names_one_binary(drawn):
    binaries = set(drawn)
    assert len({c.slug for c in drawn}) == len(binaries)


@pytest.mark.slow
@PATIENT
@given(epilogues())
def test_every_epilogue_has_a_title_that_fits_into_an_identifier(program):
    assert re.fullmatch(r"([A-Za-z][A-Za-z0-9_]*[A-Za-z0-9])?", program.graph.title)
    assert len(program.graph.title) <= MAX_TITLE
    assert "__" not in program.graph.title
    assert len(repr(program.graph)) < 80


@PATIENT
@given(CONFIGS)
def test_a_configuration_s_repr_is_python(config):
    assert eval(repr(config)) == config


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (ThreadblockShape(128, 256, 64), "ThreadblockShape(128, 256, 64)"),
        (ClusterShape(), "ClusterShape(1, 1)"),
        (Sm90Config(ThreadblockShape(64, 8, 64)), "Sm90Config(ThreadblockShape(64, 8, 64))"),
        (
            Sm90Config(ThreadblockShape(64, 8, 64), schedule="cooperative", swap_ab=True),
            "Sm90Config(ThreadblockShape(64, 8, 64), schedule='cooperative', swap_ab=True)",
        ),
        (
            Sm80Config(ThreadblockShape(64, 64, 32), WarpShape(32, 32, 32), stages=4),
            "Sm80Config(ThreadblockShape(64, 64, 32), WarpShape(32, 32, 32), stages=4)",
        ),
        (GemvConfig(), "GemvConfig()"),
        (SmallConfig(ThreadblockShape(32, 32, 16), warps=4), "SmallConfig(ThreadblockShape(32, 32, 16), warps=4)"),
        (Operand.of("f16.col.align2"), "Operand.of('f16.col.align2')"),
        (saved.graph, "<graph bias_relu_scale_residual_pre_total>"),
    ],
)
def test_a_repr_leaves_out_defaults(value, text):
    assert repr(value) == text


def test_a_spec_s_repr_fits_on_a_line_or_two():
    short = "KernelSpec(a='bf16.row', b='bf16.col', d='bf16.row', epilogue=<graph bias_relu>, config={})"
    assert repr(spec()) == short.format("Sm90Config(ThreadblockShape(128, 128, 64))")
    order = "order=TileOrder(raster='heuristic', swizzle=4, by_gpc=False)"
    ordered = short.format(f"Sm90Config(ThreadblockShape(128, 128, 64)), {order}")
    assert repr(spec(order=TileOrder(swizzle=4))) == ordered
    other = spec(epilogue=saved, inputs={"bias": "f32", "residual": "bf16.row"}, outputs={"pre": "f32.col"})
    assert "inputs={'bias': 'f32'}, outputs={'pre': 'f32.col'})" in repr(other)
    assert repr(spec(target="sm_80")).endswith(", target='sm_80')")


# ---- What is no declaration ------------------------------------------------------------------------------------------

TILE = ThreadblockShape(128, 128, 64)


@pytest.mark.sample(2)
@pytest.mark.parametrize("shape", [ThreadblockShape, WarpShape, InstructionShape])
@pytest.mark.parametrize("side", ["128", 128.0, True, None, 0, -64, (128,)])
@pytest.mark.parametrize("at", range(3))
def test_a_shape_is_of_positive_integers(shape, side, at):
    sides = [64, 64, 64]
    sides[at] = side
    with pytest.raises(ConfigError, match=re.escape(f"positive integers for m, n, k: {'mnk'[at]} is {side!r}")):
        shape(*sides)
    with pytest.raises(ConfigError, match="ClusterShape takes positive integers for m, n: n is"):
        ClusterShape(1, side)


WRONG_FIELDS = [
    (
        lambda **f: Sm90Config(**{"threadblock": TILE} | f),
        "threadblock",
        [(128, 128, 64), None, "128x128x64", WarpShape(1, 1, 1)],
    ),
    (lambda **f: Sm90Config(TILE, **f), "cluster", [(1, 1), None, TILE]),
    (lambda **f: Sm90Config(TILE, **f), "schedule", ["auto", None, 1, ["pingpong"]]),
    (lambda **f: Sm90Config(TILE, **f), "scheduler", ["stream-k", True]),
    (lambda **f: Sm90Config(TILE, **f), "stages", ["4", 4.0, True]),
    (lambda **f: Sm90Config(TILE, **f), "swap_ab", [1, "yes", None]),
    (lambda **f: Sm90Config(TILE, **f), "split_k", ["2", True, None]),
    (lambda **f: Sm90Config(TILE, **f), "means", ["before", True, None]),
    (lambda **f: Sm90Config(TILE, **f), "realign", [0, None]),
    (lambda **f: Sm90Config(TILE, **f), "accumulation", ["slow", True, None]),
    (lambda **f: Sm90Config(TILE, **f), "resident", ["2", True, None]),
    (TileOrder, "raster", ["along_k", None]),
    (TileOrder, "swizzle", ["2", 2.0, True, 3, 16, 0]),
    (TileOrder, "by_gpc", [1, None]),
    (lambda **f: Sm80Config(TILE, **f), "warp", [TILE, (64, 64, 32), None]),
    (lambda **f: Sm80Config(TILE, WarpShape(64, 64, 64), **f), "instruction", [(16, 8, 16), None]),
    (lambda **f: Sm80Config(TILE, WarpShape(64, 64, 64), **f), "stages", [None, "3", True]),
    (lambda **f: Sm80Config(TILE, WarpShape(64, 64, 64), **f), "stream_k", [1, None]),
    (GemvConfig, "rows", ["1", True, None]),
    (GemvConfig, "warps", [8.0]),
    (GemvConfig, "pieces", [(8,)]),
]


@pytest.mark.parametrize(("make", "field", "value"), [(m, f, v) for m, f, values in WRONG_FIELDS for v in values])
def test_a_configuration_has_fields_of_the_declared_types(make, field, value):
    with pytest.raises(ConfigError, match=rf"^{field} must be .*, not {re.escape(repr(value))}$"):
        make(**{field: value})


def test_every_field_of_every_configuration_is_checked():
    there = {
        (cls.__name__, f.name)
        for cls in (Sm90Config, Sm80Config, GemvConfig, SmallConfig, TileOrder)
        for f in fields(cls)
    }
    tried = {field for _, field, _ in WRONG_FIELDS}
    assert {name for _, name in there} == tried


class NoEpilogue:
    graph = "none"


@pytest.mark.parametrize(
    ("argument", "value", "error", "said"),
    [
        ("epilogue", lambda acc: acc, TypeError, r"decorated with @cutlass_ops.epilogue, not <lambda>: decorate"),
        ("epilogue", None, TypeError, r"epilogue must be a function .* not None: .* for D = A @ B, return acc"),
        ("epilogue", "relu", TypeError, "epilogue must be a function .* not 'relu'"),
        ("epilogue", NoEpilogue(), TypeError, "epilogue must be a function"),
        ("epilogue", co.gemm, TypeError, "epilogue must be a function .* not gemm"),
        ("a", torch.bfloat16, TypeError, r"^a: .* not torch.bfloat16; use 'bf16.row' or 'bf16.col'$"),
        ("a", torch.uint8, TypeError, r"^a: .* such as 'bf16.row', not torch.uint8$"),
        ("a", torch.int8, TypeError, r"^a: .*, not torch.int8; use 'i8.row' or 'i8.col'$"),
        ("a", "bf16", ValueError, r"^a is 'bf16', which has no major: use 'bf16.row' or 'bf16.col'$"),
        ("b", "float16", ValueError, r"^b is 'float16', which has no major: use 'f16.row' or 'f16.col'$"),
        ("d", "f32.align2", ValueError, "^d is 'f32.align2', which has no major"),
        ("d", bf16, ValueError, "^d is 'bf16', which has no major"),
        ("a", None, TypeError, "^a: an operand must be a text of the form .*, not None$"),
        ("b", b"bf16.col", TypeError, "^b: an operand must be a text"),
        ("d", ("bf16", "row"), TypeError, "^d: an operand must be a text"),
        ("a", "bf16.rows", ValueError, "^a: operand 'bf16.rows' is not of the form"),
        ("a", "f128.row", ValueError, "^a: unknown dtype 'f128': use one of f16, bf16, f32"),
        ("a", "bf16.row.align0", ValueError, "^a: alignment must be a positive number of elements, not 0"),
        (
            "config",
            "sm90",
            TypeError,
            "config must be one of GemvConfig, PackedRowsConfig, PointwiseConfig, Sm80Config, Sm90Config, SmallConfig, "
            "not 'sm90'",
        ),
        ("config", (128, 128, 64), TypeError, r"config must be .*, not \(128, 128, 64\)"),
        ("config", None, TypeError, "config must be .*, not None"),
        ("config", Sm90Config, TypeError, "config must be .*, not <class"),
        ("inputs", {"bias": torch.float32}, TypeError, r"^inputs\['bias'\]: .*; use 'f32.row' or 'f32.col'"),
        ("inputs", {"bias": None}, TypeError, r"^inputs\['bias'\]: .*, not None"),
        ("inputs", {"gate": "f32"}, ValueError, "^inputs names gate, which the epilogue does not have: it has bias$"),
        ("inputs", {1: "f32", "x": "f32"}, ValueError, "^inputs names 1, x, which"),
        ("inputs", ["f32"], TypeError, "^inputs must be a mapping"),
        ("inputs", "f32", TypeError, "^inputs must be a mapping"),
        ("outputs", {"d": "f32.row"}, ValueError, "^outputs names d, .* it has none, and d is a separate argument$"),
        ("outputs", [], TypeError, "^outputs must be a mapping"),
        ("target", 90, ValueError, "^target 90 is not supported: use one of sm_80, "),
        ("target", ["sm_90"], ValueError, "^target "),
        ("target", "", ValueError, "^target ''"),
        ("target", "sm90", ValueError, "use one of sm_90, sm_90a$"),
    ],
)
def test_a_wrong_argument_is_named(argument, value, error, said):
    with pytest.raises(error, match=said):
        spec(**{argument: value})


@pytest.mark.parametrize(
    ("target", "why"),
    [
        ("sm_70", "7.0 lacks"),
        ("sm_75", "7.5 lacks"),
        ("sm_87", "8.7 has no kernels of its own"),
        ("sm_100", "10.0 cannot run the kernels' machine code"),
        ("sm_100a", "10.0 cannot run the kernels' machine code"),
        ("sm_120", "12.0 cannot run the kernels' machine code"),
    ],
)
def test_an_architecture_without_kernels_gets_the_supported_ones_and_what_to_do(target, why):
    with pytest.raises(ValueError, match=rf"compute capability {why}") as caught:
        spec(target=target)
    assert f"Supported targets: {', '.join(arch.TARGETS)}" in str(caught.value)
    assert "torch.matmul" in str(caught.value)
    capabilities = {f"{major}.{minor}" for major, minor in (t.capability for t in arch.TARGETS.values())}
    assert all(c in str(caught.value) for c in capabilities)


@pytest.mark.parametrize("scaling", [(1,), (0, 128), (1, 128.0), [1, 128], 128, (True, 1)])
def test_a_scaling_is_the_block_that_shares_a_scale(scaling):
    with pytest.raises(ConfigError, match="scaling is None or the"):
        Operand(bf16, "row", 8, scaling)


def test_vectors_and_outputs_have_no_blocks():
    with pytest.raises(ValueError, match=r"inputs\['bias'\] is bf16.row.blocks1x128: only a and b"):
        spec(inputs={"bias": "bf16.blocks1x128"})


@pytest.mark.parametrize(
    ("field", "wrong", "said"),
    [
        ("dtype", "bf16", r"^dtype must be an element type, not 'bf16': use Operand\.of\('bf16\.row'\)"),
        ("dtype", None, r"^dtype must be an element type, not None"),
        ("major", "rows", "^major must be 'row' or 'col', not 'rows'$"),
        ("alignment", "8", "^alignment must be a positive number of elements, not '8'$"),
        ("alignment", 0, "^alignment must be a positive number of elements, not 0$"),
        ("promoted", "promoted", "^promoted must be True or False, not 'promoted'$"),
        ("promoted", None, "^promoted must be True or False, not None$"),
    ],
)
def test_a_wrong_field_of_an_operand_is_named(field, wrong, said):
    with pytest.raises(ConfigError, match=said):
        replace(Operand.of("bf16.row"), **{field: wrong})


# ---- Operands ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "operand"),
    [
        ("bf16.row", Operand(bf16, "row", 8)),
        ("f16.col.align2", Operand(f16, "col", 2)),
        ("bf16.row.blocks1x128", Operand(bf16, "row", 8, (1, 128))),
        ("f16.row.align1.blocks128x64", Operand(f16, "row", 1, (128, 64))),
        ("f32", Operand(f32, "row", 4)),
        ("float16", Operand(f16, "row", 8)),
        (bf16, Operand(bf16, "row", 8)),
        (Operand(f32, "col", 1), Operand(f32, "col", 1)),
    ],
)
def test_operands_are_parsed(text, operand):
    assert Operand.of(text) == operand
    assert Operand.of(str(operand)) == operand


@pytest.mark.parametrize(
    "text",
    [
        "",
        "bf16.",
        "bf16.rows",
        "BF16",
        "bf16.row.align",
        "bf16.row.align-1",
        "row",
        " f16",
        "f16.blocks0x1",
        "f16.blocks1",
    ],
)
def test_other_text_is_no_operand(text):
    with pytest.raises(ValueError, match=r"operand|dtype"):
        Operand.of(text)


@pytest.mark.parametrize("data", [[], [[]], "spec", None, {1: 2}])
def test_a_spec_is_a_json_object(data):
    with pytest.raises(ConfigError):
        KernelSpec.from_json(data)
