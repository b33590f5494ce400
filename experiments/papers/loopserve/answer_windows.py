"""Which window of queries finds the tokens that an answer attends to (Observation 4, Figs. 2 c, 4 a and 4 b)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import pandas as pd
import plotly.express as px
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from experiments.papers.loopserve.asked import PLACES, asked, kinds_of
from sinkscope.errors import SinkscopeError
from sinkscope.generation.decode import decode
from sinkscope.hooks.trace import trace
from sinkscope.measure import Mean, Natural, Result, Row, Setup, column, mean_of, measurement
from sinkscope.measure.margin import interval_of
from sinkscope.models.draws import draws
from sinkscope.results.style import figure_of

SHARES = (0.1, 0.05, 0.15)
TRIED = 2  # output windows that choose; later tokens are those behind them


@dataclass(frozen=True)
class Asked:
    """Dialogues of one form, and what judges a choice of tokens."""

    share: float
    chat: bool
    place: str
    later: bool

    def __str__(self) -> str:
        form = "chat template" if self.chat else "plain"
        return f"{self.share:.0%}, {form}, {self.place}, {'later' if self.later else 'all'}"


@dataclass(frozen=True, kw_only=True)
class Overlap(
    Row,
    table="overlap",
    title="share of the tokens that the answer attends to most which a window's attention chooses",
    most=12,
    note="Rows: share of the prompt, form, place of the question, and the output tokens that judge: all, or those "
    "behind the tried windows. Chance is the share of the prompt.",
):
    """The overlap of choices with what the answer attends to most, mean over dialogues."""

    key: Asked
    last: Mean | None = column("last\ninput", "share", "Chosen by the last window of the prompt.")
    earlier: Mean | None = column("earlier\ninput", "share", "By earlier windows of the prompt, mean over these.")
    first: Mean | None = column("first\noutput", "share", "By the first window of the answer.")
    second: Mean | None = column("second\noutput", "share", "By the second window of the answer.")
    random: Mean | None = column("control:\nrandom input", "share", "By a window of the prompt drawn at random.")
    other: Mean | None = column(
        "control:\nother's output", "share", "By the first window of the next dialogue's answer: places alone."
    )


@dataclass(frozen=True)
class Apart:
    """Pairs of output windows of dialogues of one form."""

    chat: bool
    place: str
    distance: int

    def __str__(self) -> str:
        return f"{'chat template' if self.chat else 'plain'}, {self.place}, {self.distance} apart"


@dataclass(frozen=True, kw_only=True)
class Blocks(Row, table="blocks", title="overlap of the choices of two output windows, at a tenth of the prompt"):
    """The overlap of two output windows by their distance (Fig. 4 b)."""

    key: Apart
    shared: Mean | None = column("shared", "share", "Tokens that both choose, over those of one.")
    other: Mean | None = column("control:\nother's", "share", "The same with windows of the next dialogue.")


@dataclass(frozen=True, kw_only=True)
class AnswerWindows(Result):
    """Overlap of the tokens that windows of queries choose with those that the answer attends to most."""

    rows: tuple[Overlap, ...]
    blocks: tuple[Blocks, ...]
    windows: Float[np.ndarray, "form window"]
    first_window: int
    kinds: tuple[str, ...]

    def conclusion(self) -> str:
        """Return what both windows find of what later tokens attend to, and what the controls do."""
        rows = [row for row in self.rows if row.key.share == SHARES[0] and row.key.later]
        own = [row for row in rows if row.key.chat] or rows
        text = {name: ", ".join(row.text(name) for row in own) for name in ("last", "first", "other", "random")}
        form = "in the chat template" if own[0].key.chat else "without a chat template"
        clear = [sum(exceeds(row, "first", other) for row in rows) for other in ("last", "other")]
        return (
            f"Of the tokens that later parts of an answer attend to, its first window finds {text['first']} and the "
            f"prompt's last window {text['last']} (question at {', '.join(PLACES)}; {form}; chance {SHARES[0]:.0%}). "
            f"By dialogue the first window clearly exceeds the last one in {clear[0]} of {len(rows)} forms, and its "
            f"control, the next dialogue's answer ({text['other']}), in {clear[1]}."
        )

    def figure(self) -> Any:
        """Draw the overlap with what all output tokens attend to over windows, as the paper's Fig. 4 a."""
        forms = [row.key for row in self.rows if row.key.share == SHARES[0] and not row.key.later]
        frame = pd.DataFrame(
            {"window": at + self.first_window, "overlap": value, "form": "chat" if form.chat else "plain"}
            | {"question": form.place}
            for form, values in zip(forms, self.windows, strict=True)
            for at, value in enumerate(values)
        )
        fig = px.line(frame, x="window", y="overlap", color="question", facet_col="form", markers=True)
        fig.update_xaxes(title_text="window (below 0: of the prompt)").update_yaxes(tickformat=".0%", range=[0, 1.02])
        fig.update_yaxes(title_text="", col=2)
        return figure_of(fig, self, width=1100, height=480)


def exceeds(row: Overlap, one: str, other: str) -> bool:
    """Return whether one column exceeds another, dialogue by dialogue, by more than the margin of the difference."""
    own, others = (getattr(row, name) for name in (one, other))
    interval = None if own is None or others is None else interval_of(np.subtract(own.by_text, others.by_text))
    return interval is not None and interval.low > 0


