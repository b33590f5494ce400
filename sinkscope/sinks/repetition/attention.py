"""Attention to the first token and to repeated tokens, beside natural text (Yona et al. 2025, Fig. 1 and 8)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import plotly.express as px
import torch
from einops import einsum, reduce
from jaxtyping import Float, Int
from torch import Tensor

from sinkscope.measure import Setup
from sinkscope.models.target import Target
from sinkscope.models.text import text_rows
from sinkscope.results.notation import count_of, word_list
from sinkscope.results.style import long_table
from sinkscope.results.tables import Table
from sinkscope.sinks.find.absence import SpikeAbsence
from sinkscope.sinks.find.context import Survey
from sinkscope.sinks.find.layer_scan import norms_after, typical_quantiles
from sinkscope.sinks.find.places import stands_out
from sinkscope.sinks.repetition.sweep import Reading, Sweep, rounded
from sinkscope.sinks.tokens import TokenRows
from sinkscope.tap.observers import attention_rows

QUERIES_AT_ONCE = 128  # at most batch x head x these x key values are in memory
TAIL = 64  # tokens of natural text behind the repetitions
NATURAL = "natural text"


@dataclass(frozen=True)
class AttentionReading(Reading):
    """Attention to position 0, and to all positions of high norm together, averaged over heads.

    A position has a high norm if it is the first one, or if its norm at the sink layer exceeds three times the typical
    one. Repetition distributes the sink over several positions, so attention to position 0 alone falls although the
    heads still attend to sinks as before. `uniform` is what the positions of high norm would get if every query
    attended to all visible positions alike. If no MLP makes a norm spike at the first token, there is no sink layer to
    read norms after, and what refers to positions of high norm is NaN.

    Attributes:
        sweep: What was repeated.
        sequences: "natural text", then the repeated tokens; the same text follows all of these.
        high: Number of positions of high norm; 0 without a sink layer.
        received: From the n-th repetition to position 0, and to all positions of high norm; in natural text, from the
            token at the same position. NaN in layers without softmax attention.
        mean: The same, averaged over all queries.
        uniform: `mean` to the positions of high norm under uniform attention.
        first_behind: First layer behind the sink layer; 0 without a sink layer.
        absence: What there is instead, if no MLP makes a norm spike at the first token.
    """

    sweep: Sweep
    sequences: tuple[str, ...]
    high: Int[np.ndarray, " sequence"]
    received: Float[np.ndarray, "to layer sequence n"]
    mean: Float[np.ndarray, "to layer sequence"]
    uniform: Float[np.ndarray, " sequence"]
    first_behind: int
    absence: SpikeAbsence | None = None

    @property
    def behind(self) -> list[int]:
        """The layers behind the sink layer that have softmax attention."""
        return [layer for layer, mean in enumerate(self.mean[0, :, 0]) if layer >= self.first_behind and mean == mean]

    @property
    def where(self) -> str:
        """The layers behind the sink layer, in words."""
        return f"After layer {self.first_behind - 1}"

    def conclusion(self) -> str:
        """How much attention the last repetition gives position 0 in layers behind the sink, beside natural text."""
        natural, *repeated = self.received[0, self.behind, :, -1].mean(0)
        where = self.where if self.high.any() else "In all layers"
        tokens = word_list(list(map(repr, self.sweep.tokens)), 1)
        return (
            f"{where}, heads give position 0 on average {np.median(repeated):.1%} of their attention at the last of "
            f"{self.sweep.times} of {tokens}, and {natural:.1%} there in natural text."
        )

    def details(self) -> list[str]:
        """Attention of all queries, sequence by sequence, or why positions of high norm were not looked for."""
        lines = []
        if self.absence is not None:
            lines.append(self.absence.sentence("attention to positions of high norm was not measured"))
        behind = self.mean[:, self.behind].mean(1)
        for number in np.flatnonzero(self.high)[:5]:
            to_first, to_high = behind[:, number]
            text = NATURAL if number == 0 else f"the text with {self.sequences[number]!r}"
            places = count_of(int(self.high[number]), "position")
            lines.append(
                f"{self.where}, over all queries of {text}, position 0 receives {to_first:.1%} of the attention, and "
                f"{places} of high norm {to_high:.1%} (uniform attention would give {self.uniform[number]:.1%})."
            )
        return lines

    def rows(self) -> Table:
        """One row per layer and sequence."""
        columns = {"to_first": self.mean[0], "to_high_norm": self.mean[1]}
        return long_table(columns, layer=range(len(self.mean[0])), sequence=self.sequences)

    def draw(self) -> Any:
        """Attention to position 0 from the n-th repetition, a line per layer and a panel per sequence."""
        layers = len(self.mean[0])
        rows = long_table(
            {"attention": self.received},
            to=("position 0", "positions of high norm"),
            layer=[str(layer) for layer in range(layers)],
            sequence=self.sequences,
            repetitions=self.sweep.counts.tolist(),
        )
        axes: dict[str, Any] = {"x": "repetitions", "y": "attention", "facet_col": "to", "facet_row": "sequence"}
        colors = px.colors.sample_colorscale("viridis", max(2, layers), low=0.2)  # darker ones are lost on dark pages
        fig = px.line(rows, render_mode="svg", **axes, color="layer", log_x=True, color_discrete_sequence=colors)
        return fig.update_layout(height=200 + 300 * len(self.sequences))


def read_attention(setup: Setup, sweep: Sweep, repeated: TokenRows) -> tuple[int | None, AttentionReading]:
    """The sink layer, and where attention goes in repeated and in natural sequences of one length.

    Args:
        setup: The model and its text.
        sweep: What is repeated.
        repeated: The sequences; the context has room for the tail behind them.
    """
    target = setup.target
    length = repeated.shape[1] + TAIL
    natural = text_rows(target.tokenizer, setup.text, 1, length, setup.bos)
    tail_ids = natural[:, -TAIL:].expand(len(repeated), -1)
    ids = torch.cat([natural, torch.cat([repeated, tail_ids], dim=1)])

    survey = Survey.of(setup)
    context = survey.first_spike
    layer = context.scan.sink_layer
    first = torch.zeros(ids.shape, dtype=torch.bool)
    first[:, 0] = True
    high = torch.zeros_like(first)
    if layer is not None:
        norms = norms_after(target, layer, ids, 1, setup.progress)
        high = first | stands_out(norms, typical_quantiles(context.scan.whole_norms)[1, layer])

    received = []
    for row, text in enumerate(ids):
        received.append(received_attention(target, text, torch.stack([first[row], high[row]]).float()))
        setup.progress("attention", row + 1, len(ids))
    received = torch.stack(received, dim=2)  # to layer row query
    attending = list(map(target.has_attention, range(target.n_layers)))
    received[:, ~torch.tensor(attending)] = torch.nan
    fair = high.float().cumsum(1) / torch.arange(1, length + 1)  # what uniform attention gives positions of high norm
    if layer is None:
        received[1] = torch.nan
        fair[:] = torch.nan
    return layer, AttentionReading(
        sweep,
        sequences=(NATURAL, *sweep.tokens),
        high=high.sum(1).numpy(),
        received=rounded(received[..., sweep.places]),
        mean=rounded(received.mean(-1)),
        uniform=rounded(fair.mean(1)),
        first_behind=0 if layer is None else min(layer + 1, target.n_layers - 1),
        absence=SpikeAbsence.of(survey, context),
    )


@torch.no_grad()
def received_attention(
    target: Target, ids: Int[Tensor, " pos"], keys: Float[Tensor, "to pos"]
) -> Float[Tensor, "to layer query"]:
    """Attention of every query to each set of keys, averaged over heads; nothing of size query x key is kept."""
    received = torch.zeros(len(keys), target.n_layers, len(ids))

    def add(layer: int, start: int, probs: Float[Tensor, "row head query key"]) -> None:
        to_sets = einsum(probs, keys.to(probs.device), "row head query key, to key -> to row head query")
        queries = slice(start, start + probs.shape[2])
        received[:, layer, queries] = reduce(to_sets, "to row head query -> to query", "mean").cpu()

    with attention_rows(target, add, rows_per_chunk=QUERIES_AT_ONCE):
        target.forward(ids[None])
    return received
