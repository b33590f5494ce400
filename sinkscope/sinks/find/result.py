"""What `find_sinks` returns. The words in which it is reported are in `sentences`, and the steps in `find`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from sinkscope.measure import Result
from sinkscope.results.notation import word_list
from sinkscope.results.result import Number
from sinkscope.sinks.find import sentences
from sinkscope.sinks.find.members import CausalSet, Neuron
from sinkscope.sinks.find.places import Scattered
from sinkscope.sinks.find.records import (
    SHORT,
    AttentionSink,
    NormSpike,
    PlacedSpike,
    PublishedSink,
    RepeatsNeeded,
    RepetitionSpike,
    SinkRate,
    Stage,
)

SHARE_OF_HEADS = "share of heads that attend to the sink"
"""The number of a card by which it is seen that heads lost the sink."""
READERS_ATTENTION = "mean attention of these heads to the sink"
"""The number of a card by which it is seen that the heads read it less."""
SINK_PLACE = "where the attention sink is"
"""The words of a card for the attention sink."""


@dataclass(frozen=True, kw_only=True)
class FindSinks(Result):
    """Where the attention sink of a model is made. Lists over layers are None where a layer was not read.

    Attributes:
        norm_spike: Positions whose norm stands out. None if there are none that words describe.
        attention_sink: Positions that heads attend to. None if there are none among the layers read.
        causal_sets: The smallest set found whose ablation removes the spike; if the spike falls and rises again, a set
            for each part.
        further_spikes: Spikes at the other places that the words for the norm spike mean.
        scattered: Positions that heads attend to and that no words describe; they do not count as a sink.
        stray_norms: Positions whose norm stands out and that no words describe.
        repetition: What makes the spike of repeated tokens. None if none has a spike, or the model has none.
        lengths: Lengths of the texts in which attention was read.
        shared_dims: Residual dimensions that are massive on all tokens alike; the verdicts leave them out.
        sink_layer: The stage that adds most to the norm. None if no MLP makes a spike.
        neurons: Candidate neurons, largest contribution first, with the effect of zeroing each.
        stages: All layers that build the spike.
        residual_dims: Massive activations of the spike at the sink layer, largest first (Sun et al. 2024).
        first_token_norm: L2 norm of the residual stream after each layer, median over texts: at the first of the places
            that the words for the spike mean, or at the first token if there is no spike.
        typical_norm: Median norm over later positions of typical text.
        typical_low: The 5 % quantile of these norms.
        typical_high: The 95 % quantile of these norms.
        layers_read: Number of layers read.
        repeats: Repetitions after which a repeated token becomes a sink.
        sink_rate: Sink rate over 100 texts, or over 25 if layers are read from disk. None if not all layers were read.
        published: What the literature reports. None if nothing is published for the model.
    """

    kind: ClassVar[str] = "find-sinks"  # read without the command, which stands in another module

    percent = ("share", "ablation_drop", "control_drop")
    matters, told = "causal", "ablation_drop"
    table_of = "neurons"
    table_without = ("neutral_post", "neutral_up")

    norm_spike: NormSpike | None = None
    attention_sink: AttentionSink | None = None
    causal_sets: tuple[CausalSet, ...] = ()
    further_spikes: tuple[PlacedSpike, ...] = ()
    scattered: Scattered = field(default_factory=Scattered)
    stray_norms: Scattered = field(default_factory=Scattered)
    repetition: RepetitionSpike | None = None
    lengths: tuple[int, ...] = (SHORT,)
    shared_dims: tuple[int, ...] = ()
    sink_layer: int | None
    neurons: tuple[Neuron, ...]
    stages: tuple[Stage, ...]
    residual_dims: tuple[int, ...]
    first_token_norm: tuple[float | None, ...]
    typical_norm: tuple[float | None, ...]
    typical_low: tuple[float | None, ...]
    typical_high: tuple[float | None, ...]
    layers_read: int
    repeats: RepeatsNeeded
    sink_rate: SinkRate | None
    published: PublishedSink | None

    @property
    def causal(self) -> tuple[Neuron, ...]:
        """The neurons that ablation has verified as causes of the sink."""
        return tuple(n for n in self.neurons if n.causal)

    @property
    def minimal(self) -> CausalSet | None:
        """The smallest set of neurons found whose ablation removes the spike."""
        return next(iter(self.causal_sets), None)

    @property
    def spike_is_first(self) -> bool:
        """Whether an MLP makes a norm spike at the first token."""
        return self.sink_layer is not None and self.norm_spike is not None and self.norm_spike.place.is_first

    @property
    def typical_ratio(self) -> float | None:
        """The 95 % quantile of typical norms at the sink layer divided by their median."""
        if self.sink_layer is None or not self.typical_norm[self.sink_layer]:
            return None
        return (self.typical_high[self.sink_layer] or 0.0) / (self.typical_norm[self.sink_layer] or 1.0)

    def numbers(self) -> list[Number]:
        """What zeroing the neurons takes away, how far the norm stands out, and who attends to the sink how much."""
        numbers = []
        minimal = self.minimal
        if minimal is not None:
            control = minimal.control
            lost = minimal.drop_sink_layer
            numbers.append(Number("norm lost without the neurons", lost, control, minimal.margin_norm))
            lost = minimal.drop_attention
            numbers.append(Number("attention lost without the neurons", lost, control, minimal.margin_attention))
        spike = self.norm_spike
        if spike is not None:
            label = "norm of the spike over the typical one"
            numbers.append(Number(label, spike.ratio, self.typical_ratio, spike.margin))
            numbers.append(Number("where the norm spike is", spike.place.words))
        if self.sink_layer is not None:
            numbers.append(Number("sink layer", str(self.sink_layer)))
        if minimal is not None:
            numbers.append(Number("neurons that make the spike", minimal.names))
        if self.attention_sink is None:
            return [*numbers, Number(SINK_PLACE, "no position")]
        return numbers + _attention_numbers(self.attention_sink)

    def conclusion(self) -> str:
        """Whether there is a norm spike and an attention sink, where, and what makes and carries them."""
        found = sentences.Found(
            spike=self.norm_spike,
            sink=self.attention_sink,
            minimal=self.minimal,
            layer=self.sink_layer,
            lengths=self.lengths,
            stray_norms=self.stray_norms.count,
            scattered=self.scattered.count,
        )
        return sentences.conclusion(found)

    def details(self) -> list[str]:
        """The layers, the sets, further spikes, the attention, the repetitions, and what is published."""
        spike = self.norm_spike
        layers = [sentences.layers_read(self.layers_read, self.model.n_layers)]
        layers += sentences.shared_dimensions(self.shared_dims)
        layers += sentences.sink_layer(self.sink_layer, self.first_token_norm, self.typical_norm)
        layers += sentences.where_the_spike_is(spike)
        sets = []
        for causal_set in self.causal_sets:
            sets += sentences.causal_set(causal_set, spike)
        if self.minimal is not None and not self.causal:
            sets.append("None of these neurons alone takes away a tenth of the norm.")
        further = [sentences.further_spike(each) for each in self.further_spikes]
        attention = sentences.sink_rate(self.sink_rate)
        attention += sentences.attention(self.attention_sink, self.lengths, self.scattered.count)
        attention += sentences.scattered(self.scattered)
        repeats = sentences.repeats(self.repeats, spike)
        if self.repetition is not None and self.minimal is not None and not self.repetition.same_neurons:
            names = word_list([each.names for each in self.causal_sets])
            repeats.append(sentences.repetition(self.repetition, names))
        groups = [layers, sets, further, attention, repeats]
        if self.published is not None:
            verdict = "matches" if self.published.matches else "differs from"
            groups.append([f"This {verdict} what is published ({self.published.source})."])
        return [" ".join(group) for group in groups if group]


def _attention_numbers(sink: AttentionSink) -> list[Number]:
    """Who attends to the sink, and how much, in all layers and in each."""
    numbers = [Number("what carries the attention sink", sink.carried_by)]
    if sink.place is None:
        return [*numbers, Number(SINK_PLACE, "learned sink logits")]
    numbers.append(Number(SINK_PLACE, sink.place.words))
    numbers.append(Number(SHARE_OF_HEADS, sink.rate, margin=sink.rate_margin))
    numbers.append(Number(READERS_ATTENTION, sink.attention, margin=sink.attention_margin))
    for number, layer in enumerate(sink.layers):
        if layer.readers:
            numbers.append(Number(f"layer {number}: {SHARE_OF_HEADS}", layer.rate, margin=layer.rate_margin))
            label = f"layer {number}: {READERS_ATTENTION}"
            numbers.append(Number(label, layer.attention, margin=layer.attention_margin))
    return numbers
