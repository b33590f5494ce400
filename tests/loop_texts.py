"""Text that repeats itself because it should, and text that loops; all of it made by code."""

from __future__ import annotations

import json
import random
from collections.abc import Callable

NOUNS = (
    "river stone lamp garden engine harbour letter window forest bridge market silver candle mirror winter ladder "
    "copper orchard compass kettle anchor barrel cellar meadow saddle lantern timber pepper velvet marble feather"
).split()
VERBS = "holds finds carries opens paints measures follows mends counts hides sells borrows".split()
CITIES = "Lisbon Oslo Turin Cork Gdansk Porto Malmo Lyon Ghent Basel Riga Split Tartu Bergen Graz Bilbao".split()


def prose(words: int, seed: int = 0) -> str:
    """Sentences of no meaning that do not repeat themselves more than English does."""
    rng = random.Random(seed)
    said: list[str] = []
    while len(said) < words:
        a, b, c = rng.sample(NOUNS, 3)
        said += f"The {a} {rng.choice(VERBS)} a {b} and {rng.choice(VERBS)} every {c} of {rng.choice(CITIES)}.".split()
    return " ".join(said[:words])


def _markdown_table(rng: random.Random) -> str:
    rows = [f"| {i} | {rng.choice(CITIES)} | {rng.choice(NOUNS)} | {rng.randint(1, 999)} |" for i in range(60)]
    return "| id | city | item | price |\n|---|---|---|---|\n" + "\n".join(rows)


def _digits_table(rng: random.Random) -> str:
    """Every cell a digit, as a tokenizer that splits numbers sees any table of numbers."""
    return "\n".join(" ".join(str(rng.randint(0, 9)) for _ in range(12)) for _ in range(80))


def _json_array(rng: random.Random) -> str:
    kinds = ("Organization", "Person", "Location", "Event", "Other")
    entries = [
        {"name": f"{rng.choice(NOUNS)} {rng.choice(CITIES)} {i}", "wikipedia url": "...", "type": rng.choice(kinds)}
        for i in range(60)
    ]
    return json.dumps(entries)


def _numbered_list(rng: random.Random) -> str:
    return "\n".join(f"{i}. Buy the {rng.choice(NOUNS)} from {rng.choice(CITIES)}." for i in range(1, 90))


def _log(rng: random.Random) -> str:
    return "\n".join(
        f"2024-03-{i // 24 + 1:02d} {i % 24:02d}:{rng.randint(0, 59):02d} INFO worker {rng.randint(1, 9)} "
        f"done in {rng.randint(10, 999)} ms"
        for i in range(60)
    )


def _refrain(rng: random.Random) -> str:
    chorus = "And the wind sings low, and the wind sings long,\nand the sea comes in with the same old song.\n"
    return "\n".join(prose(36, rng.randint(0, 999)) + "\n" + chorus for _ in range(12))


def _litany(rng: random.Random) -> str:
    return "\n".join(f"For the {rng.choice(NOUNS)} of {rng.choice(CITIES)}, we give thanks." for _ in range(60))


def _getters(rng: random.Random) -> str:
    names = rng.sample(NOUNS, 24)
    return "\n".join(f"def get_{n}(self) -> int:\n    return self._{n}\n" for n in names)


def _switch(rng: random.Random) -> str:
    return "\n".join(f"case {i}: return {rng.choice(NOUNS)!r};" for i in range(70))


def _imports(rng: random.Random) -> str:
    return "\n".join(f"from package.{a} import {b}_{a}" for a in NOUNS for b in rng.sample(NOUNS, 2))


def _csv(rng: random.Random) -> str:
    return "\n".join(
        f"{rng.choice(CITIES)},{rng.randint(0, 99)},{rng.randint(0, 99)},{rng.random():.3f}" for _ in range(70)
    )


def _dialogue(rng: random.Random) -> str:
    return "\n".join(
        f"Q: Where is the {rng.choice(NOUNS)}?\nA: It is in {rng.choice(CITIES)}, near the {rng.choice(NOUNS)}."
        for _ in range(40)
    )


def _times_table(_: random.Random) -> str:
    return "\n".join(f"{a} x {b} = {a * b}" for a in range(2, 10) for b in range(1, 11))


def _separators(rng: random.Random) -> str:
    """Sections under lines of dashes, each of them an exact repetition by itself."""
    return "\n".join("-" * 40 + "\n" + prose(60, rng.randint(0, 999)) for _ in range(8))


def _countdown(_: random.Random) -> str:
    """The song in which only a number changes."""
    verse = "{a} bottles of beer on the wall, {a} bottles of beer. Take one down, pass it around, {b} left.\n"
    return "".join(verse.format(a=n, b=n - 1) for n in range(60, 0, -1))


def _schedule(rng: random.Random) -> str:
    days = "Monday Tuesday Wednesday Thursday Friday".split()
    return "\n".join(
        f"{day} {hour}:00 - room {rng.randint(1, 30)}, {rng.choice(NOUNS)}"
        for _ in range(3)
        for day in days
        for hour in range(9, 15)
    )


HONEST: dict[str, Callable[[random.Random], str]] = {
    f.__name__.strip("_"): f
    for f in (
        _markdown_table,
        _digits_table,
        _json_array,
        _numbered_list,
        _log,
        _refrain,
        _litany,
        _getters,
        _switch,
        _imports,
        _csv,
        _dialogue,
        _times_table,
        _separators,
        _countdown,
        _schedule,
    )
}

LOOPED = {  # what follows prose: name -> the piece that repeats, words of it before the split
    "word": "the ",
    "phrase": "and then ",
    "sentence": "I am sorry, I do not know the answer. ",
    "json": '{"name":"U.S. Air Force Academy","wikipedia url":"...","type":"Organization"}, ',
    "template": "Draft Interpretation: the stone is a sign. Self-Correction: the stone is not a sign, it is a mirror. ",
    "code": "x = x + 1\n",
    "chinese": "我不知道，",
}
