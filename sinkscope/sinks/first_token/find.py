"""Which neurons make the attention sink, verified by ablation (Yona et al. 2025, sections 4.2 and 4.4).

`find_sinks` goes one way. Typical text shows in which layers the first token's norm rises (`layer_scan`) and which
heads attend to it (`attention_received`). The neurons of these layers are zeroed one by one (`neurons`) and in sets
(`sets`). Then components are replaced to see what the heads need (`carriers`). All edits are rows of one pass
(`effects`).
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from sinkscope.errors import SinkscopeError
from sinkscope.measure import Positive, Setup, measurement
from sinkscope.measure.evidence import NEEDED
from sinkscope.measure.margin import margin_of
from sinkscope.models.names import published_for
from sinkscope.sinks.first_token.attention_received import (
    AttentionReading,
    AttentionReceived,
    attention_of_all,
    attention_received,
    with_long_texts,
)
from sinkscope.sinks.first_token.carriers import carried_by, carriers, spike_maker
from sinkscope.sinks.first_token.context import SinkContext
from sinkscope.sinks.first_token.effects import attending_heads
from sinkscope.sinks.first_token.layer_scan import STEP_SHARE, first_median, typical_quantiles
from sinkscope.sinks.first_token.neurons import RepeatedSinks, VerifiedNeurons, repeat_until_half, verify_neurons
from sinkscope.sinks.first_token.result import (
    RATE_EPS,
    SHORT,
    AttentionSink,
    Carrier,
    CausalSet,
    FindSinks,
    LaterSink,
    NormSpike,
    PublishedSink,
    RepeatedToken,
    RepeatsNeeded,
    SinkPosition,
    Stage,
)
from sinkscope.sinks.first_token.sets import CANDIDATES, CausalSets, causal_sets, later_sinks, repetition_spike
from sinkscope.sinks.tokens import pick_tokens, prefixes, repetition_limit

CARRIER_TEXTS = 2
CARRIER_LENGTH = 48  # typical text in which components are replaced


@measurement(
    group="Sinks",
    figure="sinkscope.sinks.first_token.figure:draw",
    loading="enough",
    quick={"max_repeats": 64},
)
def find_sinks(
    setup: Setup,
    *,
    tokens: Sequence[str] | None = None,
    all_layers: bool = False,
    top_k: Positive = CANDIDATES,
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
    width = setup.target.d_mlp
    if top_k > width:
        raise SinkscopeError(f"--top-k {top_k} is more than the {width} neurons of a layer; give at most that")
    words = pick_tokens(setup.tokenizer, setup.ids, tokens, setup.seed)
    first_tokens = prefixes(setup, words)
    limit = repetition_limit(setup.target, max_repeats)
    setup.record(max_repeats=limit, unknown_tokens=_unknown_share(setup))

    whole = all_layers or setup.target.resident
    verified_stages = None
    repeated = None
    verified = VerifiedNeurons()
    while True:
        # In which layers is the spike built, and which heads attend to the first token?
        reading = None
        if not whole and len(setup.target.layers) == setup.target.n_layers:  # no more layers are loaded meanwhile
            reading = AttentionReading(setup.target, setup.ids)
        context = SinkContext.read(setup, whole=whole, reading=reading)
        scan = context.scan
        depth = len(scan.layers)
        sink_rate = None
        if whole:
            received, sink_rate = attention_of_all(setup)
        elif reading is not None:
            received = reading.received(depth)
        else:
            received = attention_received(setup.target, setup.ids, layers=depth)

        # Which neurons of these layers build it, alone and in sets?
        sets = CausalSets()
        if scan.stages:
            if scan.stages != verified_stages:  # after reading further layers they are often the same
                repeated = repeat_until_half(context, words, first_tokens, limit, setup.progress)
                verified = verify_neurons(context, top_k, repeated.view)
                verified_stages = scan.stages
            sets = causal_sets(context, verified.neurons, received.heads)

        # If they do not carry the attention to the first token, the layers read were too few.
        carries_attention = sets.minimal is not None and sets.minimal.carries_attention
        if whole or depth == scan.n_layers or carries_attention:
            break
        whole = True

    # What makes the spikes, what do the heads need, and does repetition go through the same neurons?
    received, later, lengths = _in_longer_texts(setup, context, received)
    spike = norm_spike(context, later)
    sink = attention_sink(context, received, spike, sets.minimal, later)
    repetition = None
    if repeated is not None and sets.minimal is not None:
        repetition = repetition_spike(context, words, first_tokens, repeated, sets.minimal, limit)

    unread = [None] * (scan.n_layers - depth)
    low, typical, high = typical_quantiles(scan.whole_norms).tolist()
    shares = (first_median(scan.mlp_norms).double() / max(scan.first_norm)).tolist()
    return FindSinks(
        norm_spike=spike,
        attention_sink=sink,
        causal_sets=sets.sets,
        later_sinks=later,
        repetition=repetition,
        lengths=lengths,
        shared_dims=tuple(scan.shared_dims),
        sink_layer=scan.sink_layer,
        neurons=sets.neurons,
        set_drop=verified.set_drop,
        set_control_drop=verified.set_control_drop,
        stages=tuple(Stage(stage, shares[stage]) for stage in scan.stages),
        residual_dims=verified.massive_dims,
        first_token_norm=(*first_median(scan.whole_norms).tolist(), *unread),
        typical_norm=(*typical, *unread),
        typical_low=(*low, *unread),
        typical_high=(*high, *unread),
        layers_read=depth,
        notebook_rule_layer=scan.notebook_layer,
        repeats=_repeats_needed(setup, words, repeated, limit),
        sink_rate=sink_rate,
        published=_published(setup.target.name, scan.sink_layer, verified),
    )


def _in_longer_texts(
    setup: Setup, context: SinkContext, received: AttentionReceived
) -> tuple[AttentionReceived, tuple[LaterSink, ...], tuple[int, ...]]:
    """Attention and later sinks, those of longer texts where no position of the texts is attended, and the lengths."""
    depth = len(context.scan.layers)
    later = later_sinks(context)
    lengths = (received.ids.shape[1],)
    if depth < context.scan.n_layers or received.attended:
        return received, later, lengths
    longer = with_long_texts(setup)
    if longer is None:
        return received, later, lengths
    reading = AttentionReading(longer.target, longer.ids)
    in_longer = SinkContext.read(longer, whole=True, reading=reading)
    later = later or later_sinks(in_longer)
    in_longer_texts = reading.received(depth)
    if in_longer_texts.attended:
        received = in_longer_texts
    return received, later, (*lengths, longer.ids.shape[1])


def norm_spike(context: SinkContext, later: Sequence[LaterSink]) -> NormSpike | None:
    """The positions whose norm stands out, and what makes the spike of the first token; None if no norm stands out.

    Args:
        context: The model and its layer scan.
        later: Tokens behind the first position whose norm stands out.
    """
    scan = context.scan
    positions = {sink.position for sink in later}
    if not scan.spike_layers:
        if not later:
            return None
        largest = max(sink.ratio for sink in later)
        return NormSpike(tuple(sorted(positions)), (), (), largest, plateau=None, made_by=None)
    step_up = scan.stages
    made_by = "MLP"
    if not scan.stages:
        step_up = (scan.growth >= STEP_SHARE).nonzero().flatten().tolist()
        made_by = spike_maker(context)
    return NormSpike(
        positions=tuple(sorted({0, *positions})),
        step_up=tuple(step_up),
        step_down=tuple((scan.growth <= -STEP_SHARE).nonzero().flatten().tolist()),
        ratio=float(scan.ratios.max()),
        plateau=(scan.spike_layers[0], scan.spike_layers[-1]),
        made_by=made_by,
        begun_by=spike_maker(context) if scan.norm_before else None,
        margin=margin_of(scan.ratios_by_text.numpy()),
        share=context.share,
    )


def attention_sink(
    context: SinkContext,
    received: AttentionReceived,
    spike: NormSpike | None,
    minimal: CausalSet | None,
    later: Sequence[LaterSink],
) -> AttentionSink | None:
    """The positions that receive attention, and what carries it; None if no position does.

    Args:
        context: The model.
        received: The attention that positions receive.
        spike: The norm spike.
        minimal: The smallest set of neurons that makes the spike of the first token.
        later: Tokens behind the first position whose norm stands out.
    """
    decode = context.target.tokenizer.decode
    positions = []
    if received.heads:
        token = int(received.ids[received.texts][0, 0])
        rate = float(received.above[:, :, received.texts, 0].float().mean())
        positions.append(SinkPosition(0, decode([token]), rate))
    for place in received.later:
        token = ""
        if place.token is not None:
            token = decode([place.token])
        positions.append(SinkPosition(place.position, token, place.rate))
    carrier = None
    tried = ()
    share = 1.0
    learned_rate = 0.0
    if received.heads:
        share = received.share
        if received.learned_heads:
            learned_rate = received.learned_rate
        if _spike_carries(received, minimal):
            carrier = "spike"
        else:
            texts = received.ids[received.texts][:CARRIER_TEXTS]
            if texts.shape[1] <= SHORT:
                texts = texts[:, :CARRIER_LENGTH]
            else:
                texts = texts[:1]  # a sink of long texts shows in the whole text only
            tried = carriers(context.target, texts, received.heads)
            needed = {candidate.name for candidate in tried if candidate.needed}
            carrier = "spike" if spike is not None and needed & {*spike.makers} else carried_by(tried)
    elif received.learned_heads:
        carrier = "learned logits"
    elif received.later:
        if any(sink.carries_attention_to(positions[0]) for sink in later):
            carrier = "spike"
        else:
            tried = _carriers_of_later(context, received)
            carrier = carried_by(tried)
    else:
        return None
    by_layer = received.rate_by_layer
    return AttentionSink(
        rate=received.learned_rate if carrier == "learned logits" else positions[0].rate,
        eps=RATE_EPS,
        positions=tuple(positions),
        layers_read=len(by_layer),
        carried_by=carrier,
        by_layer=by_layer,
        carriers=tried,
        share=share,
        length=received.ids.shape[1],
        window=received.window,
        learned_rate=learned_rate,
    )


def _spike_carries(received: AttentionReceived, minimal: CausalSet | None) -> bool:
    """Whether at least half of the heads that attend to the first token lose it without the spike."""
    if minimal is None or minimal.heads_lost is None:
        return False
    behind = [layer for layer, _ in received.heads if layer > minimal.sites[0].layer]
    return minimal.heads_lost * len(behind) / len(received.heads) >= NEEDED


def _carriers_of_later(context: SinkContext, received: AttentionReceived) -> tuple[Carrier, ...]:
    """What was tried for the first of the tokens behind the first position."""
    place = received.later[0]
    row = 0
    if place.token is not None:
        row = int((received.ids[:, place.position] == place.token).nonzero()[0])
    text = received.ids[row : row + 1]
    heads = attending_heads(context.target, text, place.position, range(len(received.above)))
    if not heads:
        return ()
    return carriers(context.target, text, heads, place.position)


def _unknown_share(setup: Setup) -> float:
    """Share of the text that the tokenizer does not know; unknown tokens in a row would act as a repeated token."""
    unknown = getattr(setup.tokenizer, "unk_token_id", None)
    if unknown is None:
        return 0.0
    return float((setup.ids[:, 1:] == unknown).float().mean())


def _repeats_needed(setup: Setup, words: list[int], repeated: RepeatedSinks | None, limit: int) -> RepeatsNeeded:
    """The median leaves out words whose first occurrence is a sink already."""
    if repeated is None:
        return RepeatsNeeded((), None, 0, limit)
    pairs = zip(words, repeated.repeats, strict=True)
    rows = [RepeatedToken(setup.tokenizer.decode([word]), word, count) for word, count in pairs]
    by_repetition = [count for count in repeated.repeats if count is not None and count > 1]
    middle = float(median(by_repetition)) if by_repetition else None
    return RepeatsNeeded(tuple(rows), middle, repeated.repeats.count(None), limit)


def _published(name: str, layer: int | None, verified: VerifiedNeurons) -> PublishedSink | None:
    published = published_for(name)
    if published is None:
        return None
    matches = {*verified.massive_dims}.issuperset(published.residual_dims)
    if published.neurons:
        causal = {(neuron.layer, neuron.neuron) for neuron in verified.causal}
        matches = layer in published.layers and causal.issuperset(published.neurons)
    elif not published.residual_dims:
        return None
    return PublishedSink(published.source, matches)
