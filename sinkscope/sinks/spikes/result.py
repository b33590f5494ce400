"""The result of `find_sinks` and `why_sink`: spikes and who attends where, as tables; what is said of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import numpy as np
from jaxtyping import Float

from sinkscope.errors import SinkscopeError
from sinkscope.measure import Result
from sinkscope.results.notation import Head, Neuron, word_list
from sinkscope.results.table import Row, Subject
from sinkscope.sinks.spikes.spike import Parts, PlaceWords, run
from sinkscope.sinks.spikes.tables import (
    AS_IT_IS,
    ONE_OTHER,
    WRITES,
    Attention,
    Cause,
    Condition,
    Conditioned,
    Constancy,
    Done,
    Effect,
    Erased,
    Largest,
    Mark,
    Marking,
    Purpose,
    Size,
    SpikeKey,
    Writer,
    Written,
    parts_names,
)
from sinkscope.sinks.thresholds import HALF


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
        size: How large it is, and who reads it.
        writers: The neurons that were tried, the largest share first.
        components: What components write of it.
        erasers: What components write against it after its peak.
        effects: What its needed parts do, with their controls.
        marks: Components that mark its place.
        conditions: What makes another position such a place.
        constant: Why heads read it.
        purpose: What attention to it is for.
    """

    place: PlaceWords
    layers: tuple[int, int]
    peak: int
    highest: int
    dims: tuple[int, ...]
    needed: Parts
    like: int | None
    held_out: bool
    texts: tuple[int, ...]
    size: Size
    writers: tuple[Writer, ...] = ()
    components: tuple[Written, ...] = ()
    erasers: tuple[Erased, ...] = ()
    effects: tuple[Effect, ...] = ()
    marks: tuple[Mark, ...] = ()
    conditions: tuple[Conditioned, ...] = ()
    constant: tuple[Constancy, ...] = ()
    purpose: tuple[Purpose, ...] = ()

    def __post_init__(self) -> None:
        if self.effects and not any(row.is_control for row in self.effects):
            raise SinkscopeError(f"the effects of the spike at {self.key} have no control: give its rows")

    @property
    def key(self) -> SpikeKey:
        """The spike, as it is known in other models."""
        return SpikeKey(self.place.name, self.layers)

    @property
    def rows(self) -> tuple[Row, ...]:
        """The rows of all its tables; of the writers, the needed ones are first."""
        writers = sorted(self.writers, key=lambda row: row.role != "needed")
        chosen = (*writers, *self.components, *self.erasers)
        answers = (*self.conditions, *self.constant, *self.purpose)
        return (*answers, self.size, *chosen, *self.effects, *self.marks)

    @property
    def effect(self) -> Effect | None:
        """What its needed parts do at the place; None if it needs none."""
        return next((row for row in self.effects if row.key.done is Done.NEEDED and not row.key.everywhere), None)

    @property
    def hidden(self) -> Purpose | None:
        """What it costs to hide the place after its first writer; None: it was not asked."""
        return next((row for row in self.purpose if row.key == "hidden"), None)

    def condition(self, key: Condition) -> Conditioned:
        """Return what a position has of it under a condition."""
        return next(row for row in self.conditions if row.key == key)

    @property
    def heads(self) -> int:
        """The heads in its layers that attend to the place."""
        return int(self.size.heads.value)

    @property
    def ratio(self) -> float:
        """Its norm over the typical one, in the layer of the run where it is largest."""
        return self.size.ratio.value

    @property
    def calibrated(self) -> dict[Neuron, float]:
        """The values that a patch writes: those of the neurons that write the spike, by what their removal does."""
        return {row.key: row.neutral.value for row in self.writers if row.role in WRITES}

    @property
    def needed_neurons(self) -> tuple[Neuron, ...]:
        """The needed neurons; empty if components are needed."""
        return tuple(part for part in self.needed if isinstance(part, Neuron))


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
        return tuple(spike for spike in self.spikes if spike.place.name == "the first token")

    @property
    def needed(self) -> tuple[Neuron, ...]:
        """The neurons that the spike with most readers needs; empty if there are none."""
        return () if self.spike is None else self.spike.needed_neurons

    def conclusion(self) -> str:
        """Return the fewest neurons that suffice and what they do at the place; or how many heads attend where."""
        sentence = None if self.spike is None else needed_sentence(self.spike)
        if sentence is not None:
            return sentence
        if self.spikes or self.readers["heads"].value:
            heads, total = self.readers.text("heads"), self.readers.text("total")
            return READERS.format(place=self.readers.label, heads=heads, total=total)
        for row in self.attention:
            if row.key.kind == "learned sink logits":
                return LEARNED.format(heads=row.text("heads"))
        return self._no_spike()

    def _no_spike(self) -> str:
        return NO_SPIKE.format(ratio=self.largest.ratio.value, where=self.largest.label)

    def subjects(self) -> list[Subject]:
        """Return the tables of each spike, and who attends where."""
        subjects: list[Subject] = []
        for number, spike in enumerate(self.spikes):
            subjects.append(spike_subject(spike, [other for other in self.spikes if other.like == number]))
        return [*subjects, Subject("Attention", (*self.attention, self.largest), "attention")]

    def details(self) -> list[str]:
        """Return what the labels mean."""
        if self.spike is None:
            return [self._no_spike()] if self.readers["heads"].value else []
        return [LEGEND]

    def figure(self) -> Any:
        """Draw norms, what writes and erases each spike, and the attention of heads."""
        from sinkscope.sinks.spikes.figure import draw  # with plotly, which a printed card does not need

        return draw(self)


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
        return tuple(row.key for row in self.marking if isinstance(row.key, Head))

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
        """Return the same with the heads that mark the first token."""
        subjects = super().subjects()
        if self.marked is not None:
            key = SpikeKey("marked first tokens", self.marked)
            title = f"Heads that mark the first token, spike of {run(*self.marked)}"
            subjects.append(Subject(title, self.marking, key, self.tokens))
        return subjects

    def details(self) -> list[str]:
        """Return what the needed neurons do, if the conclusion says something else, and what the labels mean."""
        lines = super().details()
        return lines if self.answered is None else [super().conclusion(), *lines]


