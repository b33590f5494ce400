"""Needles: a file of prompts by kind, depth and length of the text (RULER, Hsieh et al. 2024, arXiv 2404.06654).

    python -m experiments.needles needles.jsonl --kinds needle chain --lengths 640 1024
    sinkscope bench --task needles.jsonl:new=8 --model recall --methods full,snapkv:0.125

- needle: one fact in a haystack of noise (niah_single_1).
- multi-key: the same, with three more facts (niah_multikey_1, but in noise instead of essays).
- key-value: the haystack itself consists of facts (niah_multikey_3).
- tracking: variable tracking, a value and a chain of names that refer to it (vt).
- chain: our own kind; it asks for the value of the last name of such a chain, in a haystack of other facts.

Facts are those of dialogues for the recall models. Chains have two of them, and the fact that is asked about links to
the one with the answer. The depth of a needle is that of the first fact that the answer needs, as a share of the
haystack; the second one of a chain stands halfway from there to the end.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import chain, islice, product
from pathlib import Path
from typing import Literal, get_args

from experiments.record import Row, write_rows
from experiments.script import run
from sinkscope.bench.tasks.vocabulary import ANSWER, ASK, END, FACT, FILLER, GAP, KEYS, QUESTION_END, TURNS, VALUES
from sinkscope.errors import SinkscopeError

Kind = Literal["needle", "multi-key", "key-value", "tracking", "chain"]
KINDS: tuple[Kind, ...] = get_args(Kind)
LENGTHS = (640, 1024, 2048)
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
_OTHERS = 3  # further facts in multi-key


def main(
    out: Path, *, kinds: Sequence[Kind] = KINDS, lengths: Sequence[int] = LENGTHS, depths: Sequence[float] = DEPTHS
) -> None:
    """Write the prompts, one of each kind, length and depth.

    Args:
        out: The file.
        kinds: Kinds of needles.
        lengths: Tokens of a prompt, at most.
        depths: Depths, from 0 to 1.
    """
    write_rows(out, [needle(*one) for one in product(kinds, lengths, depths)])


def needle(kind: str, length: int, depth: float, seed: int = 0) -> Row:
    """Build a prompt; the same arguments always give the same prompt.

    Args:
        kind: One of `KINDS`.
        length: Maximum tokens, with BOS; the haystack fills them, leaving less than one of its pieces.
        depth: Depth of the first fact that the answer needs.
        seed: Seed of every random choice.

    Raises:
        SinkscopeError: The length is too small for the required facts.
    """
    name = f"{kind} {length} {depth:g} 0"
    rng = random.Random(f"recall {name} {seed}")
    keys = rng.sample(KEYS, len(KEYS))
    asked, other = keys.pop(), keys.pop()
    right = rng.sample(VALUES, 2)
    needles = [_fact(rng, asked, right, END)]
    if kind in ("tracking", "chain"):
        needles = [_fact(rng, other, right, END), _fact(rng, asked, rng.sample(VALUES, 2), other)]
    tail = [ASK, asked, *QUESTION_END, ANSWER]
    head = [TURNS[0], *_words(rng, GAP)]
    others = _others(rng, keys)
    few = [*islice(others, _OTHERS if kind == "multi-key" else 0)]
    room = length - 1 - sum(map(len, [head, tail, *needles, *few]))
    if room < 0:
        raise SinkscopeError(f"length {length}: {kind} needs {length - room} tokens at least; give longer prompts")
    hay: list[list[str]] = []
    is_crowded = kind in ("key-value", "chain")
    for piece in chain(others if is_crowded else (), iter(lambda: _words(rng, 1), None)):
        room -= len(piece)
        if room < 0:
            break
        hay.append(piece)
    if is_crowded:
        rng.shuffle(hay)  # facts may be fewer than there is room for
    for one in few:
        hay.insert(rng.randint(0, len(hay)), one)
    count, steps = len(hay), len(needles)
    for step in reversed(range(steps)):
        hay.insert(round(count * (depth + (1 - depth) * step / steps)), needles[step])
    text = " ".join(chain(head, *hay, tail))
    return {"id": name, "set": "needle", "part": kind, "prompt": text, "answers": [" ".join(right)]}


def _words(rng: random.Random, number: int) -> list[str]:
    return [rng.choice(FILLER) for _ in range(number)]


def _fact(rng: random.Random, key: str, values: Sequence[str], link: str) -> list[str]:
    return [FACT, key, *values, link, *_words(rng, GAP)]


def _others(rng: random.Random, keys: Sequence[str]) -> Iterator[list[str]]:
    """Facts that nobody asks about."""
    for key in keys:
        values = rng.sample(VALUES, 2)
        yield _fact(rng, key, values, rng.choice([*KEYS, END]))


if __name__ == "__main__":
    run(main)
