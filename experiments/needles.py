"""Needles: a file of prompts by kind, depth and length of the text (RULER, Hsieh et al. 2024, arXiv 2404.06654).

    python -m experiments.needles needles.jsonl --model recall --kinds needle chain --lengths 640 1024
    sinkscope bench --task needles.jsonl:new=8 --model recall --methods full,snapkv:0.125

- needle: one statement in a haystack of noise (niah_single_1).
- multi-key: the same, with three more statements of the same kind (niah_multikey_1, but in noise instead of essays).
- key-value: the haystack itself consists of such statements (niah_multikey_3).
- tracking: variable tracking, a value and a chain of names that refer to it (vt).
- chain: our own kind; it asks for the value of the last name of such a chain, in a haystack of other statements.

The recall models read facts as in dialogues; their chains have two facts, and the fact that is asked about links to the
one with the answer. Any other model reads simple sentences, of the first three kinds. The depth of a needle is that of
the first statement that the answer needs, as a share of the haystack; further statements are spread evenly from there
to the end.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import chain, cycle, islice, product
from pathlib import Path
from typing import Any, Literal

from experiments.record import Row, write_rows
from experiments.script import run
from sinkscope.bench.tasks.vocabulary import ANSWER, ASK, END, FACT, FILLER, GAP, KEYS, QUESTION_END, TURNS, VALUES
from sinkscope.errors import SinkscopeError
from sinkscope.models.checkpoints.locate import RECALL, TWO_HOPS
from sinkscope.opening.load import load

KINDS = ("needle", "multi-key", "key-value", "tracking", "chain")
SENTENCES = KINDS[:3]
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
LINKED = ("tracking", "chain")
"""Needles in which several statements lead to the answer; the recall models alone read them."""
CROWDED = ("key-value", "chain")
"""Needles whose haystack consists of other statements."""
_OTHERS = 3  # further statements in multi-key
_NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
_COLOURS = "black blue brown golden gray green orange pink purple red silver white yellow".split()
_THINGS = (
    "apple bag ball bell book boat bowl box brush button cake candle cap car chair coat coin cup doll drum flag flower "
    "hat jar key kite knife lamp leaf letter map mirror nut pen pencil pillow plate ring rope shell ship shoe spoon "
    "star stick stone toy train umbrella"
).split()
_PLACES = (
    "attic barn basement bathroom bedroom cave cellar church city classroom desert field forest garage garden hall "
    "hospital hotel kitchen lake library market meadow museum office park river school shop station tower town valley "
    "village"
).split()


Parts = tuple[str, list[str], Iterator[str], Iterator[str], str, str]
"""What a prompt is made of: text before the haystack, statements that the answer needs, statements that nobody asks
about, pieces of the haystack, the question, and the string that must appear in the answer."""


def main(
    out: Path,
    *,
    model: str = "bundled",
    kinds: Sequence[Literal[*KINDS]] = SENTENCES,
    lengths: Sequence[int] = (640, 1024),
    depths: Sequence[float] = DEPTHS,
) -> None:
    """Write the prompts, one of each kind, length and depth.

    Args:
        out: The file.
        model: The model that will read them.
        kinds: Kinds of needles; of models other than the recall models the first three.
        lengths: Tokens of a prompt, at most.
        depths: Depths, from 0 to 1.
    """
    tokenizer = load(model).tokenizer
    write_rows(out, [needle(tokenizer, model, *one) for one in product(kinds, lengths, depths)])


def needle(tokenizer: Any, model: str, kind: str, length: int, depth: float, seed: int = 0, number: int = 0) -> Row:
    """Build a prompt; the same arguments always give the same prompt.

    Args:
        tokenizer: Counts tokens.
        model: The model; the recall models read facts, and others sentences.
        kind: One of `KINDS`; with sentences one of the first three.
        length: Maximum tokens; the haystack fills them, leaving less than one of its pieces.
        depth: Depth of the first statement that the answer needs, 0 to 1.
        seed: Seed of every random choice.
        number: Number of the prompt among those with the same kind, length and depth.

    Raises:
        SinkscopeError: The length is too small for the required statements, or the model reads no such kind.
    """
    facts = model in (RECALL, TWO_HOPS)
    if kind not in SENTENCES and not facts:
        raise SinkscopeError(f"--kinds {kind}: for {model} there are {', '.join(SENTENCES)}")
    name = f"{kind} {length} {depth:g} {number}"
    rng = random.Random(f"{'recall' if facts else 'facts'} {name} {seed}")
    head, needles, others, filler, tail, answer = _facts(kind, rng) if facts else _sentences(rng)

    @cache
    def size(text: str) -> int:
        return len(tokenizer(f" {text}", add_special_tokens=False)["input_ids"])

    few = [*islice(others, _OTHERS if kind == "multi-key" else 0)]
    room = length - 1 - sum(map(size, [head, tail, *needles, *few]))
    if room < 0:
        raise SinkscopeError(f"length {length}: {kind} needs {length - room} tokens at least; give longer prompts")
    hay: list[str] = []
    for piece in chain(others if kind in CROWDED else (), filler):
        room -= size(piece)
        if room < 0:
            break
        hay.append(piece)
    if kind in CROWDED:
        rng.shuffle(hay)  # statements may be fewer than there is room for
    for other in few:
        hay.insert(rng.randint(0, len(hay)), other)
    count, steps = len(hay), len(needles)
    for step in reversed(range(steps)):
        hay.insert(round(count * (depth + (1 - depth) * step / steps)), needles[step])
    text = " ".join([head, *hay, tail]).lstrip()
    return {"id": name, "set": "needle", "part": kind, "prompt": text, "answers": [answer]}


def _facts(kind: str, rng: random.Random) -> Parts:
    keys = rng.sample(KEYS, len(KEYS))
    asked, other = keys.pop(), keys.pop()

    def words(number: int) -> str:
        return " ".join(rng.choice(FILLER) for _ in range(number))

    def fact(key: str, values: Sequence[str], link: str) -> str:
        return " ".join([FACT, key, *values, link, words(GAP)])

    def others() -> Iterator[str]:
        for key in keys:
            yield fact(key, rng.sample(VALUES, 2), rng.choice([*KEYS, END]))

    right = rng.sample(VALUES, 2)
    needles = [fact(asked, right, END)]
    if kind in LINKED:
        needles = [fact(other, right, END), fact(asked, rng.sample(VALUES, 2), other)]
    tail = " ".join([ASK, asked, *QUESTION_END, ANSWER])
    head = f"{TURNS[0]} {words(GAP)}"
    return head, needles, others(), iter(lambda: words(1), ""), tail, " ".join(right)


def _sentences(rng: random.Random) -> Parts:
    things = [f"{rng.choice(_COLOURS)} {thing}" for thing in rng.sample(_THINGS, len(_THINGS))]
    places = rng.sample(_PLACES, len(_PLACES))
    facts = [f"The {thing} was in the {place}." for thing, place in zip(things, places, strict=False)]
    # The prompt does not end in "was in the", so that decoding finds the place.
    tail = f"\nWhere was the {things[0]}? The {things[0]}"
    return "", facts[:1], iter(facts[1:]), cycle([_NOISE]), tail, places[0]


if __name__ == "__main__":
    run(main)
