"""Parsing of sizes, element types, majors and ops on a command line or in a catalogue.

Every unambiguous spelling is accepted. Anything else is refused with an example to copy.
"""

from __future__ import annotations

import itertools
import math
import re
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from typing import NoReturn

from cutlass_ops.base import dtypes, mma
from cutlass_ops.base.errors import ConfigError
from cutlass_ops.base.units import counted
from cutlass_ops.declare.problem import MOST_ELEMENTS, Problem
from cutlass_ops.declare.spec import Major
from cutlass_ops.epilogue import Epilogue, builtin, composed
from cutlass_ops.epilogue.unknown import alike

# Most problems for one text.
_MOST_PROBLEMS = 1 << 16

_PROBLEM = "Give MxNxK, such as 512x4096x4096; each may be a list, such as 1,16,64x4096x4096"
_WEIGHT = "Give NxK, such as 4096x4096; each may be a list, such as 4096,8192x4096"
_TILE = "Give BLOCK_M, BLOCK_N and BLOCK_K as one MxNxK, such as 128x128x64"

# The default epilogues of the functions in norms.py and gated.py, by the dtype of A and B.
_16_BITS = tuple(t.name for t in mma.OPERANDS if t.bits == 16)
NORMS: dict[str, Mapping[str, Epilogue]] = {
    "rmsnorm_gemm": dict.fromkeys(_16_BITS, composed.rms_norm),
    "layernorm_gemm": dict.fromkeys(_16_BITS, composed.layer_norm),
    "gemm_residual_rms": composed.RESIDUAL_RMS,
    "gemm_swiglu": dict.fromkeys(map(str, mma.OPERANDS), composed.swiglu),
}
OPS = (*builtin.BY_OP, *NORMS)
# Dtypes of these functions' inputs that differ from A's.
INPUT_DTYPES: dict[str, Mapping[str, str]] = {"layernorm_gemm": {"column_sum": dtypes.f32.name}}

# Element types of A and B, for people.
DTYPES = f"{', '.join(map(str, mma.OPERANDS[:-1]))} or {mma.OPERANDS[-1]}"

_AROUND = re.compile(r"\s*([,x=])\s*")
_TUPLE = re.compile(r"\(\s*([0-9]+),([0-9]+),([0-9]+)\s*\)")
_NAMED = re.compile(r"([mnk])=(.*)")
_NEXT = re.compile(r"x|,(?=[mnk]=)")

_MAJORS: dict[str, Major] = {
    **dict.fromkeys(("row", "rows", "row-major", "rowmajor", "row_major"), "row"),
    **dict.fromkeys(("col", "cols", "column", "columns", "col-major", "column-major", "colmajor", "col_major"), "col"),
}  # fmt: skip


def problems_of(texts: str | Iterable[str]) -> list[Problem]:
    """Return the problems of texts such as ``"1,16x4096x4096"``: every combination of listed extents."""
    whole = texts if isinstance(texts, str) else " ".join(texts)
    if not whole.strip():
        _refuse(whole, "a problem size", "it is empty", _PROBLEM)
    problems: list[Problem] = []
    for word in itertools.chain.from_iterable(map(_listed, _words(whole))):
        sides = _sides(word, "mnk", "a problem size", _PROBLEM)
        m, n, k = map(max, sides)
        if max(m * n, n * k, m * k) > MOST_ELEMENTS:
            _refuse(word, "a problem size", f"it has a matrix of more than {MOST_ELEMENTS:,} elements", _PROBLEM)
        if len(problems) + math.prod(map(len, sides)) > _MOST_PROBLEMS:
            _refuse(whole, "a problem size", f"it stands for more than {_MOST_PROBLEMS:,} problems", "Give fewer")
        problems += [Problem(*extents) for extents in itertools.product(*sides)]
    return problems


def problem_of(texts: Sequence[str]) -> Problem:
    """Return the only problem of some words."""
    problems = problems_of(texts)
    if len(problems) != 1:
        raise ConfigError(f"an op runs at one problem here, not at {len(problems)}: give one MxNxK")
    return problems[0]


def tile_of(text: str) -> tuple[int, int, int]:
    """Return the extents M, N and K of a Triton kernel's tile, such as ``"128x128x64"``."""
    words = _words(text) or [text]
    if len(words) != 1:
        _refuse(text, "a tile", f"it has {len(words)} words", _TILE)
    sides = _sides(words[0], "mnk", "a tile", _TILE)
    if any(len(side) != 1 for side in sides):
        _refuse(text, "a tile", "it stands for several", _TILE)
    m, n, k = (side[0] for side in sides)
    return m, n, k


def is_script(text: str) -> bool:
    """Whether a text is the path of a Python script, and not the import path of an epilogue in one."""
    return text.endswith(".py") and ":" not in text


def weights_of(text: str, rows: int = 1) -> list[tuple[int, int]]:
    """Return the weights (N, K) of a text such as ``"4096x4096"``, checked for up to `rows` rows of A."""
    words = _words(text) or [text]
    if len(words) != 1:
        _refuse(text, "the size of a weight", "it has a space", _WEIGHT)
    n, k = _sides(words[0], "nk", "the size of a weight", _WEIGHT)
    if max(n) * max(k) > MOST_ELEMENTS or rows * max(*n, *k) > MOST_ELEMENTS:
        _refuse(text, "the size of a weight", f"it has more than {MOST_ELEMENTS:,} elements", _WEIGHT)
    if len(n) * len(k) > _MOST_PROBLEMS:
        _refuse(text, "the size of a weight", f"it stands for more than {_MOST_PROBLEMS:,} weights", "Give fewer")
    return list(itertools.product(n, k))


