"""The set, half for choosing rules and half for the report, as `texts.jsonl.xz` beside this file holds it.

It is data: a rule of ours must not change with the programs that once drew the texts.
"""

from __future__ import annotations

import json
import lzma
from pathlib import Path

from experiments.record import Row

HALVES = ("choose", "report")
TEXTS = Path(__file__).with_name("texts.jsonl.xz")


def texts_of(half: str) -> list[Row]:
    """The texts of a half: `text`, `class`, `half`, and `start`, the first character of a loop's first copy."""
    rows: list[Row] = []
    with lzma.open(TEXTS, "rt", encoding="utf-8") as lines:
        for line in lines:
            row = json.loads(line)
            if row["half"] == half:
                rows.append(row)
    return rows
