"""How much attention the positions of typical text receive, and from which heads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from einops import reduce
from jaxtyping import Bool, Float, Shaped
from torch import Tensor

from sinkscope.files.progress import Progress, silent
from sinkscope.measure import Setup
from sinkscope.models.hooks import first_tensor, on_output
from sinkscope.models.norms import norm_of
from sinkscope.models.target import Target
from sinkscope.models.text import text_rows
from sinkscope.results.claims import Search
from sinkscope.sinks.find.places import MOST_TEXTS, SINK_HEADS, sink_places
from sinkscope.sinks.find.records import RATE_EPS, SHORT, SinkRate
from sinkscope.sinks.removal.components import Heads
from sinkscope.sinks.tokens import Mask, TokenRows
from sinkscope.tap.observers import visible_rows

RATE_TEXTS = 100  # texts over which the sink rate is defined (Gu et al. 2024)
LATER_QUERIES = 16  # later queries a position needs: heads that attend to themselves favour the last positions
LIFT = 3.0  # times uniform attention, from which a query attends to a position among several
LEAST_PART = 0.25  # of what the most attended of several positions gets, each of them gets at least
LEAST_SEEN = 8  # positions that a query has to see to be judged by that, and queries that a position needs
NARROWEST = 24  # smallest window of which heads can be judged: in a smaller one every position gets much attention
BATCH_ELEMENTS = 1 << 25  # a batch takes 128 MB at its widest activation
IN_CACHE = 1 << 20  # the same on a CPU: what leaves its cache takes longer


@dataclass(frozen=True, eq=False)
class AttentionReceived:
    """The attention that positions of the texts `ids` receive, and their norms; all zero until `listening`.

    Attributes:
        ids: The texts.
        received: Mean attention to the position `at` from all queries at or after it that see it. The last positions of
            each text are left out because too few queries see them. 0 in layers with a window of less than 24.
        lasting: Share of these queries that give the position at least three times as much as by uniform attention; of
            queries that see at least eight positions, and 16 positions later or more.
        learned: Mean attention to the learned sink logit of each head.
        norms: Norm of every position after each layer.
        attending: Which layers attend; of the others some were not read, and those of a hybrid model have no heads.
    """

    ids: TokenRows
    received: Float[Tensor, "layer head text at"]
    lasting: Float[Tensor, "layer head text at"]
    learned: Float[Tensor, "layer head text"]
    norms: Float[Tensor, "layer text pos"]
    attending: Bool[Tensor, " layer"]

    @classmethod
    def unread(cls, target: Target, ids: TokenRows) -> AttentionReceived:
        """Nothing yet."""
        texts, length = ids.shape
        depth = target.n_layers
        received = torch.zeros(depth, target.n_heads, texts, max(1, length - LATER_QUERIES))
        return cls(
            ids,
            received=received,
            lasting=received.clone(),
            learned=torch.zeros(depth, target.n_heads, texts),
            norms=torch.zeros(depth, texts, length),
            attending=torch.tensor(list(map(target.has_attention, range(depth)))),
        )

    # --- reading ---

    @contextmanager
    def listening(self, target: Target, texts: slice, without: Sequence[int] = ()) -> Iterator[None]:
        """A context in which a pass over some of the texts is taken down; norms leave out residual dimensions."""
        depth = len(self.norms)

        def take_norms(layer: int, output: Any) -> None:
            self.norms[layer, texts] = norm_of(first_tensor(output), without).reshape(len(self.ids[texts]), -1).cpu()

        hooks = []
        for layer in range(depth):
            hooks.append((target.layers[layer], "post", on_output(partial(take_norms, layer))))
        read = partial(self._read, texts, target)
        rows = visible_rows(target, read, layers=list(range(depth)), rows_per_chunk=self.ids.shape[1], whole=False)
        with target.hooks(*hooks), rows:
            yield

    def _read(
        self,
        texts: slice,
        target: Target,
        layer: int,
        _first: int,
        probs: Float[Tensor, "text head query key"],
        visible: Callable[[], Bool[Tensor, "text _ query key"]],
    ) -> None:
        sees = visible()[0, 0].to(probs.device)
        places = torch.arange(len(sees), device=probs.device)
        seen = sees.sum(1, keepdim=True)
        if bool(sees[-1, 0]) or int(sees[-1].sum()) >= NARROWEST:
            far = sees & (places[:, None] - places >= LATER_QUERIES) & (seen >= LEAST_SEEN)
            shares = self._share(probs, sees), self._share(probs >= LIFT / (seen + 1), far, LEAST_SEEN)
            self.received[layer, :, texts], self.lasting[layer, :, texts] = (
                target.shards.gather(share, target.n_heads, 0).cpu() for share in shares
            )
        if target.adapter.learned_sinks:
            to_tokens = reduce(probs.sum(-1), "text head query -> head text", "mean")
            self.learned[layer, :, texts] = target.shards.gather(1 - to_tokens, target.n_heads, 0).cpu()

    def _share(
        self, rows: Shaped[Tensor, "text head query key"], where: Bool[Tensor, "query key"], least: int = 1
    ) -> Float[Tensor, "head text at"]:
        """The mean over some queries; 0 of fewer than so many."""
        total, number = reduce(rows * where, "text head query key -> head text key", "sum"), where.sum(0)
        share = total / number.clamp(min=1) * (number >= least)
        return share[..., : self.received.shape[-1]].float()

    # --- what was read ---

    def _together(self, there: Bool[Tensor, "*layer text at"]) -> Float[Tensor, "layer head text"]:
        """Attention to some positions in sum, mean over the queries from the first of them on."""
        queries = self.ids.shape[1] - torch.arange(there.shape[-1]).float()
        seeing = torch.where(there, queries, 0).amax(-1).clamp(min=1)
        return (self.received * there * queries).sum(-1) / seeing

    @cached_property
    def above(self) -> Bool[Tensor, "layer head text at"]:
        """Whether heads attend to positions: to one alone, or lastingly to several that together get as much."""
        several = self.lasting >= MOST_TEXTS
        fair = self.received >= LEAST_PART * (self.received * several).amax(-1, keepdim=True)
        together = several & fair & (self._together(several) > RATE_EPS)[..., None]
        return (self.received > RATE_EPS) | together

    @property
    def rate(self) -> float:
        """The sink rate of position 0: the share of (layer, head) above the threshold, averaged over texts."""
        return float((self.received[self.attending][..., 0] > RATE_EPS).float().mean())

    @property
    def judged(self) -> TokenRows:
        """The texts, up to the last position to which attention is judged."""
        return self.ids[:, : self.received.shape[-1]]

    @cached_property
    def places(self) -> Mask:
        """The positions of these that enough heads attend to."""
        return sink_places(self.above[self.attending])

    def _in_most(self, above: Bool[Tensor, "layer head case"]) -> Heads:
        """The (layer, head) pairs that attend in most cases; none if they are too few for a sink."""
        steady = reduce(above.float(), "layer head case -> layer head", "mean").nan_to_num() >= MOST_TEXTS
        heads = [(layer, head) for layer, head in steady.nonzero().tolist()]
        return heads if len(heads) >= SINK_HEADS else []

    def readers(self, there: Mask) -> Heads:
        """The (layer, head) pairs that attend to most of some places; empty if too few for a sink."""
        return self._in_most(self.above[:, :, there[:, : self.received.shape[-1]]])

    @cached_property
    def learned_heads(self) -> Heads:
        """The (layer, head) pairs whose learned sink logit exceeds the threshold in most texts; empty if too few."""
        return self._in_most(self.learned > RATE_EPS)

    @property
    def most_attended(self) -> Search:
        """The largest share of the texts in which two heads attend to one position, or to one token, unfiltered."""
        anywhere = self.above[self.attending].int().sum((0, 1)) >= SINK_HEADS
        most, at = anywhere.float().mean(0).max(0)
        return Search("positions", anywhere.shape[1], float(most), f"position {int(at)}")


@torch.no_grad()
def attention_received(
    target: Target,
    ids: TokenRows,
    *,
    without: Sequence[int] = (),
    progress: Progress = silent,
    batch: int = 8,
) -> AttentionReceived:
    """Run texts and record how much attention every position receives, and its norm after every layer.

    The attention that position k receives is the mean of A[i, k] over all queries i >= k (Gu et al. 2024) that see it.

    Args:
        target: The model.
        ids: Texts of equal length.
        without: Residual dimensions that norms leave out.
        progress: Called after each batch.
        batch: Number of texts that run together.
    """
    received = AttentionReceived.unread(target, ids)
    for start in range(0, len(ids), batch):
        texts = slice(start, min(start + batch, len(ids)))
        with received.listening(target, texts, without):
            target.forward(ids[texts], upto=target.n_layers - 1)
        progress("sink rate", texts.stop, len(ids))
    return received


def attention_of_all(setup: Setup, without: Sequence[int] = ()) -> tuple[AttentionReceived, SinkRate]:
    """Attention and norms in all layers over many short texts, as the sink rate is defined.

    Args:
        setup: The model and its text.
        without: Residual dimensions that norms leave out.
    """
    target = setup.target
    length = min(SHORT, target.max_positions or SHORT)
    elements = IN_CACHE if target.device.type == "cpu" else BATCH_ELEMENTS
    texts, batch = RATE_TEXTS, max(1, elements // (length * target.d_mlp))
    if not target.resident:  # every batch reads all layers from disk again: there is one smaller batch
        texts, batch = RATE_TEXTS // 4, RATE_TEXTS
    ids = text_rows(setup.tokenizer, setup.text, texts, length, setup.bos)
    received = attention_received(target, ids, without=without, progress=setup.progress, batch=batch)
    return received, SinkRate(length, len(ids), received.rate)
