"""Draw mutations of the library, and say which tests notice each.

A mutation is a small wrong change: a comparison that is turned, another constant, a statement that is gone, branches
that are swapped. Before and after tests are cut, run::

    python -m tests.mutations --seed 68 --count 60 --out before.json
    python -m tests.mutations --seed 68 --count 60 --out after.json --against before.json

The same seed draws the same mutations of the same source. Each runs alone in a copy of the checkout, with the quick
tests of the files that name the mutated module, then of those that name modules which import it, and the contract
suite. The first failure ends a run. A test that fails without the mutation as well counts for nothing. ``--out`` is
written after each mutation, and a second call goes on from there. With ``--against``, the files that noticed a mutation
run first, and those that nothing noticed are not run again.
"""

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
from pathlib import Path

ROOT = Path(__file__).parents[1]
CONTRACT = "tests/unit/test_op_contract.py"
QUICK = "not compile and not gpu and not slow"
PATIENCE = 600  # seconds until tests that do not end count as failed
MOST = 24  # files of tests that a mutation runs

_TURNED = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
           ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In}  # fmt: skip
_ARITHMETIC = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.FloorDiv: ast.Mult, ast.Div: ast.Mult}
_HOLDERS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def _changes(node, statement):
    """Yield functions that change a node of a tree in place, each in one way; one that returns it: it shall go."""
    if isinstance(node, ast.Compare) and type(node.ops[0]) in _TURNED:
        yield lambda: node.ops.__setitem__(0, _TURNED[type(node.ops[0])]())
    elif isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
        if not any(isinstance(x, ast.Constant) and isinstance(x.value, str) for x in (node.left, node.right)):
            yield lambda: setattr(node, "op", _ARITHMETIC[type(node.op)]())
    elif isinstance(node, ast.BoolOp):
        yield lambda: setattr(node, "op", ast.Or() if isinstance(node.op, ast.And) else ast.And())
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool | int):
        yield lambda: setattr(node, "value", not node.value if isinstance(node.value, bool) else node.value + 1)
    elif isinstance(node, ast.If | ast.IfExp | ast.While):
        yield lambda: setattr(node, "test", ast.UnaryOp(ast.Not(), node.test))
    elif isinstance(node, ast.Return) and not isinstance(node.value, ast.Constant | None):
        yield lambda: setattr(node, "value", None)
    elif node is statement and isinstance(node, ast.AugAssign | ast.Raise | ast.Expr):
        if not isinstance(getattr(node, "value", None), ast.Constant):  # a docstring
            yield lambda: node


def mutation_of(file, rng):
    """Draw a mutation of a module; None if the statement that was drawn has none."""
    lines = (ROOT / file).read_text().splitlines(keepends=True)
    functions = [n for n in ast.walk(ast.parse("".join(lines))) if isinstance(n, _HOLDERS[:2])]
    inside = {id(n): n for function in functions for n in ast.walk(function) if isinstance(n, ast.stmt)}
    statements = [n for n in inside.values() if not isinstance(n, _HOLDERS)]
    if not statements:
        return None
    statement = rng.choice(statements)
    begin, end = statement.lineno, statement.end_lineno
    if lines[begin - 1].lstrip().startswith("elif"):  # which has no text of its own
        return None
    # Of a statement that holds others, the head alone: its body has statements of its own.
    heads = [n for n in ast.iter_child_nodes(statement) if not isinstance(n, ast.stmt | ast.excepthandler)]
    nodes = [statement, *(node for head in heads for node in ast.walk(head))]
    changes = [change for node in nodes for change in _changes(node, statement)]
    if not changes:
        return None
    if rng.choice(changes)() is statement:
        statement = ast.Pass()
    indent = " " * (len(lines[begin - 1]) - len(lines[begin - 1].lstrip()))
    text = "".join(f"{indent}{line}\n" for line in ast.unparse(ast.fix_missing_locations(statement)).split("\n"))
    return {"file": file, "line": begin, "end": end, "before": "".join(lines[begin - 1 : end]), "after": text}


def modules():
    """Return the modules of the library."""
    return sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "cutlass_ops").rglob("*.py"))


