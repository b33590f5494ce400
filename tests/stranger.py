"""A package of somebody else, with one measurement in one file, installed for the length of a test."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import invalidate_caches
from pathlib import Path

import sinkscope
from sinkscope.files.envelope import kinds, measurements, other_measurements

SOURCE = Path(__file__).parent / "fixtures" / "attention_entropy.py"
KIND, NAME, MODULE = "attention-entropy", "attention_entropy", "stranger_entropy"


@contextmanager
def installed(folder: Path, source: str, name: str = NAME) -> Iterator[None]:
    """Install the package in a folder; sinkscope looks for measurements again, as a new process would."""
    (folder / f"{MODULE}.py").write_text(source)
    info = folder / "stranger-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: stranger\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[sinkscope.measurements]\nentropy = {MODULE}:{name}\n")
    sys.path.insert(0, str(folder))
    _look_again()
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        sys.modules.pop(MODULE, None)
        vars(sinkscope).pop(NAME, None)
        _look_again()


def _look_again() -> None:
    invalidate_caches()
    other_measurements.cache_clear()
    measurements.cache_clear()
    kinds.cache_clear()
