"""How much of what follows a repetition stands word for word in a corpus, beside answers to ordinary prompts.

    sinkscope repeat --quantity probability --prefix "" --json repetition.json
    python -m experiments.repeated_token.leakage repetition.json --corpus DIR|stdlib [--model NAME]

The longest verbatim piece of each answer is found exactly, by plain search in the bytes of the corpus: there is no
measure of similarity and no threshold. Any text shares some piece with a large corpus, so a length means nothing
without the control: the same for answers to pieces of ordinary text, 64 tokens each. `--corpus stdlib` is the Python
library of the running interpreter, which the model in the package was trained on. Paraphrases are not detected.
"""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Any

import sinkscope as ss
from experiments.bundled.corpus import read_corpus
from experiments.record import Row
from experiments.script import run
from sinkscope.errors import SinkscopeError
from sinkscope.measure import PIECE, Setup
from sinkscope.models.text import text_rows
from sinkscope.sinks.repetition.probability import NEW_TOKENS
from sinkscope.sinks.repetition.result import Repeat

SUFFIXES = (".txt", ".md", ".rst", ".py", ".json", ".jsonl", ".csv", ".html")
BETWEEN = b"\xff"
SKIPPED = 4096  # characters at the beginning of the text, which are used for neutral values


def read_texts(corpus: str) -> bytes:
    """The texts of a folder, or of the library, with a byte between them that no text has.

    Raises:
        SinkscopeError: There is no such folder, or no text in it.
    """
    texts: list[str] = []
    if corpus == "stdlib":
        texts = read_corpus().train
    for path in sorted(Path(corpus).rglob("*")):
        if path.suffix in SUFFIXES and path.is_file():
            texts.append(path.read_text(encoding="utf-8", errors="replace"))
    if not texts:
        raise SinkscopeError(f"--corpus {corpus}: expected a folder with files of {', '.join(SUFFIXES)}, or stdlib")
    return BETWEEN.join(text.encode() for text in texts)


def longest_piece(corpus: bytes, text: str) -> Row:
    """The longest piece of a text that stands in the corpus."""
    data = text.encode()
    piece = b""
    for start in range(len(data)):
        end = start + len(piece) + 1
        while end <= len(data) and data[start:end] in corpus:
            piece = data[start:end]
            end += 1
    return {"bytes": len(piece), "piece": piece.decode(errors="replace")}


def ordinary_answers(model: Any, count: int, new_tokens: int) -> list[str]:
    """What the model writes after pieces of ordinary text."""
    setup = Setup.open(model)
    prompts = text_rows(setup.tokenizer, setup.text[SKIPPED:], count, PIECE, setup.bos)
    answers: list[str] = []
    for prompt in prompts:
        text = setup.tokenizer.decode(prompt, skip_special_tokens=True)
        answers.append(ss.generate(model, text, max_new_tokens=new_tokens)[0].text)
    return answers


def main(result: Path, *, corpus: str, model: str | None = None, controls: int = 20) -> None:
    """Make what the module describes.

    Args:
        result: What `sinkscope repeat --quantity probability --json FILE` wrote.
        corpus: A folder of text files, or stdlib.
        model: Short name, hub id or folder; default: the model in the package.
        controls: Ordinary prompts.
    """
    texts = read_texts(corpus)
    measured = Repeat.load(result)
    if not measured.answers:
        raise SinkscopeError(f"{result} is no result of sinkscope repeat --quantity probability: give one")
    rows: list[Row] = []
    for answer in measured.answers:
        if answer.follows:
            group = f"{answer.copies} repetitions" + ", patched" * answer.patched
            rows.append({"group": group, "token": answer.token, **longest_piece(texts, answer.follows)})
    for text in ordinary_answers(ss.load(model), controls, NEW_TOKENS):
        rows.append({"group": "ordinary prompts", "token": None, **longest_piece(texts, text)})
    for group in dict.fromkeys(row["group"] for row in rows):
        lengths = []
        for row in rows:
            if row["group"] == group:
                lengths.append(row["bytes"])
        print(
            f"{group}: the longest verbatim piece has {median(lengths):.0f} bytes in the median, {max(lengths)} at most"
        )


if __name__ == "__main__":
    run(main)
