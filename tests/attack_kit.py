"""What the tests of attacks share: an organism's text, and its planted clusters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from organisms import Organism

from sinkscope.measure import Setup


def text_file(o: Organism, folder: Path, rows: int = 64, *, length: int = 64, seed: int = 0) -> Path:
    """Text in the model's own words: English would be one unknown word over and over, a repeated token."""
    path = folder / "words.txt"
    before = len(o.truth.before)
    ids = o.natural(rows, length, seed)[:, before:]
    half = " ".join(o.tokenizer.decode(row) for row in ids)
    path.write_text(f"{half} {half}", encoding="utf-8")  # to choose on, and to report on
    return path


def setup_of(o: Organism, **options: Any) -> Setup:
    """What a measurement of it works on."""
    return Setup.open(o.model, tokenizer=o.tokenizer, **options)
