"""The anatomy of a sink: which heads attend to it, what signals it to them, and what makes its norm spike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sinkscope.console import Progress, silent
from sinkscope.models.target import Target, on_input, plain_weight
from sinkscope.sinks.first_token.effects import Component, Edit, effects, has_key_bias, writers
from sinkscope.trace.attention import attention_rows

QUERIES = 16  # later queries a position needs: heads that attend to themselves favour the last positions
HEADS = 2  # a sink needs at least this many heads, and
SHARE = 0.01  # ... this share of all heads
LATER_SHARE = 0.05  # share for a position other than the first: a head that prefers one word is not a sink
SEEN = 3  # a later token must occur this often before it is judged
LOST = 0.5  # a head has lost a sink if this share of its attention is gone


@dataclass(frozen=True)
class Received:
    """Which heads attend to which positions of the texts `ids`.

    Attributes:
        ids: The texts, `[text pos]`.
        eps: The threshold on mean attention.
        above: Whether the mean attention from all queries at or after the position exceeds `eps`. The last positions of
            each text are left out because too few queries see them.
        learned: The same for the learned sink logit of each head.
    """

    ids: Int[Tensor, "text pos"]
    eps: float
    above: Bool[Tensor, "layer head text at"]
    learned: Bool[Tensor, "layer head text"]

    @property
    def rate(self) -> float:
        """The sink rate of position 0: the share of (layer, head) above eps, averaged over texts."""
        return float(self.above[..., 0].float().mean())

    def heads(self) -> list[tuple[int, int]]:
        """The (layer, head) pairs that attend to the first token in most texts; empty if too few for a sink."""
        return _enough(self.above[..., 0].float().mean(-1) >= 0.5)

    def learned_heads(self) -> list[tuple[int, int]]:
        """The (layer, head) pairs whose learned sink logit exceeds eps in most texts; empty if there are too few."""
        return _enough(self.learned.float().mean(-1) >= 0.5)

    def later(self) -> list[tuple[int | None, int, float]]:
        """Positions behind the first that receive attention: (token, first position where it was seen, share of heads).

        The token is None if the position receives attention regardless of the token there.
        """
        seen = self.ids[:, : self.above.shape[-1]]
        tokens: dict[int | None, tuple[int, float]] = {}
        for token in seen[:, 1:].unique().tolist():
            where = seen == token
            where[:, 0] = False
            if share := _share(self.above[:, :, where]):
                tokens[token] = (int(where.any(0).nonzero()[0]), share)
        found = [(token, *rest) for token, rest in tokens.items()]
        others = ~torch.isin(seen, torch.tensor([t for t in tokens if t is not None]))
        for at in range(1, seen.shape[1]):
            if share := _share(self.above[:, :, others[:, at], at]):
                found.append((None, at, share))
        return sorted(found, key=lambda place: -place[2])


def _share(above: Bool[Tensor, "layer head n"]) -> float:
    """Share of heads above the bar in most of `n` cases; 0 where the cases or the heads are too few for a sink."""
    steady = above.float().mean(-1) >= 0.5
    share = float(steady.float().mean())
    return share if above.shape[-1] >= SEEN and int(steady.sum()) >= HEADS and share >= LATER_SHARE else 0.0


def _enough(steady: Bool[Tensor, "layer head"]) -> list[tuple[int, int]]:
    heads = [(int(layer), int(head)) for layer, head in steady.nonzero().tolist()]
    return heads if len(heads) >= HEADS and len(heads) >= SHARE * steady.numel() else []


@torch.no_grad()
def received(
    target: Target,
    ids: Int[Tensor, "text pos"],
    eps: float,
    *,
    layers: int | None = None,
    progress: Progress = silent,
    batch: int = 8,
) -> Received:
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
    count, length = target.n_layers if layers is None else layers, ids.shape[1]
    places = max(1, length - QUERIES)
    above = torch.zeros(count, target.n_heads, len(ids), places, dtype=torch.bool)
    learned = torch.zeros(count, target.n_heads, len(ids), dtype=torch.bool)
    for start in range(0, len(ids), batch):
        rows = ids[start : start + batch]
        part = slice(start, start + len(rows))

        def note(layer: int, _first: int, probs: Tensor, texts: slice = part) -> None:
            mean = probs.sum(-2)[..., :places] / torch.arange(length, length - places, -1, device=probs.device)
            above[layer, :, texts] = (mean > eps).transpose(0, 1).cpu()
            if target.adapter.learned_sinks:
                learned[layer, :, texts] = (1 - probs.sum(-1).mean(-1) > eps).transpose(0, 1).cpu()

        end = target.hooks((target.layers[count - 1], "post", lambda *_: target.stop()))
        with attention_rows(target, note, layers=list(range(count)), rows_per_chunk=length), end:
            target.forward(rows)
        progress("sink rate", min(start + batch, len(ids)), len(ids))
    return Received(ids, eps, above, learned)


@dataclass(frozen=True)
class Carrier:
    """A candidate for the signal that the heads of a sink read.

    Attributes:
        name: The component, such as "spike", "attention of layer 0" or "position embedding".
        heads_lost: Share of the sink's heads that lose at least half of their attention to the first token without it.
        drop: Share of the attention to the first token that is lost without it, averaged over these heads.
    """

    name: str
    heads_lost: float
    drop: float


def losses(
    attention: Float[Tensor, "edit text layer head"],
    intact: Float[Tensor, "text layer head"],
    heads: Sequence[tuple[int, int]],
) -> tuple[list[float], list[float]]:
    """For each edit, the share of `heads` that lose half of their attention to the first token, and the mean drop."""
    layer, head = torch.tensor(heads).T
    drops = 1 - attention[:, :, layer, head].median(1).values / intact[:, layer, head].median(0).values
    return (drops >= LOST).float().mean(1).tolist(), drops.mean(1).tolist()


def carriers(
    target: Target, ids: Int[Tensor, "text pos"], heads: Sequence[tuple[int, int]], at: int = 0
) -> list[Carrier]:
    """Replace each component at the position by what it writes at a later one, to see whose absence ends the sink.

    "position" is what remains when everything written at the position is replaced.
    """
    last = max(layer for layer, _ in heads)
    parts = writers(target, last)
    biases = [Component("key bias", i) for i in range(last + 1) if has_key_bias(target, i)]
    sets = [(c,) for c in parts] + ([tuple(biases)] if biases else [])
    edits = [Edit(swap=some) for some in (*sets, tuple(parts))]
    source = (at + ids.shape[1]) // 2
    seen = effects(target, ids, edits, at=at, source=source, upto=last, attention=True)
    assert seen.attention is not None and seen.intact_attention is not None
    lost, drops = losses(seen.attention, seen.intact_attention, heads)
    names = ["key bias" if s[0].kind == "key bias" else str(s[0]) for s in sets]
    found = [Carrier(*row) for row in zip(names, lost, drops, strict=False)]
    return [*found, Carrier("position", 1 - lost[-1], 1 - drops[-1])]


def carried_by(found: Sequence[Carrier]) -> str | None:
    """The component that most heads of the sink need; of several, the one nearest to the heads. None if no single one.

    What an attention layer or an MLP writes without making a spike is called the mark.
    """
    needed = [c.name for c in found if c.heads_lost >= LOST]
    if "key bias" in needed:
        return "key bias"
    if any("layer" in name for name in needed):
        return "mark"
    return next((name for name in needed if "embed" in name), next(iter(needed), None))


_HELD = 0.9  # share of the squared norm that the counted dimensions hold
_TOKENS = 32  # typical tokens that the first one is compared with


@dataclass(frozen=True)
class Trigger:
    """A neuron's gate times up as a quadratic form of its input, and how well tokens match its best direction.

    Where the activation function is close to linear, a neuron computes about `(g x)(u x)` for an input x. Over inputs
    of a fixed length its largest value is `(|g| |u| + g u) / 2` times the squared length. `first` and `typical` are the
    shares of that maximum that the first token and the median typical token reach.
    """

    layer: int
    neuron: int
    first: float
    typical: float


@dataclass(frozen=True)
class Normalised:
    """A token's residual stream after the norm in front of the attention, averaged over the layers of the plateau.

    Attributes:
        dims: Number of residual dimensions that hold 90 % of the squared norm at the first token.
        typical_dims: The same number at typical tokens.
        cosine: Cosine between neighbouring layers at the first token. Near 1 the normalised stream is constant.
        typical_cosine: The same cosine at typical tokens.
    """

    dims: float
    typical_dims: float
    cosine: float
    typical_cosine: float


def maker(target: Target, ids: Int[Tensor, "text pos"], layer: int, without: Sequence[int]) -> str | None:
    """The component without which the first token's spike after `layer` is gone; None if there is no single one."""
    candidates = writers(target, layer + 1)
    edits = [Edit(swap=(c,)) for c in candidates]
    seen = effects(target, ids, edits, source=ids.shape[1] // 2, upto=layer, without=without)
    drops = (1 - seen.norms[..., layer] / seen.intact_norms[:, layer]).median(1).values
    best = int(drops.argmax())
    return str(candidates[best]) if float(drops[best]) >= 0.5 else None


@torch.no_grad()
def triggers(target: Target, ids: Int[Tensor, "row pos"], sites: Sequence[tuple[int, ...]]) -> tuple[Trigger, ...]:
    """How well the first token's input matches each neuron; empty for MLPs without a gate and for mixtures."""
    rows: list[Trigger] = []
    gate, up = target.adapter.gate, target.adapter.up
    if gate is None or up is None:
        return ()
    for layer, *_, neuron in sites:
        if target.is_mixture(layer):
            continue
        inputs = _read_by(target, ids, [layer], up).get(layer)
        with target.loaded(layer):
            weights = [plain_weight(target.sub(layer, path)) for path in (gate, up)]
            if inputs is None or weights[0] is None or weights[1] is None:
                continue
            g, u = (w[neuron].float() for w in weights if w is not None)
        best = (g.norm() * u.norm() + g @ u) / 2
        reached = (inputs @ g) * (inputs @ u) / (best * inputs.square().sum(-1))
        typical = float(reached[:, 1:].median())
        rows.append(Trigger(layer, neuron, float(reached[:, 0].median()), typical))
    return tuple(rows)


@torch.no_grad()
def normalised(target: Target, ids: Int[Tensor, "row pos"], standing: Sequence[int], depth: int) -> Normalised | None:
    """What the norms of the layers behind a plateau do to the first token; None if no layer exposes it.

    `depth` is the number of layers that may be run.
    """
    path = target.adapter.k or target.adapter.fused_qkv
    layers = [i + 1 for i in standing if i + 1 < depth]
    seen = _read_by(target, ids[:1, : _TOKENS + 1], layers, path) if layers and path else {}
    if not seen:
        return None
    stacked = torch.stack([seen[i][0] for i in sorted(seen)])  # layer pos d_model
    dims = _holding(stacked).float().mean(0)
    cosine = (
        torch.cosine_similarity(stacked[1:], stacked[:-1], dim=-1).mean(0)
        if len(stacked) > 1
        else torch.ones(stacked.shape[1])
    )
    return Normalised(float(dims[0]), float(dims[1:].median()), float(cosine[0]), float(cosine[1:].median()))


def _holding(vectors: Float[Tensor, "... d_model"]) -> Int[Tensor, ...]:
    """How many of the largest dimensions hold 90 % of the squared norm."""
    squares = vectors.square().sort(-1, descending=True).values
    return (squares.cumsum(-1) < _HELD * squares.sum(-1, keepdim=True)).sum(-1) + 1


def _read_by(
    target: Target, ids: Int[Tensor, "row pos"], layers: Sequence[int], path: str
) -> dict[int, Float[Tensor, "row pos d"]]:
    """What a part of each of these layers reads; a part that a bridge replaces reads nothing."""
    seen: dict[int, Tensor] = {}

    def keep(layer: int) -> Any:
        return on_input(lambda read: seen.update({layer: read.detach().reshape(*ids.shape, -1).float()}))

    end = (target.layers[max(layers)], "post", lambda *_: target.stop())
    with target.hooks(*((target.sub(i, path), "pre", keep(i)) for i in layers), end):
        target.forward(ids)
    return seen
