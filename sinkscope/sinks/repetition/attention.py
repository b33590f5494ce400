"""Attention that first, repeated, cluster and ordinary tokens receive, by layer (Yona et al. 2025, Fig. 1 and 8)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import plotly.express as px
import torch
from einops import einsum
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import one_hot

from sinkscope.measure import Setup
from sinkscope.models.draws import seed_of
from sinkscope.models.target import Target
from sinkscope.models.text import text_rows
from sinkscope.results.notation import word_list
from sinkscope.results.style import GREY, long_table
from sinkscope.results.tables import Table
from sinkscope.sinks.attack.clusters import find_clusters
from sinkscope.sinks.find.spikes import sink_neurons
from sinkscope.sinks.repetition.sweep import Reading, Sweep, rounded
from sinkscope.sinks.tokens import TokenRows, sample_tokens, vocabulary
from sinkscope.tap.observers import attention_rows

QUERIES_AT_ONCE = 128  # at most batch x head x these x key values are in memory
TAIL = 64  # tokens of natural text after the repetitions; their attention is read
CANDIDATES = 4096  # tokens of the vocabulary at most among which a cluster is searched
NATURAL, ONE_CLUSTER = "natural text", "one cluster"
FIRST, REPEATED, CLUSTER, ORDINARY = range(4)
CLASSES = ("first", "repeated", "cluster", "ordinary")


@dataclass(frozen=True)
class AttentionReading(Reading):
    """Attention that one token of each class receives from the last 64 tokens, which are natural text.

    All numbers are means over heads and over pairs of a query and a token of the class that it sees. NaN: a sequence
    has no token of the class, or a layer has no softmax attention.

    Attributes:
        sweep: What was repeated.
        sequences: "natural text", the repeated tokens, and "one cluster": different tokens that one head of layer 0
            marks, as many as there are repetitions if the cluster has them. Without such a cluster it is left out.
        classes: "first": the token at position 0; "repeated"; "cluster"; "ordinary": all others.
        received: Attention that a token of the class receives.
        uniform: What it would receive if every query attended to all visible tokens alike.
        first_behind: First layer after the sink layer; 0 without a sink layer.
        absence: What there is instead, if no MLP makes a norm spike at the first token.
    """

    sweep: Sweep
    sequences: tuple[str, ...]
    classes: tuple[str, ...]
    received: Float[np.ndarray, "sequence class layer"]
    uniform: Float[np.ndarray, "sequence class"]
    first_behind: int
    absence: str | None = None

    @property
    def layer(self) -> int:
        """The first layer with softmax attention whose heads can read the spike."""
        attending = np.flatnonzero(np.isfinite(self.received[0, FIRST]))
        return int(min(attending[attending >= self.first_behind], default=attending[-1]))

    @property
    def times(self) -> Float[np.ndarray, "sequence class"]:
        """How many times as much as by uniform attention a token receives in this layer."""
        return self.received[:, :, self.layer] / self.uniform

    def conclusion(self) -> str:
        """Attention to a repetition in the first layer after the spike, beside an ordinary token of natural text."""
        repeated = np.median(self.times[1 : 1 + len(self.sweep.tokens), REPEATED])
        tokens = word_list(list(map(repr, self.sweep.tokens)), 1)
        return (
            f"In layer {self.layer}, each of {self.sweep.times} of {tokens} receives {repeated:.2f} times its share of "
            f"uniform attention, an ordinary token of natural text {self.times[0, ORDINARY]:.2f} times."
        )

    def details(self) -> list[str]:
        """What first tokens and tokens of a cluster receive, or why no cluster was looked for."""
        first = self.times[:, FIRST]
        repeated = np.median(first[1 : 1 + len(self.sweep.tokens)])
        lines = [
            f"The first token receives {first[0]:,.1f} times its share in natural text, and {repeated:,.1f} times with "
            "repetitions after it."
        ]
        if ONE_CLUSTER in self.sequences:
            lines.append(f"Each of many tokens of one cluster receives {self.times[-1, CLUSTER]:.2f} times its share.")
        if self.absence:
            lines.append(self.absence)
        return lines

    def rows(self) -> Table:
        """One row per sequence, layer and class that it has."""
        table = []
        uniform = np.broadcast_to(self.uniform[:, :, None], self.received.shape)
        columns = {"attention": self.received, "uniform": uniform}
        layers = range(self.received.shape[2])
        for row in long_table(columns, sequence=self.sequences, token_class=self.classes, layer=layers):
            if row["attention"] is not None:
                table.append(row)
        return table

    def draw(self) -> Any:
        """Attention that a token of each class receives by layer, and under uniform attention; a panel per sequence."""
        rows = self.rows()
        for row in rows.copy():
            if row["token_class"] == CLASSES[FIRST]:
                rows.append({**row, "token_class": "uniform attention", "attention": row["uniform"]})
        axes: dict[str, Any] = {"x": "layer", "y": "attention", "color": "token_class", "facet_col": "sequence"}
        fig = px.line(rows, render_mode="svg", **axes, facet_col_wrap=3, log_y=True, markers=True)
        fig.update_yaxes(exponentformat="power")
        fig.update_traces(line={"dash": "dot", "color": GREY}, mode="lines", selector={"name": "uniform attention"})
        return fig.update_layout(height=180 + 300 * (1 + (len(self.sequences) - 1) // 3))


def read_attention(setup: Setup, sweep: Sweep, repeated: TokenRows) -> tuple[int | None, AttentionReading]:
    """The sink layer, and the attention that each class of tokens receives.

    Args:
        setup: The model and its text.
        sweep: What is repeated.
        repeated: The sequences; the context has room for the tail after them.
    """
    target = setup.target
    natural = text_rows(target.tokenizer, setup.text, 1, repeated.shape[1] + TAIL, setup.bos)[0]
    tail = natural[-TAIL:]
    sink = sink_neurons(setup)
    before = len(sweep.before)
    texts = {NATURAL: (natural, ORDINARY)}
    for token, row in zip(sweep.tokens, repeated, strict=True):
        texts[token] = torch.cat([row, tail]), REPEATED
    members = cluster_members(setup, [*repeated[0, :before].tolist(), *tail.tolist()])[: sweep.max_repeats]
    if len(members):
        texts[ONE_CLUSTER] = torch.cat([repeated[0, :before], members, tail]), CLUSTER
    received, uniform = [], []
    for number, (ids, kind) in enumerate(texts.values()):
        roles = torch.full_like(ids, ORDINARY)
        roles[before:-TAIL] = kind
        roles[0] = FIRST
        keys = one_hot(roles, len(CLASSES)).float()
        seen = keys.cumsum(0)[-TAIL:]  # query class
        visible = torch.arange(len(ids) - TAIL, len(ids)) + 1
        share = (seen / visible[:, None]).sum(0) / seen.sum(0)
        received.append(received_attention(target, ids, keys) / seen.sum(0)[:, None])
        uniform.append(share)
        setup.progress("attention", number + 1, len(texts))
    received = torch.stack(received)
    attending = list(map(target.has_attention, range(target.n_layers)))
    received[:, :, ~torch.tensor(attending)] = torch.nan
    return sink.layer, AttentionReading(
        sweep,
        sequences=tuple(texts),
        classes=CLASSES,
        received=rounded(received),
        uniform=rounded(torch.stack(uniform)),
        first_behind=0 if sink.layer is None else min(sink.layer + 1, target.n_layers - 1),
        absence=None if sink.layer is not None else sink.absence("tokens of a cluster were not looked for"),
    )


def cluster_members(setup: Setup, left_out: Sequence[int]) -> Int[Tensor, " token"]:
    """The tokens of the largest cluster in random order, without some others; none if no head marks any alone."""
    sink = sink_neurons(setup)
    if not sink.neurons or not setup.target.has_attention(0):
        return torch.zeros(0, dtype=torch.long)
    candidates = sample_tokens(vocabulary(setup.target), CANDIDATES, seed_of(setup.seed, "tokens to cluster"))
    clusters = find_clusters(setup, sink.neurons, sorted(candidates), None)
    largest = clusters.tokens_of(clusters.heads[0]) if clusters is not None and clusters.heads else ()
    others = sorted({*largest} - {*left_out, *setup.tokenizer.all_special_ids})
    order = sample_tokens(others, len(others), seed_of(setup.seed, "order in a cluster"))
    return torch.tensor(order, dtype=torch.long)


@torch.no_grad()
def received_attention(
    target: Target, ids: Int[Tensor, " pos"], keys: Float[Tensor, "pos class"]
) -> Float[Tensor, "class layer"]:
    """Attention from the last 64 positions to each class of keys, summed over these, mean over heads."""
    received = torch.zeros(keys.shape[1], target.n_layers)
    begin = len(ids) - TAIL

    def add(layer: int, start: int, probs: Float[Tensor, "row head query key"]) -> None:
        late = probs[:, :, max(0, begin - start) :]
        total = einsum(late, keys.to(late.device), "row head query key, key kind -> kind")
        received[:, layer] += total.cpu() / probs.shape[1]

    with attention_rows(target, add, rows_per_chunk=QUERIES_AT_ONCE):
        target.forward(ids[None])
    return received
