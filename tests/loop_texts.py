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


HONEST = {row["id"]: row["prompt"] for row in rows_of("honest.jsonl")}
"""Tables, data, code, refrains, lists and logs."""
