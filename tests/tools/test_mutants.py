"""The list of mutants fits the code, and the tests named in it kill every one of them."""

from __future__ import annotations

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from tools import mutants

MUTANTS = mutants.mutants()


def test_every_line_of_the_list_is_read_and_every_name_is_one_mutant():
    text = Path(mutants.__file__).with_suffix(".txt").read_text()
    assert len(MUTANTS) == text.count("\n- ") > 80
    assert len({m.name for m in MUTANTS}) == len(MUTANTS)


def is_there(file: str, test: str = "") -> bool:
    """Whether there is a file of tests of this name or path, and a test of this name in it."""
    found = [*(mutants.TREE / "tests").rglob(file)]
    return any(f"def {test}" in one.read_text() for one in found)


def test_no_mutant_is_stale():
    """Each is read, its fragment is found once, its change is other code that can be parsed, and its tests exist."""
    assert len(MUTANTS) == len((mutants.TREE / "tools/mutants.txt").read_text().strip().split("\n\n"))
    changes = {m.name: mutants.changed(m, mutants.TREE) for m in MUTANTS}
    stale = [name for name, change in changes.items() if change is None]
    dumped = cache(lambda text: ast.dump(ast.parse(text)))  # several mutants change the same file
    for _, before, after in filter(None, changes.values()):
        assert dumped(before) != ast.dump(ast.parse(after))
    missing = {name for m in MUTANTS for name in m.tests.split() if not is_there(*name.split("::"))}
    assert (stale, missing) == ([], set())


@pytest.mark.slow
@pytest.mark.timeout(4 * 3600)
def test_every_mutant_is_killed():
    command = [sys.executable, "-m", "tools.mutants"]  # a process that has not imported the package
    done = subprocess.run(command, cwd=mutants.TREE, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