def dtype_of(text: str) -> str:
    """Return the name of an element type of A and B, such as ``"bf16"``. Raises ConfigError if the text names none."""
    try:
        found = dtypes.dtype(text, dtypes.DECLARED)
    except ValueError:
        raise ConfigError(f"{reprlib.repr(text)} is not an element type of A and B: use {DTYPES}") from None
    if found not in mma.OPERANDS:
        raise ConfigError(f"A and B cannot be {found}: use {DTYPES} (sums have a wider type with all of them)")
    return found.name


def major_of(text: str) -> Major:
    """Return the major that a text names. Raises ConfigError if the text does not name one."""
    found = _MAJORS.get(text.strip().lower())
    if found is None:
        raise ConfigError(f"{reprlib.repr(text)} is not a major: use row or col")
    return found


def epilogue_of(name: str, dtype: str) -> Epilogue | None:
    """Return the epilogue of a named op for a dtype of A and B, or None if the name is not one of :data:`OPS`."""
    if name not in NORMS:
        return builtin.BY_OP.get(name)
    found = NORMS[name].get(dtypes.dtype(dtype, dtypes.DECLARED).name)
    if found is None:
        raise ConfigError(f"{name} does not take {dtype}: use {' or '.join(NORMS[name])}")
    return found


def require_groups(name: str, dtype: str) -> None:
    """Require an op and a dtype of A and B that groups of rows can have."""
    if name in NORMS:
        raise ConfigError(f"{name} has no groups: leave out --groups, or name gemm or an epilogue without a norm")
    if dtypes.dtype(dtype, dtypes.DECLARED) not in dtypes.GROUPED:
        raise ConfigError(f"groups do not take {dtype}: use {', '.join(map(str, dtypes.GROUPED))}")


def op_of(text: str) -> str:
    """Return the name of an op, or the import path ``MODULE:NAME`` of an epilogue."""
    name = re.sub(r"^(co|cutlass_ops)[.:]", "", text.strip())
    if name.lower().replace("-", "_") in OPS:
        return name.lower().replace("-", "_")
    module, colon, attribute = (part.strip() for part in text.partition(":"))
    if colon and module and attribute:
        # A file in the working folder is a module.
        path = module.removeprefix("./").removesuffix(".py").replace("/", ".") if module.endswith(".py") else module
        return f"{path}:{attribute}"
    question = f": {alike(name, OPS)}" if alike(name, OPS) else "."
    raise ConfigError(
        f"{reprlib.repr(text)} is not the name of an op{question} The ops are {', '.join(OPS)}. Write your own "
        "epilogue as MODULE:NAME"
    )


def _words(text: str) -> list[str]:
    """Split a text into one word for each problem, with separators x , and = and no spaces around them."""
    signs = _AROUND.sub(r"\1", re.sub(r"[*×]", "x", text.lower()))
    words: list[str] = []
    for word in re.split(r"[\s;]+", _TUPLE.sub(r"\1x\2x\3", signs).strip()):
        before = words[-1] if words else ""
        # Join extents that were named one by one.
        if _names(word) and _names(before) and not _names(word) & _names(before):
            words[-1] = f"{before}x{word}"
        elif word:
            words.append(word)
    return words


def _listed(word: str) -> list[str]:
    """Split problems that are listed with commas. An extent between two of them is the next one's."""
    if "=" in word or word.count("x") <= 2:
        return [word]
    found: list[str] = []
    for part in word.split(","):
        if found and found[-1].count("x") < 2:
            found[-1] += f",{part}"
        else:
            found.append(part)
    return found


def _names(word: str) -> set[str]:
    return set(re.findall(r"[mnk](?==)", word))


def _sides(word: str, names: str, what: str, example: str) -> list[list[int]]:
    parts = _NEXT.split(word) if "=" in word else word.split("x")
    if "=" in word:
        parts = _in_order(parts, names, word, what, example)
    if len(parts) != len(names):
        extents = counted(len(parts), "extent")
        _refuse(word, what, f"it has {extents}, not {len(names)}", example)
    return [_extents(part, word, what, example) for part in parts]


def _in_order(parts: Sequence[str], names: str, word: str, what: str, example: str) -> list[str]:
    found = [match for part in parts if (match := _NAMED.fullmatch(part))]
    given = {match[1]: match[2] for match in found}
    if len(found) != len(parts) or len(given) != len(parts) or set(given) != set(names):
        _refuse(word, what, f"{', '.join(names.upper())} must each be named once", example)
    return [given[name] for name in names]


def _extents(text: str, word: str, what: str, example: str) -> list[int]:
    extents = text.split(",")
    for each in extents:
        if not re.fullmatch("[0-9]+", each):
            _refuse(word, what, f"{reprlib.repr(each)} is not a positive integer", example)
        if len(each) > math.log10(MOST_ELEMENTS) + 1:
            _refuse(word, what, f"{reprlib.repr(each)} is too large", example)
        if not int(each):
            _refuse(word, what, "an extent of 0 leaves nothing to compute", example)
    return [int(each) for each in extents]


def _refuse(text: str, what: str, why: str, example: str) -> NoReturn:
    raise ConfigError(f"{reprlib.repr(text)} is not {what}: {why}. {example}")
