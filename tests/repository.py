"""Where the files of the repository are."""

from pathlib import Path

ROOT = Path(__file__).parents[1]
FIGURES = ROOT / "figures"
