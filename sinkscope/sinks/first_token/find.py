"""Which neurons make the attention sink, verified by ablation (Yona et al. 2025, sections 4.2 and 4.4).

`find_sinks` goes one way. A survey of typical text says where the attention sink and the norm spike are (`context`).
The layers that build the spike are read at its places (`layer_scan`), and their neurons are zeroed one by one
(`neurons`) and in sets (`sets`). Then components are replaced to see what the heads need (`carriers`). All edits are
rows of one pass (`effects`).
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from sinkscope.errors import SinkscopeError
from sinkscope.measure import Natural, ScanPart, Setup, measurement
from sinkscope.measure.margin import margin_of
from sinkscope.models.names import published_for
from sinkscope.sinks.first_token.attention_sink import MadeSpike, attention_sink
from sinkscope.sinks.first_token.carriers import spike_maker
from sinkscope.sinks.first_token.context import SinkContext, Survey
from sinkscope.sinks.first_token.layer_scan import STEP_SHARE, LayerScan, typical_quantiles
from sinkscope.sinks.first_token.members import CausalSet, Neuron
from sinkscope.sinks.first_token.neurons import repeat_until_half, verify_neurons
from sinkscope.sinks.first_token.places import Places
from sinkscope.sinks.first_token.records import (
    NormSpike,
    PlacedSpike,
    PublishedSink,
    RepeatedToken,
    RepeatsNeeded,
    Scattered,
    Stage,
    TokenShare,
)
from sinkscope.sinks.first_token.result import FindSinks
from sinkscope.sinks.first_token.sets import CANDIDATES, CausalSets, causal_sets, repetition_spike, sets_at
from sinkscope.sinks.tokens import pick_tokens, prefixes, repetition_limit


@measurement(
    group="Sinks",
    order=1,
    help="Find the layer and the neurons that make the sink.",
    scan=ScanPart(1, topic="Sink", full={"all_layers": True}),
    figure="sinkscope.sinks.first_token.figure:draw",
    quick={"max_repeats": 64},
)
def find_sinks(
    setup: Setup,
    *,
    tokens: Sequence[str] | None = None,
    all_layers: bool = False,
    top_k: Natural = CANDIDATES,
    max_repeats: Natural | None = None,
) -> FindSinks:
    """Find the layer and the neurons that make the attention sink, and verify each by ablation against a control.

    A model given by name is streamed: its layers are read upward, a few in memory at a time, until the first token's
    norm has stayed flat for a third of the layers. If the model has no sink, `sink_layer` is None.

    Args:
        tokens: Words to repeat, one token each. By default five words of the text.
        all_layers: Read every layer even if the model is not in memory: late stages, and the sink rate.
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
    repeats = None
    entering = {}
    verified = ()
    while True:
        # Where are the sink and the spike, and in which layers is the spike built?
        survey = Survey.of(setup, whole=whole)
        context = survey.first_spike
        if survey.spike is not None:
            context = survey.context(survey.spike.rules[0])
        scan = context.scan
        depth = len(scan.layers)

        # Which neurons of these layers build it, alone and in sets?
        sets = CausalSets()
        if scan.stages and survey.spike is not None:
            if scan.stages != verified_stages:  # after reading further layers they are often the same
                repeats, entering = repeat_until_half(context, words, first_tokens, limit, setup.progress)
                verified = verify_neurons(context, top_k)
                verified_stages = scan.stages
            sets = causal_sets(context, verified, survey.readers)
        # If they do not carry the attention to these places, the layers read were too few.
        carries_attention = sets.minimal is not None and sets.minimal.carries_attention
        if whole or depth == scan.n_layers or carries_attention:
            break
        whole = True

    # What makes the spikes, what do the heads need, and does repetition go through the same neurons?
    made = made_spikes(survey, context, sets.minimal)
    spike = made[0].spike if made else None
    repetition = None
    if repeats is not None and sets.minimal is not None:
        repetition = repetition_spike(context, words, first_tokens, repeats, entering, sets.sites, limit)

    unread = [None] * (scan.n_layers - depth)
    low, typical, high = typical_quantiles(survey.first.scan.whole_norms).tolist()
    shares = (scan.middle(scan.mlp_norms).double() / max(scan.spike_norm)).tolist()
    return FindSinks(
        norm_spike=spike,
        attention_sink=attention_sink(survey, made),
        causal_sets=sets.sets,
        further_spikes=tuple(_placed(survey, each) for each in made[1:]),
        scattered=_scattered(survey.received.places.outside(survey.sink), setup),
        stray_norms=_scattered(survey.spikes.outside(survey.spike), setup),
        repetition=repetition,
        lengths=survey.lengths,
        shared_dims=tuple(scan.shared_dims),
        sink_layer=scan.sink_layer if spike is not None else None,
        neurons=sets.neurons,
        stages=tuple(Stage(stage, shares[stage]) for stage in scan.stages if spike is not None),
        residual_dims=tuple(scan.massive_activations),
        first_token_norm=(*scan.middle(scan.whole_norms).tolist(), *unread),
        typical_norm=(*typical, *unread),
        typical_low=(*low, *unread),
        typical_high=(*high, *unread),
        layers_read=depth,
        repeats=_repeats_needed(setup, words, repeats, limit),
        sink_rate=survey.rate,
        published=_published(setup.target.name, scan, verified),
    )


