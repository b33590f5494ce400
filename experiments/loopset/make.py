"""The set: 22 classes of loops and 13 of honest repetition, half for choosing and half for the report.

    python -m experiments.loopset.make [--half choose|report] [--out texts.jsonl]

Each line has `text`, `class`, `half`, and, of a loop, `start`: the character at which its first copy begins. The same
texts are made every time.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from experiments.loopset.honest import HONEST
from experiments.loopset.looped import LOOPED
from experiments.record import Row
from experiments.script import run
from sinkscope.files.output import write_atomic
from sinkscope.models.text import typical_text

HALVES = ("choose", "report")
LOOPS, OTHERS = 8, 12  # texts of each class in each half


def _healthy(rng: random.Random) -> str:
    """A beginning of 40 to 200 words of documentation."""
    text = typical_text()
    words = text[rng.randrange(len(text) - 4000) :].split()
    return " ".join(words[1 : rng.randint(41, 201)])


def made_set(halves: tuple[str, ...] = HALVES) -> Iterator[Row]:
    """The texts of the halves."""
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


def main(*, half: Literal[*HALVES] | None = None, out: Path = Path("texts.jsonl")) -> None:
    """Make what the module describes."""
    halves = (half,)
    if half is None:
        halves = HALVES
    lines = []
    for text in made_set(halves):
        lines.append(json.dumps(text, ensure_ascii=False) + "\n")
    write_atomic(out, "".join(lines))
    print(f"{len(lines)} texts are in {out}")


if __name__ == "__main__":
    run(main)
