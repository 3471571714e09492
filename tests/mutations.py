"""Draw mutations of the library, and say which tests notice each.

A mutation is a small wrong change: a comparison that is turned, another constant, a statement that is gone, branches
that are swapped. Tests that are worth keeping fail for it. Before and after tests are cut, run::

    python -m tests.mutations --seed 7 --count 60 --out before.json
    python -m tests.mutations --seed 7 --count 60 --out after.json --against before.json

The same seed draws the same mutations of the same source. Each runs in a copy of the checkout, which stays as it is.
The quick tests of the files that name the mutated module run first, then those of modules that import it, and the
contract suite; the first failure ends a run. ``--every`` goes on to name all tests that fail. ``--files`` draws from
these files alone, ``--tests`` runs these tests alone, ``--list`` only prints what is drawn.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
CONTRACT = "tests/unit/test_op_contract.py"
QUICK = "not compile and not gpu and not slow"
PATIENCE = 600  # seconds until tests that do not end count as failed

_TURNED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
_ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.FloorDiv: ast.Mult, ast.Div: ast.Mult,
}  # fmt: skip


_HOLDERS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


@dataclass(frozen=True)
class Mutation:
    """A wrong change.

    Attributes
    ----------
    file : str
        The module's path in the repository.
    line, end : int
        The lines that are replaced, both included.
    before, after : str
        What stood there, and what stands there now.
    """

    file: str
    line: int
    end: int
    before: str
    after: str

    def applied(self, root: Path) -> str:
        """Return the module's text with the change."""
        lines = (root / self.file).read_text().splitlines(keepends=True)
        found = "".join(lines[self.line - 1 : self.end])
        if found != self.before:
            raise ValueError(f"{self.file}:{self.line} is not what was drawn from: draw again")
        return "".join((*lines[: self.line - 1], self.after, *lines[self.end :]))


def _changes(node: ast.AST, parent: ast.AST) -> Iterator[Callable[[], Any]]:
    """Yield functions that change a node of a tree in place, each in one way."""
    if isinstance(node, ast.Compare):
        turned = _TURNED.get(type(node.ops[0]))
        if turned is not None:
            yield lambda: node.ops.__setitem__(0, turned())
    elif isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC and not isinstance(parent, ast.JoinedStr):
        if not any(isinstance(x, ast.Constant) and isinstance(x.value, str) for x in (node.left, node.right)):
            yield lambda: setattr(node, "op", _ARITHMETIC[type(node.op)]())
    elif isinstance(node, ast.BoolOp):
        yield lambda: setattr(node, "op", ast.Or() if isinstance(node.op, ast.And) else ast.And())
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield lambda: setattr(node, "op", ast.UAdd()) or setattr(node, "operand", ast.Call(
            ast.Name("bool", ast.Load()), [node.operand], []))  # fmt: skip
    elif isinstance(node, ast.Constant) and isinstance(node.value, (bool, int)):
        other = not node.value if isinstance(node.value, bool) else node.value + 1
        yield lambda: setattr(node, "value", other)
    elif isinstance(node, (ast.If, ast.IfExp)) and not _has_elif(node) and node.orelse:
        yield lambda: node.__dict__.update(body=node.orelse, orelse=node.body)
    elif isinstance(node, ast.If):
        yield lambda: setattr(node, "test", ast.Constant(False))
    elif isinstance(node, (ast.AugAssign, ast.Raise)) or (
        isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
    ):
        yield lambda: node


def _has_elif(node: ast.If | ast.IfExp) -> bool:
    return isinstance(node, ast.If) and bool(node.orelse) and isinstance(node.orelse[0], ast.If)


def _statements(tree: ast.Module) -> Iterator[tuple[ast.stmt, list[ast.stmt], int]]:
    """Yield each statement inside of functions, with the list that holds it and its place there."""
    functions = [n for n in ast.walk(tree) if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))]
    seen = set()
    for function in functions:
        for holder in ast.walk(function):
            for name in ("body", "orelse", "finalbody"):
                for at, statement in enumerate(found if isinstance(found := getattr(holder, name, None), list) else ()):
                    if isinstance(statement, ast.stmt) and id(statement) not in seen:
                        seen.add(id(statement))
                        yield statement, found, at


def mutation_of(file: str, rng: random.Random, root: Path = ROOT) -> Mutation | None:
    """Draw a mutation of a module; None if the statement that was drawn has none."""
    text = (root / file).read_text()
    lines = text.splitlines(keepends=True)
    statements = [each for each in _statements(ast.parse(text)) if not isinstance(each[0], _HOLDERS)]
    if not statements:
        return None
    statement, holder, at = rng.choice(statements)
    begin, end = statement.lineno, statement.end_lineno or statement.lineno
    # Of a statement that holds others, the head alone: its body has statements of its own.
    heads = [n for n in ast.iter_child_nodes(statement) if not isinstance(n, (ast.stmt, ast.excepthandler))]
    nodes = [(statement, statement), *((head, statement) for head in heads)]
    nodes += [(node, parent) for head in heads for parent in ast.walk(head) for node in ast.iter_child_nodes(parent)]
    every = [change for node, parent in nodes for change in _changes(node, parent)]
    if not every or lines[begin - 1].lstrip().startswith("elif"):  # which has no text of its own
        return None
    if rng.choice(every)() is statement:
        holder[at] = statement = ast.copy_location(ast.Pass(), statement)
    indent = " " * (len(lines[begin - 1]) - len(lines[begin - 1].lstrip()))
    unparsed = ast.unparse(ast.fix_missing_locations(statement))
    after = "".join(f"{indent}{line}\n" for line in unparsed.split("\n"))
    return Mutation(file, begin, end, "".join(lines[begin - 1 : end]), after)


