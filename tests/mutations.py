"""Draw mutations of the library, and say which tests notice each.

A mutation is a small wrong change: a comparison that is turned, another constant, a statement that is gone, branches
that are swapped. Before and after tests are cut, run::

    pip install coverage
    coverage run --branch --source cutlass_ops --context tests -m pytest -m "not compile and not gpu and not slow"
    coverage json --show-contexts -o covered.json
    python -m tests.mutations covered.json --seed 68 --count 60 --out before.json
    python -m tests.mutations covered.json --seed 68 --count 60 --out after.json --against before.json

with ``dynamic_context = test_function`` in coverage's settings, so that it notes which test runs which line. The same
seed draws the same mutations, of lines that a test runs. Each runs alone in a copy of the checkout, with the tests that
run its lines: at most 40, those of few lines first, and first of all the one that noticed it ``--against``. The first
failure ends a run. A test that fails without the mutation as well counts for nothing. ``--out`` is written after each
mutation, and a second call goes on from there.
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
QUICK = "not compile and not gpu and not slow"
PATIENCE = 300  # seconds until tests that do not end count as failed
MOST = 40  # tests of a mutation

_TURNED = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
           ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In}  # fmt: skip
_ARITHMETIC = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.FloorDiv: ast.Mult, ast.Div: ast.Mult}
_HOLDERS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def _changes(node, statement):
    """Yield functions that change a node of a tree in place, each in one way; one that returns it: it shall go."""
    if isinstance(node, ast.Compare) and type(node.ops[0]) in _TURNED:
        yield lambda: node.ops.__setitem__(0, _TURNED[type(node.ops[0])]())
    elif isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
        if not any(isinstance(x, ast.Constant | ast.JoinedStr) for x in (node.left, node.right)):
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
        yield lambda: node


def mutation_of(file, rng, lines_run):
    """Draw a mutation of a statement of a module that a test runs; None if the statement that was drawn has none."""
    lines = (ROOT / file).read_text().splitlines(keepends=True)
    functions = [n for n in ast.walk(ast.parse("".join(lines))) if isinstance(n, _HOLDERS[:2])]
    inside = {id(n): n for function in functions for n in ast.walk(function) if isinstance(n, ast.stmt)}
    statements = [n for n in inside.values() if not isinstance(n, _HOLDERS) and n.lineno in lines_run]
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


def draw(seed, count, covered):
    """Draw mutations: a module by how many lines of it tests run, then one of its statements. None is drawn twice."""
    rng, files, found = random.Random(seed), sorted(covered), []
    weights = [len(covered[file]) for file in files]
    while len(found) < count:
        (file,) = rng.choices(files, weights)
        each = mutation_of(file, rng, covered[file])
        if each is not None and each not in found:
            found.append(each)
    return found


def read(path):
    """Return which tests run which line of which file: ``{file: {line: tests}}``, by coverage's report."""
    files = json.loads(path.read_text())["files"]
    lines = {f: {int(n): set(filter(None, ts)) for n, ts in found["contexts"].items()} for f, found in files.items()}
    return {file: kept for file, found in lines.items() if (kept := {n: ts for n, ts in found.items() if ts})}


def tests_of(mutation, covered, checkout):
    """Return the tests that run a mutation's lines, if they are still there: those that run few lines first."""
    runs = set().union(*(covered[mutation["file"]].get(n, ()) for n in range(mutation["line"], mutation["end"] + 1)))
    many = dict.fromkeys(runs, 0)
    for tests in covered[mutation["file"]].values():
        for test in tests & runs:
            many[test] += 1
    found = []
    for test in sorted(runs, key=lambda test: (many[test], test)):
        module = (re.match(r"(?:\w+\.)*test_\w+?(?=\.)", test) or [""])[0]
        path, name = module.replace(".", "/") + ".py", test[len(module) + 1 :].replace(".", "::")
        if (checkout / path).is_file() and f"def {name.rpartition('::')[2]}(" in (checkout / path).read_text():
            found.append(f"{path}::{name}")
    return found[:MOST]


def first_failure(checkout, tests):
    """Return the first test that fails in a checkout; None if all pass."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", QUICK, "-rfE", "--tb=no"]
    environment = {**os.environ, "PYTHONPATH": str(checkout), "PYTHONDONTWRITEBYTECODE": "1"}
    run = {"cwd": checkout, "capture_output": True, "text": True, "env": environment}
    try:
        done = subprocess.run([*command, *tests], timeout=PATIENCE, check=False, **run)
    except subprocess.TimeoutExpired:
        return f"not ended after {PATIENCE} s"
    named = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    return named[1] if named else f"pytest ended with {done.returncode}" if done.returncode not in (0, 5) else None


def noticed(mutation, checkout, tests):
    """Return the first test that fails with a mutation and passes without; None if there is none."""
    path, tests = checkout / mutation["file"], list(tests)
    original = path.read_text()
    lines = original.splitlines(keepends=True)
    while tests:
        path.write_text("".join((*lines[: mutation["line"] - 1], mutation["after"], *lines[mutation["end"] :])))
        failed = first_failure(checkout, tests)
        path.write_text(original)
        alone = failed and failed.partition("[")[0]
        if failed is None or "::" not in failed or first_failure(checkout, [alone]) is None:
            return failed
        tests = [test for test in tests if test != alone]
    return None


def main():
    """Draw, run, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("covered", type=Path, help="coverage's report in JSON, with contexts")
    parser.add_argument("--seed", type=int, default=68)
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--against", type=Path, default=None, help="an earlier --out: fail if fewer are noticed")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    covered = read(args.covered)
    rows = json.loads(args.out.read_text()) if args.out.exists() else []
    before = json.loads(args.against.read_text()) if args.against else []
    with tempfile.TemporaryDirectory() as folder:
        checkout = Path(folder)
        checkout.chmod(0o755)  # tests of other users' folders would fail in a private one, with or without a mutation
        listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
        for name in filter(lambda name: (ROOT / name).is_file(), listed.splitlines()):
            (checkout / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, checkout / name)
        for at, each in enumerate(draw(args.seed, args.count, covered)[len(rows) :], len(rows)):
            known = before[at]["killed_by"] if before else None
            tests, alone = tests_of(each, covered, checkout), known and known.partition("[")[0]
            killed = noticed(each, checkout, [alone]) if alone in tests else None
            killed = killed or noticed(each, checkout, tests)
            rows.append({**each, "killed_by": killed})
            args.out.write_text(json.dumps(rows, indent=1) + "\n")
            print(f"{at}: {each['file']}:{each['line']}: {killed}", flush=True)
    kills = [sum(row["killed_by"] is not None for row in table) for table in (rows, before)]
    print(f"{kills[0]} of {len(rows)} mutations are noticed")
    if kills[0] < kills[1]:
        raise SystemExit(f"fewer than the {kills[1]} before")


if __name__ == "__main__":
    main()
