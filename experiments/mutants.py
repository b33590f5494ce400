"""Small wrong changes of the code, each of which the tests named beside it must notice.

`mutants.txt` lists them: a fragment of the source and what replaces it. The fragment is looked for in all files of the
package, so that moving code does not matter, and white space counts only as white space. A fragment that is not found
exactly once is reported as stale. The tests run in a copy of the tree:

    python -m experiments.mutants --list
    python -m experiments.mutants --only causal-without-control
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

TREE = Path(__file__).resolve().parents[1]
TIMEOUT = 120  # seconds of one test


class Mutant(NamedTuple):
    """A wrong change and the test files, names with spaces between, that must notice it."""

    name: str
    tests: str
    fragment: str
    replacement: str


def mutants() -> list[Mutant]:
    """The mutants of `mutants.txt`. In each, three lines stand for `name: tests`, the fragment and the replacement."""
    text = Path(__file__).with_suffix(".txt").read_text()
    found = re.findall(r"^(\S+): (.+)\n- (.+)\n\+ ?(.*)$", text, re.M)
    return [Mutant(*parts) for parts in found]


def place_of(fragment: str, tree: Path) -> tuple[Path, re.Match[str]] | None:
    """The only place of a fragment in the package; None if there is none, or more than one."""
    pattern = re.compile(r"\s+".join(map(re.escape, fragment.split())))
    files = sorted((tree / "sinkscope").rglob("*.py"))
    found = [(file, match) for file in files for match in pattern.finditer(file.read_text())]
    return found[0] if len(found) == 1 else None


def tried(mutant: Mutant, tree: Path) -> str:
    """Apply a mutant in `tree`, run its tests, and undo it: killed, survived, hung, stale, or what went wrong."""
    place = place_of(mutant.fragment, tree)
    if place is None:
        return "stale"
    file, match = place
    before = file.read_text()
    file.write_text(before[: match.start()] + mutant.replacement + before[match.end() :])
    words = ["-q", "-x", "-n", "0", "-p", "no:cacheprovider", "--timeout", str(TIMEOUT)]
    command = [sys.executable, "-m", "pytest", *words, *(f"tests/{name}" for name in mutant.tests.split())]
    env = {**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(command, cwd=tree, env=env, capture_output=True, text=True, check=False)
    finally:
        file.write_text(before)
    if "Timeout (>" in done.stdout + done.stderr:
        return "hung"
    return {0: "survived", 1: "killed"}.get(done.returncode, f"pytest failed: {done.stdout.strip()[-300:]}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="say what there is and what is stale, and run nothing")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these mutants")
    args = parser.parse_args()
    chosen = [mutant for mutant in mutants() if not args.only or mutant.name in args.only]
    results: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "tree"
        if not args.list:
            shutil.copytree(TREE, copy, ignore=shutil.ignore_patterns(".git", "__pycache__", ".venv"))
        for mutant in chosen:
            if args.list:
                place = place_of(mutant.fragment, TREE)
                results.append("stale" if place is None else f"in {place[0].relative_to(TREE)}")
            else:
                results.append(tried(mutant, copy))
            print(f"{mutant.name}: {results[-1]}", flush=True)
    good = sum(result.startswith("in ") or result == "killed" for result in results)
    print(f"{good} of {len(results)} are {'found' if args.list else 'killed'}.")
    return int(good < len(results) or not results)


if __name__ == "__main__":
    sys.exit(main())
