"""Scores of an answer against correct answers, 0 to 1."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Sequence

from sinkscope.errors import SinkscopeError, first_line
from sinkscope.kv.registry import import_object

_ARTICLE = re.compile(r"\b(?:a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def score(metric: str, text: str, answers: Sequence[str]) -> float:
    """Return the score of an output.

    Args:
        metric: A name in `METRICS`, or `package.module:function`; the function gets the output and the answers.
        text: The model's output.
        answers: Correct answers, at least one.

    Raises:
        SinkscopeError: The metric is unknown or fails, or gives no number from 0 to 1.
    """
    expected = f"; expected {', '.join(METRICS)} or package.module:function"
    function = METRICS[metric] if metric in METRICS else import_object(metric, f"metric {metric!r}", expected)
    try:
        value = float(function(text, answers))
    except Exception as error:  # a function of the user's own may fail in any way
        raise SinkscopeError(
            f"metric {metric!r} failed ({type(error).__name__}: {first_line(error)}) on the output {text!r:.60}: "
            "mend it, or install what it needs"
        ) from None
    if not 0 <= value <= 1:
        raise SinkscopeError(f"metric {metric!r} is {value}: expected a number from 0 to 1")
    return value


def check_metric(metric: str, answers: Sequence[str]) -> None:
    """Refuse a metric that cannot score: it is tried with the first right answer as the output.

    Raises:
        SinkscopeError: As for `score`.
    """
    score(metric, answers[0], answers)


def normalised(text: str) -> list[str]:
    """Return the words in lower case, without ASCII punctuation, then without articles (SQuAD's normalisation)."""
    return _ARTICLE.sub(" ", text.lower().translate(_PUNCTUATION)).split()


def f1(text: str, answers: Sequence[str]) -> float:
    """Return the best harmonic mean of precision and recall over words of the output and of an answer (LongBench)."""
    best, words = 0.0, normalised(text)
    for wanted in map(normalised, answers):
        common = (Counter(words) & Counter(wanted)).total()
        best = max(best, 2 * common / max(1, len(words) + len(wanted)))
    return best


def contains(text: str, answers: Sequence[str]) -> float:
    """Return 1 if an answer occurs in the output, ignoring case."""
    return float(any(answer.lower() in text.lower() for answer in answers))


METRICS: dict[str, Callable[[str, Sequence[str]], float]] = {"f1": f1, "contains": contains}
