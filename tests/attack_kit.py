"""What the tests of sinks share: an organism's text, and what a measurement says of a planted spike."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from organisms import Organism, hard
from organisms.organism import FIRST, SECOND

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


def hard_options(h: Organism, folder: Path) -> dict[str, Any]:
    """How a planted model is opened."""
    rows, seed = 20, 0
    if h.truth.share < 1:
        rows, seed = 40, 1  # with 0, two of twelve texts of one model begin with a token that is marked: too few
    text = text_file(h, folder, rows, seed=seed)
    return {"tokenizer": h.tokenizer, "text": text, "bos": None if h.truth.bos else False}


@cache
def measured_spikes(measurement: Any, name: str, family: str) -> tuple[Organism, Setup, Any]:
    """A planted model, what is measured on, and what `find_sinks` or `why_sink` says."""
    h = hard(name, family)
    with TemporaryDirectory() as folder:
        setup = Setup.open(h.model, **hard_options(h, Path(folder)))
    return h, setup, measurement.on(setup)


def words_of(h: Organism, place: Any) -> str:
    """How words say where a spike was planted."""
    if place == FIRST:
        return "the first token" if h.truth.share == 1 else "some first tokens"
    return "position 1" if place == SECOND else repr(h.tokenizer.decode([place]))
