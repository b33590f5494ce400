"""2WikiMultihopQA of LongBench: its prompt and its score, F1 of words (Bai et al. 2024; Xu et al. 2026, Table 2)."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Iterable, Sequence

from sinkscope.errors import SinkscopeError

MAX_NEW_TOKENS = 32  # LongBench's longest answer for this task
_ARTICLE = re.compile(r"\b(?:a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)

HEAD = (
    "Below are several passages and, after them, a question about what they say. Reply with the answer alone, without "
    "any further words.\n\nPassages:\n"
)
TAIL = "\n\nUsing the passages above, reply with the answer alone, without any further words.\n\nQuestion: {}\nAnswer:"


def wiki2_prompt(passages: str, question: str) -> str:
    """LongBench's prompt in our own words: instruction, passages, instruction, question."""
    return f"{HEAD}{passages}{TAIL.format(question)}"


def normalise(text: str) -> str:
    """Lower case, without ASCII punctuation, then without articles; one space between words."""
    return " ".join(_ARTICLE.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def f1(prediction: str, answer: str) -> float:
    """Harmonic mean of precision and recall over the words of both, each counted as often as it occurs.

    0 if no word is shared, also if either text is empty after `normalise`.
    """
    said, right = normalise(prediction).split(), normalise(answer).split()
    shared = sum((Counter(said) & Counter(right)).values())
    if not shared:
        return 0.0
    precision, recall = shared / len(said), shared / len(right)
    return 2 * precision * recall / (precision + recall)


def best_f1(prediction: str, answers: Iterable[str]) -> float:
    """The best `f1` over the right answers; 0 if there are none."""
    return max((f1(prediction, answer) for answer in answers), default=0.0)


def score(predictions: Sequence[str], answers: Sequence[Iterable[str]]) -> float:
    """Mean of `best_f1` in percent, as LongBench and Table 2 print it; not rounded.

    Raises:
        SinkscopeError: no predictions, or not as many as answers.
    """
    if not predictions or len(predictions) != len(answers):
        raise SinkscopeError(
            f"{len(predictions)} predictions for {len(answers)} questions: expected one for each, and at least one"
        )
    return 100 * sum(map(best_f1, predictions, answers)) / len(predictions)
