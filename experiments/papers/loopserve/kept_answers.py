"""What methods do to a model's own answers, by place of the question (Tables 1 and 8, Figs. 5, 7, 9 to 11 and 13)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import plotly.express as px
import torch
from jaxtyping import Float

from experiments.papers.loopserve.asked import PLACES, Named, asked
from experiments.papers.loopserve.runs import RandomKeep
from sinkscope.bench.answer import Answer, answer_rows, mean_known
from sinkscope.bench.methods import FULL, make_method, read_methods
from sinkscope.errors import SinkscopeError
from sinkscope.files.records import PositiveShare
from sinkscope.generation.decode import decode
from sinkscope.measure import Mean, Natural, Result, Row, Setup, column, mean_of, measurement, optional
from sinkscope.results.style import figure_of

FIRST = 16  # decoding steps in which LoopServe reads everything
CONTROL = f"{RandomKeep.__module__}:{RandomKeep.__name__}:{{}}:window=32"
RANDOM = "control: random part"


@dataclass(frozen=True)
class At:
    """A method, and where the question stands."""

    method: str
    place: str

    def __str__(self) -> str:
        return f"{self.method}, {self.place}"


@dataclass(frozen=True, kw_only=True)
class Change(
    Row,
    table="changes",
    title="the model's own answers under each method",
    note="Rise of the loss of the answer that the model writes with its full cache, in nats a token; lower is better, "
    f"0 with it. In its first {FIRST} tokens loopserve reads everything, the control never does.",
):
    """What a method does to answers, mean over dialogues."""

    key: At
    rise: Mean | None = column("rise of\nthe loss", "rise", "Mean over all tokens of the answer.")
    late: Mean | None = column("behind the\nfirst 16", "rise", "Mean over tokens behind the first 16.")
    over: Mean | None = optional(
        "behind 16,\nover control", "rise", "That minus the same of the control, dialogue by dialogue."
    )
    same: Mean | None = column("likeliest\nis the same", "share", "Tokens of the answer that are the likeliest still.")


@dataclass(frozen=True, kw_only=True)
class Cost(Row, table="costs", title="what each method costs, beside the full cache in the same run"):
    """The costs of a method over all dialogues."""

    key: Named
    time: Mean = column("time", "times", "Wall time of reading and answering, over that with the full cache.")
    read: Mean | None = optional("tokens read\nin a step", "count", "Tokens that a decoding step reads.")
    held: Mean | None = optional("tokens\nheld", "count", "Most tokens in the cache.")
    cells: Mean | None = optional("cells of\nthe prompt", "share", "Cells of the prompt's attention that are computed.")


@dataclass(frozen=True, kw_only=True)
class KeptAnswers(Result):
    """Rise of the loss of a model's own answers under methods, by place of the question, and what these cost."""

    rows: tuple[Change, ...]
    costs: tuple[Cost, ...]

    def conclusion(self) -> str:
        """Return the method that changes answers least behind the first tokens, and which ones the control beats."""
        methods = [cost.key.name for cost in self.costs if cost.key.name != RANDOM]
        worst = {name: max(self.of(name), key=late_of) for name in [*methods, RANDOM]}
        best = min(methods, key=lambda name: late_of(worst[name]))
        row = worst[best]
        (control,) = (other for other in self.of(RANDOM) if other.key.place == row.key.place)
        return (
            f"Behind the first {FIRST} tokens, in which loopserve reads everything, {best} raises the loss of the "
            f"model's own answers least: by {row.text('late')} nats a token with the question at its worst place, "
            f"{row.key.place} (a random part of the cache, the control: {control.text('late')}). "
            f"{self.against_control(methods)}"
        )

    def against_control(self, methods: Sequence[str]) -> str:
        """Return which methods the control clearly beats somewhere, and how many it loses to everywhere."""
        beaten: list[str] = []
        better = 0
        for name in methods:
            over = [row.over for row in self.of(name)]
            if any(mean is None or mean.margin is None for mean in over):
                return "With one dialogue there is no margin, and no difference from the control is shown."
            if any(mean.value > mean.margin for mean in over):
                beaten.append(name)
            better += all(mean.value < -mean.margin for mean in over)
        wins = f"clearly better than {', '.join(beaten)} at some place" if beaten else "clearly better than none"
        return (
            f"Dialogue by dialogue the control is {wins}, and {better} of {len(methods)} methods are clearly better "
            "than it at every place."
        )

    def of(self, method: str) -> list[Change]:
        """Return the rows of a method."""
        return [row for row in self.rows if row.key.method == method]

    def figure(self) -> Any:
        """Draw bars by method, a colour for each place of the question."""
        names = [row.key.method for row in self.rows]
        fig = px.bar(
            x=names,
            y=[late_of(row) for row in self.rows],
            error_y=[0.0 if row.late is None else row.late.margin or 0.0 for row in self.rows],
            color=[row.key.place for row in self.rows],
            barmode="group",
        )
        fig.update_xaxes(title_text="", tickangle=-35)
        fig.update_yaxes(title_text=f"rise behind the first {FIRST} tokens, nats a token")
        fig.update_layout(legend_title="question")
        return figure_of(fig, self, width=1100, height=560, bottom=180)


