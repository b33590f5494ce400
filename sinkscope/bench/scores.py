"""Scores of an answer against correct answers, 0 to 1."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Sequence
from pkgutil import resolve_name
from typing import Any

from sinkscope.errors import SinkscopeError

_ARTICLE = re.compile(r"\b(?:a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def score(metric: str, text: str, answers: Sequence[str]) -> float:
    """Return the score of an output.

    Args:
        metric: A name in `METRICS`, or `package.module:function`; the function gets the output and the answers.
        text: The model's output.
        answers: Correct answers, at least one.

    Raises:
        SinkscopeError: The metric is unknown.
    """
    if metric in METRICS:
        return METRICS[metric](text, answers)
    try:
        own = resolve_name(metric)
    except (ImportError, AttributeError, ValueError):
        own = None
    if not callable(own):
        raise SinkscopeError(f"metric {metric!r} is unknown: expected {', '.join(METRICS)} or package.module:function")
    score: Any = own(text, answers)
    return float(score)


def normalised(text: str) -> list[str]:
    """Return the words in lower case, without ASCII punctuation, then without articles (SQuAD's normalisation)."""
    return _ARTICLE.sub(" ", text.lower().translate(_PUNCTUATION)).split()


def f1(text: str, answers: Sequence[str]) -> float:
    """Return the best harmonic mean of precision and recall over words of the output and of an answer (LongBench)."""
    best = 0.0
    words = normalised(text)
    for answer in answers:
        wanted = normalised(answer)
        common = sum((Counter(words) & Counter(wanted)).values())
        if common:
            precision = common / len(words)
            recall = common / len(wanted)
            best = max(best, 2 * precision * recall / (precision + recall))
    return best


def contains(text: str, answers: Sequence[str]) -> float:
    """Return 1 if an answer occurs in the output, ignoring case."""
    return float(share(text, answers) > 0)


def share(text: str, answers: Sequence[str]) -> float:
    """Return the share of the answers that occur in the output, ignoring case (RULER's `string_match_all`)."""
    return sum(answer.lower() in text.lower() for answer in answers) / len(answers)


METRICS: dict[str, Callable[[str, Sequence[str]], float]] = {
    "f1": f1,
    "contains": contains,
    "share": share,
}
