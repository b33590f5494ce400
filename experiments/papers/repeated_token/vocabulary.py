"""How many copies each token of a vocabulary needs until it has half of the first token's spike (Fig. 6)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import plotly.graph_objects as go
from jaxtyping import Bool

from experiments.papers.repeated_token.circuit import Word, first_tokens, sink_neurons_of
from sinkscope.measure import Mean, Natural, Result, Row, Setup, column, mean_of, measurement, optional
from sinkscope.models.draws import draws, some_of
from sinkscope.results.style import figure_of
from sinkscope.sinks.repeat import copies_of
from sinkscope.sinks.tokens import MAX_REPEATS, prefix_of, token_texts

SAMPLE = 128
NO_SINK = ("Another", "bit", "dust")
"""Tokens that make no sink in the paper's Fig. 6."""
AT_ONCE = 32  # tokens between two reports of progress


@dataclass(frozen=True, kw_only=True)
class Reached(
    Row,
    table="reached",
    title="tokens that reach half of the spike",
    note="The control: the first copy, behind what texts begin with, has half already, so nothing is repeated.",
):
    """How many of the tokens reach half of the first token's spike."""

    key: str = "tokens"
    tokens: Mean = column("tokens", "count", "Tokens that were repeated.")
    reached: Mean = column("reach\nhalf", "share", "Tokens that reach half of the spike within the copies.")
    first: Mean = column("control: with\nthe first copy", "share", "Tokens that have half with their first copy.")

    @property
    def label(self) -> str:
        """What it is called."""
        return "of the vocabulary"


@dataclass(frozen=True, kw_only=True)
class OfWord(Row, table="words", title="words of the paper's Fig. 6"):
    """When a word reaches half of the spike."""

    key: Word
    copies: Mean | None = optional("copies", "count", "First number of copies with half of the spike; - never.")


@dataclass(frozen=True, kw_only=True)
class Vocabulary(Result):
    """The number of copies after which tokens have half of the first token's spike.

    Attributes:
        reached: How many do.
        words: The words that make no sink in the paper.
        ids: Ids of the tokens.
        repeats: First number of copies with half of the spike, of each token; None: none within the limit.
    """

    reached: tuple[Reached, ...]
    words: tuple[OfWord, ...]
    ids: tuple[int, ...]
    repeats: tuple[int | None, ...]

    def conclusion(self) -> str:
        """Return how many tokens reach half, beside those that need no repetition."""
        (row,) = self.reached
        never = [word.label for word in self.words if word.copies is None]
        return (
            f"Of {row.text('tokens')} tokens of the vocabulary, {row.text('reached')} reach half of the first token's "
            f"spike within {self.settings.get('copies', MAX_REPEATS):,} copies (as a control, {row.text('first')} have "
            f"it with their first copy). Of the paper's three words that do not, "
            f"{len(never)} of {len(self.words)} do not here."
        )

    def figure(self) -> Any:
        """Draw how many tokens have reached half after each number of copies."""
        reached = np.sort([count for count in self.repeats if count is not None])
        share = np.arange(1, len(reached) + 1) / len(self.repeats)
        x, y = [1, *reached, self.settings.get("copies", MAX_REPEATS)], [0, *share, len(reached) / len(self.repeats)]
        fig: Any = go.Figure(go.Scatter(x=x, y=y, line={"shape": "hv"}))
        fig.update_xaxes(type="log", dtick=1, title_text="copies")
        fig.update_yaxes(tickformat=".0%", range=[0, 1], title_text="tokens with half of the spike")
        return figure_of(fig, self, width=900, height=460)


@measurement(loading="fits")
def vocabulary(
    setup: Setup,
    *,
    sample: Natural = SAMPLE,
    every: bool = False,
    copies: Natural = MAX_REPEATS,
    words: Sequence[str] = NO_SINK,
) -> Vocabulary:
    """Repeat tokens of the vocabulary, and count the copies after which they have half of the first token's spike.

    Args:
        sample: Number of tokens that are drawn.
        every: Repeat every token of the vocabulary and draw none.
        copies: Largest number of copies.
        words: Words that are repeated, too; of each, its first token.
    """
    spike = sink_neurons_of(setup).spike
    special = set(setup.tokenizer.all_special_ids)
    ids = [token for token in range(len(setup.tokenizer)) if token not in special]
    if not every:
        ids = some_of(ids, sample, draws(setup.seed, "tokens of the vocabulary"))
    asked = first_tokens(setup, words).tolist()
    copies = min(copies, (setup.target.max_positions or copies + 1) - 1)
    setup.record(copies=copies)
    counts: list[int | None] = []
    for begin in range(0, len(ids) + len(asked), AT_ONCE):
        some = [*ids, *asked][begin : begin + AT_ONCE]
        counts += copies_of(setup.target, [spike], some, prefix_of(setup, some), copies)[0]
        setup.progress("tokens", len(counts), len(ids) + len(asked))
    repeats = counts[: len(ids)]
    reached = np.array([count is not None for count in repeats])
    first = np.array([count == 1 for count in repeats])
    row = Reached(
        tokens=Mean(float(len(ids)), kind="count"),
        reached=share_of(reached, drawn=not every),
        first=share_of(first, drawn=not every),
    )
    of_words: list[OfWord] = []
    for text, count in zip(token_texts(setup.target, asked), counts[len(ids) :], strict=True):
        of_words.append(OfWord(key=Word(text), copies=None if count is None else Mean(float(count), kind="count")))
    return Vocabulary(reached=(row,), words=tuple(of_words), ids=tuple(ids), repeats=tuple(repeats))


def share_of(which: Bool[np.ndarray, " token"], *, drawn: bool) -> Mean:
    """Return a share of tokens, with its margin if they were drawn."""
    share = mean_of(which.astype(float)) if drawn else None
    return share or Mean(float(which.mean()))
