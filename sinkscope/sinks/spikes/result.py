"""The result of `find_sinks` and `why_sink`: spikes and who attends where, as tables; what is said of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

import numpy as np
from jaxtyping import Float

from sinkscope.measure import Result
from sinkscope.results.headline import Headline
from sinkscope.results.notation import Head, Neuron
from sinkscope.results.table import Subject
from sinkscope.sinks.spikes.record import SpikeResult
from sinkscope.sinks.spikes.sentences import (
    answer_headlines,
    brief_of,
    cause_sentence,
    legend,
    needed_headlines,
    needed_sentence,
    no_spike_sentence,
    purpose_sentence,
    readers_sentence,
    spike_title,
    spike_words,
)
from sinkscope.sinks.spikes.spike import PlaceKind, layers_words
from sinkscope.sinks.spikes.tables import (
    AttendedKind,
    Attention,
    Brief,
    Largest,
)
from sinkscope.sinks.spikes.why_tables import (
    Marking,
    MarkingKind,
)

WHY_TABLES = ("conditions", "constant", "purpose", "marks")
"""The tables of a spike that `why_sink` prints; pages and files have all."""


@dataclass(frozen=True, kw_only=True)
class FindSinks(Result):
    """The norm spikes of a model, what writes and needs them, and the heads that attend to their places.

    Attributes:
        spikes: The spikes, most read first.
        attention: Who attends where: heads at the first spike's place or the first token, and elsewhere.
        largest: The largest norm over the typical one that was seen.
        heads: Mean attention of each head to position 0; NaN in layers that do not attend.
        typical_norm: Median norm of later positions after each layer.
        first_token_norm: Median norm of first tokens after each layer.
    """

    kind = "find-sinks"

    spikes: tuple[SpikeResult, ...]
    attention: tuple[Attention, ...]
    largest: Largest
    heads: Float[np.ndarray, "layer head"]
    typical_norm: tuple[float, ...]
    first_token_norm: tuple[float, ...]

    @property
    def spike(self) -> SpikeResult | None:
        """The spike that most heads read; None if there is none."""
        return next(iter(self.spikes), None)

    @property
    def readers(self) -> Attention:
        """The heads that attend to the place of the first spike, or to the first token if there is none."""
        return self.attention[0]

    @property
    def first_spikes(self) -> tuple[SpikeResult, ...]:
        """The spikes of the first token."""
        return tuple(spike for spike in self.spikes if spike.place.key.kind is PlaceKind.FIRST)

    @property
    def needed(self) -> tuple[Neuron, ...]:
        """The neurons that the spike with most readers needs; empty if there are none."""
        return () if self.spike is None else self.spike.needed_neurons

    def conclusion(self) -> str:
        """Return what the needed neurons do at the place, beside their control; or how many heads attend where."""
        sentence = None if self.spike is None else needed_sentence(self.spike)
        if sentence is not None:
            return sentence
        for row in self.attention:
            attends = row.heads is not None and row.heads.value
            if attends and (self.spikes or row is self.readers or row.key.kind is AttendedKind.LEARNED):
                return readers_sentence(row)
        return no_spike_sentence(self.largest)

    def subjects(self) -> list[Subject]:
        """Return the tables of each spike, and who attends where; of all spikes but the first, a line is shown."""
        subjects: list[Subject] = []
        shown = self.shown_spike
        for number, spike in enumerate(self.spikes):
            also = [other for other in self.spikes if other.like == number]
            subjects.append(spike_subject(spike, also, is_shown=spike is shown))
        briefs: list[Brief] = []
        for spike in self.spikes:
            if spike.like is None and spike is not shown:
                briefs.append(brief_of(spike))
        summary = Subject("", tuple(briefs), "other spikes", is_summary=True)
        attention = Subject("", (*self.attention, self.largest), "attention")
        return [*subjects[:1], *([summary] if briefs else []), attention, *subjects[1:]]

    def compared(self) -> list[Subject]:
        """Return the same without the lines of other spikes, whose tables have their numbers."""
        return [subject for subject in self.subjects() if not subject.is_summary]

    @property
    def shown_spike(self) -> SpikeResult | None:
        """The spike whose tables are printed."""
        return self.spike

    def details(self) -> list[str]:
        """Return what the labels mean."""
        if self.spike is None:
            attends = self.readers["heads"].value
            return [no_spike_sentence(self.largest)] if attends else []
        return [legend(len(self.spike.texts))]

    def headlines(self) -> list[Headline]:
        """Return what the needed parts of the first spike do, beside the strongest control."""
        return [] if self.spike is None else needed_headlines(self.spike)

    def figure(self) -> Any:
        """Draw norms, what writes and erases each spike, and the attention of heads."""
        from sinkscope.sinks.spikes.figure import draw  # with plotly, which a printed card does not need

        return draw(self)


@dataclass(frozen=True)
class MarkedKey:
    """The heads that mark the first token, for its spike in these layers."""

    layers: tuple[int, int]

    def __str__(self) -> str:
        return f"marking heads, {layers_words(*self.layers)}"


@dataclass(frozen=True, kw_only=True)
class WhySink(FindSinks):
    """The circuit of each sink: what marks its place, what writes and needs its spike, who reads it, and what for.

    Attributes:
        marking: The heads that mark the first token, over many tokens.
        marked: The layers of the spike that they mark.
        tokens: The tokens that have it, by which two results are compared.
    """

    kind = "why-sink"
    marking: tuple[Marking, ...] = ()
    marked: tuple[int, int] | None = None
    tokens: tuple[str, ...] = ()

    @property
    def answered(self) -> SpikeResult | None:
        """The first spike of which it was asked what makes its place or what the place is for; None without any."""
        return next((spike for spike in self.spikes if spike.conditions or spike.purpose), None)

    @property
    def marks(self) -> tuple[Head, ...]:
        """The heads without one of which less than half of the spike is left of a token that is put first."""
        heads: list[Head] = []
        for row in self.marking:
            if row.key.kind is MarkingKind.HEAD and row.key.head is not None:
                heads.append(row.key.head)
        return tuple(heads)

    def headlines(self) -> list[Headline]:
        """Return what makes a position the sink and what it is for; where this was not asked, as `find_sinks`."""
        return super().headlines() if self.answered is None else answer_headlines(self.answered)

    def figure(self) -> Any:
        """Draw what makes a position the sink, and what the place is for."""
        from sinkscope.sinks.spikes.figure import draw_answers

        return draw_answers(self)

    def conclusion(self) -> str:
        """Return what makes a position the sink and what it is for; where this was not asked, as `find_sinks`."""
        if self.answered is None:
            return super().conclusion()
        sentences = (cause_sentence(self.answered), purpose_sentence(self.answered))
        return " ".join(filter(None, sentences))

    def subjects(self) -> list[Subject]:
        """Return the same with the heads that mark the first token; what makes the sink, and what for, is shown."""
        subjects: list[Subject] = []
        for subject in super().subjects():
            shown = WHY_TABLES if subject.is_shown and self.answered is not None else ()
            subjects.append(replace(subject, shown_tables=shown))
        if self.marked is not None:
            title = f"Heads that mark the first token, for its spike in {layers_words(*self.marked)}"
            subjects.append(Subject(title, self.marking, MarkedKey(self.marked), self.tokens))
        return subjects

    @property
    def shown_spike(self) -> SpikeResult | None:
        """The spike whose tables are printed: the one that was asked."""
        return self.answered or self.spike

    def details(self) -> list[str]:
        """Return what the needed neurons do, if the conclusion says something else, and what the labels mean."""
        lines = super().details()
        return lines if self.answered is None else [super().conclusion(), *lines]


def spike_subject(spike: SpikeResult, also: Iterable[SpikeResult] = (), *, is_shown: bool = True) -> Subject:
    """Return a spike with its tables.

    Args:
        spike: The spike.
        also: The same spike at other places.
        is_shown: Whether the console shows it.
    """
    words = spike_words(spike, sorted(also, key=attrgetter("heads"), reverse=True))
    texts = tuple(f"text {text}" for text in spike.texts)
    return Subject(spike_title(spike), spike.rows, spike.key, texts, words, is_shown=is_shown)
