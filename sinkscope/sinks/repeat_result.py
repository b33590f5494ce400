"""What `repeat` returns: one number after each count of repetitions, or in each layer, and its drawing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
import plotly.express as px
import plotly.graph_objects as go
from jaxtyping import Float, Int

from sinkscope.measure import Mean, Result, Row
from sinkscope.measure.margin import share_interval
from sinkscope.results.effect import Effect
from sinkscope.results.notation import percent, word_form, word_list
from sinkscope.results.row import row_beside
from sinkscope.results.style import GREY, figure_of, long_table
from sinkscope.results.tables import Table
from sinkscope.sinks.thresholds import HALF

SENTENCES = {
    "attention": "{copies} get {value} of the attention in layer {layer} ({control}).",
    "probability": "After {copies}, the token comes next with a probability of {value} ({control}).",
}
"""What the first effect says."""
HALF_REACHED = "reach half of the first token's projection"
TURNS = {"norm": HALF_REACHED, "probability": "stop being repeated"}
QUANTITIES = {"norm": "norm", "attention": "attention", "probability": "probability of the token"}
Quantity = Literal["norm", "attention", "probability"]


@dataclass(frozen=True, kw_only=True)
class Repeat(Result):
    """One reading of a model over the number of repetitions of a token.

    Attributes:
        quantity: What was read. "norm": projection on the direction of each spike, as a share of the first token's;
            "attention": attention that the last 64 tokens, which are natural text, give to places, over what each place
            would get if all tokens got the same; "probability": probability that the token comes once more.
        instead: What there is instead of a finding.
        copies: Number of copies of each token.
        effects: What the last copy has in each condition, or which share of the attention the copies get, mean over
            tokens; beside one copy at the position of the last, and other tokens there.
        ids: Ids of the repeated tokens.
        conditions: The spikes; of attention the sequences; of probabilities "intact".
        tokens: The repeated tokens; with "attention" the places.
        at: Numbers of repetitions; with "attention" layers. None for a vocabulary, whose curves are not kept.
        values: What was read. NaN where there is nothing to read; None for a vocabulary.
        shown: Which of `at` the table and the effects are about.
        repeats: First number of repetitions that reaches half of the first token's projection; with "probability" the
            first from which on the probability stays below a half. NaN if never.
    """

    kind = "repeat"  # read and drawn without the command, which stands in another module
    drawing: ClassVar = "sinkscope.sinks.repeat_result:draw"
    glossary: ClassVar = {
        "condition": "the spike, or the sequence that was read",
        "projection": "on the spike's direction after the last repetition, over that of the first token",
        "attention": "what a place gets in the layer after the peak of the spike, over what uniform attention gives it",
        "probability": "of the token to come once more after the last repetition",
    }

    quantity: Quantity
    instead: str | None = None
    copies: int = 0
    effects: tuple[Effect, ...]
    ids: tuple[int, ...] = ()
    conditions: tuple[str, ...] = ()
    tokens: tuple[str, ...] = ()
    at: Int[np.ndarray, " n"] | None = None
    values: Float[np.ndarray, "condition token n"] | None = None
    shown: int = -1
    repeats: Float[np.ndarray, "condition token"] | None = None

    def conclusion(self) -> str:
        """Say how many words converge in each spike, how much attention copies get, or how likely one more is."""
        if self.instead is not None:
            return self.instead
        if self.quantity != "norm" or self.repeats is None:
            copies = f"{self.copies:,} copies of a token"
            return self.effects[0].sentence(SENTENCES[self.quantity], copies=copies, layer=str(self.shown))
        total, parts, reached = len(self.tokens), list[str](), [int((row > 1).sum()) for row in self.repeats]
        for count, condition, repeats in zip(reached, self.conditions, self.repeats, strict=True):
            already = int((repeats == 1).sum())
            parts.append(f"{count:,} in {condition}" + (f" ({already:,} more with one copy)" if already else ""))
        interval = share_interval(reached[0], total)
        margin = "" if interval is None else f" (± {total * interval.margin:,.0f})"
        words = f"tokens{margin} {word_form(reached[0], 'reaches', 'reach')} half of the first token's spike"
        parts[0] = f"{reached[0]:,} of {total:,} {words}{parts[0].removeprefix(f'{reached[0]:,}')}"
        within = "" if self.at is None else f" within {int(self.at[-1]):,} copies"
        control = "".join(f" ({effect.control[0]}: {percent(effect.control[1])} of it)" for effect in self.effects[:1])
        return f"{word_list(parts)}{within}{control}."

    def details(self) -> list[str]:
        """Say how many tokens turn under each condition."""
        lines: list[str] = []
        if self.repeats is not None:
            for condition, repeats in zip(self.conditions, self.repeats, strict=True):
                turned = repeats[np.isfinite(repeats)]
                line = f"{len(turned)} of {len(repeats)} tokens {TURNS[self.quantity]} ({condition}"
                if len(turned):
                    line += f"; {_after(int(turned.min()), int(turned.max()))}"
                lines.append(f"{line}).")
        return lines

    def findings(self) -> list[Row]:
        """Return what the last copy has, or how much attention the copies get, beside one copy or other tokens."""
        by_token, rows = tuple[float, ...](), list[Row]()
        if self.quantity != "attention" and self.values is not None:
            by_token = tuple(self.values[0, :, -1].tolist())
        for effect in self.effects[:1]:
            value = Mean(effect.value, effect.margin, by_token, "share")
            label, (control, share) = f"{QUANTITIES[self.quantity]} with copies of a token", effect.control
            rows.append(row_beside(label, value, share, control, texts=self.tokens if by_token else ()))
        return rows

    @property
    def column(self) -> str:
        """Return the name of what was read in tables and drawings; norms are shares of the first token's."""
        return "projection" if self.quantity == "norm" else self.quantity

    def rows(self) -> Table:
        """Return a row per condition and token."""
        columns: dict[str, Any] = {"repeats": self.repeats}
        if self.values is not None:
            columns = {self.column: self.values[:, :, self.shown], **columns}
        return long_table(columns, condition=self.conditions, token=self.tokens)


def _after(least: int, most: int) -> str:
    """Say after how many copies tokens turn."""
    if least == most:
        return f"after {least} {word_form(least, 'copy', 'copies')}"
    return f"after {least} to {most} copies"


def draw(result: Repeat) -> go.Figure:
    """Draw a line per token and a panel per condition; of a vocabulary a histogram."""
    fig: Any = go.Figure()
    if result.at is not None and result.values is not None:
        x = "layer" if result.quantity == "attention" else "repetitions"
        axes: dict[str, Any] = {"condition": result.conditions, "token": result.tokens, x: result.at.tolist()}
        rows = long_table({result.column: result.values}, **axes)
        shown: dict[str, Any] = {"x": x, "y": result.column, "color": "token", "facet_col": "condition"}
        fig = px.line(rows, render_mode="svg", **shown, log_x=x == "repetitions", log_y=x == "layer")
        fig.update_yaxes(exponentformat="power")
        if result.repeats is not None:
            fig.add_hline(HALF, line={"color": GREY, "dash": "dot"})
    elif result.repeats is not None:
        words = "log2 of the repetitions until a sink"
        fig = px.histogram(x=np.log2(result.repeats[0]), nbins=48, labels={"x": words})
        fig.update_yaxes(title_text="tokens")
    return figure_of(fig, result, width=1200, height=480)
