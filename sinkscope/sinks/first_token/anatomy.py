"""The anatomy of a sink: which heads attend to it, what signals it to them, and what makes its norm spike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sinkscope.console import Progress, silent
from sinkscope.measure import Setup
from sinkscope.models.target import Target, on_input, plain_weight
from sinkscope.sinks.first_token.effects import Component, Edit, attending, effects, has_key_bias, writers
from sinkscope.sinks.first_token.found import (
    HEADS,
    LOST,
    RATE_EPS,
    AttentionSink,
    Carrier,
    CausalSet,
    LaterSink,
    Normalised,
    NormSpike,
    SinkPosition,
    SinkRate,
    Sites,
    Trigger,
)
from sinkscope.sinks.first_token.walk import LEAST, Walk
from sinkscope.text import text_rows
from sinkscope.trace.attention import attention_rows

RATE_LENGTH, RATE_TEXTS = 64, 100  # texts over which the sink rate is defined (Gu et al. 2024)
QUERIES = 16  # later queries a position needs: heads that attend to themselves favour the last positions
SHARE = 0.01  # a sink needs at least this share of all heads, and at least HEADS of them
LATER_SHARE = 0.05  # share for a position other than the first: a head that prefers one word is not a sink
SEEN = 3  # a later token must occur this often before it is judged
_HELD = 0.9  # share of the squared norm that the counted dimensions hold
_TOKENS = 32  # typical tokens that the first one is compared with


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

    @cached_property
    def heads(self) -> list[tuple[int, int]]:
        """The (layer, head) pairs that attend to the first token in most texts; empty if too few for a sink."""
        return _enough(self.above[..., 0].float().mean(-1) >= 0.5)

    @cached_property
    def learned_heads(self) -> list[tuple[int, int]]:
        """The (layer, head) pairs whose learned sink logit exceeds eps in most texts; empty if there are too few."""
        return _enough(self.learned.float().mean(-1) >= 0.5)

    @cached_property
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


def listened(setup: Setup, depth: int, *, whole: bool) -> tuple[Received, SinkRate | None]:
    """Attention over many short texts, as the sink rate is defined; over the typical text where these do not fit.

    Of a model that is not read `whole`, the typical text is run up to layer `depth`, and there is no rate.
    """
    target, ids = setup.target, setup.ids
    if not whole or (target.max_positions or RATE_LENGTH) < RATE_LENGTH:
        return received(target, ids, RATE_EPS, layers=depth), None
    # A batch takes 128 MB at its widest activation. Layers read from disk are read once, so there is one smaller batch.
    fitting = max(1, (1 << 25) // (RATE_LENGTH * target.d_mlp))
    texts, batch = (RATE_TEXTS, fitting) if target.resident else (RATE_TEXTS // 4, RATE_TEXTS)
    ids = text_rows(setup.tokenizer, setup.text, texts, RATE_LENGTH, setup.bos)
    heard = received(target, ids, RATE_EPS, progress=setup.progress, batch=batch)
    return heard, SinkRate(RATE_EPS, RATE_LENGTH, len(ids), heard.rate)


def carriers(
    target: Target, ids: Int[Tensor, "text pos"], heads: Sequence[tuple[int, int]], at: int = 0
) -> tuple[Carrier, ...]:
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
    lost, drops = seen.lost(heads)
    names = ["key bias" if s[0].kind == "key bias" else str(s[0]) for s in sets]
    found = [Carrier(*row) for row in zip(names, lost, drops, strict=False)]
    return (*found, Carrier("position", 1 - lost[-1], 1 - drops[-1]))


def carried_by(found: Sequence[Carrier]) -> str | None:
    """The component that most heads of the sink need; of several, the one nearest to the heads. None if no single one.

    What an attention layer or an MLP writes without making a spike is called the mark.
    """
    needed = [c.name for c in found if c.needed]
    if "key bias" in needed:
        return "key bias"
    if any("layer" in name for name in needed):
        return "mark"
    return next((name for name in needed if "embed" in name), next(iter(needed), None))


def attention_sink(
    target: Target,
    heard: Received,
    spike: NormSpike | None,
    minimal: CausalSet | None,
    later: Sequence[LaterSink],
) -> AttentionSink | None:
    """The positions that receive attention, and what carries it; None if no position does.

    Args:
        target: The model.
        heard: The attention that positions receive.
        spike: The norm spike.
        minimal: The smallest set of neurons that makes the spike of the first token.
        later: Tokens behind the first position whose norm stands out.
    """
    if not (heard.heads or heard.learned_heads or heard.later):
        return None
    decode = target.tokenizer.decode
    positions = [SinkPosition(0, decode([int(heard.ids[0, 0])]), heard.rate)] if heard.heads else []
    positions += [SinkPosition(at, "" if token is None else decode([token]), rate) for token, at, rate in heard.later]
    if heard.heads:
        rate, (carried, tried) = heard.rate, _carried_first(target, heard, spike, minimal)
    elif heard.learned_heads:
        rate, carried, tried = float(heard.learned.float().mean()), "learned logits", ()
    else:
        rate, (carried, tried) = positions[0].rate, _carried_later(target, heard, positions[0], later)
    by_layer = tuple(heard.above[..., 0].float().mean((1, 2)).tolist())
    return AttentionSink(rate, RATE_EPS, tuple(positions), len(by_layer), carried, by_layer, tried)


def _carried_first(
    target: Target, heard: Received, spike: NormSpike | None, minimal: CausalSet | None
) -> tuple[str | None, tuple[Carrier, ...]]:
    """What carries the sink at the first token, and what was tried where its spike does not."""
    if minimal is not None:
        behind = sum(i > minimal.sites[0].layer for i, _ in heard.heads) / len(heard.heads)
        if (minimal.heads_lost or 0.0) * behind >= LOST:
            return "spike", ()
    tried = carriers(target, heard.ids[:2, :48], heard.heads)
    makers: list[str | None] = []
    if spike is not None and 0 in spike.positions:
        makers = [f"MLP of layer {i}" for i in spike.step_up] if spike.made_by == "MLP" else [spike.made_by]
    return "spike" if any(c.needed and c.name in makers for c in tried) else carried_by(tried), tried


def _carried_later(
    target: Target, heard: Received, place: SinkPosition, later: Sequence[LaterSink]
) -> tuple[str | None, tuple[Carrier, ...]]:
    """The same of the first of the tokens behind the first position."""
    made = [s.set for s in later if s.token == place.token]
    if any(m is not None and (m.heads_lost or 0.0) >= LOST for m in made):
        return "spike", ()
    token, at, _ = heard.later[0]
    row = 0 if token is None else int((heard.ids[:, at] == token).nonzero()[0])
    there = attending(target, heard.ids[row], at, len(heard.above), RATE_EPS)
    tried = carriers(target, heard.ids[row : row + 1], there, at) if there else ()
    return carried_by(tried), tried


def norm_spike(
    target: Target, ids: Int[Tensor, "row pos"], seen: Walk, minimal: CausalSet | None, later: Sequence[LaterSink]
) -> NormSpike | None:
    """The positions whose norm stands out, and what makes the spike of the first token; None if no norm stands out.

    Args:
        target: The model.
        ids: Typical text.
        seen: The walk.
        minimal: The smallest set of neurons that makes the spike of the first token.
        later: Tokens behind the first position whose norm stands out.
    """
    standing, stages, behind = seen.standing, seen.stages, {one.position for one in later}
    if not standing:
        ratio = max((one.ratio for one in later), default=None)
        return None if ratio is None else NormSpike(tuple(sorted(behind)), (), (), ratio, None, None)
    return NormSpike(
        positions=tuple(sorted({0, *behind})),
        step_up=tuple(stages or seen.steps(1)),
        step_down=tuple(seen.steps(-1)),
        ratio=max(a / max(b, LEAST) for a, b in zip(seen.spike, seen.usual, strict=True)),
        plateau=(standing[0], standing[-1]),
        made_by="MLP" if stages else maker(target, ids[:2, :32], standing[0], seen.shared),
        triggers=() if minimal is None else triggers(target, ids, minimal.numbers),
        normalised=normalised(target, ids, [i + 1 for i in standing if i + 1 < len(seen.first)]),
    )


def maker(target: Target, ids: Int[Tensor, "text pos"], layer: int, without: Sequence[int]) -> str | None:
    """The component without which the first token's spike after `layer` is gone; None if there is no single one."""
    candidates = writers(target, layer + 1)
    edits = [Edit(swap=(c,)) for c in candidates]
    drops = effects(target, ids, edits, source=ids.shape[1] // 2, upto=layer, without=without).drops(layer)
    best = int(drops.argmax())
    return str(candidates[best]) if float(drops[best]) >= 0.5 else None


@torch.no_grad()
def triggers(target: Target, ids: Int[Tensor, "row pos"], sites: Sites) -> tuple[Trigger, ...]:
    """How well the first token's input matches each neuron; empty for MLPs without a gate and for mixtures."""
    gate, up = target.adapter.gate, target.adapter.up
    if gate is None or up is None:
        return ()
    rows: list[Trigger] = []
    read = _read_by(target, ids, [layer for layer, *_ in sites if not target.is_mixture(layer)], up)
    for layer, *_, neuron in sites:
        if layer not in read:
            continue
        inputs = read[layer]
        with target.loaded(layer):
            weights = [plain_weight(target.sub(layer, path)) for path in (gate, up)]
            if weights[0] is None or weights[1] is None:
                continue
            g, u = (w[neuron].float() for w in weights if w is not None)
        best = (g.norm() * u.norm() + g @ u) / 2
        reached = (inputs @ g) * (inputs @ u) / (best * inputs.square().sum(-1))
        rows.append(Trigger(layer, neuron, float(reached[:, 0].median()), float(reached[:, 1:].median())))
    return tuple(rows)


@torch.no_grad()
def normalised(target: Target, ids: Int[Tensor, "row pos"], layers: Sequence[int]) -> Normalised | None:
    """What the norms of the layers behind a plateau do to the first token; None if no layer exposes it."""
    path = target.adapter.k or target.adapter.fused_qkv
    seen = _read_by(target, ids[:1, : _TOKENS + 1], layers, path) if path else {}
    if not seen:
        return None
    stacked = torch.stack([seen[i][0] for i in sorted(seen)])  # layer pos d_model
    squares = stacked.square().sort(-1, descending=True).values
    few = squares.cumsum(-1) < _HELD * squares.sum(-1, keepdim=True)
    dims, cosine = (few.sum(-1) + 1).float().mean(0), torch.ones(stacked.shape[1])
    if len(stacked) > 1:
        cosine = torch.cosine_similarity(stacked[1:], stacked[:-1], dim=-1).mean(0)
    return Normalised(float(dims[0]), float(dims[1:].median()), float(cosine[0]), float(cosine[1:].median()))


def _read_by(
    target: Target, ids: Int[Tensor, "row pos"], layers: Sequence[int], path: str
) -> dict[int, Float[Tensor, "row pos d"]]:
    """What a part of each of these layers reads; a part that a bridge replaces reads nothing."""
    seen: dict[int, Tensor] = {}
    if not layers:
        return seen

    def keep(layer: int) -> Any:
        return on_input(lambda read: seen.update({layer: read.detach().reshape(*ids.shape, -1).float()}))

    end = (target.layers[max(layers)], "post", lambda *_: target.stop())
    with target.hooks(*((target.sub(i, path), "pre", keep(i)) for i in dict.fromkeys(layers)), end):
        target.forward(ids)
    return seen
