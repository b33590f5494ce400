"""The result of `find_sinks` and `why_sink`: the spikes, who reads them, and what is said of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from jaxtyping import Float

from sinkscope.measure import Number, Result
from sinkscope.results.cards import Card
from sinkscope.results.notation import head_name, word_list
from sinkscope.results.parts import Neuron
from sinkscope.results.tables import Table
from sinkscope.sinks.spikes import answer_cards, cards
from sinkscope.sinks.spikes.compared import numbers_beside
from sinkscope.sinks.spikes.first_marks import MarkingHeads
from sinkscope.sinks.spikes.records import Attended, Largest, OtherBos, Readers, SinkRate, SpikeResult, part_of
from sinkscope.sinks.thresholds import READS

FIRST = "the first token"


@dataclass(frozen=True, kw_only=True)
class FindSinks(Result):
    """The norm spikes of a model, what writes and needs them, and the heads that attend to their places.

    Attributes:
        spikes: The spikes, most read first.
        readers: Heads that attend to the place of the first spike, or to the first token if there is none.
        attended: Places without a spike that heads attend to.
        learned_heads: Heads that attend to their learned sink logit.
        largest: The largest norm over the typical one that was seen.
        heads: Mean attention of each head to position 0; NaN in layers that do not attend.
        bos: What the other choice of BOS gives. None: the tokenizer has no BOS token.
        sink_rate: The sink rate of position 0.
        typical_norm: Median norm of later positions after each layer.
        first_token_norm: Median norm of first tokens after each layer.
        layers_read: Number of layers.
        first_ids: The ids before the text itself, such as BOS.
    """

    kind = "find-sinks"  # read and drawn without the command, which stands in another module
    drawing: ClassVar[Any] = "sinkscope.sinks.spikes.figure:draw"
    percent = ("share", "margin", "remaining")
    tables_on_request = True
    columns = ("part", "role", "share", "remaining", "heads", "loss", "place", "layers")
    glossary: ClassVar = {
        "part": "a neuron, a component, or a set of them that was removed as one",
        "role": "what its removal at the place does to the spike: needed (it is in the smallest set that suffices), "
        "lowers, backup (it writes only when others are gone), raises, another spike (it lowers that one more), "
        "nothing; or mark",
        "share": "what it adds along the spike's direction, as a share of the spike",
        "margin": "half of the 95 % interval of the share over texts",
        "remaining": "share of the spike that remains without it alone",
        "heads": "heads in the spike's layers that still attend to the place without it alone",
        "loss": "rise of the loss without it alone, in nats a token",
        "place": "where the spike is",
        "layers": "layers in which the spike stands out",
    }

    spikes: tuple[SpikeResult, ...]
    readers: Readers
    attended: tuple[Attended, ...] = ()
    learned_heads: int = 0
    largest: Largest
    heads: Float[np.ndarray, "layer head"]
    bos: OtherBos | None
    sink_rate: SinkRate
    typical_norm: tuple[float, ...]
    first_token_norm: tuple[float, ...]
    layers_read: int
    first_ids: tuple[int, ...]

    @property
    def spike(self) -> SpikeResult | None:
        """The spike that most heads read; None if there is none."""
        return next(iter(self.spikes), None)

    @property
    def answered(self) -> SpikeResult | None:
        """The first spike with an answer to what makes its place or what the place is for; None without any."""
        asked = [spike for spike in self.spikes if spike.conditions is not None or spike.purpose is not None]
        return next(iter(asked), None)

    @property
    def first_spikes(self) -> tuple[SpikeResult, ...]:
        """The spikes of the first token."""
        return tuple(spike for spike in self.spikes if spike.place.words == FIRST)

    @property
    def needed(self) -> tuple[Neuron, ...]:
        """The neurons that the spike with most readers needs; empty if there are none."""
        if self.spike is None or self.spike.needed is None:
            return ()
        return self.spike.needed.neurons

    def conclusion(self) -> str:
        """Return the fewest neurons that suffice and what they do at the place; or how many heads attend where."""
        sentence = None if self.spike is None else cards.needed_sentence(self.spike)
        if sentence is not None:
            return sentence
        if self.readers.heads or self.spikes:
            return cards.readers_sentence(self.readers)
        if self.learned_heads:
            return cards.LEARNED.format(heads=self.learned_heads, total=self.readers.total)
        return self._no_spike

    def cards(self) -> list[Card]:
        """Return a card for each spike, and one for who attends where."""
        made: list[Card] = []
        for number, spike in enumerate(self.spikes):
            if spike.like is None:
                made.append(cards.spike_card(spike, [other for other in self.spikes if other.like == number]))
        attended = [sink for sink in self.attended if self.spikes or sink.place.words != self.readers.place]
        learned = self.learned_heads if self.readers.heads or self.spikes else 0  # else the conclusion says it
        attention = cards.attention_card(self.readers, attended, learned, self.bos, self.readers.total)
        return made if attention is None else [*made, attention]

    def details(self) -> list[str]:
        """Return what the labels mean."""
        if self.spike is not None:
            effects, lines = [spike.effect for spike in self.spikes if spike.effect is not None], list[str]()
            if effects and all(effect.at_place.loss is None for effect in effects):
                lines.append(cards.NO_LOSS)
            return [*lines, cards.LEGEND]
        return [self._no_spike] if self.readers.heads else []

    @property
    def _no_spike(self) -> str:
        ratio, token = f"{self.largest.ratio:.1f}", repr(self.largest.token)
        return cards.NO_SPIKE.format(ratio=ratio, token=token, layer=self.largest.layer)

    def rows(self) -> Table:
        """A row for each writer, for components that a spike needs, and for marks."""
        rows: Table = []
        for spike in self.spikes:
            rows += spike_rows(spike)
        return rows

    def to_frame(self) -> Any:
        """Return `rows` as a data frame: layer, neuron and expert whole numbers, and the interval of each share."""
        import pandas as pd

        frame = super().to_frame()
        columns: dict[str, list[int | None]] = {"layer": [], "neuron": [], "expert": []}
        for row in self.rows():
            part = part_of(row["part"]) if " + " not in row["part"] and " and " not in row["part"] else None
            for name, values in columns.items():
                values.append(getattr(part, name, None))
        for name, values in columns.items():
            frame[name] = pd.array(values, dtype="Int64")
        if len(frame):
            shares, margins = (frame[name].astype(float) for name in ("share", "margin"))
            frame["value"], frame["lower"], frame["upper"] = shares, shares - margins, shares + margins
        return frame

    def numbers(self) -> list[Number]:
        """Return the heads, the spike's ratio, its neurons, and what is lost without them."""
        total = max(self.readers.total, 1)
        margin = None if self.readers.margin is None else self.readers.margin / total
        samples = {f"text {text}": heads / total for text, heads in enumerate(self.readers.by_text)}
        names = list[str]()
        if self.readers.place == FIRST:  # `heads` are about position 0
            for layer, attention in enumerate(self.heads):
                names += [head_name(layer, head) for head, share in enumerate(attention) if share > READS]
        share, label = self.readers.heads / total, "share of heads that attend to the sink"
        numbers = [Number("heads", label, share, margin=margin, share=True, samples=samples, items=tuple(names))]
        if self.spike is not None:
            numbers.append(Number("place", "where the norm spike is", self.spike.place.words))
            numbers.append(Number("layers", "layers in which it stands out", cards.span(*self.spike.layers)))
            numbers.append(Number("ratio", "norm of the spike over the typical one", self.spike.ratio))
            if self.needed:
                needed = tuple(map(str, self.needed))
                numbers.append(Number("neurons", "neurons that the spike needs", word_list(needed, 4), items=needed))
            numbers += effect_numbers(self.spike)
        return numbers

    def numbers_beside(self, other: Any) -> tuple[list[Number], list[Number]]:
        """Return the numbers of both results; numbers of the same spike have the same key."""
        return numbers_beside(self, other)


