"""The result of `find_sinks` and `why_sink`: spikes and who attends where, as rows of tables; what is said of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import inf
from operator import attrgetter, itemgetter
from typing import Any

import numpy as np
from jaxtyping import Float

from sinkscope.errors import SinkscopeError
from sinkscope.measure import Result
from sinkscope.results.notation import Component, Head, Neuron, percent, read_head, read_neuron, word_list
from sinkscope.results.row import Card, Row, of_table
from sinkscope.sinks.spikes.spike import PlaceWords, run, span
from sinkscope.sinks.thresholds import HALF

WRITES = ("needed", "lowers", "backup")
"""The roles of neurons that write a spike."""
CAUSES = ("its token", "alone", "id 0")
"""What is special about the first token."""
AS_IT_IS = "as it is"
ONE_OTHER = "sees 1 other, drawn"
"""Rows of the table of conditions that are controls."""
TAKEN = {"its token": "place, another token", "alone": "place, sees 4 more", "id 0": "place, 32 later"}
"""The row in which each cause is taken away at the place."""
PURPOSE_CONTROLS = "purpose, controls"
"""The table of what hiding another key costs."""
NO_EQUAL = "no set of other neurons writes as much"
"""What a control says that is two thirds of its layer's neurons."""


@dataclass(frozen=True, kw_only=True)
class SpikeResult:
    """A spike as a result says it: what was chosen on one half of the texts, in numbers of the other half.

    Attributes:
        place: Where it is.
        layers: First and last layer of the run in which it stands out.
        peak: The layer after which it is largest.
        highest: The layer of the run after which its norm is farthest above the typical one.
        dims: Residual dimensions that hold at least a tenth of its direction's square.
        needed: The smallest set found without which less than a quarter of it is left; empty: no set that was tried.
        like: Number of an earlier spike that this one repeats at another place. None: it repeats none.
        held_out: Whether its numbers are of texts that did not find it.
        texts: The numbers of these texts among those that were read.
        rows: Everything that was measured of it, by tables.
    """

    place: PlaceWords
    layers: tuple[int, int]
    peak: int
    highest: int
    dims: tuple[int, ...]
    needed: tuple[str, ...]
    like: int | None
    held_out: bool
    texts: tuple[int, ...]
    rows: tuple[Row, ...]

    def __post_init__(self) -> None:
        if self.table("effects") and not self.table("controls"):
            raise SinkscopeError(f"the effects of {title_of(self)} have no control: give the rows of its controls")

    def table(self, name: str) -> dict[str, Row]:
        """Return the rows of a table by their names."""
        return of_table(self.rows, name)

    def named(self, table: str, name: str) -> Row:
        """Return a row of a table; an empty one if it was not measured."""
        return self.table(table).get(name, Row(table, name))

    @property
    def heads(self) -> int:
        """The heads in its layers that attend to the place."""
        return int(self.named("spike", "read by").get("heads"))

    @property
    def ratio(self) -> float:
        """Its norm over the typical one, in the layer of the run where it is largest."""
        return self.named("spike", "norm").get("ratio")

    @property
    def calibrated(self) -> dict[Neuron, float]:
        """The values that a patch writes: those of the neurons that write the spike, by what their removal does."""
        neurons = self.table("writers").values()
        return {Neuron.of(read_neuron(row.name)): row.get("neutral") for row in neurons if row.note in WRITES}

    @property
    def needed_neurons(self) -> tuple[Neuron, ...]:
        """The needed neurons; empty if components are needed."""
        neurons = list[Neuron]()
        for name in self.needed:
            part = part_of(name)
            if isinstance(part, Neuron):
                neurons.append(part)
        return tuple(neurons)


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
        sentence = None if self.spike is None else needed_sentence(self.spike)
        readers = self.readers
        learned = of_table(self.attention, "attention").get("learned sink logits")
        if sentence is not None:
            return sentence
        if readers.get("heads") or self.spikes:
            return READERS.format(place=readers.name, **readers.numbers)
        if learned is not None:
            return LEARNED.format(heads=learned.numbers["heads"])
        return self._no_spike()

    def _no_spike(self) -> str:
        largest = of_table(self.attention, "norm")["largest"]
        return NO_SPIKE.format(ratio=largest.get("ratio"), where=largest.note)

    def cards(self) -> list[Card]:
        """Return a card for each spike, and one for who attends where."""
        made: list[Card] = []
        for number, spike in enumerate(self.spikes):
            if spike.like is None:
                made.append(spike_card(spike, [other for other in self.spikes if other.like == number]))
        said = list[tuple[str, str]]()
        for row in self.attention:
            if row.table != "norm":
                said.append((row.name, row.words(ATTENTION)))
        return [*made, Card("Attention", tuple(said))]

    def details(self) -> list[str]:
        """Return what the labels mean."""
        if self.spike is None:
            return [self._no_spike()] if self.readers.get("heads") else []
        return [LEGEND]

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

        return draw_answers(self, (AS_IT_IS, ONE_OTHER), PURPOSE_CONTROLS)

    def findings(self) -> list[Row]:
        """Return the same with the heads that mark the first token."""
        return [*super().findings(), *self.marking]

    def conclusion(self) -> str:
        """Return what makes a position the sink and what it is for; where this was not asked, as `find_sinks`."""
        if self.answered is None:
            return super().conclusion()
        sentences = (cause_sentence(self.answered), purpose_sentence(self.answered))
        return " ".join(filter(None, sentences))

    def cards(self) -> list[Card]:
        """Return the answers first: what makes the place, why heads read it, what attention to it is for."""
        answers = [card for spike in self.spikes for card in answer_cards(spike)]
        cards = [*answers, *super().cards()]
        if self.marking:
            title = f"Heads that mark the first token: spike of {self.marking[0].about}"
            said = [(row.name, row.words(MARKS)) for row in self.marking[:MARKING]]
            cards.append(Card(title, tuple(said)))
        return cards

    def details(self) -> list[str]:
        """Return what the needed neurons do, if the conclusion says something else, and what the labels mean."""
        lines = super().details()
        return lines if self.answered is None else [super().conclusion(), *lines]


