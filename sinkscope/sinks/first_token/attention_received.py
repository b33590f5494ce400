"""Which heads attend to which positions of typical text."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cached_property, partial

import torch
from einops import reduce
from jaxtyping import Bool, Float
from torch import Tensor

from sinkscope.errors import SinkscopeError
from sinkscope.files.console import Progress, silent
from sinkscope.measure import Setup
from sinkscope.models.target import Target
from sinkscope.models.text import text_rows
from sinkscope.sinks.first_token.result import RATE_EPS, SINK_HEADS, Heads, SinkRate
from sinkscope.sinks.tokens import TokenRows
from sinkscope.trace.attention import attention_rows

RATE_LENGTH, RATE_TEXTS = 64, 100  # texts over which the sink rate is defined (Gu et al. 2024)
LONG_LENGTH, LONG_TEXTS = 512, 4  # texts in which attention is read before it is said that there is no sink
SOME_TEXTS = 0.2  # least share of the texts in which heads attend to a sink of some texts
LATER_QUERIES = 16  # later queries a position needs: heads that attend to themselves favour the last positions
NARROWEST = 8  # smallest window of which heads can be judged: in a smaller one every position gets much attention
MOST_TEXTS = 0.5  # a head attends to a position if it does so in at least this share of the texts
ALL_TEXTS = 0.9  # a sink that at least this share of the texts has is one of all texts
FIRST_SHARE = 0.01  # a sink at the first position needs this share of all heads, and at least SINK_HEADS of them
LATER_SHARE = 0.05  # share for a position other than the first: a head that prefers one word is not a sink
LATER_CASES = 3  # a later token must occur this often before it is judged, and a position with so many tokens
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
        above: Whether the mean attention to the position `at` exceeds the threshold: from all queries at or after it,
            or, if a window hides it from some, from the farther half of those that see it. The last positions of each
            text are left out because too few queries see them, and layers with a window of less than 8.
        learned: The same for the learned sink logit of each head.
        windows: Positions that a query of each layer sees; None: all.
        attending: Which layers attend; the others of a hybrid model keep a state and count in no rate.
    """

    ids: TokenRows
    above: Bool[Tensor, "layer head text at"]
    learned: Bool[Tensor, "layer head text"]
    windows: tuple[int | None, ...]
    attending: Bool[Tensor, " layer"]

    @property
    def rate(self) -> float:
        """The sink rate of position 0: the share of (layer, head) above the threshold, averaged over texts."""
        return float(self.above[self.attending][..., 0].float().mean())

    @property
    def rate_by_layer(self) -> tuple[float, ...]:
        """The sink rate of position 0 in each layer."""
        return tuple(reduce(self.above[..., 0].float(), "layer head text -> layer", "mean").tolist())

    @cached_property
    def texts(self) -> Bool[Tensor, " text"]:
        """Texts whose first token is a sink. If heads attend to it in nearly all texts, all of them.

        If no head attends in most texts, the heads that do in some are taken, and the texts in which most of these
        attend; they must be some texts, of different first tokens, and the heads more than for a sink of all texts.
        """
        to_first = self.above[..., 0]
        share = reduce(to_first.float(), "layer head text -> layer head", "mean")
        always = share >= MOST_TEXTS
        least = max(SINK_HEADS, FIRST_SHARE * share[self.attending].numel())
        if int(always.sum()) >= least:
            return _texts_of(to_first, always)
        sometimes = share >= SOME_TEXTS
        texts = _texts_of(to_first, sometimes)
        heads_suffice = int(sometimes.sum()) >= max(least, LATER_SHARE * share[self.attending].numel())
        texts_suffice = int(texts.sum()) >= SOME_TEXTS * len(texts)
        if heads_suffice and texts_suffice and len(self.ids[texts, 0].unique()) >= LATER_CASES:
            return texts
        return torch.zeros_like(texts)

    @property
    def share(self) -> float:
        """Share of the texts whose first token is a sink."""
        return float(self.texts.float().mean())

    @cached_property
    def heads(self) -> Heads:
        """The (layer, head) pairs that attend to the first token in most of `texts`; empty if too few for a sink."""
        return self._heads_of_a_sink(self.above[..., self.texts, 0])

    @cached_property
    def learned_heads(self) -> Heads:
        """The (layer, head) pairs whose learned sink logit exceeds the threshold in most texts; empty if too few."""
        return self._heads_of_a_sink(self.learned)

    def _heads_of_a_sink(self, above: Bool[Tensor, "layer head text"]) -> Heads:
        steady = _in_most_texts(above)
        heads = [(layer, head) for layer, head in steady.nonzero().tolist()]
        if len(heads) < max(SINK_HEADS, FIRST_SHARE * steady[self.attending].numel()):
            return []
        return heads

    @property
    def attended(self) -> bool:
        """Whether there is an attention sink at any position, or at learned logits."""
        return bool(self.heads or self.learned_heads or self.later)

    @property
    def learned_rate(self) -> float:
        """Share of (layer, head) pairs whose learned sink logit exceeds the threshold, averaged over texts."""
        return float(self.learned[self.attending].float().mean())

    @property
    def window(self) -> int | None:
        """The smallest window of the layers of the heads that attend; None if they see everything."""
        windows = [self.windows[layer] for layer, _ in self.heads]
        return min(filter(None, windows), default=None)

    @cached_property
    def later(self) -> list[AttendedToken]:
        """Positions behind the first that receive attention, most heads first.

        A position counts whatever stands there if different tokens receive attention at it. Elsewhere each token is
        judged, over at least two positions.
        """
        ids = self.ids[:, : self.above.shape[-1]]
        elsewhere = torch.ones_like(ids, dtype=torch.bool)
        attended = self._at_positions(ids, elsewhere)
        elsewhere[:, [0, *(place.position for place in attended)]] = False
        tokens = []
        for token in ids[:, 1:].unique().tolist():
            where = elsewhere & (ids == token)
            rate = _later_rate(self.above[self.attending][:, :, where])
            positions = where.any(0).nonzero().flatten()
            if rate is not None and len(positions) > 1:
                tokens.append(AttendedToken(token, int(positions[0]), rate))
        if tokens:  # a position may have seemed attended because these tokens stand there
            ordinary = ~torch.isin(ids, torch.tensor([place.token for place in tokens]))
            attended = self._at_positions(ids, ordinary)
        return sorted([*tokens, *attended], key=lambda place: -place.rate)

    def _at_positions(self, ids: TokenRows, counted: Bool[Tensor, "text at"]) -> list[AttendedToken]:
        """Positions at which different tokens receive attention."""
        attended = []
        for position in range(1, ids.shape[1]):
            texts = counted[:, position]
            rate = _later_rate(self.above[self.attending][:, :, texts, position])
            if rate is not None and len(ids[texts, position].unique()) >= LATER_CASES:
                attended.append(AttendedToken(None, position, rate))
        return attended


