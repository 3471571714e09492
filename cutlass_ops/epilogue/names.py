"""Which names an epilogue's inputs and outputs may have: they are keyword arguments in Python.

In C++ they have these names as well, where nothing else has them (:func:`is_plain`).
"""

from __future__ import annotations

import keyword
import re
import reprlib

from cutlass_ops.base.errors import ConfigError

MAX_LENGTH = 64

# C++20's keywords, alternative tokens and literals (ISO/IEC 14882:2020, [lex.key]).
_KEYWORDS = """
alignas alignof and and_eq asm auto bitand bitor bool break case catch char char8_t char16_t char32_t class compl
concept const consteval constexpr constinit const_cast continue co_await co_return co_yield decltype default delete
do double dynamic_cast else enum explicit export extern false float for friend goto if inline int long mutable
namespace new noexcept not not_eq nullptr operator or or_eq private protected public register reinterpret_cast
requires return short signed sizeof static static_assert static_cast struct switch template this thread_local throw
true try typedef typeid typename union unsigned using virtual void volatile wchar_t while xor xor_eq
"""
CPP_KEYWORDS = frozenset(_KEYWORDS.split())

# Names that a rendered kernel has itself, and macros of the headers that it includes.
_TAKEN = """
a b c d l m n k acc accumulator inputs outputs args arguments params problem workspace stream device
raster swizzle
stride shape alignment lda ldb ldc ldd config spec target kernel dtype gemm
cutlass cute cutlass_ops std tvm cuda main
threadIdx blockIdx blockDim gridDim warpSize dim3 half
mean_of_a mean_square_of_a means row_index column_index
assert errno stdin stdout stderr linux unix major minor
"""
IN_KERNELS = frozenset(_TAKEN.split())

# A call's other arguments: an input of such a name could not be told from them.
RESERVED = frozenset(("a", "b", "out", "out_dtype", "math", "epilogue", "groups", "self"))

# Compiled when they are first needed, as re does with texts.
_IDENTIFIER = r"[A-Za-z][A-Za-z0-9_]*"
_STEP = r"v[0-9]+"


def check_name(name: object, what: str) -> None:
    """Raise ConfigError, with the reason, if a name cannot be used at a call. Names that only C++ forbids are allowed.

    The name may come from an untrusted file and be no string at all. `what` is ``"input"`` or ``"output"``.
    """
    problem = _problem(name)
    if problem:
        raise ConfigError(f"{what} name {reprlib.repr(name)} {problem}: choose another name")


def _problem(name: object) -> str | None:
    if not isinstance(name, str):
        return "is not a string"
    if len(name) > MAX_LENGTH:
        return f"has {len(name)} characters, more than {MAX_LENGTH}"
    if not re.fullmatch(_IDENTIFIER, name):
        return "must be ASCII letters, digits and underscores, starting with a letter"
    if keyword.iskeyword(name):
        return "is a Python keyword"
    if name in RESERVED:
        return "is an argument of every call"
    return None


def is_plain(name: str) -> bool:
    """Whether a name that :func:`check_name` lets pass can be used in C++ unchanged.

    It cannot if it is a keyword, a name of the kernel's own, which ends in an underscore or is in :data:`IN_KERNELS`, a
    possible macro or a name reserved for the compiler. Nor can "v0", "v1" and so on: with an underscore, functions call
    their steps so.
    """
    shouted = len(name) > 1 and name.upper() == name
    own = name.endswith("_") or name in IN_KERNELS or re.fullmatch(_STEP, name)
    return not (shouted or "__" in name or own or name in CPP_KEYWORDS)