def made_spikes(survey: Survey, context: SinkContext, minimal: CausalSet | None) -> list[MadeSpike]:
    """The spike of each kind of place, and what makes it; none if no norm stands out at the first kind.

    Args:
        survey: Where the spikes are.
        context: The model at the first kind of place.
        minimal: The neurons that make the spike there.
    """
    made = []
    if survey.spike is None or not context.scan.spike_layers:
        return made
    for rule in survey.spike.rules:
        if made:
            context = survey.context(rule)
            if not context.scan.spike_layers:
                continue
            minimal = sets_at(context, survey.received.readers(rule)).minimal
        made.append(MadeSpike(rule, norm_spike(context, survey), minimal))
    return made


def norm_spike(context: SinkContext, survey: Survey) -> NormSpike:
    """The places whose norm stands out, and what makes the spike of the kind that a context looks at."""
    scan = context.scan
    assert survey.spike is not None
    step_up = scan.stages
    made_by = "MLP"
    if not scan.stages:
        step_up = (scan.growth >= STEP_SHARE).nonzero().flatten().tolist()
        made_by = spike_maker(context)
    return NormSpike(
        place=survey.spike,
        positions=tuple(survey.spikes.of(rule).earliest for rule in survey.spike.rules),
        step_up=tuple(step_up),
        step_down=tuple((scan.growth <= -STEP_SHARE).nonzero().flatten().tolist()),
        ratio=float(scan.ratios.max()),
        runs=tuple(scan.spike_runs),
        made_by=made_by,
        begun_by=spike_maker(context) if scan.norm_before else None,
        margin=margin_of(scan.ratios_by_text.numpy()),
    )


def _placed(survey: Survey, made: MadeSpike) -> PlacedSpike:
    """The spike of a further kind of place."""
    rule = made.rule
    position = survey.spikes.of(rule).earliest
    return PlacedSpike(rule.words, position, rule.token, made.spike.ratio, made.spike.made_by, made.set)


def _scattered(places: Places, setup: Setup) -> Scattered:
    """Places that no words describe."""
    common = [TokenShare(token, share) for token, share in places.common(setup.tokenizer.decode)]
    return Scattered(len(places), tuple(common))


def _unknown_share(setup: Setup) -> float:
    """Share of the text that the tokenizer does not know; unknown tokens in a row would act as a repeated token."""
    unknown = getattr(setup.tokenizer, "unk_token_id", None)
    if unknown is None:
        return 0.0
    return float((setup.ids[:, 1:] == unknown).float().mean())


def _repeats_needed(setup: Setup, words: list[int], repeats: list[int | None] | None, limit: int) -> RepeatsNeeded:
    """The median leaves out words whose first occurrence is a sink already."""
    if repeats is None:
        return RepeatsNeeded((), None, 0, limit)
    pairs = zip(words, repeats, strict=True)
    rows = [RepeatedToken(setup.tokenizer.decode([word]), word, count) for word, count in pairs]
    by_repetition = [count for count in repeats if count is not None and count > 1]
    middle = float(median(by_repetition)) if by_repetition else None
    return RepeatsNeeded(tuple(rows), middle, repeats.count(None), limit)


def _published(name: str, scan: LayerScan, verified: Sequence[Neuron]) -> PublishedSink | None:
    published = published_for(name)
    if published is None:
        return None
    matches = {*scan.massive_activations}.issuperset(published.residual_dims)
    if published.neurons:
        causal = {(neuron.layer, neuron.neuron) for neuron in verified if neuron.causal}
        matches = scan.sink_layer in published.layers and causal.issuperset(published.neurons)
    elif not published.residual_dims:
        return None
    return PublishedSink(published.source, matches)
