"""What builds the site of docs/: links that leave docs/, and docstrings for the API reference; see mkdocs.yml."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import griffe

import cutlass_ops
from cutlass_ops import e

ROOT = Path(__file__).resolve().parents[1]

_LINK = re.compile(r"(?<!!)\[([^\]]*)\]\((\.\./[^)]*)\)")
_ROLE = re.compile(r":(?:func|class|meth|mod|data|attr):`([^`]+)`")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Put the path in the repository in the place of each link that leaves docs/, since the site has no such page."""
    folder = (ROOT / "docs" / page.file.src_uri).parent

    def path_of(link: re.Match[str]) -> str:
        text, target = link.groups()
        path = (folder / target.partition("#")[0]).resolve()
        if (ROOT / "docs") in path.parents:
            return link[0]
        if not path.exists():
            raise FileNotFoundError(f"docs/{page.file.src_uri} links to {target}, which is not there")
        name = path.relative_to(ROOT).as_posix()
        return f"`{name}`" if text.strip("`") in (name, path.name, target) else f"{text} (`{name}`)"

    return _LINK.sub(path_of, markdown)


class Docstrings(griffe.Extension):
    """Docstrings as they are when the package is imported, with references that the site can resolve."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Give ops, which are instances, the docstring that they write themselves, and turn roles into references."""
        if obj.is_attribute and obj.parent is not None and obj.parent.path == "cutlass_ops.run.ops":
            op = getattr(importlib.import_module(obj.parent.path), obj.name, None)
            if hasattr(op, "__signature__"):
                obj.docstring = griffe.Docstring(op.__doc__, parent=obj)
        if obj.docstring is not None:
            obj.docstring.value = _ROLE.sub(_reference, obj.docstring.value)


def _reference(role: re.Match[str]) -> str:
    """Return a link to a public name, and any other name as code."""
    name = role[1].removeprefix("~").removeprefix("cutlass_ops.")
    if name in e.__all__:
        return f"[`{name}`][cutlass_ops.e.{name}]"
    return f"[`{name}`][cutlass_ops.{name}]" if name in cutlass_ops.__all__ else f"`{name}`"
