"""Which neurons make the attention sink, verified by ablation (Yona et al. 2025, sections 4.2 and 4.4).

`find_sinks` works in this order: the layers are walked upward (`walk`), the attention that positions receive is read
(`anatomy`), the neurons of the stages are ablated one by one and in sets (`ablation`, in passes of `effects`), and the
component that makes and the one that carries the sink are determined (`anatomy`). The result is in `found`.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

import torch

from sinkscope.errors import SinkscopeError
from sinkscope.measure import Positive, Setup, measurement
from sinkscope.models.names import published_for
from sinkscope.models.target import Target
from sinkscope.sinks.first_token.ablation import Found, Proof, attention_without, causal_sets, later_sinks, prove
from sinkscope.sinks.first_token.anatomy import attention_sink, listened, norm_spike
from sinkscope.sinks.first_token.found import LOST, FindSinks, Published, RepeatedToken, Repeats, Stage
from sinkscope.sinks.first_token.walk import Repetition, repeat_until_half, walk_far_enough
from sinkscope.sinks.tokens import pick_tokens, prefixes, room


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
        if layer is not None and at != stages:  # after reading further layers these are often the same
            at = stages
            repeated = repeat_until_half(target, layer, words, starts, limit, setup.progress, seen.shared)
            proof = prove(target, ids, layer, top_k, generator, repeated.view, stages, seen.shared)
        if layer is not None:
            sets = causal_sets(target, ids, seen, proof.neurons, heard.heads, generator)
        minimal = sets.minimal
        if whole or depth == target.n_layers or (minimal is not None and (minimal.heads_lost or 0.0) >= LOST):
            break
        whole = True  # the stages found do not carry the attention to the first token: read on
    later = later_sinks(target, ids, seen, generator)
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
        neurons=(*proof.neurons, *sets.added),
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
        attention=None if layer is None else attention_without(target, ids, layer, proof),
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
