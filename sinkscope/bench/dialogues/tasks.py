"""LongBench's eleven sets as the paper uses them (LoopServe, Table 6)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from sinkscope.errors import SinkscopeError

Family = Literal["qa", "summary", "few-shot"]
Metric = Literal["f1", "rouge-l", "accuracy", "exact", "contains"]
PAPER_WORDS_PER_TURN, PAPER_TURNS = 9321.49, 2.61
"""Row of Table 4 for all sets together."""


@dataclass(frozen=True)
class Task:
    """One set.

    Attributes:
        name: its file in LongBench.
        title: its name in the paper.
        family: which of Algorithms 1 to 3 builds it.
        metric: how answers are scored.
        turns: turns of a dialogue, in the paper.
        dialogues: number of dialogues, in the paper.
        tokens: "Avg Token" of Table 6; the paper does not say for which tokenizer, nor whether for a turn.
    """

    name: str
    title: str
    family: Family
    metric: Metric
    turns: int
    dialogues: int
    tokens: float


TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        Task("narrativeqa", "NQA", "qa", "f1", 3, 500, 30545.54),
        Task("qasper", "Qasper", "qa", "f1", 3, 500, 5434.41),
        Task("multifieldqa_en", "MFQA-en", "qa", "f1", 3, 500, 7279.64),
        Task("hotpotqa", "HotpotQA", "qa", "f1", 3, 500, 13847.19),
        Task("2wikimqa", "2WikiMQA", "qa", "f1", 3, 500, 7471.16),
        Task("musique", "Musique", "qa", "f1", 3, 500, 16587.56),
        Task("multi_news", "MultiNews", "summary", "rouge-l", 2, 500, 2376.46),
        Task("gov_report", "GovReport", "summary", "rouge-l", 2, 500, 9324.43),
        Task("qmsum", "QMSum", "summary", "rouge-l", 2, 500, 12780.29),
        Task("trec", "TREC", "few-shot", "accuracy", 2, 199, 2293.99),
        # The paper names accuracy, which summaries do not have; LongBench uses Rouge-L.
        Task("samsum", "SAMSUM", "few-shot", "rouge-l", 2, 199, 3113.73),
    )
}


def task_of(name: str) -> Task:
    """The task of that name.

    Raises:
        SinkscopeError: there is none; the message lists all.
    """
    if name not in TASKS:
        raise SinkscopeError(f"task {name!r} is unknown: expected one of {', '.join(TASKS)}, recall, or scbench_...")
    return TASKS[name]
