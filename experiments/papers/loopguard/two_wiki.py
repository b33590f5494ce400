"""Answers to questions about long contexts under caches and the guard (Table 2)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import plotly.graph_objects as go

from experiments.longbench import ANSWER_ALONE, LongBenchRecord, read_longbench
from experiments.papers.loopguard.caches import H2O, PRINTED, WHOLE, Method
from experiments.papers.loopguard.runs import acts_of, share
from sinkscope.bench.benchmark import run
from sinkscope.bench.record import BenchRecord, Prompt, Turn
from sinkscope.bench.task import PromptFile
from sinkscope.errors import SinkscopeError
from sinkscope.measure import Mean, Natural, Result, Row, Setup, column, measurement
from sinkscope.results.style import BLUE, bars, figure_of

MADE_UP = Path(__file__).with_name("two_wiki_made_up.jsonl")
"""Eight made-up records in LongBench's form: names, towns and films that do not exist."""
NEW = 32
"""Tokens of an answer, as in LongBench: fewer than the 64 of the guard's warm-up."""


@dataclass(frozen=True, kw_only=True)
class Answers(Row, table="methods", title="answers"):
    """The answers under a method."""

    key: Method
    f1: Mean = column("F1", "share", "Best F1 of an answer's words with those of a right answer, mean over records.")
    same: Mean = column("as with the\nwhole cache", "share", "Answers that are the whole cache's, token for token.")
    acts: Mean = column("acts", "count", "Interventions in all answers.")

    @property
    def short_label(self) -> str:
        """The method."""
        return self.key.name


@dataclass(frozen=True, kw_only=True)
class TwoWiki(Result):
    """Answers to the questions of 2WikiMultihopQA's records under caches of a fixed budget and under the guard.

    Attributes:
        records: Number of records.
        longest: Largest number of tokens of a prompt.
        records_are_made_up: Whether they are the made-up records of the project.
    """

    methods: tuple[Answers, ...]
    records: int
    longest: int
    records_are_made_up: bool

    def conclusion(self) -> str:
        """Return that the guard's answers are the whole cache's, and what other caches lose."""
        rows = {row.key.name: row for row in self.methods}
        made_up = "made-up " if self.records_are_made_up else ""
        others: list[str] = []
        for name in ("StreamingLLM", H2O):
            others.append(f"{name} gives {rows[name].text('same')} of them (F1 {rows[name].text('f1')})")
        return (
            f"On {self.records} {made_up}records the guard's answers are the whole cache's, token for token (F1 "
            f"{rows[PRINTED].text('f1')}), because they end before its warm-up. As controls of the same budget, "
            f"{' and '.join(others)}."
        )

    def figure(self) -> Any:
        """Draw F1 by method."""
        fig = go.Figure()
        bars(fig, self.methods, "f1", BLUE)
        fig.update_yaxes(title_text="F1", range=[0, 1.02])
        return figure_of(fig, self, width=800, height=460)


def prompt_of(record: LongBenchRecord) -> Prompt:
    """Return the prompt of LongBench (config/dataset2prompt.json, "2wikimqa")."""
    passages = f"The following are given passages.\n{record.context}"
    text = f"{ANSWER_ALONE}\n\n{passages}\n\n{ANSWER_ALONE}\n\nQuestion: {record.question}\nAnswer:"
    return Prompt(record.id, (Turn(text, record.answers, "f1"),), "2wikimqa")


def row_of(name: str, answers: Sequence[BenchRecord], whole: Sequence[BenchRecord]) -> Answers:
    """Return the row of a method."""
    same = share(one.tokens == other.tokens for one, other in zip(answers, whole, strict=True))
    acts = Mean(float(sum(len(acts_of(answer)) for answer in answers)))
    return Answers(
        key=Method(name), f1=share(float(answer.metrics["score"] or 0.0) for answer in answers), same=same, acts=acts
    )


@measurement(loading="whole")
def two_wiki(setup: Setup, *, records: Path = MADE_UP, budget: Natural = 1024, count: Natural = 200) -> TwoWiki:
    """Answer questions about passages with the whole cache, under the printed guard and under caches of its budget.

    Args:
        records: LongBench's 2wikimqa.jsonl. By default eight made-up records of its form.
        budget: Cached tokens of the guard and of the other caches.
        count: Largest number of records, the first ones.
    """
    prompts = tuple(prompt_of(record) for record in read_longbench(records)[:count])
    methods = {WHOLE: "full", "StreamingLLM": f"streaming:{budget}", H2O: f"h2o:{budget}"}
    methods[PRINTED] = f"loopguard:paper:{budget}"
    answers: dict[str, list[BenchRecord]] = {}
    for name, method in methods.items():
        report = partial(setup.progress, name)
        task = PromptFile(given=prompts, new=NEW)
        answers[name] = [*run(setup.target, task, [method], progress=lambda what, *at, report=report: report(*at))]
    rows = {name: row_of(name, own, answers[WHOLE]) for name, own in answers.items()}
    if rows[PRINTED].same.value < 1:
        raise SinkscopeError(
            f"{rows[PRINTED].text('same')} of the guard's answers are the whole cache's, expected all: answers of "
            f"{NEW} tokens end before its warm-up, so report this as a fault of the guard"
        )
    longest = max(int(answer.metrics["prompt_tokens"] or 0) for answer in answers[WHOLE])
    return TwoWiki(
        methods=tuple(rows.values()), records=len(prompts), longest=longest, records_are_made_up=records == MADE_UP
    )
