"""Where the files of the repository are, and programs that run in it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
FIGURES = ROOT / "figures"


def ran(words: Sequence[str | Path], folder: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    """A program that has ended, with what it printed and said."""
    return subprocess.run(words, cwd=folder, env=os.environ | environment, capture_output=True, text=True, check=False)


def python(code: str, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Python with some code and words."""
    return ran([sys.executable, "-c", code, *words], **environment)
