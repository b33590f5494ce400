"""Answers that repeat because they should: what was asked for, or what the form of a text brings; in two halves.

The 32 forms of `honest_answers.jsonl` for choosing, and those to report, are different forms.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from sinkscope.files.records import read_records


@dataclass(frozen=True)
class HonestAnswer:
    """One answer.

    Attributes:
        half: "choose" or "report".
        form: What repeats in it.
        prompt: What was asked for.
        answer: The text.
    """

    half: str
    form: str
    prompt: str
    answer: str


def honest_answers(half: str) -> list[HonestAnswer]:
    """The answers of a half."""
    read = read_records(Path(__file__).with_suffix(".jsonl"), HonestAnswer, "the file of honest answers")
    return [answer for answer in read if answer.half == half]
