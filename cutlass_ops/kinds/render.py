"""Render a spec as readable C++. Only this module imports jinja2.

Templates name types, instantiate them and bind them. They receive plain values. An undefined value is an error.
"""

from __future__ import annotations

import json
import reprlib
import textwrap
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from cutlass_ops.base import forks, resources
from cutlass_ops.base.dtypes import f32, u8
from cutlass_ops.base.errors import ToolchainError
from cutlass_ops.declare.compressing import CompressSpec
from cutlass_ops.declare.quantizing import Declaration, QuantizeSpec
from cutlass_ops.declare.spec import KernelSpec
from cutlass_ops.kinds import legality
from cutlass_ops.kinds.lower import named_for_cpp
from cutlass_ops.kinds.table import kind_of

if TYPE_CHECKING:
    import jinja2

_WIDTH = 110


def source(spec: Declaration) -> str:
    """Return the C++ source of a kernel. Equal specs give equal bytes.

    Parameters
    ----------
    spec : KernelSpec
        The declaration.

    Returns
    -------
    str
        The text of a ``.cu`` file that needs only the headers of CUTLASS, tvm-ffi and this library.

    Raises
    ------
    ConfigError
        If the declaration is not legal. The message has the reasons, as :func:`check` returns them.
    TypeError
        If `spec` is not a KernelSpec.
    ToolchainError
        If the package jinja2 is not installed.

    Examples
    --------
    >>> @co.epilogue
    ... def bias_relu(acc, bias: co.Row):
    ...     return co.e.relu(acc + bias)
    >>> config = co.Sm90Config(co.ThreadblockShape(128, 128, 64), co.ClusterShape(2, 1))
    >>> spec = co.KernelSpec(a="bf16.row", b="bf16.col", d="bf16.row", epilogue=bias_relu, config=config)
    >>> "#include" in co.source(spec)
    True
    """
    if isinstance(spec, KernelSpec):
        legality.require_legal(spec)
    return render(spec)


def render(spec: Declaration) -> str:
    """Return the source of a declaration that is known to be legal. Others give an error from within, or wrong C++."""
    if isinstance(spec, QuantizeSpec):
        return _filled("quantize.cu.j2", _quantizing(spec) | _header(spec))
    if isinstance(spec, CompressSpec):
        return _filled("compress.cu.j2", _compressing(spec) | _header(spec))
    if not isinstance(spec, KernelSpec):
        raise TypeError(f"spec must be a KernelSpec, not {reprlib.repr(spec)}")
    kind = kind_of(spec.config)
    return _filled(kind.template, kind.context(named_for_cpp(spec)) | _header(spec))


def _filled(template: str, context: dict[str, Any]) -> str:
    with forks.held_off():  # jinja2 has locks of its own
        return _environment().get_template(template).render(context)


def _quantizing(spec: QuantizeSpec) -> dict[str, Any]:
    """Return the variables of ``quantize.cu.j2``."""
    types = dict.fromkeys((spec.x, spec.d, f32))
    return {
        "element_types": [{"cpp": t.cpp, "dl_code": t.dl_code} for t in types],
        "x": spec.x.cpp,
        "d": spec.d.cpp,
        "by_rows": spec.block is None,
    }


def _compressing(spec: CompressSpec) -> dict[str, Any]:
    """Return the variables of ``compress.cu.j2``."""
    types = [{"cpp": t.cpp, "dl_code": t.dl_code} for t in (spec.w, u8)]
    return {"element_types": types, "w": spec.w.cpp, "prune": spec.prune}


def _header(spec: Declaration) -> dict[str, Any]:
    canonical = json.dumps(spec.to_json(), sort_keys=True)
    return {
        "slug": spec.slug,
        "canonical": textwrap.wrap(canonical, _WIDTH, break_long_words=False, break_on_hyphens=False),
        "rebuild": "save the declaration as spec.json, then: python -m cutlass_ops build spec.json",
    }


@lru_cache(maxsize=1)
def _environment() -> jinja2.Environment:
    try:
        import jinja2  # imported here: loading kernels does not need it
    except ImportError:
        raise ToolchainError(
            'a kernel cannot be rendered without the package jinja2: pip install "cutlass_ops[build]"'
        ) from None

    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(resources.templates()),
        undefined=jinja2.StrictUndefined,
        autoescape=False,  # the output is C++, not HTML, and all names are already validated
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
