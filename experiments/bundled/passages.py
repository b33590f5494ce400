"""Generates passages: documents in which names, facts and lines recur, so that a model gains from attending to them.

Each kind of document is a function of a random generator; `passages(seed, count, stories)` makes documents of all
kinds. The filler between facts consists of whole sentences of the stories.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import numpy as np

PEOPLE = tuple(
    "Anna Ben Clara David Emma Felix Grace Henry Iris Jack Kate Leo Lily Max Mia Nora Oscar Paul Rosa Sam Sue Tim Tom "
    "Zoe".split()
)
COLORS = tuple("black blue brown golden gray green orange pink purple red silver white yellow".split())
THINGS = tuple(
    "apple bag ball bell book boat bowl box brush button cake candle cap car chair coat coin cup doll drum flag "
    "flower hat jar key kite knife lamp leaf letter map mirror nut pen pencil pillow plate ring rope shell ship shoe "
    "spoon star stick stone toy train umbrella".split()
)
PLACES = tuple(
    "attic barn basement bathroom bedroom boat cave cellar church city classroom desert field forest garage garden "
    "hall hospital hotel kitchen lake library market meadow museum office park river school shop station tower town "
    "valley village".split()
)
ANIMALS = tuple("bear bird cat cow dog duck fish fox frog goat hen horse lion mouse owl pig rabbit sheep wolf".split())

Filler = Sequence[str]


def sentences(stories: Sequence[str]) -> list[str]:
    """Sentences of 20 to 160 characters, in the order of the stories."""
    parts = (part.strip() for story in stories for part in re.split(r"(?<=[.!?])\s+", story))
    return [part for part in parts if 20 <= len(part) <= 160 and part[0].isupper() and part[-1] in ".!?"]


def _some(rng: np.random.Generator, words: Sequence[str], count: int) -> list[str]:
    return rng.choice(words, size=count, replace=False).tolist()


def _lines(rng: np.random.Generator, filler: Filler, count: int) -> list[str]:
    return [filler[i] for i in rng.integers(len(filler), size=count)]


def _between(rng: np.random.Generator, filler: Filler, most: int) -> list[str]:
    """A run of filler whose length is spread evenly over orders of magnitude."""
    count = int(np.exp(rng.uniform(0, np.log(most + 1)))) - 1
    start = int(rng.integers(max(1, len(filler) - count)))
    return list(filler[start : start + count])


def located(rng: np.random.Generator, count: int) -> list[tuple[str, str]]:
    """Different things, each with a colour, and the different places where they are."""
    things = [f"{rng.choice(COLORS)} {thing}" for thing in _some(rng, THINGS, count)]
    return list(zip(things, _some(rng, PLACES, count), strict=True))


def question(thing: str) -> str:
    return f"Where was the {thing}? The {thing} was in the"


def scattered(rng: np.random.Generator, facts: Sequence[tuple[str, str]], filler: Filler, most: int) -> str:
    """The facts, one sentence each, with filler between them and after them."""
    parts: list[str] = []
    for thing, place in facts:
        parts += [f"The {thing} was in the {place}.", *_between(rng, filler, most)]
    return " ".join(parts)


def retrieval(rng: np.random.Generator, filler: Filler) -> str:
    """Facts between filler, asked for afterwards in other orders."""
    facts = located(rng, int(rng.integers(2, 7)))
    text = scattered(rng, facts, filler, int(rng.choice([0, 0, 2, 8, 40])))
    orders = [rng.permutation(len(facts)) for _ in range(int(rng.integers(1, 4)))]
    answers = [f"{question(*facts[i][:1])} {facts[i][1]}." for order in orders for i in order]
    return text + "\n" + "\n".join(answers)


def listing(rng: np.random.Generator, filler: Filler) -> str:
    """A list, and the same list again."""
    name = rng.choice(PEOPLE)
    items = _some(rng, THINGS, int(rng.integers(3, 11)))
    mark: Callable[[int], str] = (lambda i: f"{i + 1}. ") if rng.random() < 0.5 else (lambda _i: "- ")
    rows = "\n".join(mark(i) + item for i, item in enumerate(items))
    between = " ".join(_between(rng, filler, 20))
    return f"{name} wrote a list:\n{rows}\n{between}\n{name} read the list again:\n{rows}\nThat was the whole list."


def table(rng: np.random.Generator, filler: Filler) -> str:
    """A table, and sentences that read it back in another order."""
    names = _some(rng, PEOPLE, int(rng.integers(3, 9)))
    rows = [(name, int(rng.integers(3, 60)), rng.choice(ANIMALS), rng.choice(COLORS)) for name in names]
    lines = [
        "| name | age | animal | color |",
        "|---|---|---|---|",
        *("| {} | {} | {} | {} |".format(*r) for r in rows),
    ]
    again = [f"{n} is {age} years old and has a {color} {animal}." for n, age, animal, color in rng.permutation(rows)]
    return "\n".join([*lines, " ".join(_between(rng, filler, 10)), *again])


def lookup(rng: np.random.Generator, _filler: Filler) -> str:
    """A Python dictionary, and its items looked up."""
    name = str(rng.choice(["places", "where", "found", "table", "items"]))
    facts = [(thing.split()[1], place) for thing, place in located(rng, int(rng.integers(3, 11)))]
    body = "\n".join(f'    "{thing}": "{place}",' for thing, place in facts)
    asked = "\n".join(f'>>> {name}["{facts[i][0]}"]\n"{facts[i][1]}"' for i in rng.permutation(len(facts)))
    return f"{name} = {{\n{body}\n}}\n{asked}"


def refrain(rng: np.random.Generator, filler: Filler) -> str:
    """A song: verses of one line that is sung some times, then the text goes on."""
    name, (line, *verses) = rng.choice(PEOPLE), _lines(rng, filler, int(rng.integers(2, 5)))
    parts = [f"{name} sang a song."]
    for verse in verses:
        parts += [verse, *[line] * int(rng.geometric(0.3) + 1)]
    return "\n".join([*parts, f"Then {name} stopped, and the song was over.", *_between(rng, filler, 8)])


def echo(rng: np.random.Generator, filler: Filler) -> str:
    """Sentences that are said by one person and later said again by another."""
    first, second = _some(rng, PEOPLE, 2)
    said = _lines(rng, filler, int(rng.integers(1, 5)))
    parts = [f'{first} said, "{line}"' for line in said] + _between(rng, filler, 40)
    parts += [f'{second} asked, "What did {first} say?" {first} had said, "{line}"' for line in said]
    return " ".join(parts)


KINDS = (retrieval, listing, table, lookup, refrain, echo)
SHARES = (0.55, 0.08, 0.1, 0.12, 0.05, 0.1)


def passages(seed: int, count: int, stories: Sequence[str]) -> list[str]:
    """Make documents of all kinds.

    Args:
        seed: of everything that is drawn.
        count: number of documents.
        stories: text that the filler is taken from.

    Returns:
        The documents; the same arguments give the same ones.
    """
    rng = np.random.default_rng([seed, 3])
    filler = sentences(stories)
    return [KINDS[kind](rng, filler) for kind in rng.choice(len(KINDS), size=count, p=SHARES)]
