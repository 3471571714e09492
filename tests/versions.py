"""Run the unit tests with other versions of Python and PyTorch than CI's, each pair in an environment of its own.

    python tests/versions.py 3.11+2.10.0 3.13+2.14.1 --out docs/versions.json --folder build/versions

An interpreter is one below ~/.pyenv, or the one of that name on PATH. Environments stay in the folder and are used
again. Pairs that were run before stay in the results; docs/versions.md shows them as a table.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
# What the tests need besides PyTorch and the extras.
NEEDED = ("pytest", "hypothesis", "transformers", "scikit-learn", "matplotlib")
QUICK = ("-q", "-p", "no:cacheprovider", "-m", "not compile and not gpu", "tests/unit")


def interpreter(version: str) -> str:
    """Return the path of a Python of this version.

    Raises
    ------
    SystemExit
        If there is none.
    """
    # pyenv's own come first: on PATH it has scripts that may know no such version.
    installed = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python{version}"))
    found = str(installed[-1]) if installed else shutil.which(f"python{version}")
    if found is None:
        raise SystemExit(f"there is no python{version} on PATH or below ~/.pyenv/versions")
    return found


def environment(folder: Path, python: str, torch: str) -> Path:
    """Return the interpreter of an environment with a version of PyTorch, made if it is not there."""
    home = folder / f"{python}+{torch}"
    executable = home / "bin" / "python"
    if not (home / "done").exists():
        subprocess.run([interpreter(python), "-m", "venv", "--clear", home], check=True)
        # Other versions of the rest than CI's, which need not exist for this Python.
        (home / "constraints.txt").write_text(f"torch=={torch}\n")
        pip = [executable, "-m", "pip", "install", "-q", "-c", home / "constraints.txt"]
        subprocess.run([*pip, "--upgrade", "pip"], check=True)
        subprocess.run([*pip, "torch", *NEEDED, "-e", f"{ROOT}[build,cli,sign,dask]"], check=True)
        (home / "done").touch()
    return executable


def run(executable: Path) -> dict[str, Any]:
    """Run the unit tests; return what the last lines say."""
    variables = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [executable, "-m", "pytest", *QUICK], cwd=ROOT, env=variables, text=True, stdout=subprocess.PIPE, check=False
    )
    lines = done.stdout.strip().splitlines()
    failures = [line.partition(" - ")[0] for line in lines if line.startswith(("FAILED ", "ERROR tests"))]
    counts = {word: int(n) for n, word in re.findall(r"(\d+) (passed|failed|skipped|deselected|errors?)", lines[-1])}
    asked = "import json, platform, torch; print(json.dumps([platform.python_version(), torch.__version__]))"
    versions = subprocess.run([executable, "-c", asked], text=True, stdout=subprocess.PIPE, check=True)
    exact = json.loads(versions.stdout)
    found: dict[str, Any] = {"python": exact[0], "torch": exact[1], "status": done.returncode, "failed": 0, **counts}
    found["failures"] = [test for test in failures if not _passes_alone(executable, test, variables)]
    # Two pairs run side by side on few cores, where a test that waits for a process may wait too short a time.
    found["passed_alone"] = [test for test in failures if test not in found["failures"]]
    return found


def _passes_alone(executable: Path, failure: str, variables: dict[str, str]) -> bool:
    test = failure.split(" ", 1)[1]
    return (
        subprocess.run([executable, "-m", "pytest", "-q", test], cwd=ROOT, env=variables, check=False).returncode == 0
    )


def table(results: dict[str, dict[str, Any]]) -> str:
    """Return the document that shows the results."""
    rows = [
        f"| {r['python']} | {r['torch']} | {r.get('passed', 0) + len(r.get('passed_alone', ()))} "
        f"| {len(r.get('passed_alone', ()))} | {len(r['failures'])} | {r['date']} |"
        for _, r in sorted(results.items())
    ]
    return "\n".join(
        (
            "# Versions",
            "",
            "The unit tests were run with these versions of Python and PyTorch by `python tests/versions.py`; the raw",
            "results are in [versions.json](versions.json). CI runs one pair, the one in `.ci/constraints.txt`.",
            "",
            "A test that fails is run again alone, since several pairs run at the same time on few cores.",
            "",
            "| Python | PyTorch | passed | passed only when run alone | failed | date |",
            "|---|---|---|---|---|---|",
            *rows,
            "",
        )
    )


def main() -> int:
    """Run the pairs that the command line names; the exit code is the number of pairs with failures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pairs", nargs="+", help="PYTHON+TORCH, such as 3.11+2.10.0")
    parser.add_argument("--out", type=Path, default=ROOT / "docs/versions.json")
    parser.add_argument("--folder", type=Path, default=ROOT / "build/versions")
    parser.add_argument("--here", action="store_true", help="with the environment that runs this, whatever it is")
    given = parser.parse_args()
    results = json.loads(given.out.read_text()) if given.out.exists() else {}
    bad = 0
    for pair in given.pairs:
        python, _, torch = pair.partition("+")
        executable = Path(sys.executable) if given.here else environment(given.folder.resolve(), python, torch)
        results[pair] = run(executable) | {"date": datetime.date.today().isoformat()}
        bad += bool(results[pair]["failures"])
        print(pair, json.dumps(results[pair]), flush=True)
        given.out.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
        given.out.with_suffix(".md").write_text(table(results))
    return bad


if __name__ == "__main__":
    sys.exit(main())
