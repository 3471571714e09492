"""Names that do not exist: what there is instead, and in an epilogue function the line."""

import pytest

import cutlass_ops as co

# By module: names, and what the error says of them.
MEANT = {
    "cutlass_ops": {
        "relu7": "did you mean relu or",
        "relu6": "write co.e.clamp(x, 0, 6).",
        "swish": "did you mean silu?",
        "Swish": "did you mean silu?",
        "leaky": "did you mean leaky_relu?",
        "relu_squared": "write co.e.square(co.e.relu(x)).",
        "softmax": "softmax needs a whole row of D",
        "linear": "the layer is co.nn.Linear",
        "Relu": "did you mean relu",
        "rmsnorm": "did you mean rmsnorm_gemm?",
        "gemm_bias_tanh": "did you mean gemm_bias",
        "Rows": "did you mean Row",
        "scaled_gemm": "call co.gemm(co.Scaled(a, scale_a), co.Scaled(b, scale_b)).",
        "grouped_gemm": "call co.gemm(a, b, groups=co.Groups(offsets)).",
        "quantize": "co.Scaled.quantize for a tensor.",
        "tuna": "did you mean tune",
        "qqq": "",
        "bessel": "",
    },
    "cutlass_ops.e": {
        "relu7": "did you mean relu or",
        "celu": "write alpha * co.e.elu(x / alpha)",
        "swish": "did you mean silu?",
        "softmax": "softmax needs a whole row of D",
        "qqq": "",
    },
    "cutlass_ops.nn": {
        "Linar": "did you mean Linear",
        "RMSNorm": "did you mean RMSNormLinear",
        "SwiGLU": "call co.gemm_swiglu",
        "dense": "the layer is co.nn.Linear",
    },
}


@pytest.mark.parametrize(
    ("module", "name", "meant"), [(module, *row) for module, rows in MEANT.items() for row in rows.items()]
)
def test_it_names_what_is_close_and_where_the_list_is(module, name, meant):
    # However far the name stands in a long function.
    many = "\n".join(f"x{n} = {n}.5" for n in range(300))
    found = {"cutlass_ops": co, "cutlass_ops.e": co.e, "cutlass_ops.nn": co.nn}[module]
    assert not hasattr(found, name)
    with pytest.raises(AttributeError, match=f"^module '{module}' has no attribute '{name}': ") as of_module:
        getattr(found, name)
    with pytest.raises(ImportError, match=f"^cannot import name '{name}' from '{module}': ") as of_import:
        exec(f"{many}\nfrom {module} import {name}")
    assert of_import.value.name == module
    for said in (str(of_module.value), str(of_import.value)):
        assert meant in said
        assert "docs/epilogues.md lists the operations" in said
        assert meant or "did you mean" not in said


def test_in_an_epilogue_it_shows_the_line():
    with pytest.raises(co.errors.EpilogueError) as error:

        @co.epilogue
        def waved(acc):
            return co.e.bessel(acc) + 1

    assert str(error.value).startswith("waved: module 'cutlass_ops.e' has no attribute 'bessel'")
    assert "return co.e.bessel(acc) + 1" in str(error.value)
    assert __file__ in str(error.value)
    assert isinstance(error.value, AttributeError)


def test_an_epilogue_may_ask_whether_there_is_a_name():
    @co.epilogue
    def careful(acc):
        return co.bessel(acc) if hasattr(co, "bessel") else co.relu(acc)

    assert "relu" in {node.op for node in careful.graph.nodes}


@pytest.mark.parametrize("module", ["cutlass_ops", "cutlass_ops.e"])
def test_private_names_are_refused_in_short(module):
    found = {"cutlass_ops": co, "cutlass_ops.e": co.e}[module]
    with pytest.raises(AttributeError, match=rf"^module '{module}' has no attribute '__wrapped__'$"):
        found.__wrapped__  # noqa: B018
    with pytest.raises(ImportError, match=f"cannot import name '_log' from '{module}'"):
        exec(f"from {module} import _log")