def sufficient(rows: Iterable[Row]) -> list[tuple[str, ...]]:
    """Return the smallest sets of causes that give an ordinary position half of the spike, beyond the margin."""
    enough: list[tuple[str, ...]] = []
    for name, row in of_table(rows, "conditions").items():
        causes = tuple(name.split(", "))
        if {*causes} <= {*CAUSES} and row.get("left") - row.margin("left") >= HALF:
            enough.append(causes)
    return [causes for causes in enough if len(causes) == min(map(len, enough))]


def part_of(name: str) -> Neuron | Head | Component:
    """Return the part of a name: "mlp 11", "attention 3", "embedding", "L0.H4", "L1.N338"."""
    kind, _, layer = name.partition(" ")
    if kind == "embedding" or layer:
        return Component(kind, int(layer) if layer else None)  # pyright: ignore[reportArgumentType] - one of the kinds
    return Head(*read_head(name)) if ".H" in name else Neuron.of(read_neuron(name))


def title_of(spike: SpikeResult) -> str:
    """Return a spike by its place and layers, as its card has it."""
    return f"Spike at {spike.place.words}, {run(*spike.layers)}"


READERS = "{heads} of {total} heads give {place} more than 0.3 of their attention."
NO_FAIR_CONTROL = "no fair control: no other neurons write as much"
SUFFICE = "{parts} suffice{s} for the spike at {place}: {done} there, {they} {does}, {control}."
NO_SPIKE = "No norm spike was found: the largest is {ratio:.1f} times the typical one, {where}."
LEARNED = "{heads} heads give their learned sink logit, which is no token, more than 0.3 of their attention."
LEGEND = (
    "±: half of the 95% interval over texts, which did not choose the neurons. needed: the fewest that leave less than "
    "a quarter of the spike. at place: they are zeroed at the place alone. hidden: later tokens do not see "
    "the place. busiest, random: other neurons of the same layers that write as much, zeroed everywhere."
)
"""What explains the labels, below the last card."""
MAKES = "A position that {causes} becomes the sink: {share} of the spike ({control})."
MAKES_NOTHING = (
    "Neither its token, nor seeing only itself, nor position id 0 makes a position the sink: at most {share}."
)
COSTS = "Hiding {place} from later tokens {where} costs {loss} nats a token (another token: {control})."
SAID = {"its token": "carries {token}", "alone": "sees only itself", "id 0": "has position id 0"}
"""What each cause is called in a sentence."""

