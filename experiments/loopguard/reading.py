"""How the text behind an act of the guard reads: bits per byte under another real model, and words that are none.

    python -m experiments.loopguard.reading WORK --real FOLDER [--out figures/loopguard_reading.json]

WORK holds the outputs of `experiments.loopguard.real`, FOLDER the files of both models. Each excerpt begins where the
guard's text goes on after its first act and has up to 128 tokens; the other remedies and the model alone are read from
the same place of the same openings. Healthy text is that of the model alone where the guard does not act, from the
median of these places on. The other model reads opening and output; only the excerpt counts. A word is unknown if the
English list of `wordfreq` (`pip install wordfreq`) lacks it; code and tables have such words, too, so compare with the
healthy text.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np
import torch

from experiments.loopguard.real import FULL, outputs_of
from experiments.loopguard.real_openings import openings_of
from experiments.record import Row, write_record
from experiments.script import run
from sinkscope.measure.margin import margin_of
from sinkscope.opening.load import load

GUARD, HALF, HEALTHY = "rewind", "report", "healthy"
SHOWN = 128  # tokens of an excerpt
FEWEST = 32  # tokens, of which an excerpt that ends by itself has at least so many

Reader = Callable[[str, str], float]
"""Returns the bits per byte of a text after another."""


def hook_points_of(guarded: dict[int, Row]) -> dict[int, int]:
    """Where the guard's text goes on after its first act, for the openings on which it acted."""
    places: dict[int, int] = {}
    for number, row in guarded.items():
        if row["acts"]:
            places[number] = row["acts"][0]["generated"] - row["acts"][0]["taken_back"]
    return places


@torch.no_grad()
def bits_per_byte(live: Any, before: str, text: str) -> float:
    """Bits that a model needs for each byte of a text, after what comes before it."""
    tokenizer, size = live.tokenizer, len(text.encode())
    start = tokenizer(before, return_tensors="pt")["input_ids"]
    ids = torch.cat([start, tokenizer(text, return_tensors="pt", add_special_tokens=False)["input_ids"]], 1)
    logits = live(ids).logits[0, start.shape[1] - 1 : -1].float()
    loss = torch.nn.functional.cross_entropy(logits, ids[0, start.shape[1] :], reduction="sum")
    return float(loss) / math.log(2) / size


def unknown_words(text: str) -> tuple[int, int]:
    """Number of words of letters that no list of English words has, and of all; the last one may be cut."""
    from wordfreq import zipf_frequency  # pyright: ignore[reportMissingImports]  # no other script needs it

    words = re.findall(r"[A-Za-z]{3,}", text)[:-1]
    return sum(zipf_frequency(word, "en") == 0 for word in words), len(words)


def reading(outputs: Sequence[tuple[Row, int]], tokenizer: Any, reader: Reader) -> Row:
    """How excerpts read: mean bits per byte with two standard errors over texts, and the share of unknown words."""
    texts = openings_of(HALF)
    bits: list[float] = []
    unknown, words = 0, 0
    for row, place in outputs:
        tokens = row["tokens"][place : place + SHOWN]
        if len(tokens) < FEWEST:
            continue
        before = texts[row["number"]][1] + tokenizer.decode(row["tokens"][:place], skip_special_tokens=True)
        text = tokenizer.decode(tokens, skip_special_tokens=True)
        bits.append(reader(before, text))
        here, all_here = unknown_words(text)
        unknown += here
        words += all_here
    return {
        "excerpts": len(bits),
        "bits": fmean(bits),
        "margin": margin_of(np.array(bits)),
        "words": words,
        "unknown": unknown / words,
    }


def main(work: Path, *, real: Path, out: Path = Path("figures/loopguard_reading.json")) -> None:
    """Make what the module describes.

    Args:
        work: Folder with a runs.jsonl.
        real: Folder of the files of two models.
        out: The JSON.
    """
    first, second = sorted(real.glob("*.gguf"))
    models: dict[str, Any] = {file.stem: load(str(file)) for file in (first, second)}
    result: Row = {}
    for name, other in ((first.stem, second.stem), (second.stem, first.stem)):
        outputs: dict[str, dict[int, Row]] = defaultdict(dict)
        for row in outputs_of([work], model=name, half=HALF):
            outputs[row["arm"]][row["number"]] = row
        places = hook_points_of(outputs[GUARD])
        begin = int(median(places.values()))
        excerpts = {HEALTHY: [(row, begin) for number, row in outputs[FULL].items() if number not in places]}
        for arm, of_arm in outputs.items():
            excerpts[arm] = [(of_arm[number], place) for number, place in places.items() if number in of_arm]
        reader = partial(bits_per_byte, models[other])
        tokenizer = models[name].tokenizer
        result[name.split("-")[0]] = {arm: reading(texts, tokenizer, reader) for arm, texts in excerpts.items()}
    write_record(out, "loopguard-reading", result, {"shown": SHOWN, "half": HALF})


if __name__ == "__main__":
    run(main)
