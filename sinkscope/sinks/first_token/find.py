"""Which neurons make the attention sink, verified by ablation (Yona et al. 2025, sections 4.2 and 4.4).

`find_sinks` goes one way. A survey of typical text says where the attention sink and the norm spike are (`context`).
The layers that build the spike are read at its places (`layer_scan`), and their neurons are zeroed one by one
(`neurons`) and in sets (`sets`). Then components are replaced to see what the heads need (`carriers`). All edits are
rows of one pass (`effects`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from einops import reduce
from jaxtyping import Bool, Float
from torch import Tensor

from sinkscope.errors import SinkscopeError
from sinkscope.measure import Positive, Setup, measurement
from sinkscope.measure.evidence import NEEDED
from sinkscope.measure.margin import margin_of
from sinkscope.models.names import published_for
from sinkscope.sinks.first_token.attention_received import AttentionReceived
from sinkscope.sinks.first_token.carriers import Carried, carriers, spike_maker
from sinkscope.sinks.first_token.context import SinkContext, Survey, texts_with
from sinkscope.sinks.first_token.layer_scan import STEP_SHARE, typical_quantiles
from sinkscope.sinks.first_token.members import RATE_EPS, CausalSet, Heads
from sinkscope.sinks.first_token.neurons import RepeatedSinks, VerifiedNeurons, repeat_until_half, verify_neurons
from sinkscope.sinks.first_token.places import ENOUGH, Places, Rule
from sinkscope.sinks.first_token.records import (
    SHORT,
    AttentionSink,
    LayerAttention,
    NormSpike,
    PlacedSpike,
    PublishedSink,
    RepeatedToken,
    RepeatsNeeded,
    SinkPosition,
    Stage,
)
from sinkscope.sinks.first_token.result import FindSinks
from sinkscope.sinks.first_token.sets import CANDIDATES, CausalSets, causal_sets, repetition_spike, sets_at
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
        # Where are the sink and the spike, and in which layers is the spike built?
        survey = Survey.of(setup, whole=whole)
        context = survey.first_spike
        heads = []
        if survey.spike is not None:
            context = survey.context(survey.spike.rules[0])
            heads = survey.received.readers(survey.spike.rules[0])
        scan = context.scan
        depth = len(scan.layers)

        # Which neurons of these layers build it, alone and in sets?
        sets = CausalSets()
        if scan.stages and survey.spike is not None:
            if scan.stages != verified_stages:  # after reading further layers they are often the same
                repeated = repeat_until_half(context, words, first_tokens, limit, setup.progress)
                verified = verify_neurons(context, top_k, repeated.view)
                verified_stages = scan.stages
            sets = causal_sets(context, verified.neurons, heads)

        # If they do not carry the attention to these places, the layers read were too few.
        carries_attention = sets.minimal is not None and sets.minimal.carries_attention
        if whole or depth == scan.n_layers or carries_attention:
            break
        whole = True

    # What makes the spikes, what do the heads need, and does repetition go through the same neurons?
    spike = norm_spike(context, survey)
    further = further_spikes(survey)
    made = []
    if spike is not None:
        made.append(MadeSpike(spike.place.rules[0], spike.makers, sets.minimal, spike.fallen))
        made += [MadeSpike(rule, (each.made_by or "",), each.set) for rule, each in further]
    sink = attention_sink(survey, made)
    repetition = None
    if repeated is not None and sets.minimal is not None:
        repetition = repetition_spike(context, words, first_tokens, repeated, sets.minimal, limit)

    unread = [None] * (scan.n_layers - depth)
    low, typical, high = typical_quantiles(survey.first.scan.whole_norms).tolist()
    shares = (scan.middle(scan.mlp_norms).double() / max(scan.spike_norm)).tolist()
    return FindSinks(
        norm_spike=spike,
        attention_sink=sink,
        causal_sets=sets.sets,
        further_spikes=tuple(each for _, each in further),
        scattered=_scattered(survey),
        stray_norms=_stray_norms(survey),
        repetition=repetition,
        lengths=survey.lengths,
        shared_dims=tuple(scan.shared_dims),
        sink_layer=scan.sink_layer if spike is not None else None,
        neurons=sets.neurons,
        set_drop=verified.set_drop,
        set_control_drop=verified.set_control_drop,
        stages=tuple(Stage(stage, shares[stage]) for stage in scan.stages if spike is not None),
        residual_dims=verified.massive_dims,
        first_token_norm=(*scan.middle(scan.whole_norms).tolist(), *unread),
        typical_norm=(*typical, *unread),
        typical_low=(*low, *unread),
        typical_high=(*high, *unread),
        layers_read=depth,
        notebook_rule_layer=survey.first.scan.notebook_layer,
        repeats=_repeats_needed(setup, words, repeated, limit),
        sink_rate=survey.rate,
        published=_published(setup.target.name, scan.sink_layer, verified),
    )


def norm_spike(context: SinkContext, survey: Survey) -> NormSpike | None:
    """The places whose norm stands out, and what makes the spike of the first kind; None if no norm stands out.

    Args:
        context: The model at the first kind of place.
        survey: Where the spikes are.
    """
    scan = context.scan
    if survey.spike is None or not scan.spike_layers:
        return None
    step_up = scan.stages
    made_by = "MLP"
    if not scan.stages:
        step_up = (scan.growth >= STEP_SHARE).nonzero().flatten().tolist()
        made_by = spike_maker(context)
    positions = [int(survey.spikes.of(rule).there.any(0).int().argmax()) for rule in survey.spike.rules]
    return NormSpike(
        place=survey.spike,
        positions=tuple(positions),
        step_up=tuple(step_up),
        step_down=tuple((scan.growth <= -STEP_SHARE).nonzero().flatten().tolist()),
        ratio=float(scan.ratios.max()),
        runs=tuple(scan.spike_runs),
        made_by=made_by,
        begun_by=spike_maker(context) if scan.norm_before else None,
        margin=margin_of(scan.ratios_by_text.numpy()),
    )


def further_spikes(survey: Survey) -> list[tuple[Rule, PlacedSpike]]:
    """The spikes of the other kinds of places, and what makes each."""
    spikes = []
    if survey.spike is None:
        return spikes
    for rule in survey.spike.rules[1:]:
        context = survey.context(rule)
        if not context.scan.spike_layers:
            continue
        heads = survey.received.readers(rule)
        made_by = "MLP"
        if not context.scan.stages:
            made_by = spike_maker(context)
        spike = PlacedSpike(
            words=rule.words,
            position=int(survey.spikes.of(rule).there.any(0).int().argmax()),
            token=rule.token,
            ratio=float(context.scan.ratios.max()),
            made_by=made_by,
            set=sets_at(context, heads).minimal,
        )
        spikes.append((rule, spike))
    return spikes


@dataclass(frozen=True)
class MadeSpike:
    """What makes the spike of one kind of place.

    Attributes:
        rule: The places.
        makers: Components, named as carriers are.
        set: Neurons that make it. None if no set that was tried does.
        fallen: Components that take it away again: without them, it hides what heads read.
    """

    rule: Rule
    makers: tuple[str, ...]
    set: CausalSet | None
    fallen: tuple[str, ...] = ()


def attention_sink(survey: Survey, made: Sequence[MadeSpike]) -> AttentionSink | None:
    """The positions that receive attention, and what carries it; None if no position does.

    Args:
        survey: Where the sinks are.
        made: What makes the spikes.
    """
    received = survey.received
    length = received.ids.shape[1]
    if survey.sink is None:
        if not received.learned_heads:
            return None
        layers = tuple(LayerAttention(rate) for rate in received.learned_rates)
        rate = received.learned_rate
        return AttentionSink(rate, RATE_EPS, None, (), len(layers), "learned logits", layers, length=length)
    rule = survey.sink.rules[0]
    heads = received.readers(rule)
    spikes = [one for one in made if _is_at(received.places, rule, one.rule)]
    carried = Carried()
    if any(_spike_carries(heads, one.set) for one in spikes):
        carrier = "spike"
    else:
        fallen = {name for each in spikes for name in each.fallen}
        makers = {name for each in spikes for name in each.makers} - fallen
        carried = _tried(survey, rule, makers)
        carrier = carried.main
    positions = []
    for each in survey.sink.rules:
        position = int(received.places.of(each).there.any(0).int().argmax())
        positions.append(SinkPosition(position, each.token, received.rate_of(each), each.words))
    attention = AttentionOfReaders(received, rule)
    return AttentionSink(
        rate=received.rate_of(rule),
        eps=RATE_EPS,
        place=survey.sink,
        positions=tuple(positions),
        layers_read=len(received.above),
        carried_by=carrier,
        layers=tuple(attention.layer(layer) for layer in range(len(received.above))),
        carriers=carried.tried,
        reads=carried.reads,
        mark=carried.mark,
        length=length,
        window=received.window(heads),
        learned_rate=received.learned_rate if received.learned_heads else 0.0,
        attention=attention.mean(attention.readers),
        rate_margin=attention.rate_margin(received.attending),
        attention_margin=attention.margin(attention.readers),
    )


@dataclass(frozen=True, eq=False)
class AttentionOfReaders:
    """How much attention one kind of place receives, and from how many heads."""

    received: AttentionReceived
    rule: Rule

    @property
    def readers(self) -> Bool[Tensor, "layer head"]:
        """The heads that attend in most cases."""
        readers = torch.zeros(self.received.above.shape[:2], dtype=torch.bool)
        for layer, head in self.received.readers(self.rule):
            readers[layer, head] = True
        return readers

    def by_text(self, values: Float[Tensor, "layer head text at"]) -> Float[Tensor, "layer head case"]:
        """Mean over the places of each text that has one."""
        where = self.received.places.of(self.rule).there
        texts = where.any(1)
        total = reduce(values[:, :, texts] * where[texts], "layer head text at -> layer head text", "sum")
        return total / where[texts].sum(1)

    def mean(self, heads: Bool[Tensor, "layer head"]) -> float | None:
        """Mean attention of some heads; None if there are none."""
        if not bool(heads.any()):
            return None
        return float(self.by_text(self.received.received)[heads].mean())

    def margin(self, heads: Bool[Tensor, "layer head"]) -> float | None:
        """Two standard errors of this mean over texts."""
        if not bool(heads.any()):
            return None
        return margin_of(self.by_text(self.received.received)[heads].mean(0).numpy())

    def rate_margin(self, layers: Any) -> float | None:
        """Two standard errors of the share of heads that attend, over texts."""
        return margin_of(self.by_text(self.received.above.float())[layers].flatten(0, -2).mean(0).numpy())

    def layer(self, layer: int) -> LayerAttention:
        """The attention of one layer."""
        if not bool(self.received.attending[layer]):
            return LayerAttention(None)
        here = torch.zeros_like(self.readers)
        here[layer] = self.readers[layer]
        return LayerAttention(
            rate=float(self.by_text(self.received.above.float())[layer].mean()),
            readers=int(here.sum()),
            attention=self.mean(here),
            rate_margin=self.rate_margin(layer),
            attention_margin=self.margin(here),
        )


def _is_at(places: Places, rule: Rule, other: Rule) -> bool:
    """Whether other words mean nearly all of the places that words mean."""
    mine = places.of(rule).there
    return bool(float(other.means(places.ids)[mine].float().mean()) >= ENOUGH)


def _spike_carries(heads: Heads, minimal: CausalSet | None) -> bool:
    """Whether at least half of the heads that attend to the sink lose it without the spike."""
    if minimal is None or minimal.heads_lost is None:
        return False
    behind = [layer for layer, _ in heads if layer > minimal.sites[0].layer]
    return minimal.heads_lost * len(behind) / len(heads) >= NEEDED


def _tried(survey: Survey, rule: Rule, makers: set[str]) -> Carried:
    """What the heads need of the components at the sink."""
    received = survey.received
    ids, at = texts_with(rule, received.places.there, received.ids)
    number = CARRIER_TEXTS
    length = max(CARRIER_LENGTH, int(at[:CARRIER_TEXTS].max()) + CARRIER_LENGTH // 3)
    if ids.shape[1] > SHORT:  # a sink of long texts shows in the whole text only
        number, length = 1, ids.shape[1]
    return carriers(survey.first.target, ids[:number, :length], received.readers(rule), at[:number], makers)


def _scattered(survey: Survey) -> int:
    """Positions that heads attend to and that the words for the sink leave out."""
    places = survey.received.places
    if survey.sink is None:
        return len(places)
    return len(places) - round(survey.sink.coverage * len(places))


def _stray_norms(survey: Survey) -> int:
    """Positions whose norm stands out and that the words for the spike leave out."""
    if survey.spike is None:
        return len(survey.spikes)
    return len(survey.spikes) - round(survey.spike.coverage * len(survey.spikes))


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
