"""What the text is like after the guard has acted: loops, words that are no words, and distinct 4-grams.

    python -m experiments.loopguard.remedies WORK --families held-out --count 48
    python -m experiments.loopguard.text WORK --stories FILE [--page docs/guard.md]

A word is known if it stands in the model's training text: in stories as `experiments.bundled.stories` writes them
(FILE), in the passages made of them, or in Python's standard library; or in the openings. The columns:

- `loops`: outputs that end in a loop, by the rule of `sinkscope bench --task loops`.
- `unknown words at seams`: acts with an unknown word beside them: the last one before the seam, or the next one. A word
  that the seam cuts is one word.
- `unknown words`: words after the first act that are not known, and in how many outputs. Without a guard, of outputs
  without an alarm, from token 48 on.
- `distinct-4`: share of different 4-grams among those of the 128 tokens after the first act (or from token 48 on).
- `perplexity`: as `experiments.loopguard.outcome` has it, not divided.
"""

from __future__ import annotations

import json
import re
import string
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from experiments.bundled.corpus import read_corpus
from experiments.bundled.passages import passages
from experiments.bundled.stories import read_stories
from experiments.drawn import put_table
from experiments.loopguard import outcome
from experiments.loopguard.openings import LOOKED_AT_ONCE, WORDS, openings
from experiments.loopguard.remedies import FULL, GUARD, PLAIN, UNALARMED, read
from experiments.record import Row
from experiments.script import run
from sinkscope.opening.load import load

COUNT, AFTER, GRAM = 48, 128, 4
LETTERS = string.ascii_letters + "'"
WORD = re.compile(f"[{LETTERS}]+")
METHODS = (FULL, PLAIN, GUARD)
HEAD = ("", "loops", "unknown words at seams", "unknown words", "distinct-4", "perplexity")
RESULT = Path(__file__).with_name("text.json")


def words(text: str) -> list[str]:
    """The words of a text, in small letters."""
    return [word.strip("'") for word in WORD.findall(text.lower())]


def training_words(stories: Path) -> set[str]:
    """The words of the training text."""
    told = read_stories(stories)
    known = {""}
    for text in (*told, *passages(0, 2000, told), *read_corpus().train):
        known.update(words(text))
    return known


def distinct(tokens: Sequence[int]) -> tuple[int, int]:
    """Number of different 4-grams, and of all."""
    grams = [tuple(tokens[place : place + GRAM]) for place in range(len(tokens) - GRAM + 1)]
    return len(set(grams)), len(grams)


def beside(before: str, after: str) -> list[str]:
    """The last word before a seam, which the seam may cut, and the next one."""
    last = re.split(r"(?<![A-Za-z'])(?=[A-Za-z'])", before)[-1]
    return words(last + after)[:2]


def summary(method: str, outputs: Sequence[Row], full: dict[Any, Row], known: set[str], tokenizer: Any) -> Row:
    """One row of the table; `full` are the outputs without a guard."""
    row = outcome.summary(method, outputs, full)
    different = grams = wrong_seams = seams = 0
    unknown: list[list[str]] = []
    for output in outputs:
        tokens = output["tokens"]
        first = UNALARMED
        if method != FULL:
            if not output["acts"]:
                continue
            first = output["acts"][0][0]
        elif output["alarm"] is not None:
            continue
        found = distinct(tokens[first : first + AFTER])
        different, grams = different + found[0], grams + found[1]
        for place, _ in output["acts"]:
            seams += 1
            before, after = tokenizer.decode(tokens[:place]), tokenizer.decode(tokens[place : place + 12])
            wrong_seams += not known.issuperset(beside(before, after))
        text = tokenizer.decode(tokens, skip_special_tokens=True)
        begun = len(tokenizer.decode(tokens[:first], skip_special_tokens=True).rstrip(LETTERS))
        unknown.append([word for word in words(text[begun:]) if word not in known])
    return {
        **row,
        "seams": seams,
        "wrong_seams": wrong_seams,
        "unknown": sum(map(len, unknown)),
        "unknown_in": sum(map(bool, unknown)),
        "texts": len(unknown),
        "distinct": different / max(1, grams),
    }


def cells(row: Row) -> list[str]:
    """A row of the table."""
    seams, name, perplexity = f"{row['wrong_seams']} of {row['seams']}", row["method"], row["perplexity"]
    if name == FULL:
        seams, name, perplexity = "-", "without a guard; its text without an alarm", row["own"]
    unknown = f"{row['unknown']} in {row['unknown_in']} of {row['texts']}"
    loops = f"{row['loops']} of {row['outputs']}"
    return [name, loops, seams, unknown, f"{row['distinct']:.2f}", f"{perplexity:.2f}"]


def main(work: Path, *, stories: Path, family: Literal[*WORDS] = LOOKED_AT_ONCE, page: Path | None = None) -> None:
    """Make what the module describes.

    Args:
        work: Folder of the outputs.
        stories: The stories of the training text, or a part of them.
        family: Which openings.
        page: The page with the table, if it is to be written.
    """
    known = training_words(stories).union(*map(words, openings(family, COUNT)))
    by_method: dict[str, list[Row]] = {method: [] for method in METHODS}
    for output in read(work):
        if output["family"] == family and output["method"] in by_method:
            by_method[output["method"]].append(output)
    full = {(output["family"], output["number"]): output for output in by_method[FULL]}
    tokenizer = load(None, backend="hf").tokenizer
    rows = [summary(method, outputs, full, known, tokenizer) for method, outputs in by_method.items()]
    made = {"part": family, "stories": len(read_stories(stories)), "rows": rows}
    RESULT.write_text(json.dumps(made, indent=1) + "\n")
    if page is not None:
        put_table(page, "loopguard.text", outcome.table([HEAD, *map(cells, rows)]))


if __name__ == "__main__":
    run(main)
