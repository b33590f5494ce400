"""Scores after LongBench's that `sinkscope bench` does not have itself; a row names them as `module:function`."""

from __future__ import annotations

from collections.abc import Sequence


def accuracy(text: str, answers: Sequence[str]) -> float:
    """1 divided by the number of classes named in the output if the correct one is among them, otherwise 0.

    The first answer is correct, the others are the wrong classes. A class whose name is a part of the correct one's
    does not count as named. (LongBench's code may miss such a part: it removes from the list that it walks.)
    """
    right = answers[0]
    named = [each for each in answers if each in text and (each == right or each not in right)]
    if right in named:
        return 1 / len(named)
    return 0.0


def rouge_l(text: str, answers: Sequence[str]) -> float:
    """F-measure of the longest common subsequence of words, by the library rouge-score; LongBench uses rouge."""
    from rouge_score.rouge_scorer import RougeScorer  # pyright: ignore[reportMissingImports]

    scorer = RougeScorer(["rougeL"])
    return max(float(scorer.score(answer, text)["rougeL"].fmeasure) for answer in answers)
