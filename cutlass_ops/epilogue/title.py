"""What an epilogue is called where people look at kernels: in traces, profiles and names of files.

The words follow from the graph alone. A function's own name is no part of a kernel: functions with equal graphs share
one, which may have been compiled before any of them was written.
"""

from __future__ import annotations

from collections.abc import Sequence

from cutlass_ops.epilogue.nodes import Node, Output

MAX_LENGTH = 48

_SILENT = ("acc", "const", "integer", "seed", "to_float", "add", "sub", "mul", "div")


def title(nodes: Sequence[Node], outputs: Sequence[Output]) -> str:
    """Return the words of a graph, joined by underscores: its inputs and functions in the order of the computation.

    The accumulator, constants and arithmetic have no words, and further outputs follow by name. What is longer than
    :data:`MAX_LENGTH` characters is cut.
    """
    words: list[str] = []
    seen: set[int] = set()
    with_acc = _with_accumulator(nodes)

    def visit(index: int) -> None:
        if index in seen:
            return
        seen.add(index)
        node = nodes[index]
        # The accumulator is what happens to: bias, then relu, then residual.
        for arg in sorted(node.args, key=lambda a: a not in with_acc):
            visit(arg)
        if node.op not in _SILENT:
            words.append(_word(node))

    for output in outputs:
        visit(output.node)
    words += [output.name for output in outputs[1:]]
    # A name may end in an underscore or hold two, as identifiers of C++ should not.
    joined = "_".join(word for name in words for word in name.split("_") if word)
    return joined[:MAX_LENGTH].rstrip("_")


def _with_accumulator(nodes: Sequence[Node]) -> set[int]:
    found: set[int] = set()
    for index, node in enumerate(nodes):
        if node.op == "acc" or not found.isdisjoint(node.args):
            found.add(index)
    return found


def _word(node: Node) -> str:
    return str(node.attr) if node.op in ("input", "cast") else node.op
