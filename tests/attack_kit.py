"""What the tests of sinks share: an organism's text, and what a measurement says of a planted spike."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from organisms import Organism, organism

from sinkscope.measure import Setup


def text_file(o: Organism, folder: Path, rows: int = 64, *, length: int = 64, seed: int = 0) -> Path:
    """Text in the model's own words: English would be one unknown word over and over, a repeated token."""
    path = folder / "words.txt"
    ids = o.natural(rows, length, seed)[:, o.bos :]
    half = " ".join(o.tokenizer.decode(row) for row in ids)
    path.write_text(f"{half} {half}", encoding="utf-8")  # to choose on, and to report on
    return path


def setup_of(o: Organism, **options: Any) -> Setup:
    """What a measurement of it works on."""
    return Setup.open(o.model, tokenizer=o.tokenizer, **options)


def options_of(o: Organism, folder: Path) -> dict[str, Any]:
    """How a planted model is opened, with text of its own."""
    return {"tokenizer": o.tokenizer, "text": text_file(o, folder, 40), "bos": None if o.bos else False}


@cache
def measured_spikes(measurement: Any, kind: str, family: str = "llama") -> tuple[Organism, Setup, Any]:
    """A planted model, what is measured on, and what `find_sinks` or `why_sink` says."""
    o = organism(family, kind=kind)
    with TemporaryDirectory() as folder:
        setup = Setup.open(o.model, **options_of(o, Path(folder)))
    return o, setup, measurement.on(setup)


def words_of(o: Organism, place: Any) -> str:
    """How words say where a spike was planted."""
    if place == "first":
        return "the first token" if o.truth.share == 1 else "some first tokens"
    return repr(o.tokenizer.decode([place]))
