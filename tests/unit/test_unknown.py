"""Names that do not exist: what there is instead, and in an epilogue function the line."""

import pytest

import cutlass_ops as co


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("relu6", "did you mean relu or"),
        ("Relu", "did you mean relu"),
        ("rmsnorm", "did you mean rmsnorm_gemm?"),
        ("gemm_bias_tanh", "did you mean gemm_bias"),
        ("Rows", "did you mean Row?"),
        ("tuna", "did you mean tune"),
    ],
)
def test_it_names_what_is_close(name, meant):
    with pytest.raises(
        AttributeError, match=f"module 'cutlass_ops' has no attribute '{name}': .*docs/epilogues.md"
    ) as error:
        getattr(co, name)
    assert meant in str(error.value)


@pytest.mark.parametrize("name", ["qqq", "bessel", "xyz"])
def test_where_nothing_is_close_it_says_where_the_list_is(name):
    with pytest.raises(AttributeError, match=f"no attribute '{name}': docs/epilogues.md lists the operations") as error:
        getattr(co, name)
    assert "did you mean" not in str(error.value)


def test_in_an_epilogue_it_shows_the_line():
    with pytest.raises(co.EpilogueError) as error:

        @co.epilogue
        def waved(acc):
            return co.bessel(acc) + 1

    assert str(error.value).startswith("waved: module 'cutlass_ops' has no attribute 'bessel'")
    assert "return co.bessel(acc) + 1" in str(error.value)
    assert __file__ in str(error.value)
    assert isinstance(error.value, AttributeError)


def test_an_epilogue_may_ask_whether_there_is_a_name():
    @co.epilogue
    def careful(acc):
        return co.bessel(acc) if hasattr(co, "bessel") else co.relu(acc)

    assert not hasattr(co, "bessel")
    assert "relu" in {node.op for node in careful.graph.nodes}


def test_names_that_tools_ask_for_are_refused_in_short():
    with pytest.raises(AttributeError, match=r"^module 'cutlass_ops' has no attribute '__wrapped__'$"):
        co.__wrapped__  # noqa: B018
