"""What builds the site of docs/: links into the repository, and docstrings for the API reference; see mkdocs.yml."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import griffe
import tomllib

import cutlass_ops
from cutlass_ops import e
from cutlass_ops.run.named import NAMED
from cutlass_ops.run.ops import Op

ROOT = Path(__file__).resolve().parents[1]
REPOSITORY = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]["Repository"]

_LINK = re.compile(r"(?<!!)\[([^\]]*)\]\((\.\./[^)]*)\)")
_ROLE = re.compile(r":(?:func|class|meth|mod|data|attr):`([^`]+)`")


def on_config(config: Any, **_: Any) -> Any:
    """Take the repository's address from pyproject.toml."""
    config.repo_url, config.repo_name = REPOSITORY, "Repository"
    return config


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Let links that leave docs/ lead into the repository, since the site has no such page."""
    folder = (ROOT / "docs" / page.file.src_uri).parent

    def path_of(link: re.Match[str]) -> str:
        text, target = link.groups()
        path = (folder / target.partition("#")[0]).resolve()
        if (ROOT / "docs") in path.parents:
            return link[0]
        if not path.exists():
            raise FileNotFoundError(f"docs/{page.file.src_uri} links to {target}, which is not there")
        name = path.relative_to(ROOT).as_posix()
        shown = f"`{name}`" if text.strip("`") in (name, path.name, target) else text
        return f"[{shown}]({REPOSITORY}/{'tree' if path.is_dir() else 'blob'}/main/{name})"

    return _LINK.sub(path_of, markdown)


class Docstrings(griffe.Extension):
    """Docstrings as they are when the package is imported, with references that the site can resolve."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Put functions in the place of ops, which are instances: they write their own signatures and docstrings."""
        if pkg.path == "cutlass_ops":
            for op in NAMED:
                if op.name in pkg["run.named"].members and not pkg["run.named"][op.name].is_function:
                    pkg["run.named"].set_member(op.name, _function(op))

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Turn roles into references."""
        if obj.docstring is not None:
            obj.docstring.value = _ROLE.sub(_reference, obj.docstring.value)


def _function(op: Op) -> griffe.Function:
    parameters = [
        griffe.Parameter(p.name, kind=griffe.ParameterKind[p.kind.name.lower()], default=_default(p))
        for p in op.__signature__.parameters.values()
    ]
    function = griffe.Function(op.name, parameters=griffe.Parameters(*parameters))
    function.docstring = griffe.Docstring(op.__doc__, parent=function)
    return function


def _default(parameter: inspect.Parameter) -> str | None:
    return None if parameter.default is parameter.empty else repr(parameter.default)


def _reference(role: re.Match[str]) -> str:
    """Return a link to a public name, and any other name as code."""
    name = role[1].removeprefix("~").removeprefix("cutlass_ops.")
    if name in e.__all__:
        return f"[`{name}`][cutlass_ops.e.{name}]"
    return f"[`{name}`][cutlass_ops.{name}]" if name in cutlass_ops.__all__ else f"`{name}`"