def _texts_of(to_first: Bool[Tensor, "layer head text"], heads: Bool[Tensor, "layer head"]) -> Bool[Tensor, " text"]:
    """Texts in which most of the heads attend to the first token; all of them if nearly all are."""
    texts = reduce(to_first[heads].float(), "head text -> text", "mean") >= MOST_TEXTS
    return texts | (texts.float().mean() >= ALL_TEXTS)


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
    ids: TokenRows,
    eps: float = RATE_EPS,
    *,
    layers: int | None = None,
    progress: Progress = silent,
    batch: int = 8,
) -> AttentionReceived:
    """Run texts and record which heads attend to which position.

    The attention that position k receives is the mean of A[i, k] over all queries i >= k (Gu et al. 2024). Where a
    window hides k from some of them, it is the mean over the farther half of the window: in the nearer half, early
    positions get much of the attention of heads that have no preference.

    Args:
        target: The model.
        ids: Texts of equal length.
        eps: Threshold; 0.3 in the paper.
        layers: Number of layers to run. None: all.
        progress: Called after each batch.
        batch: Number of texts that run together.
    """
    depth = layers or target.n_layers
    reading = AttentionReading(target, ids, eps)
    for start in range(0, len(ids), batch):
        texts = slice(start, min(start + batch, len(ids)))
        with reading.listening(texts, depth):
            target.forward(ids[texts], upto=depth - 1)
        progress("sink rate", texts.stop, len(ids))
    return reading.received(depth)


