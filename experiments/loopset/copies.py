"""At how many copies each class of repetition is cut, and from how many on it is reported.

    python -m experiments.loopset.copies [--out figures/loops_copies.json]

Copies follow 60 words of ordinary text, one after another, until the monitor calls them a loop, 400 at most; the first
report of what may be honest is noted beside it. Classes whose copies differ are drawn anew for each of five seeds, and
the row has the median.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from statistics import median

from experiments.loopset.formats import honest
from experiments.record import Row, record
from experiments.script import run
from sinkscope.files.output import write_atomic
from sinkscope.loops import Watch
from sinkscope.loops.text.pieces import Piece

MOST = 400
SENTENCE = "I will now check the file again and report what I see there."
WAYS = (
    "I look once more at the old file.",
    "Once more, I look at the old file.",
    "The old file, once more I look at it.",
)
PARAGRAPH = " ".join(SENTENCE.replace("file", f"file {part}") for part in "abcdefgh")
JSON = '{"name": "", "email": "", "active": false},'
CLASSES: dict[str, Callable[[int, Random], str]] = {
    "a word of prose": lambda n, rng: "hello ",
    "a syllable": lambda n, rng: "ha",
    "an emoji": lambda n, rng: "😂",
    "a sentence": lambda n, rng: f"{SENTENCE} ",
    "a paragraph of 8 sentences": lambda n, rng: PARAGRAPH,
    "short items that count": lambda n, rng: f"{n + 9}. Grapefruit ",
    "sentences that count": lambda n, rng: f"Step {n}: {SENTENCE} ",
    "a line of code": lambda n, rng: "x = x + 1\n",
    "lines of code that count": lambda n, rng: f"    elif x == {n}:\n        return {n}\n",
    "an object of JSON": lambda n, rng: f"{JSON}\n",
    "a line of a log": lambda n, rng: "INFO retry the same request now\n",
    "a rule of one sign": lambda n, rng: "─",
    "rows of numbers that count": lambda n, rng: f"{n} 0 0 1\n",
    "two words in any order": lambda n, rng: rng.choice(("the ", "the, ", "the the ")),
    "a sentence in other words": lambda n, rng: f"{rng.choice(WAYS)} ",
    "short lines in any order": lambda n, rng: rng.choice(("OK.\n", "Done.\n", "Yes.\n", "Sure.\n")),
}


def found(make: Callable[[int, Random], str], seed: int) -> tuple[int | None, int | None]:
    """The number of copies at which a class is cut, and that at which it is first reported; None: not within 400."""
    rng = Random(seed)
    watch, reported = Watch(), None
    list(watch.take(Piece("a", text=f"{honest(rng, 60)}.\n")))
    for number in range(MOST):
        for alarm in watch.take(Piece("a", text=make(number, rng))):
            if alarm.cut:
                return number + 1, reported
            reported = reported or number + 1
    return None, reported


def suspicious(make: Callable[[int, Random], str], seed: int) -> int | None:
    """The number of copies from which on the whole text is suspicious at least."""
    low, high = 0, MOST
    while low < high:
        middle = (low + high) // 2
        rng, watch = Random(seed), Watch()
        text = f"{honest(rng, 60)}.\n" + "".join(make(number, rng) for number in range(middle))
        list(watch.take(Piece("a", text=text, ends=True)))
        if watch.checked[0].verdict in ("suspicious", "loops", "looped"):
            high = middle
        else:
            low = middle + 1
    return low if low < MOST else None


def rows() -> Iterator[Row]:
    """A row for each class."""
    for name, make in CLASSES.items():
        cuts = [found(make, seed)[0] for seed in range(5)]
        reports = [suspicious(make, seed) for seed in range(5)]
        known = [cut for cut in cuts if cut is not None]
        told = [one for one in reports if one is not None]
        yield {
            "class": name,
            "cut": median(known) if len(known) == len(cuts) else None,
            "reported": median(told) if len(told) == len(reports) else None,
        }


def main(*, out: Path = Path("figures/loops_copies.json")) -> None:
    """Make what the module describes.

    Args:
        out: The JSON.
    """
    table = list(rows())
    for row in table:
        print(row)
    write_atomic(out, record("loops-copies", {"classes": table}, {}, dtype="text"))


if __name__ == "__main__":
    run(main)
