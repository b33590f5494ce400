"""Answers to questions about long contexts under caches and the guard (Table 2)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from experiments.longbench import ANSWER_ALONE, LongBenchRecord, read_longbench
from experiments.papers.loopguard.runs import share
from sinkscope.bench.benchmark import run
from sinkscope.bench.record import Prompt, Turn
from sinkscope.bench.task import PromptFile
from sinkscope.errors import SinkscopeError
from sinkscope.measure import Mean, Natural, Result, Row, Setup, column, measurement

MADE_UP = Path(__file__).with_name("two_wiki_made_up.jsonl")
"""Eight made-up records in LongBench's form: names, towns and films that do not exist."""
NEW = 32
"""Tokens of an answer, as in LongBench: fewer than the 64 of the guard's warm-up."""


@dataclass(frozen=True, kw_only=True)
class Answers(Row, table="methods", title="answers"):
    """The answers under a method."""

    key: str
    f1: Mean = column("F1", "share", "Best F1 of an answer's words with those of a right answer, mean over records.")
    same: Mean = column("as with the\nwhole cache", "share", "Answers that are the whole cache's, token for token.")


@dataclass(frozen=True, kw_only=True)
class TwoWiki(Result):
    """Answers to the questions of 2WikiMultihopQA's records under caches of a fixed budget and under the guard."""

    methods: tuple[Answers, ...]
    records: int

    def conclusion(self) -> str:
        """Return that the guard's answers are the whole cache's, and what other caches lose."""
        _, streaming, h2o, guard = self.methods
        others = " and ".join(f"{row.key} {row.text('same')} (F1 {row.text('f1')})" for row in (streaming, h2o))
        return (
            f"Of {self.records} records, {guard.text('same', margin=False)} of the guard's answers are the whole "
            f"cache's, token for token (F1 {guard.text('f1')}), because they end before its warm-up. As controls of "
            f"the same budget, {others}."
        )


def prompt_of(record: LongBenchRecord) -> Prompt:
    """Return the prompt of LongBench (config/dataset2prompt.json, "2wikimqa")."""
    passages = f"The following are given passages.\n{record.context}"
    text = f"{ANSWER_ALONE}\n\n{passages}\n\n{ANSWER_ALONE}\n\nQuestion: {record.question}\nAnswer:"
    return Prompt(record.id, (Turn(text, record.answers, "f1"),), "2wikimqa")


@measurement(loading="whole")
def two_wiki(setup: Setup, *, records: Path = MADE_UP, budget: Natural = 1024, count: Natural = 200) -> TwoWiki:
    """Answer questions about passages with the whole cache, under the printed guard and under caches of its budget.

    Args:
        records: LongBench's 2wikimqa.jsonl. By default eight made-up records of its form.
        budget: Cached tokens of the guard and of the other caches.
        count: Largest number of records, the first ones.
    """
    prompts = tuple(map(prompt_of, read_longbench(records)[:count]))
    methods = ("full", f"streaming:{budget}", f"h2o:{budget}", f"loopguard:paper:{budget}")
    answers = run(setup.target, PromptFile(given=prompts, new=NEW), methods, progress=setup.progress)
    rows: list[Answers] = []
    for method in methods:
        own = answers[len(rows) * len(prompts) :][: len(prompts)]
        same = share(one.tokens == other.tokens for one, other in zip(own, answers, strict=False))
        rows.append(Answers(key=method, f1=share(float(one.metrics["score"] or 0) for one in own), same=same))
    if rows[-1].same.value < 1:
        raise SinkscopeError(
            f"{rows[-1].text('same')} of the guard's answers are the whole cache's, expected all: they end before its "
            "warm-up, so report this as a fault of the guard"
        )
    return TwoWiki(methods=tuple(rows), records=len(prompts))