def sufficient(rows: Iterable[Conditioned]) -> list[tuple[Cause, ...]]:
    """Return the smallest sets of causes that give an ordinary position half of the spike, beyond the margin."""
    enough: list[tuple[Cause, ...]] = []
    for row in rows:
        if row.key.gives and row.left.value - (row.left.margin or 0.0) >= HALF:
            enough.append(row.key.causes)
    return [causes for causes in enough if len(causes) == min(map(len, enough))]


# --- sentences ---

READERS = "{heads} of {total} heads give {place} more than 0.3 of their attention."
SUFFICE = "{parts} suffice{s} for the spike at {place}: {done} there, {they} {does}{control}."
NO_SPIKE = "No norm spike was found: the largest is {ratio:.1f} times the typical one, {where}."
LEARNED = "{heads} heads give their learned sink logit, which is no token, more than 0.3 of their attention."
LEGEND = (
    "±: half of the 95% interval over texts, which did not choose the neurons. Needed: the fewest that leave less than "
    "a quarter of the spike. Controls: other neurons of the same layers; they write as much, unless a row says how "
    "much."
)
"""What explains the labels, below the last table."""
MAKES = "A position that {causes} becomes the sink: {share} of the spike ({control})."
MAKES_NOTHING = (
    "Neither its token, nor seeing only itself, nor position id 0 makes a position the sink: at most {share}."
)
COSTS = "Hiding {place} from later tokens from layer {since} on costs {loss} nats a token (another token: {control})."
SAID = {Cause.TOKEN: "carries {token}", Cause.ALONE: "sees only itself", Cause.ID: "has position id 0"}
"""What each cause is called in a sentence."""


def needed_sentence(spike: SpikeResult) -> str | None:
    """Return what the needed set of a spike costs at the place, beside the strongest control; None: not measured."""
    effect = spike.effect
    if effect is None:
        return None
    s, they = ("s", "it") if len(spike.needed) == 1 else ("", "they")
    does = f"leave{s} {effect.text('left')} of it"
    if effect.loss is not None:
        does = f"cost{s} {effect.text('loss')} nats a token"
    return SUFFICE.format(
        parts=parts_names(spike.needed, 2 if len(spike.needed) == 2 else 1),
        s=s,
        place=spike.place.words,
        done="zeroed" if spike.needed_neurons else "replaced",
        they=they,
        does=does,
        control=beside_control(spike, effect),
    )