@measurement(loading="whole")
def answer_windows(
    setup: Setup, *, dialogues: Natural = 24, length: Natural = 320, new: Natural = 64, window: Natural = 16
) -> AnswerWindows:
    """Measure which windows of queries find the tokens of a prompt that the answer attends to.

    Args:
        dialogues: Number of dialogues, of four kinds of text in turn.
        length: Tokens of a prompt.
        new: Tokens of an answer; it goes on where the model would end it.
        window: Queries of a window.
    """
    if new <= TRIED * window:
        raise SinkscopeError(f"--new {new}: give more than {TRIED * window}, the tokens of the windows that are tried")
    forms = [*product([False, True] if setup.tokenizer.chat_template else [False], PLACES)]
    rows: list[Overlap] = []
    blocks: list[Blocks] = []
    drawn: list[Float[np.ndarray, " window"]] = []
    for at, (chat, place) in enumerate(forms):
        prompts = asked(setup, dialogues, length, place, chat)
        setup.progress("forms", at, len(forms))
        sums = window_sums(setup, prompts, new, window)
        for share, later in product(SHARES, (False, True)):
            by_window, found = overlaps(setup, sums, share, later, f"{place}, {chat}")
            rows.append(Overlap(key=Asked(share, chat, place, later), **found))
            if share == SHARES[0] and not later:
                drawn.append(by_window)
        blocks += apart(sums, chat, place)
    setup.progress("forms", len(forms), len(forms))
    rows.sort(key=lambda row: SHARES.index(row.key.share))
    kinds = tuple(kinds_of(dialogues))
    before = -(length // window)
    return AnswerWindows(
        rows=tuple(rows), blocks=tuple(blocks), windows=np.stack(drawn), first_window=before, kinds=kinds
    )


@dataclass(frozen=True)
class Sums:
    """Attention to the tokens of prompts, summed over layers, heads and the queries of each window.

    Attributes:
        prompt: Windows of the prompt, the last of them last, `[text window key]`.
        output: Windows of the answer.
        later: All output tokens behind the windows that are tried, `[text key]`.
        whole: All output tokens.
    """

    prompt: Tensor
    output: Tensor
    later: Tensor
    whole: Tensor


def window_sums(setup: Setup, prompts: Sequence[Sequence[int]], new: int, window: int) -> Sums:
    """Let the model answer, and sum the attention of each window to the tokens of the prompt."""
    answers, _ = decode(setup.target, prompts, new, min_new_tokens=new)
    ids = torch.cat([torch.tensor(prompts), torch.tensor(answers)], 1)
    size = len(prompts[0])
    before, after = size // window, new // window

    def summed(pattern: Float[Tensor, "batch head query key"]) -> Float[Tensor, "batch window key"]:
        rows = pattern.float().sum(1)[..., :size]
        inside = rows[:, size - before * window : size + after * window].unflatten(1, (before + after, window)).sum(2)
        output = rows[:, size:]
        return torch.cat([inside, output[:, TRIED * window :].sum(1, True), output.sum(1, True)], 1)

    traced = trace(setup.target, ids, "blocks.*.attn.hook_pattern", summed, batch_size=4)
    sums = torch.stack([*traced.values()]).double().sum(0)
    return Sums(sums[:, :before], sums[:, before:-2], sums[:, -2], sums[:, -1])


def heaviest(sums: Tensor, share: float) -> Bool[Tensor, "*rows key"]:
    """Return which keys hold the most, as many as the share says."""
    best = sums.topk(max(1, int(share * sums.shape[-1])), -1).indices
    return torch.zeros_like(sums, dtype=torch.bool).scatter(-1, best, True)


def overlaps(setup: Setup, sums: Sums, share: float, later: bool, form: str) -> tuple[Any, dict[str, Mean | None]]:
    """Return the overlap by window, mean over dialogues, and that of the columns."""
    truth = heaviest(sums.later if later else sums.whole, share)
    chosen = heaviest(torch.cat([sums.prompt, sums.output], 1), share)
    found = ((chosen & truth[:, None]).sum(-1) / truth.sum(-1, keepdim=True)).numpy()
    before = sums.prompt.shape[1]
    lot = torch.randint(before, (len(found),), generator=draws(setup.seed, f"input windows of {form}")).numpy()
    others = (chosen[:, before].roll(-1, 0) & truth).sum(-1) / truth.sum(-1)
    columns = {
        "last": found[:, before - 1],
        "earlier": found[:, : before - 1].mean(1),
        "first": found[:, before],
        "second": found[:, before + 1],
        "random": found[np.arange(len(found)), lot],
        "other": others.numpy(),
    }
    return found.mean(0), {name: mean_of(values, "share") for name, values in columns.items()}


def apart(sums: Sums, chat: bool, place: str) -> list[Blocks]:
    """Compare the choices of output windows by their distance."""
    chosen = heaviest(sums.output, SHARES[0])
    count = chosen[0, 0].sum()
    made: list[Blocks] = []
    for distance in range(1, chosen.shape[1]):
        early, late = chosen[:, :-distance], chosen[:, distance:]
        shared, other = (((each & late).sum(-1) / count).mean(1).numpy() for each in (early, early.roll(-1, 0)))
        key = Apart(chat, place, distance)
        made.append(Blocks(key=key, shared=mean_of(shared, "share"), other=mean_of(other, "share")))
    return made
