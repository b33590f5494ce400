"""Which heads attend to which positions of typical text."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from einops import reduce
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sinkscope.files.console import Progress, silent
from sinkscope.measure import Setup
from sinkscope.models.target import Target
from sinkscope.models.text import text_rows
from sinkscope.sinks.first_token.result import RATE_EPS, SINK_HEADS, SinkRate
from sinkscope.trace.attention import attention_rows

RATE_LENGTH, RATE_TEXTS = 64, 100  # texts over which the sink rate is defined (Gu et al. 2024)
LATER_QUERIES = 16  # later queries a position needs: heads that attend to themselves favour the last positions
MOST_TEXTS = 0.5  # a head attends to a position if it does so in at least this share of the texts
FIRST_SHARE = 0.01  # a sink at the first position needs this share of all heads, and at least SINK_HEADS of them
LATER_SHARE = 0.05  # share for a position other than the first: a head that prefers one word is not a sink
LATER_CASES = 3  # a later token must occur this often before it is judged
BATCH_ELEMENTS = 1 << 25  # a batch takes 128 MB at its widest activation


@dataclass(frozen=True)
class AttendedToken:
    """A position behind the first that heads attend to.

    Attributes:
        token: Id of the token. None if the position receives attention regardless of the token there.
        position: First position where it was seen.
        rate: Share of (layer, head) pairs that attend to it.
    """

    token: int | None
    position: int
    rate: float


@dataclass(frozen=True)
class AttentionReceived:
    """Which heads attend to which positions of the texts `ids`.

    Attributes:
        ids: The texts.
        above: Whether the mean attention from all queries at or after the position `at` exceeds the threshold. The last
            positions of each text are left out because too few queries see them.
        learned: The same for the learned sink logit of each head.
        attending: Which layers attend; the others of a hybrid model keep a state and count in no rate.
    """

    ids: Int[Tensor, "text pos"]
    above: Bool[Tensor, "layer head text at"]
    learned: Bool[Tensor, "layer head text"]
    attending: Bool[Tensor, " layer"]

    @property
    def rate(self) -> float:
        """The sink rate of position 0: the share of (layer, head) above the threshold, averaged over texts."""
        return float(self.above[self.attending][..., 0].float().mean())

    @property
    def learned_rate(self) -> float:
        """The same rate of the learned sink logits."""
        return float(self.learned[self.attending].float().mean())

    @property
    def rate_by_layer(self) -> tuple[float, ...]:
        """The sink rate of position 0 in each layer."""
        return tuple(reduce(self.above[..., 0].float(), "layer head text -> layer", "mean").tolist())

    @cached_property
    def heads(self) -> list[tuple[int, int]]:
        """The (layer, head) pairs that attend to the first token in most texts; empty if too few for a sink."""
        return self._heads_of_a_sink(_in_most_texts(self.above[..., 0]))

    @cached_property
    def learned_heads(self) -> list[tuple[int, int]]:
        """The (layer, head) pairs whose learned sink logit exceeds the threshold in most texts; empty if too few."""
        return self._heads_of_a_sink(_in_most_texts(self.learned))

    def _heads_of_a_sink(self, steady: Bool[Tensor, "layer head"]) -> list[tuple[int, int]]:
        heads = [(layer, head) for layer, head in steady.nonzero().tolist()]
        if len(heads) < SINK_HEADS or len(heads) < FIRST_SHARE * steady[self.attending].numel():
            return []
        return heads

    @cached_property
    def later(self) -> list[AttendedToken]:
        """Positions behind the first that receive attention, most heads first.

        Each token is judged wherever it stands, and each position by the tokens that are no sinks themselves.
        """
        ids = self.ids[:, : self.above.shape[-1]]
        attended: list[AttendedToken] = []
        for token in ids[:, 1:].unique().tolist():
            where = ids == token
            where[:, 0] = False
            rate = _later_rate(self.above[self.attending][:, :, where])
            if rate is not None:
                first_seen = int(where.any(0).nonzero()[0])
                attended.append(AttendedToken(token, first_seen, rate))
        ordinary = ~torch.isin(ids, torch.tensor([place.token for place in attended]))
        for position in range(1, ids.shape[1]):
            rate = _later_rate(self.above[self.attending][:, :, ordinary[:, position], position])
            if rate is not None:
                attended.append(AttendedToken(None, position, rate))
        return sorted(attended, key=lambda place: -place.rate)


def _in_most_texts(above: Bool[Tensor, "layer head case"]) -> Bool[Tensor, "layer head"]:
    return reduce(above.float(), "layer head case -> layer head", "mean") >= MOST_TEXTS


def _later_rate(above: Bool[Tensor, "layer head case"]) -> float | None:
    """Share of heads that attend in most of the cases; None where the cases or the heads are too few for a sink."""
    if above.shape[-1] < LATER_CASES:
        return None
    steady = _in_most_texts(above)
    rate = float(steady.float().mean())
    if int(steady.sum()) < SINK_HEADS or rate < LATER_SHARE:
        return None
    return rate


@torch.no_grad()
def attention_received(
    target: Target,
    ids: Int[Tensor, "text pos"],
    eps: float,
    *,
    layers: int | None = None,
    progress: Progress = silent,
    batch: int = 8,
) -> AttentionReceived:
    """Run texts and record which heads attend to which position.

    The attention that position k receives is the mean of A[i, k] over all queries i >= k (Gu et al. 2024).

    Args:
        target: The model.
        ids: Texts of equal length.
        eps: Threshold; 0.3 in the paper.
        layers: Number of layers to run. None: all.
        progress: Called after each batch.
        batch: Number of texts that run together.
    """
    depth, length = target.n_layers, ids.shape[1]
    if layers is not None:
        depth = layers
    places = max(1, length - LATER_QUERIES)
    queries = torch.arange(length, length - places, -1)  # queries that see each position
    above = torch.zeros(depth, target.n_heads, len(ids), places, dtype=torch.bool)
    learned = torch.zeros(depth, target.n_heads, len(ids), dtype=torch.bool)
    for start in range(0, len(ids), batch):
        texts = slice(start, min(start + batch, len(ids)))

        def read(layer: int, _first: int, probs: Float[Tensor, "text head query key"], texts: slice = texts) -> None:
            received = reduce(probs, "text head query key -> head text key", "sum")
            above[layer, :, texts] = (received[..., :places] / queries.to(probs.device) > eps).cpu()
            if target.adapter.learned_sinks:
                to_tokens = reduce(probs.sum(-1), "text head query -> head text", "mean")
                learned[layer, :, texts] = (1 - to_tokens > eps).cpu()

        with attention_rows(target, read, layers=list(range(depth)), rows_per_chunk=length):
            target.forward(ids[texts], upto=depth - 1)
        progress("sink rate", texts.stop, len(ids))
    attending = torch.tensor([target.has_attention(layer) for layer in range(depth)])
    return AttentionReceived(ids, above, learned, attending)


def attention_of_the_read(setup: Setup, depth: int) -> AttentionReceived:
    """Attention over the typical text in the first `depth` layers."""
    return attention_received(setup.target, setup.ids, RATE_EPS, layers=depth)


def attention_of_all(setup: Setup) -> tuple[AttentionReceived, SinkRate | None]:
    """Attention in all layers over many short texts, as the sink rate is defined.

    If the context is too short for these texts, the typical text is used, and there is no rate.
    """
    target = setup.target
    if target.max_positions is not None and target.max_positions < RATE_LENGTH:
        return attention_of_the_read(setup, target.n_layers), None
    texts, batch = RATE_TEXTS, max(1, BATCH_ELEMENTS // (RATE_LENGTH * target.d_mlp))
    if not target.resident:  # every batch reads all layers from disk again: there is one smaller batch
        texts, batch = RATE_TEXTS // 4, RATE_TEXTS
    ids = text_rows(setup.tokenizer, setup.text, texts, RATE_LENGTH, setup.bos)
    received = attention_received(target, ids, RATE_EPS, progress=setup.progress, batch=batch)
    return received, SinkRate(RATE_EPS, RATE_LENGTH, len(ids), received.rate)