def beside_control(spike: SpikeResult, effect: Effect) -> str:
    """Return what the control does that costs most, or leaves least; the words say so if that is as much."""
    controls = [row for row in spike.effects if row.is_control and row.left is not None]
    if not controls:
        return ", without a control"
    if effect.loss is not None and all(row.loss is not None for row in controls):
        control = max(controls, key=lambda row: row["loss"].value)
        number, more = "loss", control["loss"].value - effect["loss"].value
    else:
        control = min(controls, key=lambda row: row["left"].value)
        number, more = "left", effect["left"].value - control["left"].value
    value = control.text(number, margin=False)
    if control.key.done is Done.AS_MANY:
        does = "cost" if number == "loss" else "leave"
        writes = f"the busiest in equal number write {control.text('norm')} as much"
        return f". No other neurons write as much: {writes} and {does} {value}"
    others = "the busiest others" if control.key.done is Done.BUSIEST else "random others"
    return f", {others} as much ({value})" if more >= -(effect[number].margin or 0.0) else f", {others} {value}"


def cause_sentence(spike: SpikeResult) -> str | None:
    """Return what makes a position such a place; None if it was not asked."""
    if not spike.conditions:
        return None
    enough = sufficient(spike.conditions)
    if not enough:
        given = [row for row in spike.conditions if row.key.gives or row.key == AS_IT_IS]
        return MAKES_NOTHING.format(share=max(given, key=lambda row: row.left.value).text("left", margin=False))
    control = f"an ordinary position: {spike.condition(AS_IT_IS).text('left', margin=False)}"
    if any(Cause.ALONE in causes for causes in enough):
        control = f"with one other token visible: {spike.condition(ONE_OTHER).text('left')}"
    best = max((spike.condition(Condition(causes)) for causes in enough), key=lambda row: row.left.value)
    said: list[str] = []
    for causes in enough:
        said.append(word_list([SAID[cause].format(token=repr(spike.place.token)) for cause in causes]))
    return MAKES.format(causes=" or ".join(said), share=best.text("left"), control=control)


def purpose_sentence(spike: SpikeResult) -> str | None:
    """Return what hiding a place costs; None if it was not asked."""
    hidden = spike.hidden
    if hidden is None:
        return None
    (control,) = (row for row in spike.purpose if row.is_control)
    words = {"place": spike.place.words, "since": hidden.since, "loss": hidden.text("loss")}
    return COSTS.format(**words, control=control.text("loss", margin=False))


# --- what stands above tables ---


def spike_subject(spike: SpikeResult, also: Iterable[SpikeResult] = ()) -> Subject:
    """Return a spike with its tables.

    Args:
        spike: The spike.
        also: The same spike at other places.
    """
    words = spike_words(spike, sorted(also, key=attrgetter("heads"), reverse=True))
    texts = tuple(f"text {text}" for text in spike.texts)
    return Subject(spike_title(spike), spike.rows, spike.key, texts, words, is_shown=spike.like is None)


def spike_title(spike: SpikeResult) -> str:
    """Return where a spike is and how large: "Spike at the first token, layers 11-29: norm 181 -> 25,102, ..."."""
    size = spike.size
    times = f"{size.text('ratio')} times the typical one"
    norm = f"norm {size.text('norm_before')} -> {size.text('norm_after')}, {times}"
    return f"Spike at {spike.place.words}, {run(*spike.layers)}: {norm}"


def spike_words(spike: SpikeResult, also: Iterable[SpikeResult]) -> tuple[tuple[str, str], ...]:
    """Return what is said of a spike beside its tables.

    Args:
        spike: The spike.
        also: The same spike at other places.
    """
    words: list[tuple[str, str]] = []
    if not spike.needed:
        words.append(("needed", "no neurons or pair of components that was tried"))
    if spike.dims:
        words.append(("along", f"dimension{'s' * (len(spike.dims) > 1)} {word_list(spike.dims)}"))
    places = [f"{other.place.words} ({other.size.text('heads')} heads)" for other in also]
    if places:
        words.append(("also at", ", ".join(places)))
    if not spike.held_out:
        words.append(("texts", "the half that chose: the other half does not have this place"))
    return tuple(words)
