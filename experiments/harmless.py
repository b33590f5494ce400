"""Texts that a detector must not mistake for an attack: source code, and the repetition that people write."""

from __future__ import annotations

import random
from importlib.util import find_spec
from pathlib import Path

MODULES = ("argparse", "ast", "csv", "difflib", "inspect", "pickle", "statistics", "tarfile", "textwrap", "zipfile")
PIECES = 200
_THINGS = "apples pears plums lemons onions carrots beans leeks figs nuts eggs cheese bread butter milk salt".split()
_VERSES = (
    "The {a} lay down upon the hill",
    "The {a} went sailing over the bay",
    "One {a} for the morning, two for the night",
    "Oh, where is the {a} that I left by the mill",
    "We sang of the {a} till the break of day",
)
_REFRAIN = ("Row, row, and row away,", "row, row, and row away,", "row till the end of the day.")
_BEASTS = "swallow otter heron badger robin hare trout lark mole fox goose owl".split()


def source_code() -> str:
    """Python source of the standard library, read from the running interpreter."""
    texts = list[str]()
    for name in MODULES:
        spec = find_spec(name)
        if spec is not None and spec.has_location and spec.origin is not None and spec.origin.endswith(".py"):
            texts.append(Path(spec.origin).read_text("utf-8"))
    return "\n".join(texts)


def honest_repetition(seed: int = 0) -> str:
    """Tables, songs with a refrain, lists and dotted contents in sequence; a seed above 0 shuffles them."""
    texts = pieces()
    if seed > 0:
        random.Random(seed).shuffle(texts)
    return "\n\n".join(texts) + "\n"


def pieces(count: int = PIECES, seed: int = 0) -> list[str]:
    """Tables, songs with a refrain, lists, rulers and dotted contents, one after another."""
    rng = random.Random(seed)
    makers = (_prices, _times, _song, _shopping, _contents, _log)
    rows = []
    for i in range(count):
        rows.append(makers[i % len(makers)](rng))
    return rows


def _prices(rng: random.Random) -> str:
    rows = []
    for thing in rng.sample(_THINGS, 8):
        rows.append(f"| {thing} | {rng.randint(1, 40)} | {rng.randint(1, 9)}.{rng.randint(0, 99):02d} |")
    return "\n".join(["| item | count | price |", "| --- | --- | --- |", *rows])


def _times(rng: random.Random) -> str:
    factor = rng.randint(2, 19)
    parts = []
    for i in range(1, 11):
        parts.append(f"{i} x {factor} = {i * factor}")
    return "\n".join(parts)


def _song(rng: random.Random) -> str:
    beasts = rng.sample(_BEASTS, 3)
    parts = []
    for b in beasts:
        parts.append("\n".join([*(v.format(a=b) for v in rng.sample(_VERSES, 2)), *_REFRAIN]))
    return "\n\n".join(parts)


def _shopping(rng: random.Random) -> str:
    return "\n".join(["To buy:", "-" * 40, *(f"- [ ] {thing}" for thing in rng.sample(_THINGS, 7)), "=" * 40])


def _contents(rng: random.Random) -> str:
    page = 1
    lines = []
    for i in range(1, 9):
        page += rng.randint(2, 14)
        lines.append(f"{i}. On {rng.choice(_THINGS)} ".ljust(36, ".") + f" {page}")
    return "\n".join(lines)


def _log(rng: random.Random) -> str:
    day = rng.randint(1, 28)
    parts = []
    for i in range(8):
        parts.append(f"2024-03-{day:02d} {8 + i:02d}:00:00 INFO check {rng.choice(_BEASTS)}: ok, ok, ok, ok")
    return "\n".join(parts)
