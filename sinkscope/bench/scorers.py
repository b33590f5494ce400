"""Scores of answers, 0 to 1, by LongBench's definitions (Bai et al. 2024) and SCBench's; exact match for our own."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Iterable, Sequence

from sinkscope.bench.dialogues.recall import END, TASK
from sinkscope.bench.dialogues.scbench import SCBENCH, Metric, shared_metric, task_of
from sinkscope.errors import SinkscopeError

_ARTICLE = re.compile(r"\b(?:a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_FIRST_LINE = {"trec", "samsum"}  # LongBench scores the first line of what was said
_ANY_CASE = {"scbench_qa_eng"}  # SCBench looks for the answer in any case


def metric_of(task: str) -> Metric:
    """What answers of a set are scored by.

    Raises:
        SinkscopeError: no such set.
    """
    if task in SCBENCH:
        return shared_metric(task)
    return "exact" if task == TASK else task_of(task).metric


def score(
    metric: Metric | str, said: str, answers: Sequence[str], *, classes: Sequence[str] = (), task: str = ""
) -> float:
    """The score of what was said against the best of the right answers.

    Args:
        metric: "f1", "rouge-l", "accuracy", "exact" or "contains".
        said: by the model.
        answers: right ones, at least one.
        classes: names that the answer is one of, for "accuracy".
        task: some of LongBench are scored by the first line, some of SCBench in any case.

    Raises:
        SinkscopeError: unknown metric, or the library of "rouge-l" is not there.
    """
    if task in _FIRST_LINE:
        said = said.lstrip("\n").split("\n")[0]
    if metric == "accuracy":
        return max(accuracy(said, answer, classes) for answer in answers)
    if metric == "rouge-l":
        return rouge_l(said, answers)
    if task in _ANY_CASE:
        said, answers = said.upper(), [answer.upper() for answer in answers]
    scores = {"f1": f1, "exact": exact, "contains": contains}
    if metric not in scores:
        raise SinkscopeError(f"metric {metric!r} is unknown: expected f1, rouge-l, accuracy, exact or contains")
    return max(scores[metric](said, answer) for answer in answers)


def exact(said: str, answer: str) -> float:
    """1 where the words are the same, up to the end mark of the recall model, which decoders may leave out."""
    return float(_until_end(said) == _until_end(answer))


def contains(said: str, answer: str) -> float:
    """1 where the answer is in what was said (SCBench, Li et al. 2025)."""
    return float(answer in said)


def _until_end(text: str) -> list[str]:
    words = text.split()
    return words[: words.index(END)] if END in words else words


def f1(said: str, answer: str) -> float:
    """Harmonic mean of precision and recall over the words of both, each counted as often as it stands there.

    Case, ASCII punctuation and articles do not count. 0 where no word is shared.
    """
    found, wanted = normalise(said).split(), normalise(answer).split()
    same = sum((Counter(found) & Counter(wanted)).values())
    if not same:
        return 0.0
    precision, recall = same / len(found), same / len(wanted)
    return 2 * precision * recall / (precision + recall)


def best_f1(said: str, answers: Iterable[str]) -> float:
    """The best `f1` over the right answers; 0 if there are none."""
    return max((f1(said, answer) for answer in answers), default=0.0)


def normalise(text: str) -> str:
    """Lower case, without ASCII punctuation, then without articles; one space between words."""
    return " ".join(_ARTICLE.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def accuracy(said: str, answer: str, classes: Sequence[str]) -> float:
    """One over the number of classes named in what was said, if the right one is among them.

    A class whose name is a part of the right one's (and not the same) does not count as named.
    """
    named = [c for c in classes if c in said and not (c in answer and c != answer)]
    return 1 / len(named) if answer in named else 0.0


def rouge_l(said: str, answers: Sequence[str]) -> float:
    """F-measure of the longest common subsequence of words, by the library rouge-score, without stemming.

    Raises:
        SinkscopeError: the library is not there.
    """
    try:
        from rouge_score.rouge_scorer import RougeScorer  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise SinkscopeError("Rouge-L needs the library rouge-score: pip install rouge-score") from None
    scorer = RougeScorer(["rougeL"])
    return max(float(scorer.score(answer, said)["rougeL"].fmeasure) for answer in answers)
