"""Text that repeats itself because it should, and text that loops."""

from __future__ import annotations

import json
import random
from typing import Any

from repository import ROOT

NOUNS = (
    "river stone lamp garden engine harbour letter window forest bridge market silver candle mirror winter ladder "
    "copper orchard compass kettle anchor barrel cellar meadow saddle lantern timber pepper velvet marble feather"
).split()
VERBS = "holds finds carries opens paints measures follows mends counts hides sells borrows".split()
CITIES = "Lisbon Oslo Turin Cork Gdansk Porto Malmo Lyon Ghent Basel Riga Split Tartu Bergen Graz Bilbao".split()


def prose(words: int, seed: int = 0) -> str:
    """Sentences of no meaning that do not repeat themselves more than English does."""
    rng = random.Random(seed)
    said = []
    while len(said) < words:
        a, b, c = rng.sample(NOUNS, 3)
        said += f"The {a} {rng.choice(VERBS)} a {b} and {rng.choice(VERBS)} every {c} of {rng.choice(CITIES)}.".split()
    return " ".join(said[:words])


def rows_of(name: str) -> list[dict[str, Any]]:
    """The rows of a fixture."""
    return [json.loads(line) for line in (ROOT / "tests/fixtures" / name).read_text(encoding="utf-8").splitlines()]


def _texts(name: str) -> dict[str, str]:
    return {row["id"]: row["prompt"] for row in rows_of(name)}


HONEST = _texts("honest.jsonl")
"""Tables, data, code, refrains, lists and logs."""
TABLES = _texts("tables.jsonl")
"""Tables and matrices whose rows follow a rule; some of their rows, or of their diagonals, are equal."""


def novelty(ids: list[int], *, window: int = 256, n: int = 4, span: int = 64) -> float:
    """Share of the last `span` tokens that completed an n-gram that their window does not contain earlier."""
    new = []
    for i in range(max(0, len(ids) - span), len(ids)):
        seen = ids[max(0, i - window + 1) : i + 1]
        grams = [tuple(seen[j : j + n]) for j in range(len(seen) - n + 1)]
        new.append(not grams or grams[-1] not in grams[:-1])
    return sum(new) / len(new) if new else float("nan")
