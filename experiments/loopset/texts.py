"""The set, half for choosing and half for the report; the same texts are made every time."""

from __future__ import annotations

import random
from collections.abc import Iterator

from experiments.loopset.honest import HONEST
from experiments.loopset.looped import LOOPED
from experiments.record import Row
from sinkscope.models.text import typical_text

HALVES = ("choose", "report")
LOOPS, OTHERS = 8, 12  # texts of each class in each half


def _healthy(rng: random.Random) -> str:
    """A beginning of 40 to 200 words of documentation."""
    text = typical_text()
    words = text[rng.randrange(len(text) - 4000) :].split()
    return " ".join(words[1 : rng.randint(41, 201)])


def made_set(halves: tuple[str, ...] = HALVES) -> Iterator[Row]:
    """The texts of the halves: `text`, `class`, `half`, and `start`, the first character of a loop's first copy."""
    for half in halves:
        for name, make in LOOPED.items():
            for i in range(LOOPS):
                rng = random.Random(f"loops {half} {name} {i}")
                before = _healthy(rng) + rng.choice((" ", "\n\n"))
                yield {"text": before + make(rng), "class": name, "half": half, "start": len(before)}
        for name, make in HONEST.items():
            for i in range(OTHERS):
                text = make(random.Random(f"honest {half} {name} {i}"))
                yield {"text": text, "class": name, "half": half, "start": None}
