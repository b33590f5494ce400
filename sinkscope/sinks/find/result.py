"""What `find_sinks` returns. The words in which it is reported are in `sentences`, and the steps in `find`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from sinkscope.measure import Result
from sinkscope.results.claims import Claim, Claims, Search
from sinkscope.results.parts import in_words, kind_of
from sinkscope.results.result import Number, lost_without
from sinkscope.sinks.find import sentences
from sinkscope.sinks.find.places import LeftOver
from sinkscope.sinks.find.records import (
    SHORT,
    Candidates,
    CausalSet,
    PerLayer,
    PublishedSink,
    RepeatsNeeded,
    RepetitionSpike,
    Sink,
    SinkRate,
    Spike,
    Stage,
)

NOWHERE = "no position"
"""Where the sink of a model without one is, on its card."""


@dataclass(frozen=True, kw_only=True)
class FindSinks(Result):
    """Where the attention sink of a model is made. Lists over layers are None where a layer was not read.

    Attributes:
        spikes: The places whose norm stands out, and what makes that. Layers, neurons and norms below are of the first.
        sinks: The places that heads attend to, and what the heads need; the last may be the learned sink logits.
        other_spikes: Positions whose norm stands out and that are too few to be measured.
        other_sinks: Positions that heads attend to and that are too few to be measured.
        most_attended: The most attended position, before any threshold.
        repetition: What makes the norm of repeated tokens. None if it is no spike, or the model has none.
        lengths: Lengths of the texts in which attention was read.
        shared_dims: Residual dimensions that are massive on all tokens alike; the verdicts leave them out.
        sink_layer: The stage that adds most to the norm. None if no MLP makes a spike.
        neurons: Candidate neurons, largest contribution first, with the effect of zeroing each.
        stages: All layers that build the spike.
        residual_dims: Massive activations of the spike at the sink layer, largest first (Sun et al. 2024).
        spike_norm: L2 norm of the residual stream after each layer, median over texts: at the first spike, or at the
            first token if there is none.
        typical_norm: Median norm over later positions of typical text.
        typical_low: The 5 % quantile of these norms.
        typical_high: The 95 % quantile of these norms.
        layers_read: Number of layers read.
        repeats: Repetitions after which a repeated token becomes a sink.
        sink_rate: Sink rate over 100 texts, or over 25 if layers are read from disk. None if not all layers were read.
        published: What the literature reports. None if nothing is published for the model.
    """

    kind = "find-sinks"  # read and drawn without the command, which stands in another module
    drawing: ClassVar[Any] = "sinkscope.sinks.find.figure:draw"

    percent = ("share", "ablation_drop", "control_drop")
    matters, told = "causal", "ablation_drop"
    table_of = "neurons"
    table_without = ("neutral_post", "neutral_up")

    spikes: tuple[Spike, ...] = ()
    sinks: tuple[Sink, ...] = ()
    other_spikes: LeftOver = field(default_factory=LeftOver)
    other_sinks: LeftOver = field(default_factory=LeftOver)
    most_attended: Search
    repetition: RepetitionSpike | None = None
    lengths: tuple[int, ...] = (SHORT,)
    shared_dims: tuple[int, ...] = ()
    sink_layer: int | None
    neurons: Candidates
    stages: tuple[Stage, ...]
    residual_dims: tuple[int, ...]
    spike_norm: PerLayer
    typical_norm: PerLayer
    typical_low: PerLayer
    typical_high: PerLayer
    layers_read: int
    repeats: RepeatsNeeded
    sink_rate: SinkRate | None
    published: PublishedSink | None

    @property
    def causal(self) -> Candidates:
        """The neurons that ablation has verified as causes of the sink."""
        return tuple(n for n in self.neurons if n.causal)

    @property
    def spike(self) -> Spike | None:
        """The first spike."""
        return next(iter(self.spikes), None)

    @property
    def sink(self) -> Sink | None:
        """The first sink."""
        return next(iter(self.sinks), None)

    @property
    def minimal(self) -> CausalSet | None:
        """The smallest set of neurons found whose ablation removes the first spike."""
        return None if self.spike is None else self.spike.set

    @property
    def claims(self) -> Claims:
        """All claims: of the makers of spikes, of the heads that attend, and of repetition."""
        claims: list[Claim] = []
        for spike in self.spikes:
            claims += spike.claims
        for sink in self.sinks:
            claims += [group.claim for group in sink.groups if group.claim is not None]
        if self.repetition is not None:
            claims += filter(None, (self.repetition.by_copies, self.repetition.same))
            claims += () if self.repetition.set is None else self.repetition.set.claims
        return tuple(claims)

    def numbers(self) -> list[Number]:
        """What zeroing the neurons takes away, how far the norm stands out, and who attends to the sink how much."""
        numbers = []
        minimal, spike = self.minimal, self.spike
        for key, claim in (("spike", minimal and minimal.claims[0]), ("attention", self._carried)):
            if claim:
                numbers.append(lost_without(f"{key}_lost", f"{key} lost without its neurons", claim))
        if spike is not None:
            numbers += [
                Number("ratio", "norm of the spike over the typical one", spike.ratio, spike.usual, spike.margin),
                Number("spike", "where the norm spike is", spike.place.words),
            ]
        if self.sink_layer is not None:
            numbers.append(Number("sink_layer", "sink layer", str(self.sink_layer)))
        if minimal is not None:
            numbers.append(Number("neurons", "neurons that make the spike", in_words(minimal.neurons)))
        return numbers + self._attention_numbers()

    @property
    def _carried(self) -> Claim | None:
        """What is left of the attention to the first sink, of the most heads that need the neurons of the spike."""
        groups = () if self.sink is None else self.sink.groups
        for group in groups:
            if group.by_spike and group.claim is not None and kind_of(group.claim.subject) == "neurons":
                return group.claim
        return None

    def _attention_numbers(self) -> list[Number]:
        """Who attends to the sink, and how much."""
        sink, name = self.sink, ("sink", "where the attention sink is")
        if sink is None:
            return [Number(*name, NOWHERE)]
        if sink.place is None:
            return [Number(*name, "learned sink logits")]
        share, mean = "share of heads that attend to the sink", "mean attention of these heads to the sink"
        return [
            Number(*name, sink.words),
            Number("heads", share, sink.rate, margin=sink.rate_margin, share=True),
            Number("attention", mean, sink.attention, None, sink.attention_margin, True),
        ]

    def conclusion(self) -> str:
        """Who attends where and what they need; without a sink, where norms stand out and what makes that."""
        return sentences.conclusion(self.spikes, self.sinks, self.most_attended)

    def details(self) -> list[str]:
        """The layers, the spikes, the sinks, the repetitions, and what is published."""
        lines = [sentences.layers_read(self.layers_read, self.model.n_layers, self.shared_dims)]
        read = [self.spikes[sink.spike].place for sink in self.sinks if sink.spike is not None]
        for spike in self.spikes:
            lines.append(sentences.spike_sentences(spike))
            if spike.place not in read:
                lines[-1] += " No head attends to most of these positions."
        if self.sink_layer is not None:
            lines[0] += (
                f" The sink layer is layer {self.sink_layer}, which builds most of the spike at {self.spikes[0].place}."
            )
        attention = sentences.statements(self.sinks)
        if not self.sinks:
            attention = [f"No attention sink was found in texts of {self.lengths[-1]} tokens ({self.most_attended})."]
        if self.sink_rate is not None:
            attention.append(sentences.sink_rate(self.sink_rate))
        lines.append(" ".join(attention))
        repeats = sentences.repeats(self.repeats, self.spike, self.repetition)
        if repeats:
            lines.append(" ".join(repeats))
        lines += sentences.left_over(self.other_spikes, "with a norm that stands out")
        lines += sentences.left_over(self.other_sinks, "that heads attend to")
        if self.published is not None:
            verdict = "matches" if self.published.matches else "differs from"
            lines.append(f"This {verdict} what is published ({self.published.source}).")
        return lines