class AttentionReading:
    """Takes down which heads attend to which position while texts run through a model."""

    def __init__(self, target: Target, ids: TokenRows, eps: float = RATE_EPS) -> None:
        self.target = target
        self.ids = ids
        self.eps = eps
        places = max(1, ids.shape[1] - LATER_QUERIES)
        self._above = torch.zeros(target.n_layers, target.n_heads, len(ids), places, dtype=torch.bool)
        self._learned = torch.zeros(target.n_layers, target.n_heads, len(ids), dtype=torch.bool)
        self._windows: list[int | None] = [None] * target.n_layers

    def listening(self, texts: slice, depth: int) -> AbstractContextManager[None]:
        """A context in which a pass over some of the texts is taken down, in the first layers."""
        read = partial(self._read, texts)
        return attention_rows(self.target, read, layers=list(range(depth)), rows_per_chunk=self.ids.shape[1])

    def _read(self, texts: slice, layer: int, _first: int, probs: Float[Tensor, "text head query key"]) -> None:
        length = probs.shape[-1]
        window = self._windows[layer] = seen_positions(probs)
        counted = probs
        places = torch.arange(length, device=probs.device)
        queries = length - places
        if window is not None:
            distance = places[:, None] - places
            farther = (distance >= window // 2) & (distance < window)
            counted = probs * farther
            queries = farther.sum(0).clamp(min=1)
        if window is None or window >= NARROWEST:
            received = reduce(counted, "text head query key -> head text key", "sum") / queries
            self._above[layer, :, texts] = (received[..., : self._above.shape[-1]] > self.eps).cpu()
        if self.target.adapter.learned_sinks:
            to_tokens = reduce(probs.sum(-1), "text head query -> head text", "mean")
            self._learned[layer, :, texts] = (1 - to_tokens > self.eps).cpu()

    def received(self, depth: int) -> AttentionReceived:
        """What was read in the first layers."""
        attending = torch.tensor(list(map(self.target.has_attention, range(depth))))
        windows = tuple(self._windows[:depth])
        return AttentionReceived(self.ids, self._above[:depth], self._learned[:depth], windows, attending)


def seen_positions(probs: Float[Tensor, "text head query key"]) -> int | None:
    """Positions that the last query sees; None if it sees all of them."""
    seen = (probs[:, :, -1] > 0).any(1).any(0)
    if bool(seen[0]):
        return None
    return int(seen.sum())


def attention_of_all(setup: Setup) -> tuple[AttentionReceived, SinkRate | None]:
    """Attention in all layers over many short texts, as the sink rate is defined.

    If the context is too short for these texts, the typical text is used, and there is no rate.
    """
    target = setup.target
    if target.max_positions is not None and target.max_positions < RATE_LENGTH:
        return attention_received(target, setup.ids), None
    texts, batch = RATE_TEXTS, max(1, BATCH_ELEMENTS // (RATE_LENGTH * target.d_mlp))
    if not target.resident:  # every batch reads all layers from disk again: there is one smaller batch
        texts, batch = RATE_TEXTS // 4, RATE_TEXTS
    ids = text_rows(setup.tokenizer, setup.text, texts, RATE_LENGTH, setup.bos)
    received = attention_received(target, ids, progress=setup.progress, batch=batch)
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
