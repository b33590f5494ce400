"""For every token of the vocabulary: after how many repetitions it becomes a sink (Yona et al. 2025, Fig. 6)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import plotly.express as px
import torch
from jaxtyping import Float, Int

from sinkscope.measure import Setup
from sinkscope.results.notation import head_name, word_form
from sinkscope.results.style import long_table
from sinkscope.results.tables import Table
from sinkscope.sinks.attack.clusters import find_clusters
from sinkscope.sinks.chunks import Columns, hold_layers, in_chunks, token_texts
from sinkscope.sinks.find.layer_scan import norms_after
from sinkscope.sinks.find.repetitions import repeats_until_half
from sinkscope.sinks.find.spikes import sink_neurons
from sinkscope.sinks.repetition.sweep import NO_LAYER, NoReading, Reading
from sinkscope.sinks.tokens import prefixes, repetition_limit, sample_tokens, vocabulary

SHORTEST = 128  # repetitions in the first pass
POSITIONS = 4096  # positions per pass


@dataclass(frozen=True)
class AtlasReading(Reading):
    """Repetition of every token of the vocabulary. NaN stands for never, and for no head.

    Attributes:
        tokens: The tokens.
        ids: Their ids.
        repeats: First number of repetitions whose norm at the sink layer reaches half of the first token's.
        norm: Norm at that repetition over the first token's; the largest norm for tokens that never become a sink.
        head: Head of layer 0 that serves the token, as in `attack`.
        max_repeats: Largest number of repetitions tried.
    """

    tokens: tuple[str, ...]
    ids: Int[np.ndarray, " token"]
    repeats: Float[np.ndarray, " token"]
    norm: Float[np.ndarray, " token"]
    head: Float[np.ndarray, " token"]
    max_repeats: int

    @property
    def resists(self) -> np.ndarray:
        """Which tokens never become a sink, `[token]`."""
        return np.isnan(self.repeats)

    def conclusion(self) -> str:
        """How many tokens get the norm of a spike by repetition, beside those that have it at once."""
        repeated, at_once = int((self.repeats > 1).sum()), int((self.repeats == 1).sum())
        return (
            f"Repetition brings {repeated} of the {len(self.ids)} tokens to half of the first token's norm; {at_once} "
            f"{word_form(at_once, 'has', 'have')} it at the first occurrence."
        )

    def details(self) -> list[str]:
        """After how many repetitions, and whether the resisting tokens are those that no head serves."""
        resists, served = self.resists, np.isfinite(self.head)
        repeated = self.repeats[self.repeats > 1]
        lines = []
        if len(repeated):
            lines.append(f"In the median, a token needs {np.median(repeated):.0f} repetitions.")
        if resists.any() and not resists.all():
            lines.append(
                f"A single head of layer 0 is enough to mark {served[resists].mean():.1%} of the {resists.sum()} "
                f"tokens that never reach it, and {served[~resists].mean():.1%} of the others."
            )
        return lines

    def rows(self) -> Table:
        """One row per token, those first that never become a sink."""
        columns = {"id": self.ids, "repeats": self.repeats, "norm": self.norm, "head": self.head}
        rows = long_table(columns, token=self.tokens)
        return sorted(rows, key=lambda row: row["repeats"] is not None)

    def draw(self) -> Any:
        """Number of tokens by the repetitions they need, coloured by the head that serves them."""
        names = []
        for head in self.head:
            names.append("no single head" if np.isnan(head) else head_name(0, int(head)))
        never = np.where(self.resists, 2.0 * self.max_repeats, self.repeats)
        labels = {
            "color": "head",
            "x": f"log2 of the repetitions until a sink (last bar: never within {self.max_repeats})",
        }
        return px.histogram(x=np.log2(never), color=names, nbins=48, labels=labels).update_yaxes(title_text="tokens")


def read_vocabulary(
    setup: Setup, max_repeats: int | None, sample: int | None, resume: str | Path | None
) -> tuple[int | None, AtlasReading | NoReading]:
    """The sink layer, and the repetitions that every token needs; without a layer, what there is instead."""
    target = setup.target
    limit = repetition_limit(target, max_repeats, 1)
    setup.record(max_repeats=limit)
    ids = vocabulary(target, None)
    if sample is not None:
        ids = sorted(sample_tokens(ids, sample, setup.seed))
    sink = sink_neurons(setup)
    layer = sink.layer
    if layer is None:
        return None, NoReading(sink.absence(NO_LAYER))
    head = np.full(len(ids), np.nan)
    clusters = find_clusters(setup, sink.neurons, ids, resume)
    if clusters is not None:
        head = clusters.head
    hold_layers(target, layer)
    work = partial(repeats_needed, setup, layer, limit)
    columns = in_chunks(
        setup, work, ids, resume, what="vocabulary", size=POSITIONS // 64, layer=layer, max_repeats=limit
    )
    return layer, AtlasReading(
        tokens=token_texts(target, ids),
        ids=np.array(ids),
        repeats=np.array(columns["repeats"], dtype=float),
        norm=np.array(columns["norm"]),
        head=head,
        max_repeats=limit,
    )


@torch.no_grad()
def repeats_needed(setup: Setup, layer: int, limit: int, tokens: list[int]) -> Columns:
    """For each token, the first number of repetitions that makes a sink, and the norm there over the first token's.

    Args:
        setup: The model and its text.
        layer: The sink layer, whose norm is read.
        limit: Largest number of repetitions. Tokens that are no sink after 128 get four times as many, and so on.
        tokens: The tokens.

    Returns:
        Columns repeats and norm, which is the largest for tokens that never become a sink.
    """
    repeats: list[int | None] = [None] * len(tokens)
    largest = [0.0] * len(tokens)
    befores = prefixes(setup, tokens)
    length = min(SHORTEST, limit)
    while None in repeats:
        left = [place for place, count in enumerate(repeats) if count is None]
        rows = torch.tensor([[befores[place], *[tokens[place]] * length] for place in left])
        norms = norms_after(setup.target, layer, rows, max(1, POSITIONS // (length + 1)))
        for place, norm in zip(left, norms, strict=True):
            share = norm[1:] / norm[0]
            count = repeats_until_half(share, 1.0)
            repeats[place] = count
            largest[place] = round(float(share.max() if count is None else share[count - 1]), 4)
        if length == limit:
            break
        length = min(4 * length, limit)
    return {"repeats": list(repeats), "norm": list(largest)}
