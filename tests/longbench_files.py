"""Files in LongBench's format, made by code, and a tokenizer that can be counted by hand."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PEOPLE = "Ellen Varga Otto Lindqvist Maud Perrin Iskra Dahl".split()
WORDS = "storm council river senator harbor winter official report city bridge train lamp paper window market".split()


class Words:
    """A token is what stands between spaces; there is one more in front, as BOS is."""

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": [0, *(1 + hash(word) % 1000 for word in text.split())]}


def prose(words: int, seed: int) -> str:
    """At least so many words, in sentences of which no two are equal."""
    rng = random.Random(seed)
    said: list[str] = []
    while sum(len(sentence.split()) for sentence in said) < words:
        middle = " ".join(rng.choice(WORDS) for _ in range(rng.randint(4, 14)))
        said.append(f"In {len(said)} {rng.choice(PEOPLE)} said {middle}.")
    return " ".join(said)


def record(task: str, number: int, context: str, **changed: Any) -> dict[str, Any]:
    return {
        "input": f"Who was it, {number}?",
        "context": context,
        "answers": ["Ellen Varga"],
        "length": 7,
        "dataset": task,
        "language": "en",
        "all_classes": None,
        "_id": f"{task}-{number}",
        **changed,
    }


def records(task: str, lengths: Sequence[int]) -> list[dict[str, Any]]:
    """One for each length in words."""
    return [record(task, i, prose(length, i)) for i, length in enumerate(lengths)]


def save(path: Path, content: Sequence[Any]) -> Path:
    """JSON lines; what is a text already stays as it is."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [line if isinstance(line, str) else json.dumps(line) for line in content]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path