SHOWN = 3  # items that a label names
MARKING = 8  # rows of heads that mark the first token, on a card


LEFT = ("{left} of the spike", "{heads:head}", "{loss} nats")
EFFECT = (
    "{size:other neuron} zeroed",
    "{norm} of the written norm",
    "{left} of the spike",
    "{intact:head}, {heads} then",
    "{loss} nats over {tokens} tokens",
    "{reached} of {sets} sets do as much",
)
LISTED = {
    "writers": ("{share}",),
    "components": ("{share}",),
    "effects": EFFECT,
    "controls": EFFECT,
    "alone": LEFT,
    "marks": ("{left} left without it", "{others} without others"),
    "erasers": ("{share}",),
}
"""How the card of a spike says the rows of each table."""
MARKS = ("{have} of {tried} tokens, each alone, have the spike", "{heads:head} replaced", "{left} left")
ATTENTION = ("{heads} of {total:head}", "{share} of the heads at position 0 of {length} tokens")
ANSWERS = {
    "What makes a position the sink": {"conditions": LEFT},
    "Why heads read it": {
        "constant": ("{before} -> {after} at the place, {ordinary_before} -> {ordinary_after} at an ordinary position",)
    },
    "What attention to it is for": dict.fromkeys(
        ("purpose", PURPOSE_CONTROLS), ("{loss} nats", "{heads:head} at the place", "{taker_heads} at position 1")
    ),
}
"""How the cards of answers say the rows of their tables."""
CONSTANT = {
    "state": "cosine of states between texts",
    "value": "norm of the value over the typical one",
}
"""What the rows of the table of constants are called on a card."""


# --- sentences ---


def needed_sentence(spike: SpikeResult) -> str | None:
    """Return what the needed set of a spike costs at the place, beside the strongest control; None: not measured."""
    effect = spike.table("effects").get("at place")
    if effect is None:
        return None
    s, they = ("s", "it") if len(spike.needed) == 1 else ("", "they")
    does = f"leave{s} {effect.numbers['left']} of it"
    if "loss" in effect.numbers:
        does = f"cost{s} {effect.numbers['loss']} nats a token"
    return SUFFICE.format(
        parts=component(word_list(spike.needed, 2 if len(spike.needed) == 2 else 1)),
        s=s,
        place=spike.place.words,
        done="zeroed" if spike.needed_neurons else "replaced",
        they=they,
        does=does,
        control=beside_control(spike, effect),
    )


def beside_control(spike: SpikeResult, effect: Row) -> str:
    """Return what the control does that costs most, or leaves least; the words say so if that is as much."""
    control = None
    strongest = -inf, -inf
    for row in spike.table("controls").values():
        if "left" not in row.numbers:  # no other part writes anything
            continue
        does = row.get("loss", 0.0), -row.get("left")  # of a place that no head reads, no loss is read
        if does > strongest:
            control = row
            strongest = does
    if control is None:
        return "without a control"
    number, sign = ("loss", 1) if {"loss"} <= effect.numbers.keys() & control.numbers.keys() else ("left", -1)
    value = control.numbers[number].digits(control.get(number))
    if control.note == NO_EQUAL:  # what such a set costs says nothing about the needed ones
        return NO_FAIR_CONTROL
    others = {"busiest": "the busiest others", "random": "random others"}[control.name]
    if sign * (control.get(number) - effect.get(number)) >= -effect.margin(number):
        return f"{others} as much ({value})"
    return f"{others} {value}"


