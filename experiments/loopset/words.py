"""Words and sentences of which the texts of the set are made."""

from __future__ import annotations

import random

NOUNS = (
    "river stone lamp garden engine harbour letter window forest bridge market silver candle mirror winter ladder "
    "copper orchard compass kettle anchor barrel cellar meadow saddle lantern timber pepper velvet marble feather "
    "report server module account invoice ticket folder report package record schedule budget contract driver"
).split()
VERBS = "holds finds carries opens paints measures follows mends counts hides sells borrows checks reads sends".split()
NAMES = "Ada Bruno Clara Dov Edda Felix Greta Hugo Ilse Jonas Kaja Leon Mira Nils Olga Paul Runa Sven Tilda Ugo".split()
PLACES = "Lisbon Oslo Turin Cork Gdansk Porto Malmo Lyon Ghent Basel Riga Split Tartu Bergen Graz Bilbao".split()
ADJECTIVES = "old green quiet heavy small bright early broken distant careful empty narrow public yellow deep".split()
ADVERBS = "slowly again today often rarely twice together alone outside later before dinner".split()


def sentence(rng: random.Random) -> str:
    """A sentence of six to fourteen words."""
    a, b, c = rng.sample(NOUNS, 3)
    forms = [
        f"The {rng.choice(ADJECTIVES)} {a} {rng.choice(VERBS)} the {b} near {rng.choice(PLACES)}.",
        f"{rng.choice(NAMES)} {rng.choice(VERBS)} a {rng.choice(ADJECTIVES)} {a} and {rng.choice(VERBS)} the {b}.",
        f"In {rng.choice(PLACES)}, {rng.choice(NAMES)} {rng.choice(VERBS)} the {a} {rng.choice(ADVERBS)}.",
        f"Every {a} of the {b} {rng.choice(VERBS)} a {c} {rng.choice(ADVERBS)}.",
        f"We know that the {a} {rng.choice(VERBS)} {rng.choice(NAMES)}, because the {b} is {rng.choice(ADJECTIVES)}.",
    ]
    return rng.choice(forms)


def paragraph(rng: random.Random, sentences: int) -> str:
    """Several sentences."""
    parts = []
    for _ in range(sentences):
        parts.append(sentence(rng))
    return " ".join(parts)


def prose(rng: random.Random, words: int) -> str:
    """At least so many words of sentences."""
    said: list[str] = []
    while len(said) < words:
        said += sentence(rng).split()
    return " ".join(said)


def letters(rng: random.Random, alphabet: str, count: int) -> str:
    """So many letters."""
    parts = []
    for _ in range(count):
        parts.append(rng.choice(alphabet))
    return "".join(parts)