def modules(root: Path = ROOT) -> list[str]:
    """Return the modules of the library."""
    return sorted(path.relative_to(root).as_posix() for path in (root / "cutlass_ops").rglob("*.py"))


def draw(seed: int, count: int, files: Sequence[str], root: Path = ROOT) -> list[Mutation]:
    """Draw mutations: a module by how many lines it has, then one of its statements. None is drawn twice."""
    rng = random.Random(seed)
    weights = [len((root / file).read_text().splitlines()) for file in files]
    found: dict[Mutation, None] = {}
    while len(found) < count:
        (file,) = rng.choices(files, weights)
        each = mutation_of(file, rng, root)
        if each is not None:
            found[each] = None
    return list(found)


# ---- Which tests -----------------------------------------------------------------------------------------------------


def names(file: str) -> re.Pattern[str]:
    """Return a pattern of what imports a module."""
    parts = Path(file).with_suffix("").parts
    parts = parts[:-1] if parts[-1] == "__init__" else parts
    package, leaf = ".".join(parts[:-1]), parts[-1]
    return re.compile(
        rf"\b{re.escape('.'.join(parts))}\b|from {re.escape(package)} import (?:[\w, ]|\(\s*)*\b{leaf}\b", re.DOTALL
    )


def files_of(file: str, root: Path = ROOT, most: int = 24) -> list[str]:
    """Return the files of tests that name a module, then those that name modules which import it, and the contract."""
    tests = {p.relative_to(root).as_posix(): p.read_text() for p in sorted((root / "tests").rglob("test_*.py"))}
    tests = {path: text for path, text in tests.items() if not path.startswith(("tests/gpu", "tests/compile"))}
    near = [path for path, text in tests.items() if names(file).search(text)]
    stem = Path(file).stem.strip("_")
    near += [path for path in tests if path not in near and stem != "init" and stem in Path(path).stem]
    importers = [other for other in modules(root) if other != file and names(file).search((root / other).read_text())]
    far = [path for path, text in tests.items() if any(names(other).search(text) for other in importers)]
    return list(dict.fromkeys((*near[:most], CONTRACT, *far)))[:most]


def copied(into: Path, root: Path = ROOT) -> None:
    """Copy what git knows of a checkout, and what it has not been told to ignore."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=root, capture_output=True, text=True, check=True,
    )  # fmt: skip
    for name in listed.stdout.splitlines():
        if (root / name).is_file():
            (into / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(root / name, into / name)


def run(mutation: Mutation | None, checkout: Path, tests: Sequence[str], every: bool) -> tuple[list[str], float]:
    """Run tests in a copy of the checkout with a mutation. Return those that failed, and the seconds that it took."""
    path = original = None
    if mutation is not None:
        path = checkout / mutation.file
        original = path.read_text()
        path.write_text(mutation.applied(checkout))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", QUICK, "-rfE", "--tb=no"]
    began = time.monotonic()
    environment = {**os.environ, "PYTHONPATH": str(checkout), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(
            [*command, *([] if every else ["-x"]), *tests], cwd=checkout, capture_output=True, text=True,
            timeout=PATIENCE, env=environment,
        )  # fmt: skip
        failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
        if done.returncode and not failed:
            failed = [f"pytest ended with {done.returncode}"]
    except subprocess.TimeoutExpired:
        failed = [f"not ended after {PATIENCE} s"]
    finally:
        if path is not None and original is not None:
            path.write_text(original)
    return failed, time.monotonic() - began


def main() -> None:
    """Draw, run, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--files", nargs="+", default=None, help="draw from these modules alone")
    parser.add_argument("--tests", nargs="+", default=None, help="run these tests alone")
    parser.add_argument("--most", type=int, default=24, help="files of tests that one mutation runs, at most")
    parser.add_argument("--every", action="store_true", help="go on after the first failure")
    parser.add_argument("--list", action="store_true", help="print what is drawn, and end")
    parser.add_argument("--seconds", type=float, default=None, help="begin no further mutation after this time")
    parser.add_argument("--against", type=Path, default=None, help="an earlier --out: fail if fewer are noticed")
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args()
    drawn = draw(args.seed, args.count, args.files or modules())
    if args.list:
        for each in drawn:
            print(f"{each.file}:{each.line}\n- {each.before.strip()}\n+ {each.after.strip()}")
        return
    rows: list[dict[str, Any]] = []
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        checkout = Path(folder)
        checkout.chmod(0o755)  # tests of other users' folders would fail in a private one, with or without a mutation
        copied(checkout)
        for at, each in enumerate(drawn):
            if args.seconds is not None and time.monotonic() - began > args.seconds:
                break
            failed, seconds = run(each, checkout, args.tests or files_of(each.file, checkout, args.most), args.every)
            rows.append({**asdict(each), "killed_by": failed, "seconds": round(seconds, 1)})
            said = failed[0] if failed else "SURVIVES"
            print(f"{at}: {each.file}:{each.line}: {said} ({seconds:.0f} s)", flush=True)
            if not failed:
                print(f"- {each.before.rstrip()}\n+ {each.after.rstrip()}", flush=True)
    killed = sum(bool(row["killed_by"]) for row in rows)
    print(f"{killed} of {len(rows)} mutations are noticed")
    if args.out is not None:
        args.out.write_text(json.dumps({"seed": args.seed, "rows": rows}, indent=1) + "\n")
    if args.against is not None:
        before = json.loads(args.against.read_text())["rows"]
        if killed < sum(bool(row["killed_by"]) for row in before[: len(rows)]):
            raise SystemExit("fewer than before")


if __name__ == "__main__":
    main()
