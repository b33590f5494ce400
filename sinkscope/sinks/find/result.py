"""What `find_sinks` returns. The words in which it is reported are in `sentences`, and the steps in `find`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from sinkscope.measure import Result
from sinkscope.results.claims import Claim, Claims, Search, without_example
from sinkscope.results.notation import count_of, short_sentence, word_list
from sinkscope.results.parts import Neuron, in_words
from sinkscope.results.result import Number
from sinkscope.sinks.find import sentences
from sinkscope.sinks.find.places import Place
from sinkscope.sinks.find.records import (
    RATE_EPS,
    Candidates,
    PerLayer,
    RepeatsNeeded,
    RepetitionSpike,
    Sink,
    SinkRate,
    Spike,
)

NOWHERE = "no position"
"""Where the sink of a model without one is, on its card."""


@dataclass(frozen=True, kw_only=True)
class SinkPlaces(Result):
    """Where spikes and sinks are, as `find_sinks` and `circuit` say it.

    Attributes:
        spikes: The places whose norm stands out, and what makes that.
        sinks: The places that heads attend to, and what the heads need; the last may be the learned sink logits.
        most_attended: The most attended position, before any threshold.
        layers_read: Number of layers read.
    """

    spikes: tuple[Spike, ...] = ()
    sinks: tuple[Sink, ...] = ()
    most_attended: Search
    layers_read: int

    @property
    def instead(self) -> str | None:
        """Where heads attend, if nothing was found that they need; or that they attend nowhere, and to what spike."""
        if self.sinks:
            sink = self.sinks[0]
            if sink.groups[0].claim is not None:
                return None
            return short_sentence(sentences.sink_fact(sink, brief=brief) for brief in (False, True))
        if not self.spikes:
            return f"Neither an attention sink nor a norm spike was found ({self.most_attended})."
        spike = self.spikes[0]
        norm = f"{spike.ratio:.0f} times the typical one (elsewhere {spike.usual:.1f})"
        place = without_example(spike.place.words)
        return f"No attention sink was found ({self.most_attended}), but the norm at {place} is {norm}."

    def facts(self) -> list[str]:
        """Who attends where, and the layers."""
        read = f"{self.layers_read} of {self.model.n_layers} layers were read."
        return [*map(sentences.sink_fact, self.sinks), read]


@dataclass(frozen=True, kw_only=True)
class FindSinks(SinkPlaces):
    """Where the attention sink of a model is made. Lists over layers end with the last one that was read.

    Layers, neurons and norms are of the first spike.

    Attributes:
        other_spikes: Positions whose norm stands out and that are too few to be measured; None if there are none.
        other_sinks: Positions that heads attend to and that are too few to be measured; None if there are none.
        repetition: What makes the norm of repeated tokens. None if it is no spike, or the model has none.
        shared_dims: Residual dimensions that are massive on all tokens alike; the norms leave them out.
        sink_layer: The stage that adds most to the norm. None if no MLP makes a spike.
        neurons: Candidate neurons, largest contribution first, with the effect of zeroing each.
        spike_norm: L2 norm of the residual stream after each layer, median over texts: at the first spike, or at the
            first token if there is none.
        typical_norm: Median norm over later positions of typical text.
        repeats: Repetitions after which a repeated token becomes a sink.
        sink_rate: Sink rate over 100 texts, or over 25 if layers are read from disk. None if not all layers were read.
    """

    kind = "find-sinks"  # read and drawn without the command, which stands in another module
    drawing: ClassVar[Any] = "sinkscope.sinks.find.figure:draw"

    percent = ("share", "ablation_drop", "control_drop")
    table_of = "neurons"
    table_without = ("neutral_post",)

    other_spikes: Place | None = None
    other_sinks: Place | None = None
    repetition: RepetitionSpike | None = None
    shared_dims: tuple[int, ...] = ()
    sink_layer: int | None
    neurons: Candidates
    spike_norm: PerLayer
    typical_norm: PerLayer
    repeats: RepeatsNeeded
    sink_rate: SinkRate | None

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
    def minimal(self) -> tuple[Neuron, ...]:
        """The smallest set of neurons found whose ablation removes the first spike; empty if none was found."""
        return () if self.spike is None else self.spike.set

    @property
    def claims(self) -> Claims:
        """All claims: of the heads that attend, of the makers of spikes, and of repetition."""
        claims: list[Claim] = []
        for sink in self.sinks:
            claims += sink.claims
        for spike in self.spikes:
            claims += spike.claims
        if self.repetition is not None:
            claims += self.repetition.claims
        return tuple(claims)

    def numbers(self) -> list[Number]:
        """What its neurons take away, how far the norm stands out, what makes that, and how many heads attend where."""
        numbers, sink, spike = super().numbers(), self.sink, self.spike
        if spike is not None:
            numbers.append(Number("ratio", "norm of the spike over the typical one", spike.ratio, spike.usual))
        if self.sink_layer is not None:
            numbers.append(Number("sink_layer", "sink layer", str(self.sink_layer)))
        if self.minimal:
            numbers.append(Number("neurons", "neurons that make the spike", in_words(self.minimal)))
        numbers.append(Number("sink", "where the attention sink is", sink.words if sink else NOWHERE))
        if sink is not None and sink.place is not None:
            share = sink.readers / sink.n_heads
            numbers.append(Number("heads", "share of heads that attend to the sink", share, share=True))
        return numbers

    def facts(self) -> list[str]:
        """The spikes, the sinks, the repetitions, the layers, and what was left over."""
        lines = [sentences.spike_fact(spike) for spike in self.spikes]
        lines += super().facts()
        if self.sink_layer is not None:
            lines[-1] += f" Layer {self.sink_layer} builds most of the spike at {self.spikes[0].place}."
        if self.shared_dims:
            dims = word_list(self.shared_dims)
            lines[-1] += f" Residual dimensions that are massive on all tokens are left out ({dims})."
        if self.sink_rate is not None:
            rate = self.sink_rate
            lines.append(
                f"The sink rate is {rate.value:.1%}: this share of all heads gives position 0 more than {RATE_EPS} of "
                f"its attention ({rate.samples} texts of {rate.length} tokens)."
            )
        if self.spike is not None:
            lines += sentences.repeats(self.repeats, self.spike.place.words)
        for left, what in (
            (self.other_spikes, "with a norm that stands out"),
            (self.other_sinks, "that heads attend to"),
        ):
            if left is not None:
                tokens, count = word_list([repr(token) for token in left.common]), count_of(len(left.cases), "position")
                lines.append(f"Left over: {count} {what} ({left.coverage:.0%} of all such; most often {tokens}).")
        return lines
