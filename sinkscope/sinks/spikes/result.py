"""The result of `find_sinks` and `why_sink`: spikes and who attends where, as rows of tables."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jaxtyping import Float

from sinkscope.measure import Result
from sinkscope.results.notation import Head, Neuron, read_head
from sinkscope.results.row import Card, Row, of_table
from sinkscope.sinks.spikes import records
from sinkscope.sinks.spikes.records import SpikeResult, title_of
from sinkscope.sinks.spikes.spike import span

MARKING = 8  # rows of heads that mark the first token, on a card


@dataclass(frozen=True, kw_only=True)
class FindSinks(Result):
    """The norm spikes of a model, what writes and needs them, and the heads that attend to their places.

    Attributes:
        spikes: The spikes, most read first.
        attention: Who attends where: heads at the first spike's place or the first token, and elsewhere; the largest
            norm over the typical one that was seen.
        heads: Mean attention of each head to position 0; NaN in layers that do not attend.
        typical_norm: Median norm of later positions after each layer.
        first_token_norm: Median norm of first tokens after each layer.
    """

    kind = "find-sinks"
    columns = ("about", "table", "name", "share", "left", "heads", "loss", "note")

    spikes: tuple[SpikeResult, ...]
    attention: tuple[Row, ...]
    heads: Float[np.ndarray, "layer head"]
    typical_norm: tuple[float, ...]
    first_token_norm: tuple[float, ...]

    @property
    def spike(self) -> SpikeResult | None:
        """The spike that most heads read; None if there is none."""
        return next(iter(self.spikes), None)

    @property
    def readers(self) -> Row:
        """The heads that attend to the place of the first spike, or to the first token if there is none."""
        return self.attention[0]

    @property
    def first_spikes(self) -> tuple[SpikeResult, ...]:
        """The spikes of the first token."""
        return tuple(spike for spike in self.spikes if spike.place.words == "the first token")

    @property
    def needed(self) -> tuple[Neuron, ...]:
        """The neurons that the spike with most readers needs; empty if there are none."""
        return () if self.spike is None else self.spike.needed_neurons

    def conclusion(self) -> str:
        """Return the fewest neurons that suffice and what they do at the place; or how many heads attend where."""
        sentence = None if self.spike is None else records.needed_sentence(self.spike)
        readers = self.readers
        learned = of_table(self.attention, "attention").get("learned sink logits")
        if sentence is not None:
            return sentence
        if readers.get("heads") or self.spikes:
            return records.READERS.format(place=readers.name, **readers.numbers)
        if learned is not None:
            return records.LEARNED.format(heads=learned.numbers["heads"])
        return self._no_spike()

    def _no_spike(self) -> str:
        largest = of_table(self.attention, "norm")["largest"]
        return records.NO_SPIKE.format(ratio=largest.get("ratio"), where=largest.note)

    def cards(self) -> list[Card]:
        """Return a card for each spike, and one for who attends where."""
        made: list[Card] = []
        for number, spike in enumerate(self.spikes):
            if spike.like is None:
                made.append(records.spike_card(spike, [other for other in self.spikes if other.like == number]))
        said = [(row.name, row.words(records.ATTENTION)) for row in self.attention if row.table != "norm"]
        return [*made, Card("Attention", tuple(said))]

    def details(self) -> list[str]:
        """Return what the labels mean."""
        if self.spike is None:
            return [self._no_spike()] if self.readers.get("heads") else []
        return [records.LEGEND]

    def figure(self) -> Any:
        """Draw norms, what writes and erases each spike, and the attention of heads."""
        from sinkscope.sinks.spikes.figure import draw  # with plotly, which a printed card does not need

        return draw(self)

    def findings(self) -> list[Row]:
        """Return everything that was measured of each spike, and who attends where."""
        rows = list(self.attention)
        for spike in self.spikes:
            title = title_of(spike)
            names = tuple(f"text {number}" for number in spike.texts)
            rows.append(Row("spike", "layers", {}, span(*spike.layers), title))
            rows.append(Row("spike", "needed parts", {}, " and ".join(spike.needed), title))
            rows += [replace(row, about=title, texts=names) for row in spike.rows]
        return rows


@dataclass(frozen=True, kw_only=True)
class WhySink(FindSinks):
    """The circuit of each sink: what marks its place, what writes and needs its spike, who reads it, and what for.

    Attributes:
        marking: The heads that mark the first token, over many tokens.
    """

    kind = "why-sink"
    marking: tuple[Row, ...] = ()

    @property
    def answered(self) -> SpikeResult | None:
        """The first spike of which it was asked what makes its place or what the place is for; None without any."""
        return next((spike for spike in self.spikes if spike.table("conditions") or spike.table("purpose")), None)

    @property
    def marks(self) -> tuple[Head, ...]:
        """The heads without one of which less than half of the spike is left of a token that is put first."""
        return tuple(Head(*read_head(row.name)) for row in self.marking if ".H" in row.name)

    def figure(self) -> Any:
        """Draw what makes a position the sink, and what the place is for."""
        from sinkscope.sinks.spikes.figure import draw_answers

        return draw_answers(self)

    def findings(self) -> list[Row]:
        """Return the same with the heads that mark the first token."""
        return [*super().findings(), *self.marking]

    def conclusion(self) -> str:
        """Return what makes a position the sink and what it is for; where this was not asked, as `find_sinks`."""
        if self.answered is None:
            return super().conclusion()
        sentences = (records.cause_sentence(self.answered), records.purpose_sentence(self.answered))
        return " ".join(filter(None, sentences))

    def cards(self) -> list[Card]:
        """Return the answers first: what makes the place, why heads read it, what attention to it is for."""
        answers = [card for spike in self.spikes for card in records.answer_cards(spike)]
        cards = [*answers, *super().cards()]
        if self.marking:
            title = f"Heads that mark the first token: spike of {self.marking[0].about}"
            said = [(row.name, row.words(records.MARKS)) for row in self.marking[:MARKING]]
            cards.append(Card(title, tuple(said)))
        return cards

    def details(self) -> list[str]:
        """Return what the needed neurons do, if the conclusion says something else, and what the labels mean."""
        lines = super().details()
        return lines if self.answered is None else [super().conclusion(), *lines]
