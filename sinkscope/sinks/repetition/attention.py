"""Attention that the sink, repeated and ordinary tokens receive, by layer (Yona et al. 2025, Fig. 1 and 8)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import plotly.express as px
import torch
from einops import einsum
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import one_hot

from sinkscope.measure import Setup
from sinkscope.models.target import Target
from sinkscope.models.text import text_rows
from sinkscope.results.claims import Outcome
from sinkscope.results.style import long_table
from sinkscope.results.tables import Table
from sinkscope.sinks.find.places import Rule
from sinkscope.sinks.find.spikes import sink_spike, surveyed
from sinkscope.sinks.repetition.sweep import Reading, Sweep, beside_copies, claim_of_copies, rounded
from sinkscope.sinks.tokens import TokenRows
from sinkscope.tap.observers import attention_rows

QUERIES_AT_ONCE = 128  # at most batch x head x these x key values are in memory
TAIL = 64  # tokens of natural text after the repetitions; their attention is read
NATURAL = "natural text"
CLASSES = ("sink", "there", "ordinary")


@dataclass(frozen=True, kw_only=True)
class AttentionReading(Reading):
    """Attention that one token of each class receives from the last 64 tokens, which are natural text.

    All numbers are means over heads and over pairs of a query and a token of the class that it sees. NaN: a sequence
    has no token of the class, or a layer has no softmax attention. The claim is of the share of all attention that the
    copies get together, beside that of the same positions with one copy and with other tokens.

    Attributes:
        sweep: What was repeated.
        place: The sink: where the first spike is that MLPs make, or else what heads attend to; without either the first
            token, which is then no sink.
        layer: The first layer with softmax attention whose heads can read the spike.
        sequences: "natural text"; the repeated tokens; and for each, one copy at the position of the last.
        classes: "there": the positions of the repetitions, whatever stands there; "sink": the others that belong to
            the place; "ordinary": the rest.
        received: Attention that a token of the class receives.
        uniform: What it would receive if every query attended to all visible tokens alike.
    """

    sweep: Sweep
    place: str
    layer: int
    sequences: tuple[str, ...]
    classes: tuple[str, ...]
    received: Float[np.ndarray, "sequence class layer"]
    uniform: Float[np.ndarray, "sequence class"]

    def facts(self) -> list[str]:
        """What each token receives, in natural text and with copies."""
        times = self.received[:, :, self.layer] / self.uniform
        first, usual, _ = times[0]
        sink, there, _ = np.median(times[1 : 1 + len(self.sweep.tokens)], axis=0)
        line = f"Each copy receives {there:.2f} times its share of uniform attention, a token there in natural text "
        line += f"{usual:.2f} times"
        if np.isfinite(first + sink):  # else no such place stands in one of the texts
            line += f"; {self.place} receives {sink:,.1f} and {first:,.1f} times its own"
        return [f"{line}."]

    def rows(self) -> Table:
        """One row per sequence, layer and class that it has."""
        uniform = np.broadcast_to(self.uniform[:, :, None], self.received.shape)
        axes = {"sequence": self.sequences, "token_class": self.classes, "layer": range(self.received.shape[2])}
        table = long_table({"attention": self.received, "uniform": uniform}, **axes)
        return [row for row in table if row["attention"] is not None]

    def draw(self) -> Any:
        """Attention that a token of each class receives by layer, a panel per sequence."""
        axes: dict[str, Any] = {"x": "layer", "y": "attention", "color": "token_class", "facet_col": "sequence"}
        fig = px.line(self.rows(), render_mode="svg", **axes, facet_col_wrap=3, log_y=True, markers=True)
        fig.update_yaxes(exponentformat="power")
        return fig.update_layout(height=180 + 300 * (1 + (len(self.sequences) - 1) // 3))


def read_attention(setup: Setup, sweep: Sweep, repeated: TokenRows) -> AttentionReading:
    """The attention that each class of tokens receives.

    Args:
        setup: The model and its text.
        sweep: What is repeated.
        repeated: The sequences; the context has room for the tail after them.
    """
    target = setup.target
    before, count = len(sweep.before), len(sweep.tokens)
    natural = text_rows(target.tokenizer, setup.text, 1, repeated.shape[1] + TAIL, setup.bos)
    natural[:, :before] = repeated[:1, :before]
    _, single, _ = beside_copies(setup, repeated, before)
    texts = torch.cat([natural[:, :-TAIL], repeated, single])
    ids = torch.cat([texts, natural[:, -TAIL:].expand(len(texts), -1)], 1)
    made = sink_spike(setup)
    place = next(iter(surveyed(setup)[0].sinks), Rule("the first token", position=0))
    if made is not None:
        place = made.spike.place
    roles = torch.where(place.means(ids), 0, 2)
    roles[:, before:-TAIL] = 1
    keys = one_hot(roles, len(CLASSES)).float()
    seen = keys.cumsum(1)[:, -TAIL:]  # row query class
    begin = ids.shape[1] - TAIL
    visible = torch.arange(begin, ids.shape[1]) + 1
    received = attention_from(target, ids, keys, begin) / seen.sum(1)[:, :, None]
    attending = target.attending
    layer = next((one for one in attending if made is None or one > made.scan.layer), attending[-1])
    together = sweep.max_repeats * received[:, 1, layer]
    copies = torch.stack([together[1 : 1 + count], together[1 + count :], together[:1].expand(count)])
    outcome = Outcome("attention", (layer,), gives=f"get {{}} of the attention in layer {layer}")
    return AttentionReading(
        sweep=sweep,
        place=place.words,
        layer=layer,
        sequences=(NATURAL, *sweep.tokens, *[f"one {token}" for token in sweep.tokens]),
        classes=CLASSES,
        received=rounded(received),
        uniform=rounded((seen / visible[:, None]).sum(1) / seen.sum(1)),
        claims=(claim_of_copies(sweep.max_repeats, outcome, copies),),
    )


@torch.no_grad()
def attention_from(
    target: Target,
    ids: TokenRows,
    keys: Float[Tensor, "row pos kind"],
    begin: int,
    size: int = 1,
) -> Float[Tensor, "row kind layer"]:
    """Attention from the positions from `begin` on to kinds of keys, summed over these queries, mean over heads.

    NaN in layers without softmax attention.

    Args:
        target: The model.
        ids: The sequences.
        keys: Which positions belong to which kind; 1 or 0.
        begin: The first of the positions whose attention is read.
        size: Sequences per pass.
    """
    received = []
    for rows, kinds in zip(ids.split(size), keys.split(size), strict=True):
        total = torch.full((len(rows), keys.shape[2], target.n_layers), torch.nan)
        total[:, :, target.attending] = 0

        def add(layer: int, start: int, probs: Tensor, total: Tensor = total, kinds: Tensor = kinds) -> None:
            late = probs[:, :, max(0, begin - start) :]
            given = einsum(late, kinds.to(late.device), "row head query key, row key kind -> row head kind")
            total[:, :, layer] += target.shards.gather(given, target.n_heads, 1).mean(1).cpu()

        with attention_rows(target, add, rows_per_chunk=QUERIES_AT_ONCE, whole=False):
            target.forward(rows)
        received.append(total)
    return torch.cat(received)


def attention_to_first(target: Target, rows: TokenRows, size: int) -> Float[Tensor, " layer"]:
    """Mean attention to position 0, over rows, heads and the queries of the second half, where tokens are sinks.

    Args:
        target: The model.
        rows: The sequences.
        size: Sequences per pass.
    """
    half = rows.shape[1] // 2
    first = torch.zeros(*rows.shape, 1)
    first[:, 0] = 1
    return attention_from(target, rows, first, half, size)[:, 0].double().mean(0) / (rows.shape[1] - half)
