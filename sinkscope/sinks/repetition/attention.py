"""Attention to the first token and to repeated tokens, beside natural text (Yona et al. 2025, Fig. 1 and 8)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import plotly.express as px
import torch
from einops import einsum, reduce
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sinkscope.files.notation import counted, listed
from sinkscope.measure import Setup
from sinkscope.models.target import Target
from sinkscope.models.text import text_rows
from sinkscope.sinks.first_token.context import SinkContext
from sinkscope.sinks.first_token.layer_scan import SPIKE_RATIO, norms_after
from sinkscope.sinks.repetition.sweep import Sweep, SweepRows, rounded
from sinkscope.sinks.tokens import TokenRows
from sinkscope.trace.attention import attention_rows

QUERIES_AT_ONCE = 128  # at most batch x head x these x key values are in memory
TAIL = 64  # tokens of natural text behind the repetitions, the same at the same positions in every sequence
NATURAL = "natural text"


@dataclass(frozen=True)
class AttentionReading:
    """Attention to position 0, and to all positions of high norm together, averaged over heads.

    A position has a high norm if it is the first one, or if its norm at the sink layer exceeds three times the typical
    one. Repetition distributes the sink over several positions, so attention to position 0 alone falls although the
    heads still attend to sinks as before. The tail is the last 64 tokens of every sequence, the same natural text, but
    only those whose norm is no higher than that of 95 % of typical text. `uniform` is what the positions of high norm
    would get if every query attended to all visible positions alike. If no MLP makes a norm spike, no position has a
    high norm, and what refers to such positions is NaN.

    Attributes:
        sequences: "natural text", then the repeated tokens.
        high: Number of positions of high norm.
        to_first: From the n-th repetition to position 0.
        to_high: From the n-th repetition to all positions of high norm.
        mean_to_first: To position 0, averaged over all queries.
        mean_to_high: To all positions of high norm, averaged over all queries.
        tail_to_first: To position 0, averaged over the tail. NaN if the tail is empty.
        tail_to_high: To all positions of high norm, averaged over the tail.
        uniform: `mean_to_high` under uniform attention.
        tail_uniform: `tail_to_high` under uniform attention.
        first_behind: First layer behind the sink layer; 0 without a sink.
    """

    sequences: tuple[str, ...]
    high: Int[np.ndarray, " sequence"]
    to_first: Float[np.ndarray, "layer token n"]
    to_high: Float[np.ndarray, "layer token n"]
    mean_to_first: Float[np.ndarray, "layer sequence"]
    mean_to_high: Float[np.ndarray, "layer sequence"]
    tail_to_first: Float[np.ndarray, "layer sequence"]
    tail_to_high: Float[np.ndarray, "layer sequence"]
    uniform: Float[np.ndarray, " sequence"]
    tail_uniform: Float[np.ndarray, " sequence"]
    first_behind: int

    def conclusion(self, sweep: Sweep) -> str:
        """How much attention repetition takes from position 0 in layers behind the sink, beside natural text."""
        means = self.mean_to_first[self.first_behind :].mean(0)
        repeated = float(np.median(means[1:]))
        where = f"Behind layer {self.first_behind - 1},"
        if not self.high.any():
            where = "No MLP makes a norm spike;"
        tokens = listed(list(map(repr, sweep.tokens)), 1)
        return (
            f"{where} the mean head gives {repeated:.1%} of its attention to position 0 after {sweep.times} of "
            f"{tokens}, and {means[0]:.1%} in natural text."
        )

    def details(self, sweep: Sweep) -> list[str]:
        """Attention of all queries, sequence by sequence."""
        lines: list[str] = []
        for number, name in enumerate(self.sequences[:5]):
            behind = slice(self.first_behind, None)
            line = "In natural text" if number == 0 else f"With {name!r}"
            line += f", position 0 receives {self.mean_to_first[behind, number].mean():.1%} of the attention"
            places = counted(int(self.high[number]), "position")
            if self.high[number]:
                line += (
                    f", and {places} of high norm {self.mean_to_high[behind, number].mean():.1%} "
                    f"(uniform attention would give {self.uniform[number]:.1%})"
                )
            lines.append(line + ".")
        return lines

    def rows(self, sweep: Sweep) -> list[dict[str, Any]]:
        """One row per layer and sequence."""
        columns = {
            "to_first": self.mean_to_first,
            "to_high_norm": self.mean_to_high,
            "tail_to_first": self.tail_to_first,
            "tail_to_high_norm": self.tail_to_high,
        }
        table: list[dict[str, Any]] = []
        for layer in range(len(self.mean_to_first)):
            for number, name in enumerate(self.sequences):
                cells: dict[str, Any] = {"layer": layer, "sequence": name}
                for column, values in columns.items():
                    share = float(values[layer, number])
                    cells[column] = None if np.isnan(share) else share
                table.append(cells)
        return table

    def draw(self, sweep: Sweep) -> Any:
        """Attention to position 0 from the n-th repetition, a line per layer and a panel per token."""
        curves: dict[str, list[Any]] = {"repetitions": [], "attention": [], "layer": [], "token": [], "to": []}
        panels = (("position 0", self.to_first), ("positions of high norm", self.to_high))
        for to, values in panels:
            for layer in range(len(values)):
                for token, shares_of in zip(sweep.tokens, values[layer], strict=True):
                    curves["repetitions"] += sweep.counts.tolist()
                    curves["attention"] += shares_of.tolist()
                    curves["layer"] += [str(layer)] * len(shares_of)
                    curves["token"] += [token] * len(shares_of)
                    curves["to"] += [to] * len(shares_of)
        colors = px.colors.sample_colorscale("viridis", max(2, len(self.to_first)))
        axes: dict[str, Any] = {
            "x": "repetitions",
            "y": "attention",
            "color": "layer",
            "facet_col": "to",
            "facet_row": "token",
        }
        return px.line(curves, **axes, log_x=True, color_discrete_sequence=colors)


def read_attention(setup: Setup, rows: SweepRows) -> tuple[int | None, AttentionReading]:
    """The sink layer, and where attention goes in repeated and in natural sequences of one length.

    Args:
        setup: The model and its text.
        rows: The sequences; the context has room for the tail behind them.
    """
    target = setup.target
    length = rows.ids.shape[1] + TAIL
    natural = text_rows(target.tokenizer, setup.text, 1, length, setup.bos)
    tail_ids = natural[:, -TAIL:].expand(len(rows.ids), -1)
    ids = torch.cat([natural, torch.cat([rows.ids, tail_ids], dim=1)])

    context = SinkContext.read(setup)
    spike = context.scan
    layer = context.sink_layer
    high = torch.zeros(ids.shape, dtype=torch.bool)
    tail = (torch.arange(length) >= length - TAIL).expand(len(ids), -1)
    if layer is not None:
        norms = norms_after(target, layer, ids, 1, setup.progress)
        _, median, highest = spike.layers[layer].typical_norms
        high = norms > SPIKE_RATIO * median
        high[:, 0] = True
        tail = tail & (norms <= highest)

    first = torch.zeros(ids.shape, dtype=torch.bool)
    first[:, 0] = True
    keys = torch.stack([first, high]).float()  # set row pos
    parts: list[Tensor] = []
    for row in range(len(ids)):
        parts.append(received_attention(target, ids[row : row + 1], keys[:, row : row + 1]))
        setup.progress("attention", row + 1, len(ids))
    received = torch.cat(parts, dim=2)  # set layer row query
    visible = torch.arange(1, length + 1)
    fair = high.float().cumsum(1) / visible  # what uniform attention gives positions of high norm
    if layer is None:
        received[1] = torch.nan
        fair = torch.full_like(fair, torch.nan)
    mean = reduce(received, "set layer row query -> set layer row", "mean")
    tail_mean = mean_where(received, tail)
    repeated = received[:, :, 1:][..., rows.places]
    return layer, AttentionReading(
        sequences=(NATURAL, *rows.sweep.tokens),
        high=high.sum(1).numpy(),
        to_first=rounded(repeated[0]),
        to_high=rounded(repeated[1]),
        mean_to_first=rounded(mean[0]),
        mean_to_high=rounded(mean[1]),
        tail_to_first=rounded(tail_mean[0]),
        tail_to_high=rounded(tail_mean[1]),
        uniform=rounded(fair.mean(1)),
        tail_uniform=rounded(mean_where(fair, tail)),
        first_behind=0 if layer is None else min(layer + 1, target.n_layers - 1),
    )


def mean_where(
    values: Float[Tensor, "*axes row query"], chosen: Bool[Tensor, "row query"]
) -> Float[Tensor, "*axes row"]:
    """Mean over the chosen queries of each row; NaN where none is chosen."""
    count = reduce(chosen.float(), "row query -> row", "sum")
    return reduce(values * chosen, "... row query -> ... row", "sum") / count


@torch.no_grad()
def received_attention(
    target: Target, ids: TokenRows, keys: Float[Tensor, "set row pos"]
) -> Float[Tensor, "set layer row query"]:
    """Attention of every query to each set of keys, averaged over heads; nothing of size query x key is kept."""
    sets, rows, length = keys.shape
    received = torch.zeros(sets, target.n_layers, rows, length)

    def add(layer: int, start: int, probs: Tensor) -> None:
        to_sets = einsum(probs, keys.to(probs.device), "row head query key, set row key -> set row head query")
        queries = slice(start, start + probs.shape[2])
        received[:, layer, :, queries] = reduce(to_sets, "set row head query -> set row query", "mean").cpu()

    with attention_rows(target, add, rows_per_chunk=QUERIES_AT_ONCE):
        target.forward(ids)
    return received
