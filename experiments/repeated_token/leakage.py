"""How much of what follows a repetition stands word for word in a corpus, beside answers to ordinary prompts.

    sinkscope repeat --read probability --prefix "" --json repetition.json
    python -m experiments.repeated_token.leakage repetition.json --corpus DIR|stdlib [--model NAME] [--out leakage.json]

The longest verbatim piece of each answer is found exactly, by a suffix array over the bytes of the corpus: there is no
measure of similarity and no threshold. Any text shares some piece with a large corpus, so a length means nothing
without the control: the same for answers to pieces of ordinary text, 64 tokens each. `--corpus stdlib` is the Python
library of the running interpreter, which the model in the package was trained on. Paraphrases are not detected.
"""

from __future__ import annotations

import time
from pathlib import Path
from statistics import median
from typing import Any

import sinkscope as ss
from experiments.record import Row, record
from experiments.repeated_token.corpus import CorpusIndex, open_corpus
from experiments.script import run
from sinkscope.files.output import write_atomic
from sinkscope.measure import PIECE, Setup
from sinkscope.models.text import text_rows
from sinkscope.sinks.repetition.probability import ProbabilityReading
from sinkscope.sinks.repetition.repeat import Repeat

SKIPPED = 4096  # characters at the beginning of the text, which are used for neutral values


def longest_piece(corpus: CorpusIndex, text: str) -> Row:
    """The longest piece of a text that stands in the corpus, and the file that has it."""
    match = corpus.longest(text.encode())
    piece = text.encode()[match.start : match.start + match.length]
    return {"bytes": match.length, "piece": piece.decode(errors="replace"), "file": match.file}


def ordinary_answers(model: Any, count: int, new_tokens: int) -> list[str]:
    """What the model writes after pieces of ordinary text."""
    setup = Setup.open(model)
    prompts = text_rows(setup.tokenizer, setup.text[SKIPPED:], count, PIECE, setup.bos)
    answers: list[str] = []
    for prompt in prompts:
        text = setup.tokenizer.decode(prompt, skip_special_tokens=True)
        answers.append(ss.generate(model, text, max_new_tokens=new_tokens)[0].text)
    return answers


def main(result: Path, *, corpus: str, model: str | None = None, controls: int = 20, out: Path | None = None) -> None:
    """Make what the module describes.

    Args:
        result: What `sinkscope repeat --read probability --json FILE` wrote.
        corpus: A folder of text files, or stdlib.
        model: Short name, hub id or folder; default: the model in the package.
        controls: Ordinary prompts.
    """
    started = time.perf_counter()
    texts = open_corpus(corpus)
    measured = Repeat.load(result)
    if texts is None or not isinstance(measured.reading, ProbabilityReading):
        raise SystemExit(f"error: {result} is not a result of sinkscope repeat --read probability")
    rows: list[Row] = []
    for answer in measured.reading.answers:
        if answer.follows:
            group = f"{answer.repeats} repetitions" + ", patched" * answer.patched
            rows.append({"group": group, "token": answer.token, **longest_piece(texts, answer.follows)})
    new_tokens = int(measured.settings["new_tokens"])
    for text in ordinary_answers(ss.load(model, backend="hf"), controls, new_tokens):
        rows.append({"group": "ordinary prompts", "token": None, **longest_piece(texts, text)})
    for group in dict.fromkeys(row["group"] for row in rows):
        lengths = []
        for row in rows:
            if row["group"] == group:
                lengths.append(row["bytes"])
        print(
            f"{group}: the longest verbatim piece has {median(lengths):.0f} bytes in the median, {max(lengths)} at most"
        )
    if out is not None:
        settings = {"model": measured.model.name, "corpus": Path(corpus).name, "controls": controls}
        write_atomic(out, record("leakage", {"rows": rows}, settings, started=started))


if __name__ == "__main__":
    run(main)
