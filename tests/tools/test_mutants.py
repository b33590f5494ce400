"""The list of mutants fits the code, and the tests named in it kill every one of them."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tools import mutants


def tried(*words: str) -> None:
    command = [sys.executable, "-m", "tools.mutants", *words]  # a process that has not imported the package
    done = subprocess.run(command, cwd=mutants.TREE, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_no_mutant_is_stale():
    tried("--list")


@pytest.mark.slow
@pytest.mark.timeout(4 * 3600)
def test_every_mutant_is_killed():
    tried()