def effect_numbers(spike: SpikeResult) -> list[Number]:
    """Return how the loss rises without the needed set of a spike, and what is left, beside the strongest control."""
    if spike.effect is None or spike.controls is None or spike.needed is None:
        return []
    outcome, strongest, numbers = spike.effect.at_place, spike.controls.strongest, list[Number]()
    control = None if strongest is None else strongest[1]
    contrast = "control" if strongest is None else f"{strongest[0]} others"
    names = word_list(spike.needed.parts, 2)
    if outcome.loss is not None:
        label = f"rise of the loss without {names} at the place, in nats a token"
        control_value = None if control is None else control.loss
        numbers.append(Number("loss", label, outcome.loss, control_value, outcome.margin, contrast=contrast))
    label = f"share of the spike that remains without {names} at the place"
    control_value = None if control is None else control.left
    numbers.append(
        Number("left.needed", label, outcome.left, control_value, outcome.left_margin, share=True, contrast=contrast)
    )
    return numbers


def spike_rows(spike: SpikeResult) -> Table:
    """Return the rows of a spike: needed neurons, other candidates, components that it needs, and marks."""
    rows: Table = []
    alone = {neuron.address: neuron for neuron in spike.alone}
    where = {"place": spike.place.words, "layers": cards.span(*spike.layers)}
    for neuron in sorted(spike.neurons, key=lambda neuron: (neuron.role != "needed", -neuron.share)):
        outcomes = {"remaining": neuron.left, "heads": None, "loss": None}
        removal = alone.get(neuron.address)
        if removal is not None:
            outcomes = {"remaining": removal.left, "heads": removal.heads, "loss": removal.loss}
        row = {"part": str(neuron.address), "role": neuron.role, "share": neuron.share, "margin": neuron.margin}
        rows.append(row | outcomes | where)
    if spike.needed is not None and not spike.needed.neurons and spike.effect is not None:
        outcome, shares = spike.effect.at_place, {writer.part: writer.share for writer in spike.writers}
        share = sum(shares.get(part, 0.0) for part in spike.needed.parts)
        row = {"part": " + ".join(spike.needed.parts), "role": "needed", "share": share, "margin": None}
        rows.append(row | {"remaining": outcome.left, "heads": outcome.heads[1], "loss": outcome.loss} | where)
    for mark in spike.marks:
        row = {"part": mark.part, "role": "mark", "share": None, "margin": None, "remaining": mark.left}
        rows.append(row | {"heads": mark.heads[1], "loss": None} | where)
    return rows


