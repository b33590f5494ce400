"""What `repeat` gives: what the last copy has beside its controls, what each token does, and the sentences of both."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from typing import Any, Literal

import numpy as np
import plotly.express as px
import plotly.graph_objects as go
from jaxtyping import Float, Int

from sinkscope.measure import Mean, Result
from sinkscope.results.headline import Headline, Verdict, verdict_of
from sinkscope.results.notation import word_list
from sinkscope.results.style import GREY, figure_of
from sinkscope.results.table import Row, Subject, whole
from sinkscope.sinks.repeat_tables import (
    AtLastCopy,
    CopiesKey,
    Filled,
    Given,
    GivenKey,
    LikelyToken,
    Places,
    RepeatedToken,
    Text,
    TokenKey,
)
from sinkscope.sinks.spikes.spike import layers_words
from sinkscope.sinks.thresholds import HALF

NOT_OF_REPETITION = "Not shown to come of repetition: "
"""How a sentence begins whose control did as much."""
Quantity = Literal["norm", "attention", "probability"]


@dataclass(frozen=True, kw_only=True)
class Repeat(Result):
    """One reading of a model over the number of repetitions of a token.

    Attributes:
        quantity: What was read. "norm": projection on the direction of each spike, as a share of the first token's;
            "attention": attention that the last 64 tokens, which are natural text, give to places, over what each place
            would get if all tokens got the same; "probability": probability that the token comes once more.
        copies: Number of copies of each token.
        effects: What the last copy has in each spike, or which share of the attention the copies get, mean over
            tokens; beside one copy at the position of the last, and other tokens there.
        ids: Ids of the repeated tokens.
        conditions: The spikes; of attention the sequences; of probabilities "intact".
        tokens: The repeated tokens; with "attention" the places.
        at: Numbers of repetitions; with "attention" layers.
        values: What was read. NaN where there is nothing to read.
        shown: Which of `at` the table and the effects are about.
        repeats: First number of repetitions that reaches half of the first token's projection; with "probability" the
            first from which on the probability stays below a half. NaN if never.
        spikes: Layers of the spikes; empty with "probability".
        below_again: First number of repetitions after that which has less than half again. NaN if none has.
    """

    quantity: Quantity
    copies: int
    effects: tuple[AtLastCopy, ...]
    ids: tuple[int, ...]
    conditions: tuple[str, ...]
    tokens: tuple[str, ...]
    at: Int[np.ndarray, " n"]
    values: Float[np.ndarray, "condition token n"]
    shown: int = -1
    repeats: Float[np.ndarray, "condition token"] | None = None
    spikes: tuple[tuple[int, int], ...] = ()
    below_again: Float[np.ndarray, "condition token"] | None = None

    def effect(self, filled: Filled, layers: tuple[int, int] | None) -> AtLastCopy:
        """Return what is read of a spike after copies, or after what a control has instead."""
        return next(row for row in self.effects if (row.key, row.layers) == (filled, layers))

    def copies_shown(self) -> AtLastCopy:
        """Return what the last copy has of the spike that most tokens reach; of several, the first."""
        shown = self.effects[0]
        for row in self.effects:
            if row.key is Filled.COPIES and len(self.reaching(row.layers)) > len(self.reaching(shown.layers)):
                shown = row
        return shown

    def nearest_control(self) -> tuple[AtLastCopy, AtLastCopy]:
        """Return what the last copy has, and the control that comes nearest to it in the same spike."""
        copies = self.copies_shown()
        controls = [self.effect(filled, copies.layers) for filled in (Filled.ONE_COPY, Filled.OTHERS)]
        return copies, min(controls, key=lambda row: abs(copies.share.value - row.share.value))

    def conclusion(self) -> str:
        """Say how many tokens reach a spike, how much attention copies get, or from where on one more is unlikely."""
        copies, control = self.nearest_control()
        beside = f"as a control, after {control.label}: {control.text('share')}"
        not_shown = verdict_beside(copies, control) is Verdict.NOT_SHOWN
        match self.quantity:
            case "norm":
                begin = NOT_OF_REPETITION if not_shown and self.reaching(copies.layers) else ""
                words = self.reached_words()
                words = f"{begin}{words[0].lower()}{words[1:]}" if begin else words
                of_several = f"In {layers_words(*copies.layers)} the" if copies.layers and self.spikes[1:] else "The"
                return f"{words} {of_several} last copy has {copies.text('share')} of it on average ({beside})."
            case "attention":
                begin = NOT_OF_REPETITION if not_shown else ""
                return (
                    f"{begin}{self.copies:,} copies of a token get {copies.text('share')} of the attention of later "
                    f"text in layer {self.shown} ({beside})."
                )
            case "probability":
                return f"{self.stopped_words()} After {self.copies:,} copies it is {copies.text('share')} ({beside})."

    def stopped_words(self) -> str:
        """Return from how many copies on one more is unlikely, and for how many tokens."""
        counts = self.stopping()
        begin = "The probability that a token comes once more falls below 50% and stays there"
        tokens = f"for {len(counts)} of {len(self.ids)} tokens"
        if not counts:
            return f"{begin} {tokens} within {self.copies:,} copies."
        first, last = min(counts), max(counts)
        span = f"{first:,}" if first == last else f"{first:,} to {last:,}"
        return f"{begin} {tokens}, from {span} copies on."

    def stopping(self) -> list[int]:
        """Return the numbers of copies from which on one more is unlikely, of the tokens that stop."""
        rows = [row for row in self.by_token() if isinstance(row, LikelyToken)]
        return [int(row.repeats.value) for row in rows if row.repeats is not None]

    def reaching(self, layers: tuple[int, int] | None) -> list[RepeatedToken]:
        """Return the tokens whose copies reach half of a spike that the first of them has not."""
        return [row for row in self.in_spike(layers) if row.apart is None and row.repeats is not None]

    def in_spike(self, layers: tuple[int, int] | None) -> list[RepeatedToken]:
        """Return what each token does in a spike."""
        return [row for row in self.by_token() if isinstance(row, RepeatedToken) and row.key.layers == layers]

    def reached_words(self) -> str:
        """Return how many tokens reach half of each spike, which have it at once, and which fall below it again."""
        reached: list[str] = []
        for layers in self.spikes:
            tokens = self.in_spike(layers)
            counted = self.reaching(layers)
            words = f"{len(counted)} of {len(tokens)} tokens in {layers_words(*layers)}"
            apart = sum(row.apart is not None for row in tokens)
            again = sum(row.below is not None for row in counted)
            more: list[str] = []
            if again:
                more.append(f"{again} of them fall{'s' * (again == 1)} below it again")
            if apart:
                more.append(f"{apart} more ha{'s' if apart == 1 else 've'} it with the first copy")
            reached.append(f"{words} ({'; '.join(more)})" if more else words)
        return (
            f"Within {self.copies:,} copies, half of the first token's norm spike is reached by {word_list(reached)}."
        )

    def by_token(self) -> list[Row]:
        """Return what each token does, in each spike; nothing where attention is read."""
        rows: list[Row] = []
        if self.repeats is None:
            return rows
        for number, repeats in enumerate(self.repeats):
            layers = self.spikes[number] if self.spikes else None
            for token, reached in enumerate(repeats.tolist()):
                first, last = (Mean(float(self.values[number, token, at])) for at in (0, -1))
                key = TokenKey(self.tokens[token], layers)
                count = whole(int(reached)) if np.isfinite(reached) else None
                if layers is None:
                    rows.append(LikelyToken(key=key, first=first, last=last, repeats=count))
                    continue
                below = np.nan if self.below_again is None else self.below_again[number, token]
                rows.append(
                    RepeatedToken(
                        key=key,
                        first=first,
                        last=last,
                        repeats=None if first.value >= HALF else count,
                        below=whole(int(below)) if np.isfinite(below) else None,
                        apart="first copy" if first.value >= HALF else None,
                    )
                )
        return rows

    def given(self) -> list[Given]:
        """Return the attention that later text gives in the layer that is shown; nothing of other quantities."""
        rows: list[Given] = []
        if self.quantity != "attention":
            return rows
        for number, text in enumerate(Text):
            for place, places in enumerate(Places):
                times = Mean(float(self.values[number, place, self.shown]))
                rows.append(Given(key=GivenKey(text, places), times=times))
        return rows

    def subjects(self) -> list[Subject]:
        """Return what the last copy has beside its controls, and what each token does."""
        titles = {
            "norm": "% of the first token's norm spike",
            "attention": f"Share of the attention of later text, layer {self.shown}",
            "probability": "Probability that the token comes once more",
        }
        title = f"{titles[self.quantity]}; {self.copies:,} copies of each of {len(self.ids)} tokens"
        return [Subject(title, (*self.effects, *self.by_token(), *self.given()), "repeat")]

    def compared(self) -> list[Subject]:
        """Return a subject for each spike, by which those of two models are paired."""
        subjects: list[Subject] = []
        for layers in dict.fromkeys(row.layers for row in self.effects):
            effects = [row for row in self.effects if row.layers == layers]
            tokens = [row for row in self.by_token() if row.key.layers == layers]
            key = CopiesKey(layers)
            names = self.tokens if self.quantity != "attention" else ()
            subjects.append(Subject(str(key), (*effects, *tokens, *self.given()), key, names))
        return subjects

    def headlines(self) -> list[Headline]:
        """Return what the last copy has beside the nearest control; that tokens stop has none."""
        if self.quantity == "probability":
            found = f"below 50% for {len(self.stopping())} of {len(self.ids)} tokens"
            return [Headline("one more copy", found, "none", Verdict.NO_CONTROL)]
        copies, control = self.nearest_control()
        words = {"norm": "spike of the last copy", "attention": "attention on copies"}
        beside = f"{control.text('share', margin=False)} (no copies)"
        return [Headline(words[self.quantity], copies.text("share"), beside, verdict_beside(copies, control))]

    def figure(self) -> go.Figure:
        """Draw a line per token and a panel per condition."""
        x = "layer" if self.quantity == "attention" else "repetitions"
        conditions = [*map(escape, self.conditions)]
        rows: list[dict[str, Any]] = []
        for condition, token, number in np.ndindex(self.values.shape):
            about = {"condition": conditions[condition], "token": escape(self.tokens[token])}
            rows.append({**about, x: int(self.at[number]), self.quantity: self.values[condition, token, number]})
        shown: dict[str, Any] = {"x": x, "y": self.quantity, "color": "token", "facet_col": "condition"}
        fig: Any = px.line(rows, render_mode="svg", **shown, log_x=x == "repetitions", log_y=x == "layer")
        fig.update_yaxes(exponentformat="power")
        if self.repeats is not None:
            fig.add_hline(HALF, line={"color": GREY, "dash": "dot"})
        return figure_of(fig, self, width=1200, height=480)


def verdict_beside(copies: AtLastCopy, control: AtLastCopy) -> Verdict:
    """Return whether the last copy has more than what a control has."""
    return verdict_of(copies.share.value, control.share.value, copies.share.margin)
