"""Which neurons make the attention sink, verified by ablation (Yona et al. 2025, sections 4.2 and 4.4).

`find_sinks` goes one way: typical text shows where the spike is built and which heads attend (`walk`), the neurons of
these layers are ablated one by one (`neurons`) and in sets (`sets`), and what was found is explained here: what makes
the spike and what the heads need, by edits of components (`effects`). The result and its words are in `found`.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sinkscope.errors import SinkscopeError
from sinkscope.measure import Positive, Setup, measurement
from sinkscope.models.names import published_for
from sinkscope.models.target import Target, on_input, plain_weight
from sinkscope.sinks.first_token.effects import attending, attention_behind, carried_by, carriers, maker
from sinkscope.sinks.first_token.found import (
    LOST,
    RATE_EPS,
    AttentionSink,
    Carrier,
    CausalSet,
    FindSinks,
    LaterSink,
    Normalised,
    NormSpike,
    Published,
    RepeatedToken,
    Repeats,
    SinkPosition,
    Sites,
    Stage,
    Trigger,
)
from sinkscope.sinks.first_token.neurons import Proof, Repetition, prove, repeat_until_half
from sinkscope.sinks.first_token.sets import Found, causal_sets, later_sinks
from sinkscope.sinks.first_token.walk import LEAST, Received, Walk, listened, walk_far_enough
from sinkscope.sinks.tokens import pick_tokens, prefixes, room

_HELD = 0.9  # share of the squared norm that the counted dimensions hold
_TOKENS = 32  # typical tokens that the first one is compared with


@measurement(
    group="Sinks",
    figure="sinkscope.figures.first_token:draw_find_sinks",
    loading="enough",
    quick={"max_repeats": 64},
    scan={
        "order": 0,
        "seconds": [1.2, 1.5],
        "full": {"all_layers": True},
        "numbers": {
            "norm lost without the neurons": [
                "minimal.drop_sink_layer",
                "minimal.control",
                "minimal.control",
            ],
            "attention to the first token without them": [
                "attention.ablated",
                "attention.control",
                "attention.intact - attention.control",
            ],
            "first token's norm over the typical one": ["norm_spike.ratio", "typical_ratio", "typical_ratio"],
        },
        "facts": {
            "sink layer": "sink_layer",
            "neurons that make the spike": "minimal.sites",
            "what carries the attention sink": "attention_sink.carried_by",
            "matches what is published": "published.matches",
        },
    },
)
def find_sinks(
    setup: Setup,
    *,
    tokens: Sequence[str] | None = None,
    all_layers: bool = False,
    top_k: Positive = 8,
    max_repeats: Positive | None = None,
) -> FindSinks:
    """Find the layer and the neurons that make the attention sink, and verify each by ablation against a control.

    A model given by name is streamed: its layers are read upward, a few in memory at a time, until the first token's
    norm has stayed flat for a third of the layers. If the model has no sink, `sink_layer` is None.

    Args:
        tokens: Words to repeat, one token each. By default five words of the text.
        all_layers: Read every layer even if the model is not in memory: late stages, sink rate, the notebook's rule.
        top_k: Number of candidate neurons of the sink layer; each is ablated.
        max_repeats: Largest number of repetitions. By default 1,024, or what the context holds.

    Example:
        sinkscope find-sinks --model llama-2-7b --json sinks.json
    """
    ids = setup.ids
    if top_k > (width := setup.target.d_mlp):
        raise SinkscopeError(f"--top-k {top_k} is more than the {width} neurons of a layer; give at most that")
    limit = room(setup.target, max_repeats)
    words = pick_tokens(setup.tokenizer, ids, tokens, setup.seed)
    starts = prefixes(setup, words)
    unknown = getattr(setup.tokenizer, "unk_token_id", None)  # repeated unknown tokens would act as a repeated token
    share = 0.0 if unknown is None else float((ids[:, 1:] == unknown).float().mean())
    setup.record(max_repeats=limit, unknown_tokens=share)
    whole = all_layers or setup.target.resident
    proof, sets, repeated, at = Proof(), Found(), None, None
    while True:
        seen = walk_far_enough(setup, whole=whole)
        target, layer, depth, stages = setup.target, seen.sink_layer, len(seen.first), seen.stages
        heard, rate = listened(setup, depth, whole=whole)
        generator = torch.Generator().manual_seed(setup.seed)
        if layer is not None:
            if at != stages:  # after reading further layers these are often the same
                at = stages
                repeated = repeat_until_half(target, layer, words, starts, limit, setup.progress, seen.shared)
                proof = prove(target, ids, layer, top_k, generator, repeated.view, stages, seen.shared)
            sets = causal_sets(target, ids, seen, proof.neurons, heard.heads, generator)
        minimal = sets.minimal
        if whole or depth == target.n_layers or (minimal is not None and (minimal.heads_lost or 0.0) >= LOST):
            break
        whole = True  # the stages found do not carry the attention to the first token: read on
    later, zeroed = later_sinks(target, ids, seen, generator), tuple(n.site for n in proof.causal)
    attention = None if layer is None else attention_behind(target, ids, layer, zeroed, proof.controls)
    spike = norm_spike(target, ids, seen, minimal, later)
    unread = [None] * (seen.n_layers - depth)
    first, low, typical, high = ((*norms, *unread) for norms in (seen.first, *zip(*seen.typical, strict=True)))
    return FindSinks(
        norm_spike=spike,
        attention_sink=attention_sink(target, heard, spike, minimal, later),
        causal_sets=sets.sets,
        later_sinks=later,
        shared_dims=tuple(seen.shared),
        not_tried=sets.not_tried,
        sink_layer=layer,
        neurons=sets.neurons,
        set_drop=proof.set_drop,
        set_control_drop=proof.set_control_drop,
        stages=tuple(Stage(i, seen.mlp_first[i] / max(seen.first)) for i in stages),
        residual_dims=proof.dims,
        first_token_norm=first,
        typical_norm=typical,
        typical_low=low,
        typical_high=high,
        layers_read=depth,
        notebook_rule_layer=seen.notebook_layer,
        repeats=_repeats(target, words, repeated, limit),
        attention=attention,
        learned_sinks=target.adapter.learned_sinks,
        sink_rate=rate,
        published=_published(target, layer, proof),
    )


def _repeats(target: Target, words: list[int], repeated: Repetition | None, limit: int) -> Repeats:
    if repeated is None:
        return Repeats((), None, 0, limit)
    found = repeated.repeats
    rows = tuple(RepeatedToken(target.tokenizer.decode([w]), w, n) for w, n in zip(words, found, strict=True))
    got = [n for n in found if n is not None and n > 1]
    return Repeats(rows, float(median(got)) if got else None, found.count(None), limit)


def _published(target: Target, layer: int | None, proof: Proof) -> Published | None:
    known = published_for(target.name)
    if known is None:
        return None
    if known.neurons:
        found = {(n.layer, n.neuron) for n in proof.causal}
        return Published(known.source, layer in known.layers and set(known.neurons) <= found)
    if known.residual_dims:
        return Published(known.source, set(known.residual_dims) <= set(proof.dims))
    return None


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
    up, down = seen.steps
    return NormSpike(
        positions=tuple(sorted({0, *behind})),
        step_up=tuple(stages or up),
        step_down=tuple(down),
        ratio=max(a / max(b, LEAST) for a, b in zip(seen.spike, seen.usual, strict=True)),
        plateau=(standing[0], standing[-1]),
        made_by="MLP" if stages else maker(target, ids[:2, :32], standing[0], seen.shared),
        triggers=() if minimal is None else triggers(target, ids, minimal.numbers),
        normalised=normalised(target, ids, [i + 1 for i in standing if i + 1 < len(seen.first)]),
    )


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

    with target.hooks(*((target.sub(i, path), "pre", keep(i)) for i in dict.fromkeys(layers))):
        target.forward(ids, upto=max(layers))
    return seen


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
        rate, (carried, tried) = positions[0].rate, _carried_later(target, heard, positions[0].token, later)
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
    makes = spike is not None and any(c.needed and c.name in spike.makers for c in tried)
    return "spike" if makes else carried_by(tried), tried


def _carried_later(
    target: Target, heard: Received, name: str, later: Sequence[LaterSink]
) -> tuple[str | None, tuple[Carrier, ...]]:
    """The same of the first of the tokens behind the first position, whose name is `name`."""
    made = [s.set for s in later if s.token == name]
    if any(m is not None and (m.heads_lost or 0.0) >= LOST for m in made):
        return "spike", ()
    token, at, _ = heard.later[0]
    row = 0 if token is None else int((heard.ids[:, at] == token).nonzero()[0])
    there = attending(target, heard.ids[row], at, len(heard.above), RATE_EPS)
    tried = carriers(target, heard.ids[row : row + 1], there, at) if there else ()
    return carried_by(tried), tried