def late_of(row: Change) -> float:
    """Return the rise of a row behind the first tokens, 0 where nothing was read."""
    return 0.0 if row.late is None else row.late.value


@measurement(loading="whole")
def kept_answers(
    setup: Setup,
    *,
    methods: Sequence[str],
    share: PositiveShare = 0.25,
    dialogues: Natural = 24,
    length: Natural = 320,
    new: Natural = 48,
) -> KeptAnswers:
    """Measure what methods do to the answers that a model writes with its full cache.

    Args:
        methods: Names, each with a budget or settings, as for `sinkscope bench`; a random part is added as a control.
        share: Budget of methods that have one and state none, as a share of the prompt.
        dialogues: Number of dialogues, of four kinds of text in turn; each is asked with the question at three places.
        length: Tokens of a prompt.
        new: Tokens of an answer.
    """
    if new <= FIRST:
        raise SinkscopeError(f"--new {new}: give more than {FIRST}, the steps in which loopserve reads everything")
    names = {name: name for name in read_methods([name for name in methods if name != FULL], share)}
    names[RANDOM] = CONTROL.format(share)
    edits = {name: make_method(text) for name, text in names.items()}
    prompts = [prompt for place in PLACES for prompt in asked(setup, dialogues, length, place, chat=False)]
    wanted, _ = decode(setup.target, prompts, new, min_new_tokens=new)
    plain, reference = answered(setup, prompts, wanted, None)
    rows: list[Change] = []
    costs: list[Cost] = []
    for at, (name, edit) in enumerate(edits.items()):
        setup.progress("methods", at, len(edits))
        answers, logs = answered(setup, prompts, wanted, edit)
        costs.append(cost_of(name, answers, plain))
        rises, same = (logs - reference)[..., 0], logs[..., 1]
        for place, (rise, likeliest) in zip(
            PLACES, zip(np.split(rises, 3), np.split(same, 3), strict=True), strict=True
        ):
            late = mean_of(rise[:, FIRST:].mean(1))
            found = {"rise": mean_of(rise.mean(1)), "late": late, "same": mean_of(likeliest.mean(1), "share")}
            rows.append(Change(key=At(name, place), **found))
    return KeptAnswers(rows=tuple(beside_control(rows)), costs=tuple(costs))


def beside_control(rows: Sequence[Change]) -> list[Change]:
    """Return rows with what each method costs over the control, dialogue by dialogue; the control's have none."""
    of_place = {row.key.place: row for row in rows if row.key.method == RANDOM}
    found: list[Change] = []
    for row in rows:
        control = of_place[row.key.place]
        if row.key.method != RANDOM and row.late is not None and control.late is not None:
            row = replace(row, over=mean_of(np.subtract(row.late.by_text, control.late.by_text)))
        found.append(row)
    return found


def answered(
    setup: Setup, prompts: Sequence[list[int]], wanted: Sequence[list[int]], edit: Any
) -> tuple[list[Answer], Float[np.ndarray, "text token 2"]]:
    """Let a method read prompts and answers; what they cost, and each token's loss and whether it is likeliest."""
    logits: list[torch.Tensor] = []
    answers = answer_rows(setup.target, prompts, len(wanted[0]), edit, along=wanted, logits=logits)
    found: list[torch.Tensor] = []
    for step, tokens in zip(logits, torch.tensor(wanted).T, strict=True):
        loss = torch.nn.functional.cross_entropy(step.float().cpu(), tokens, reduction="none")
        found.append(torch.stack([loss, (step.argmax(-1).cpu() == tokens).float()], -1))
    return answers, torch.stack(found, 1).double().numpy()


def cost_of(name: str, answers: Sequence[Answer], plain: Sequence[Answer]) -> Cost:
    """Return what a method costs beside the full cache."""
    means = {
        key: mean_known(one.metrics[key] for one in answers) for key in ("read", "cached_peak", "cells", "seconds")
    }
    time = (means["seconds"] or 0.0) / (mean_known(one.metrics["seconds"] for one in plain) or 1.0)
    read, held, cells = (None if means[key] is None else Mean(means[key]) for key in ("read", "cached_peak", "cells"))
    return Cost(key=Named(name), time=Mean(time), read=read, held=held, cells=cells)