def cause_sentence(spike: SpikeResult) -> str | None:
    """Return what makes a position such a place; None if it was not asked."""
    asked = spike.table("conditions")
    enough = sufficient(spike.rows)
    if not asked:
        return None
    if not enough:
        given = [row.get("left") for name, row in asked.items() if {*name.split(", ")} <= {*CAUSES, AS_IT_IS}]
        return MAKES_NOTHING.format(share=percent(max(given)))
    control = f"an ordinary position: {percent(asked[AS_IT_IS].get('left'))}"
    if any("alone" in causes for causes in enough):
        control = f"with one other token visible: {asked[ONE_OTHER].numbers['left']}"
    best = max((asked[", ".join(causes)] for causes in enough), key=lambda row: row.get("left"))
    said = [word_list([SAID[cause].format(token=repr(spike.place.token)) for cause in causes]) for causes in enough]
    return MAKES.format(causes=" or ".join(said), share=best.numbers["left"], control=control)


def purpose_sentence(spike: SpikeResult) -> str | None:
    """Return what hiding a place costs; None if it was not asked."""
    hidden = spike.table("purpose").get("hidden")
    if hidden is None:
        return None
    (control,) = spike.table(PURPOSE_CONTROLS).values()
    words = {"place": spike.place.words, "where": hidden.note, "loss": hidden.numbers["loss"]}
    return COSTS.format(**words, control=replace(control.numbers["loss"], margin=None))


# --- cards ---


def spike_card(spike: SpikeResult, others: Sequence[SpikeResult] = ()) -> Card:
    """Return the card of a spike.

    Args:
        spike: The spike.
        others: The same spike at other places.
    """
    norm = spike.named("spike", "norm")
    needed = component(word_list(spike.needed, SHOWN))
    times = f"{spike.ratio:,.{int(spike.ratio < 10)}f} times the typical one after layer {spike.highest}"
    said = f"{norm.get('norm_before'):,.0f} -> {norm.get('norm_after'):,.0f}, {times}"
    if spike.dims:
        said += f"; along dimension{'s' * (len(spike.dims) > 1)} {word_list(spike.dims)}"
    rows = {"norm": said, "needed": "no neurons or pair of components that was tried"}
    if spike.needed:
        them = {1: "it", 2: "both"}.get(len(spike.needed), f"these {len(spike.needed)}")
        rows["needed"] = f"{needed}; {spike.named('spike', 'needed').numbers['left']} left without {them} at the place"
    for table, phrases in LISTED.items():
        own = spike.table(table)
        if table in ("effects", "controls"):
            for name, row in own.items():
                rows[name] = row.words(phrases)
        elif table != "alone" or len(own) > 1:
            rows[table] = listed(own.values(), phrases)
    also = list[Row]()
    for other in sorted(others, key=attrgetter("heads"), reverse=True):
        also.append(replace(other.named("spike", "read by"), name=f"{other.place.words}:"))
    rows["also at"] = listed(also, LEFT)
    rows["texts"] = "" if spike.held_out else "the half that chose: the other half does not have this place"
    return Card(title_of(spike), tuple(filter(itemgetter(1), rows.items())))


def listed(rows: Iterable[Row], phrases: Sequence[str]) -> str:
    """Return the first rows on one line, each with its name, its numbers and its note, and how many more there are."""
    items = list[str]()
    for row in rows:
        items.append(f"{component(row.name)} {row.words(phrases)}")
    return "   ".join([*items[:SHOWN], f"and {len(items) - SHOWN} more"] if len(items) > SHOWN else items)


def answer_cards(spike: SpikeResult) -> list[Card]:
    """Return what makes a position the sink, why heads read it, and what attention to it is for, if this was asked."""
    cards: list[Card] = []
    for title, tables in ANSWERS.items():
        said: list[tuple[str, str]] = []
        for table, phrases in tables.items():
            said += [(CONSTANT.get(name, name), row.words(phrases)) for name, row in spike.table(table).items()]
        cards += [Card(f"{title}: {spike.place.words}, {run(*spike.layers)}", tuple(said))] if said else []
    return cards


def component(parts: str) -> str:
    """Return parts on a card, from their names in JSON: "MLP 11", "attention 3", "embedding", "L0.H4"."""
    return parts.replace("mlp", "MLP")
