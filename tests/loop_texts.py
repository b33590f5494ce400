"""Text that repeats itself because it should, and text that loops."""

from __future__ import annotations

import json
import random
from collections.abc import Callable

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


def _honest_texts() -> dict[str, str]:
    texts: dict[str, str] = {}
    for line in (ROOT / "tests/fixtures/honest.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        texts[row["id"]] = row["prompt"]
    return texts


HONEST = _honest_texts()
"""Tables, data, code, refrains, lists and logs."""

LOOPED = {  # what follows prose: name -> the piece that repeats, words of it before the split
    "word": "the ",
    "phrase": "and then ",
    "sentence": "I am sorry, I do not know the answer. ",
    "json": '{"name":"U.S. Air Force Academy","wikipedia url":"...","type":"Organization"}, ',
    "template": "Draft Interpretation: the stone is a sign. Self-Correction: the stone is not a sign, it is a mirror. ",
    "code": "x = x + 1\n",
    "chinese": "我不知道，",
}


def novelty(ids: list[int], *, window: int = 256, n: int = 4, span: int = 64) -> float:
    """Share of the last `span` tokens that completed an n-gram that their window does not contain earlier."""
    new = []
    for i in range(max(0, len(ids) - span), len(ids)):
        seen = ids[max(0, i - window + 1) : i + 1]
        grams = [tuple(seen[j : j + n]) for j in range(len(seen) - n + 1)]
        new.append(not grams or grams[-1] not in grams[:-1])
    return sum(new) / len(new) if new else float("nan")


def _matrix(size: int, cell: Callable[[int, int], object], between: str = " ", end: str = "\n") -> str:
    return end.join(between.join(str(cell(i, j)) for j in range(size)) for i in range(size))


def _one_hot(place: int, size: int = 4) -> list[int]:
    return [int(place == j) for j in range(size)]


TABLES = {
    "identity": _matrix(8, lambda i, j: int(i == j)),
    "identity in LaTeX": _matrix(10, lambda i, j: int(i == j), " & ", " \\\\\n"),
    "identity of numpy": _matrix(16, lambda i, j: f"{float(i == j)}", " ", "]\n ["),
    "zeros": _matrix(10, lambda i, j: 0, ", ", "],\n["),
    "chessboard": _matrix(8, lambda i, j: "XO"[(i + j) % 2]),
    "sorted labels": json.dumps({"labels": [_one_hot(i // 12) for i in range(48)]}),
    "indented labels": json.dumps([_one_hot(max(1, i - 9)) for i in range(14)], indent=1),
    "flags": json.dumps([{"rain": int(i % 11 == 3), "wind": int(i % 7 == 5), "snow": 0} for i in range(40)]),
    "zeros in hex": "\n".join(f"{16 * i:08x} {' 00' * 16}" for i in range(24)),
}
"""Tables and matrices whose rows follow a rule; some of their rows, or of their diagonals, are equal."""
