"""Detectors of loops side by side on the set: recall, false alarms and delay.

    python -m experiments.loopset.compare [--half choose|report|again] [--out figures/loops_compare.json]

A detector takes a text and returns the number of characters after which it would have stopped the generation, or None.
Those of others are written from their public rules; all of them get the same tokens, the words of `loops.outputs`.
"""

from __future__ import annotations

import json
import lzma
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pandas as pd

from experiments.record import Row, write_record
from experiments.script import run
from sinkscope.loops import check
from sinkscope.loops.text.outputs import spans

HALVES = ("choose", "report", "again")
TEXTS = Path(__file__).with_name("texts.jsonl.xz")
"""The set: a half for choosing rules, one for the report, and as many texts that were drawn again after the choice.

It is data: a rule of ours must not change with what once drew the texts.
"""
Detector = Callable[[str], int | None]
OURS = "sinkscope, loops or suspicious"


def texts_of(half: str) -> list[Row]:
    """The texts of a half: `text`, `class`, `half`, and `start`, the first character of a loop's first copy."""
    with lzma.open(TEXTS, "rt", encoding="utf-8") as lines:
        return [row for row in map(json.loads, lines) if row["half"] == half]


def number(words: Iterable[str]) -> list[int]:
    """Number the words in the order of their first occurrence."""
    numbers: dict[str, int] = {}
    return [numbers.setdefault(word, len(numbers)) for word in words]


def exact_copies(
    smallest: int, largest: int, copies: int, text: str, *, tokens: int = 0, every: int = 1, after: int = 0
) -> int | None:
    """The last tokens are so many exact copies of a sequence of `smallest` to `largest` tokens, `tokens` in all.

    It looks at every `every`-th token, from the one with the number `after` on.
    """
    words = spans(text)
    ids = number(word for word, _ in words)
    places: dict[int, list[int]] = {}
    for end, last in enumerate(ids, 1):
        before = places.setdefault(last, [])
        before.append(end - 1)
        if end < after or end % every:
            continue
        for place in reversed(before[:-1]):
            size = end - 1 - place
            begin = end - max(copies * size, tokens)
            if begin < 0 or size > largest:
                break
            if size < smallest or ids[begin] != ids[begin + size]:
                continue
            if ids[begin : end - size] == ids[begin + size : end]:
                return words[end - 1][1]
    return None


def ours(verdicts: tuple[str, ...], text: str) -> int | None:
    """Where `loops.check` finds a text to have one of the verdicts."""
    (result,) = check(text).records
    if result.verdict not in verdicts or result.detected is None:
        return None
    return [*spans(text), ("", len(text))][result.detected - 1][1]


DETECTORS: dict[str, Detector] = {
    "sinkscope, loops": partial(ours, ("loops", "looped")),
    OURS: partial(ours, ("loops", "looped", "suspicious")),
    "vllm, 4 to 128, 4 copies": partial(exact_copies, 4, 128, 4),  # vllm#35451 with the sizes of vllm#52677
    "vllm, 1 to 20, 3 copies": partial(exact_copies, 1, 20, 3),  # vllm#40097, for structured output
    "llama.cpp, 16 to 1024, 4 copies": partial(exact_copies, 16, 1024, 4),  # llama.cpp#26039
    "vllm-mlx, 1 to 128, 3 copies": partial(exact_copies, 1, 128, 3, tokens=48, every=16, after=64),  # vllm-mlx#723
}


def scored(detector: str, texts: Sequence[Row], alarms: Sequence[int | None], own: Sequence[int | None]) -> Row:
    """What the alarms of a detector are worth, beside our own alarms.

    Delays are mean numbers of characters from the beginning of a loop, of the loops that both find.
    """
    frame: Any = pd.DataFrame(texts, columns=["class", "start"]).assign(alarm=alarms, own=own)
    frame = frame.astype({"start": float, "alarm": float, "own": float})
    frame["hit"] = frame.alarm > frame.start.fillna(0)
    loops, honest = frame[frame.start.notna()], frame[frame.start.isna()]
    both = loops[loops.hit & (loops.own > loops.start)]
    shares = frame.groupby("class", sort=False).hit.mean()
    return {
        "detector": detector,
        "recall": mean(loops.hit),
        "lowest": shares[loops["class"].unique()].min(),
        "false_alarms": mean(honest.hit),
        "our_delay": mean(both.own - both.start),
        "their_delay": mean(both.alarm - both.start),
        "we_first": mean(both.own <= both.alarm),
        "by_class": shares.to_dict(),
    }


def mean(values: Any) -> float | None:
    """None of nothing."""
    return round(float(values.mean()), 4) if len(values) else None


def compare(texts: Sequence[Row], detectors: dict[str, Detector] = DETECTORS) -> Row:
    """Run detectors over texts whose truth is known."""
    alarms = {name: [detector(text["text"]) for text in texts] for name, detector in detectors.items()}
    honest = sum(text["start"] is None for text in texts)
    looping = dict.fromkeys(text["class"] for text in texts if text["start"] is not None)
    rows = [scored(detector, texts, found, alarms[OURS]) for detector, found in alarms.items()]
    return {"loops": len(texts) - honest, "honest": honest, "looping": list(looping), "detectors": rows}


def main(
    *,
    half: Literal[*HALVES] = "report",
    out: Path = Path("figures/loops_compare.json"),
) -> None:
    """Make what the module describes."""
    write_record(out, "loops-compare", compare(texts_of(half)), {"half": half}, dtype="text")


if __name__ == "__main__":
    run(main)