@dataclass(frozen=True, kw_only=True)
class WhySink(FindSinks):
    """The circuit of each sink: what marks its place, what writes and needs its spike, who reads it, and copies.

    Attributes:
        marking: The heads that mark the first token, over many tokens. None: it was not asked.
    """

    kind = "circuit"
    page = "measure/why-sink"
    drawing: ClassVar[Any] = "sinkscope.sinks.spikes.figure:draw_circuit"

    marking: MarkingHeads | None = None

    def conclusion(self) -> str:
        """Return what makes a position the sink and what it is for; where this was not asked, what marks the place."""
        if self.answered is not None:
            sentences = (answer_cards.cause_sentence(self.answered), answer_cards.purpose_sentence(self.answered))
            return " ".join(sentence for sentence in sentences if sentence is not None)
        return super().conclusion() if self.spike is None else cards.marks_sentence(self.spike)

    def cards(self) -> list[Card]:
        """Return the answers first: what makes the place, why heads read it, what attention to it is for."""
        made: list[Card] = []
        for spike in self.spikes:
            answers = answer_cards.conditions_card, answer_cards.constancy_card, answer_cards.purpose_card
            for answer in answers:
                card = answer(spike)
                if card is not None:
                    made.append(card)
        marking = None if self.marking is None else self.marking.card()
        return [*made, *super().cards(), *([] if marking is None else [marking])]

    def details(self) -> list[str]:
        """Return what marks the place, what the needed neurons do, and what the labels mean."""
        if self.spike is None:
            return super().details()
        lines = [super().conclusion(), *super().details()]
        marks = self.spike.marks
        if self.answered is not None and marks:
            lines.insert(0, cards.marks_sentence(self.spike))
        if self.marking is not None:
            lines.append(self.marking.sentence())
        return lines

    def numbers(self) -> list[Number]:
        """Return what marks the place, what remains of the spike without it, and the heads that attend there."""
        if self.spike is None or not self.spike.marks:
            return super().numbers()
        mark = self.spike.marks[0]
        label = "share of the spike that remains with what marks its place replaced"
        left = Number("left", label, mark.left, mark.others, mark.margin, share=True, contrast="others")
        return [left, Number("mark", "what marks the place", mark.part), *super().numbers()]
