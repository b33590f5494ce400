"""How much attention the positions of typical text receive, and from which heads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from einops import reduce
from jaxtyping import Bool, Float
from torch import Tensor

from sinkscope.errors import SinkscopeError
from sinkscope.files.console import Progress, silent
from sinkscope.measure import Setup
from sinkscope.models.hooks import first_tensor, on_output
from sinkscope.models.norms import norm_of
from sinkscope.models.target import Target
from sinkscope.models.text import text_rows
from sinkscope.sinks.first_token.members import RATE_EPS, Heads
from sinkscope.sinks.first_token.places import (
    MOST_TEXTS,
    PLACE_SHARE,
    POSITION_SHARE,
    SINK_HEADS,
    Description,
    Places,
    Rule,
    describe,
    sink_places,
)
from sinkscope.sinks.first_token.records import SinkRate
from sinkscope.sinks.tokens import TokenRows
from sinkscope.tap.observers import visible_rows

RATE_LENGTH, RATE_TEXTS = 64, 100  # texts over which the sink rate is defined (Gu et al. 2024)
LONG_LENGTH, LONG_TEXTS = 512, 4  # texts in which attention is read before it is said that there is no sink
LATER_QUERIES = 16  # later queries a position needs: heads that attend to themselves favour the last positions
NARROWEST = 8  # smallest window of which heads can be judged: in a smaller one every position gets much attention
BATCH_ELEMENTS = 1 << 25  # a batch takes 128 MB at its widest activation


@dataclass(frozen=True, eq=False)
class AttentionReceived:
    """The attention that positions of the texts `ids` receive.

    Attributes:
        ids: The texts.
        received: Mean attention to the position `at` from all queries at or after it that see it or, if a window hides
            it from some, from the farther half of those that see it. The last positions of each text are left out
            because too few queries see them. 0 in layers with a window of less than 8.
        learned: Mean attention to the learned sink logit of each head.
        windows: Positions that a query of each layer sees; None: all.
        attending: Which layers attend; the others of a hybrid model keep a state and have no heads.
        norms: Norm of every position after each layer.
        eps: Mean attention above which a head attends to a position.
    """

    ids: TokenRows
    received: Float[Tensor, "layer head text at"]
    learned: Float[Tensor, "layer head text"]
    windows: tuple[int | None, ...]
    attending: Bool[Tensor, " layer"]
    norms: Float[Tensor, "layer text pos"]
    eps: float = RATE_EPS

    @property
    def rate(self) -> float:
        """The sink rate of position 0: the share of (layer, head) above the threshold, averaged over texts."""
        return float(self.above[self.attending][..., 0].float().mean())

    @cached_property
    def above(self) -> Bool[Tensor, "layer head text at"]:
        """Whether heads attend to positions."""
        return self.received > self.eps

    @cached_property
    def places(self) -> Places:
        """The positions that enough heads attend to."""
        return sink_places(self.above[self.attending], self.ids)

    @property
    def n_heads(self) -> int:
        """Number of heads of layers that attend."""
        return self.above[self.attending].shape[:2].numel()

    def readers(self, rule: Rule) -> Heads:
        """The (layer, head) pairs that attend to most of the sinks that words mean; empty if too few for a sink."""
        share = POSITION_SHARE
        if rule.position is None or rule.tokens:
            share = PLACE_SHARE
        steady = _in_most(self.above[:, :, self.places.of(rule).there])
        if int(steady.sum()) < max(SINK_HEADS, share * self.n_heads):
            return []
        return [(layer, head) for layer, head in steady.nonzero().tolist()]

    def described(self, decode: Callable[[list[int]], str]) -> Description | None:
        """Words for the attention sink; None if no words hold for places that enough heads attend to."""
        return describe(self.places, decode, lambda rule: bool(self.readers(rule)))

    def rate_of(self, rule: Rule) -> float:
        """Share of all heads that attend to the sinks that words mean."""
        return float(self.above[self.attending][:, :, self.places.of(rule).there].float().mean())

    @cached_property
    def learned_heads(self) -> Heads:
        """The (layer, head) pairs whose learned sink logit exceeds the threshold in most texts; empty if too few."""
        steady = _in_most(self.learned > self.eps)
        if int(steady.sum()) < max(SINK_HEADS, POSITION_SHARE * self.n_heads):
            return []
        return [(layer, head) for layer, head in steady.nonzero().tolist()]

    @property
    def learned_rate(self) -> float:
        """Share of (layer, head) pairs whose learned sink logit exceeds the threshold, averaged over texts."""
        return float((self.learned[self.attending] > self.eps).float().mean())

    @property
    def learned_rates(self) -> tuple[float | None, ...]:
        """The same for each layer; None in layers without attention."""
        rates = reduce((self.learned > self.eps).float(), "layer head text -> layer", "mean").tolist()
        return tuple(rate if attends else None for rate, attends in zip(rates, self.attending.tolist(), strict=True))

    def window(self, heads: Heads) -> int | None:
        """The smallest window of the layers of some heads; None if they see everything."""
        windows = [self.windows[layer] for layer, _ in heads]
        return min(filter(None, windows), default=None)


def _in_most(above: Bool[Tensor, "layer head case"]) -> Bool[Tensor, "layer head"]:
    """The heads that attend in most cases; none of no case."""
    return reduce(above.float(), "layer head case -> layer head", "mean").nan_to_num() >= MOST_TEXTS


@torch.no_grad()
def attention_received(
    target: Target,
    ids: TokenRows,
    eps: float = RATE_EPS,
    *,
    layers: int | None = None,
    without: tuple[int, ...] = (),
    progress: Progress = silent,
    batch: int = 8,
) -> AttentionReceived:
    """Run texts and record how much attention every position receives, and its norm after every layer.

    The attention that position k receives is the mean of A[i, k] over all queries i >= k (Gu et al. 2024). Where a
    window hides k from some of them, it is the mean over the farther half of the window: in the nearer half, early
    positions get much of the attention of heads that have no preference.

    Args:
        target: The model.
        ids: Texts of equal length.
        eps: Threshold; 0.3 in the paper.
        layers: Number of layers to run. None: all.
        without: Residual dimensions that norms leave out.
        progress: Called after each batch.
        batch: Number of texts that run together.
    """
    depth = layers or target.n_layers
    reading = AttentionReading(target, ids, eps, without)
    for start in range(0, len(ids), batch):
        texts = slice(start, min(start + batch, len(ids)))
        with reading.listening(texts, depth):
            target.forward(ids[texts], upto=depth - 1)
        progress("sink rate", texts.stop, len(ids))
    return reading.received(depth)


class AttentionReading:
    """Takes down the attention that positions receive, and their norms, while texts run through a model."""

    def __init__(self, target: Target, ids: TokenRows, eps: float = RATE_EPS, without: tuple[int, ...] = ()) -> None:
        self.target = target
        self.ids = ids
        self.eps = eps
        self.without = without
        places = max(1, ids.shape[1] - LATER_QUERIES)
        self._received = torch.zeros(target.n_layers, target.n_heads, len(ids), places)
        self._learned = torch.zeros(target.n_layers, target.n_heads, len(ids))
        self._norms = torch.zeros(target.n_layers, *ids.shape)
        self._windows: list[int | None] = [None] * target.n_layers

    @contextmanager
    def listening(self, texts: slice, depth: int) -> Iterator[None]:
        """A context in which a pass over some of the texts is taken down, in the first layers."""
        read = partial(self._read, texts)
        hooks = []
        for layer in range(depth):
            hooks.append((self.target.layers[layer], "post", on_output(partial(self._layer_done, texts, layer))))
        rows = visible_rows(self.target, read, layers=list(range(depth)), rows_per_chunk=self.ids.shape[1])
        with self.target.hooks(*hooks), rows:
            yield

    def _layer_done(self, texts: slice, layer: int, output: Any) -> None:
        norms = norm_of(first_tensor(output), self.without)
        self._norms[layer, texts] = norms.reshape(len(self.ids[texts]), -1).cpu()

    def _read(
        self,
        texts: slice,
        layer: int,
        _first: int,
        probs: Float[Tensor, "text head query key"],
        visible: Callable[[], Bool[Tensor, "text _ query key"]],
    ) -> None:
        length = probs.shape[-1]
        sees = visible()[0, 0].to(probs.device)
        window = None
        if not bool(sees[-1, 0]):
            window = int(sees[-1].sum())
            places = torch.arange(length, device=probs.device)
            sees = sees & (places[:, None] - places >= window // 2)
        self._windows[layer] = window
        if window is None or window >= NARROWEST:
            shares = reduce(probs * sees, "text head query key -> head text key", "sum") / sees.sum(0).clamp(min=1)
            self._received[layer, :, texts] = shares[..., : self._received.shape[-1]].cpu()
        if self.target.adapter.learned_sinks:
            to_tokens = reduce(probs.sum(-1), "text head query -> head text", "mean")
            self._learned[layer, :, texts] = (1 - to_tokens).cpu()

    def received(self, depth: int) -> AttentionReceived:
        """What was read in the first layers."""
        return AttentionReceived(
            ids=self.ids,
            received=self._received[:depth],
            learned=self._learned[:depth],
            windows=tuple(self._windows[:depth]),
            attending=torch.tensor(list(map(self.target.has_attention, range(depth)))),
            norms=self._norms[:depth],
            eps=self.eps,
        )


def attention_of_all(setup: Setup, without: tuple[int, ...] = ()) -> tuple[AttentionReceived, SinkRate | None]:
    """Attention and norms in all layers over many short texts, as the sink rate is defined.

    If the context is too short for these texts, the typical text is used, and there is no rate.

    Args:
        setup: The model and its text.
        without: Residual dimensions that norms leave out.
    """
    target = setup.target
    if target.max_positions is not None and target.max_positions < RATE_LENGTH:
        return attention_received(target, setup.ids, without=without), None
    texts, batch = RATE_TEXTS, max(1, BATCH_ELEMENTS // (RATE_LENGTH * target.d_mlp))
    if not target.resident:  # every batch reads all layers from disk again: there is one smaller batch
        texts, batch = RATE_TEXTS // 4, RATE_TEXTS
    ids = text_rows(setup.tokenizer, setup.text, texts, RATE_LENGTH, setup.bos)
    received = attention_received(target, ids, without=without, progress=setup.progress, batch=batch)
    return received, SinkRate(RATE_EPS, RATE_LENGTH, len(ids), received.rate)


def with_long_texts(setup: Setup) -> Setup | None:
    """The same setup with a few longer texts; None if the context or the text is too short for any."""
    length = min(LONG_LENGTH, setup.target.max_positions or LONG_LENGTH)
    if length <= RATE_LENGTH:
        return None
    try:
        return replace(setup, ids=text_rows(setup.tokenizer, setup.text, LONG_TEXTS, length, setup.bos))
    except SinkscopeError:  # the text is shorter than that
        return None