def draw(seed, count):
    """Draw mutations: a module by how many lines it has, then one of its statements. None is drawn twice."""
    rng, files, found = random.Random(seed), modules(), []
    weights = [len((ROOT / file).read_text().splitlines()) for file in files]
    while len(found) < count:
        each = mutation_of(rng.choices(files, weights)[0], rng)
        if each is not None and each not in found:
            found.append(each)
    return found


def files_of(file):
    """Return the files of tests that name a module or what imports it, the nearest first, with the contract."""

    def names(file):
        *package, leaf = [part for part in Path(file).with_suffix("").parts if part != "__init__"]
        whole, parent = "[.]".join((*package, leaf)), "[.]".join(package)
        return re.compile(rf"\b{whole}\b|from {parent} import [\w, (\n]*\b{leaf}\b")

    tests = {p.relative_to(ROOT).as_posix(): p.read_text() for p in sorted((ROOT / "tests").rglob("test_*.py"))}
    tests = {path: text for path, text in tests.items() if not path.startswith(("tests/gpu", "tests/compile"))}
    library = {each: (ROOT / each).read_text() for each in modules()}
    found = [path for path in tests if Path(file).stem in Path(path).stem]
    seen, level = {file}, {file}
    while level and len(found) < MOST:
        patterns = [names(each) for each in level]
        found += [path for path, text in tests.items() if any(pattern.search(text) for pattern in patterns)]
        level = {other for other, text in library.items() if any(each.search(text) for each in patterns)} - seen
        seen |= level
    room = re.compile("[.]".join(Path(file).parts[:2]))  # modules that register themselves are imported by no name
    found = list(dict.fromkeys((*found, *(path for path, text in tests.items() if room.search(text)))))
    return list(dict.fromkeys((*found[: MOST - 1], CONTRACT)))


def first_failure(checkout, tests):
    """Return the first test that fails in a checkout; None if all pass."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", QUICK, "-rfE", "--tb=no"]
    environment = {**os.environ, "PYTHONPATH": str(checkout), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(
            [*command, *tests], cwd=checkout, capture_output=True, text=True, timeout=PATIENCE, env=environment
        )
    except subprocess.TimeoutExpired:
        return f"not ended after {PATIENCE} s"
    named = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    return named[1] if named else f"pytest ended with {done.returncode}" if done.returncode not in (0, 5) else None


def noticed(mutation, checkout, tests):
    """Return the first test that fails with a mutation and passes without; None if there is none."""
    path, tests = checkout / mutation["file"], list(tests)
    original = path.read_text()
    lines = original.splitlines(keepends=True)
    while True:
        path.write_text("".join((*lines[: mutation["line"] - 1], mutation["after"], *lines[mutation["end"] :])))
        failed = first_failure(checkout, tests)
        path.write_text(original)
        if failed is None or "::" not in failed or first_failure(checkout, [failed.partition("[")[0]]) is None:
            return failed
        tests.append(f"--deselect={failed}")


def main():
    """Draw, run, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=68)
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--against", type=Path, default=None, help="an earlier --out: fail if fewer are noticed")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    rows = json.loads(args.out.read_text()) if args.out.exists() else []
    before = json.loads(args.against.read_text()) if args.against else []
    with tempfile.TemporaryDirectory() as folder:
        checkout = Path(folder)
        checkout.chmod(0o755)  # tests of other users' folders would fail in a private one, with or without a mutation
        listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
        for name in filter(lambda name: (ROOT / name).is_file(), listed.splitlines()):
            (checkout / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, checkout / name)
        for at, each in enumerate(draw(args.seed, args.count)[len(rows) :], len(rows)):
            known = before[at]["killed_by"] if before else ""
            first = [file for file in [(known or "").partition("::")[0]] if (checkout / file).is_file()]
            killed = (
                None if known is None else noticed(each, checkout, dict.fromkeys([*first, *files_of(each["file"])]))
            )
            rows.append({**each, "killed_by": killed})
            args.out.write_text(json.dumps(rows, indent=1) + "\n")
            print(f"{at}: {each['file']}:{each['line']}: {killed}", flush=True)
    kills = [sum(row["killed_by"] is not None for row in table) for table in (rows, before)]
    print(f"{kills[0]} of {len(rows)} mutations are noticed")
    if kills[0] < kills[1]:
        raise SystemExit(f"fewer than the {kills[1]} before")


if __name__ == "__main__":
    main()
