"""Texts of four kinds as JSON lines, of which `experiments.loopserve.lines_loss` reads the loss along lines.

    python -m experiments.loopserve.texts --out texts.jsonl --dialogue-files FILE ... [--count 3] [--characters 12000]

The kinds are those of `experiments.loopserve.real`, in turn; each text is a piece of its kind that no other text has.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from experiments.loopserve.real import TEXTS
from experiments.record import Row, write_rows
from experiments.script import run
from sinkscope.errors import SinkscopeError


def main(*, out: Path, dialogue_files: Sequence[Path], count: int = 3, characters: int = 12_000) -> None:
    """Write the texts.

    Args:
        out: The file.
        dialogue_files: JSON lines with "turns" of MT-bench, and answers of other files between.
        count: Number of texts of each kind.
        characters: Length of a text.
    """
    whole = {kind: text_of(dialogue_files) for kind, text_of in TEXTS.items()}
    rows: list[Row] = []
    for number in range(count):
        for kind, text in whole.items():
            piece = text[number * characters : (number + 1) * characters]
            if len(piece) < characters:
                raise SinkscopeError(f"the {kind} has {len(text):,} characters: expected {count * characters:,}")
            rows.append({"kind": kind, "text": piece})
    write_rows(out, rows)


if __name__ == "__main__":
    run(main)
