"""Tracing the circuit of each attention sink, from the mark of its position to the heads that attend to it.

`find_sinks` says which positions are sinks and which neurons make their spikes. Components are replaced there, and the
spike and the attention that are left are read (`position_effect`). What is said of a step follows the rule of
`sinkscope.measure.evidence`.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import plotly.graph_objects as go
import torch
from einops import reduce
from jaxtyping import Float
from plotly.subplots import make_subplots

from sinkscope.files.notation import agreeing, brief, counted, head_name, listed, neuron_name
from sinkscope.files.tables import Table, percent
from sinkscope.measure import Number, Positive, Result, Setup, measurement
from sinkscope.measure.evidence import NEEDED, Evidence, beside
from sinkscope.measure.style import BLUE, GREY, ORANGE, finished, unfolded
from sinkscope.models.target import Target, norm_of
from sinkscope.sinks.first_token.attention_received import with_long_texts
from sinkscope.sinks.first_token.effects import Component, Edit, effects, key_bias, key_projection, one_by_one
from sinkscope.sinks.first_token.find import find_sinks
from sinkscope.sinks.first_token.members import RATE_EPS, Sites, sites_of
from sinkscope.sinks.first_token.places import Rule
from sinkscope.sinks.first_token.position_effect import Marks, PositionEffect, random_swaps
from sinkscope.sinks.first_token.records import SHORT
from sinkscope.sinks.first_token.result import FindSinks
from sinkscope.sinks.first_token.search import random_sets
from sinkscope.sinks.first_token.sentences import few_heads
from sinkscope.sinks.tokens import TokenRows, prefixes
from sinkscope.trace.attention import attention_rows
from sinkscope.trace.run import trace

FIGURE_COMPONENTS = 12
NAMED, WORDS_OF_NAMES = 3, 6  # components that a sentence names at most, and the words that they may take
MARK, NEURONS, REPETITION, KEYS = "mark", "neurons", "repetition", "keys"
TEXTS = 2  # pieces of typical text
LATER_SINKS = 3  # sinks behind the first token that are traced at most


@dataclass(frozen=True)
class CircuitStep:
    """What one step of a circuit needs.

    Attributes:
        name: "mark": what marks the position for the spike; "neurons": the neurons that make the spike; "repetition":
            what marks the last of many repetitions; "keys": what heads read that do not need the spike.
        components: The components that were replaced, the chosen ones first; or the neurons.
        necessity: Share of the effect that is lost if the component writes at the position what it writes at a typical
            one, or if the neuron is zero.
        sufficiency: Share of the effect that a typical position gains from the component. NaN where that cannot be
            tested: neurons, and biases of keys.
        control: Largest loss of 20 single random heads; for neurons, `together_control`. None: there are too few.
        chosen: What is needed alone or, if nothing is, the smallest set found.
        alone: What is lost without each of the chosen. If the attention needs the spike, this is a loss of attention,
            because heads may read a spike of half the size as well.
        together: What is lost without all of them. None if nothing was chosen.
        together_control: Largest loss without as many random heads, or neurons of the same layers.
    """

    name: str
    components: tuple[str, ...]
    necessity: Float[np.ndarray, " component"]
    sufficiency: Float[np.ndarray, " component"]
    control: float | None
    chosen: tuple[str, ...]
    alone: Float[np.ndarray, " chosen"]
    together: float | None
    together_control: float | None

    @property
    def carried(self) -> bool:
        """Whether the chosen components are needed together."""
        return Evidence(self.together, self.together_control).holds

    @property
    def needed_alone(self) -> tuple[str, ...]:
        """Those of the chosen that are needed alone, if all are needed together."""
        pairs = zip(self.chosen, self.alone.tolist(), strict=True)
        return tuple(name for name, lost in pairs if self.carried and Evidence(lost, self.control).holds)

    def rows(self) -> Table:
        """A row for each component."""
        columns = {
            "necessity": self.necessity,
            "necessity_control": [self.control] * len(self.components),
            "sufficiency": self.sufficiency,
        }
        target = "keys" if self.name == KEYS else "spike"
        return unfolded(columns, step=[self.name], source=self.components, target=[target])

    def in_words(self) -> str:
        """What is lost without the chosen components, beside random ones."""
        if not self.carried and np.isnan(self.necessity).all():
            return "nothing tried is needed"
        if not self.carried:
            largest = int(np.nanargmax(self.necessity))
            lost, control = self._beside_random(float(self.necessity[largest]), self.control)
            return (
                f"nothing tried is needed; most, {lost}, is lost without {_named((self.components[largest],))}{control}"
            )
        lost, control = self._beside_random(self.together or 0.0, self.together_control)
        count, names, alone = len(self.chosen), _named(self.chosen), self.needed_alone
        if self.name == MARK and count == 1 and self.alone[0] < NEEDED:  # which is a loss of attention
            return f"{lost} is lost without {names}{control}, but the attention stays"
        if len(alone) == count:
            are, them = agreeing(count, "is", "are each"), agreeing(count, "it", "them")
            return f"{names} {are} needed: {lost} is lost without {them}{control}"
        if not alone:
            return f"none is needed alone; {lost} is lost without {names}{control}"
        every = "both" if count == 2 else f"all {count}"
        are = agreeing(len(alone), "is", "are")
        return f"only {_named(alone)} {are} needed alone; {lost} is lost without {every}{control}"

    def _beside_random(self, lost: float, control: float | None) -> tuple[str, str]:
        """A loss, and its control in brackets."""
        text, chance = beside(lost, control)
        if control is None:
            return text, ""
        return text, f" (random {'neurons' if self.name == NEURONS else 'heads'}: at most {chance})"


@dataclass(frozen=True)
class Readers:
    """The heads that give a position at least 0.3 of their attention, those with most attention first.

    If there are any behind the layer of the spike, only these count.

    Attributes:
        carried_by: What their keys need: "spike", or components. Empty if nothing was found.
        heads: The heads.
        of: Number of heads that were looked at: those behind a layer, or all.
        behind: This layer, after which the spike stands out. None: all heads count.
        length: Length of the texts in which attention was read; a window cuts them.
        attention: Mean attention of each head to the position.
        attention_without: The same without what carries it; equal to `attention` if nothing was found.
        control: The lowest attention of all heads together without as many random neurons or heads. None if there are
            too few.
    """

    carried_by: tuple[str, ...]
    heads: tuple[str, ...]
    of: int
    behind: int | None
    length: int
    attention: Float[np.ndarray, " head"]
    attention_without: Float[np.ndarray, " head"]
    control: float | None

    @property
    def evidence(self) -> Evidence:
        """The attention that is lost without what carries it."""
        intact = float(self.attention.mean())
        control = None if self.control is None else intact - self.control
        return Evidence(intact - float(self.attention_without.mean()), control, intact)

    def rows(self) -> Table:
        """A row per head."""
        if not self.carried_by:
            return []
        source = "spike" if self.carried_by == ("spike",) else "marks"
        control = None if self.control is None else 1 - self.control / float(self.attention.mean())
        columns = {
            "necessity": 1 - self.attention_without / self.attention,
            "necessity_control": [control] * len(self.heads),
            "sufficiency": [None] * len(self.heads),
        }
        return unfolded(columns, step=["readers"], source=[source], target=self.heads)

    def in_words(self) -> str:
        """The attention with and without what carries it."""
        if not self.evidence.holds:
            return "nothing that was replaced takes it away"
        carried = _named(self.carried_by)
        control = "" if self.control is None else f" ({self.control:.2f} in the random control)"
        before, after = self.attention.mean(), self.attention_without.mean()
        return f"without {carried} the mean of that attention falls from {before:.2f} to {after:.2f}{control}"


@dataclass(frozen=True, kw_only=True)
class SinkCircuit:
    """How one sink comes about, step by step.

    Attributes:
        place: The position in words: "the first token" and this token, or a later token or position. None if there is
            neither spike nor sink.
        position: The position.
        sink_layer: The last layer whose neurons make the spike. None if no MLP does.
        steps: What the spike and the attention need.
        readers: The heads that attend to the position. None if there are none.
        stands_out: Whether the norm of a later position stands out.
    """

    place: str | None = None
    position: int = 0
    sink_layer: int | None = None
    steps: tuple[CircuitStep, ...] = ()
    readers: Readers | None = None
    stands_out: bool = False

    def step(self, name: str) -> CircuitStep | None:
        """A step by its name; None if the circuit does not have it."""
        for step in self.steps:
            if step.name == name:
                return step
        return None

    def edges(self) -> Table:
        """The edges, from the mark to the heads."""
        rows = []
        for step in self.steps:
            rows += step.rows()
        if self.readers is not None:
            rows += self.readers.rows()
        return [{"sink": self.place, **row} for row in rows]

    def sentence(self, place: str | None) -> str:
        """What marks the sink or, without a spike, what its readers need, with the control."""
        mark, keys = self.step(MARK), self.step(KEYS)
        if mark is not None:
            return f"For the spike of {place}, {mark.in_words()}."
        if keys is not None:
            spike = ", whose spike has no known neurons" if self.stands_out else " without a spike"
            return f"Heads attend to {place}{spike}; {keys.in_words()}."
        return f"No neurons were found that make a spike of {place}, and no head attends to it."


@dataclass(frozen=True, kw_only=True)
class Circuit(SinkCircuit, Result):
    """How each sink comes about: first that of the first token or, if it is none, the next one behind it.

    Attributes:
        first_token: The token that stands first in the texts.
        lengths: Lengths of the texts in which attention sinks were looked for.
        later: The circuits of further sinks.
        repeated: The token that is repeated.
        repeats: How often it is repeated.
        learned_share: Mean share of attention that the learned sink logits take. None if the model has none.
        first_share: Mean share of attention that the first token takes.
        untested: What may carry a sink and cannot be replaced in this model.
    """

    percent = ("necessity", "necessity_control", "sufficiency")
    columns = ("step", "source", "target", "necessity", "necessity_control")
    glossary: ClassVar = {
        "sink": "the position that the edge belongs to",
        "step": "what the edge belongs to",
        "target": "the input, or the head, that reads the source",
        "necessity": "share of the effect that is lost without the source",
        "necessity_control": "largest loss with random heads or neurons instead",
        "sufficiency": "share of the effect that a typical position gains from the source",
    }

    first_token: str
    lengths: tuple[int, ...] = (SHORT,)
    later: tuple[SinkCircuit, ...] = ()
    repeated: str | None = None
    repeats: int | None = None
    learned_share: float | None = None
    first_share: float | None = None
    untested: tuple[str, ...] = ()

    def rows(self) -> Table:
        """The edges of every sink."""
        rows = self.edges()
        for sink in self.later:
            rows += sink.edges()
        return rows

    def conclusion(self) -> str:
        """What marks the first of the sinks, or what its readers need, with the control."""
        if self.place is None:
            return f"No circuit: no norm stands out, and {few_heads(self.lengths)}."
        places = [self.place]
        if self.position == 0:
            places.append("the first token")
        return brief(map(self.sentence, places))

    def numbers(self) -> list[Number]:
        """The spike without its marks, and the attention without what carries it."""
        numbers = []
        mark = self.step(MARK)
        if mark is not None:
            numbers.append(Number("spike lost without its marks", mark.together, mark.together_control))
        if self.readers is not None:
            without = float(self.readers.attention_without.mean())
            numbers.append(Number("attention without what carries it", without, self.readers.control))
        return numbers

    def details(self) -> list[str]:
        """The neurons, repetition, the readers, further sinks, learned sink logits, and what was not tested."""
        lines = []
        neurons, repetition, readers = self.step(NEURONS), self.step(REPETITION), self.readers
        if neurons is not None:
            lines.append(f"Of the neurons that write the spike, {neurons.in_words()}.")
        if repetition is not None:
            times = counted(self.repeats or 0, "repetition")
            lines.append(f"After {times} of {self.repeated!r}, {repetition.in_words()}.")
        if readers is not None:
            give = agreeing(len(readers.heads), "gives", "give")
            behind = "" if readers.behind is None else f" behind layer {readers.behind}"
            lines.append(
                f"In texts of {readers.length} tokens, {len(readers.heads)} of {counted(readers.of, 'head')}{behind} "
                f"{give} {self.place} more than {RATE_EPS} of their attention; {readers.in_words()}."
            )
        if self.later:
            lines.append(" ".join([sink.sentence(sink.place) for sink in self.later]))
        if self.learned_share is not None:
            lines.append(
                f"Learned sink logits take {percent(self.learned_share)} of the attention, the first token "
                f"{percent(self.first_share)}."
            )
        if self.untested:
            lines.append(f"Not tested: {listed(self.untested)}.")
        return lines


def _named(components: tuple[str, ...], most: int = NAMED) -> str:
    """Components in a sentence: heads and neurons by their names, others with an article."""
    names = []
    for name in components:
        names.append(name if name.startswith("L") else f"the {name}")
    while most > 1 and len(listed(names, most).split()) > WORDS_OF_NAMES:
        most -= 1
    return listed(names, most)


def draw(result: Circuit) -> go.Figure:
    """Necessity, control and sufficiency of the edges, step by step."""
    panels = {}
    for row in result.rows():
        title = f"{row['step']}, {row['sink']}" if result.later else row["step"]
        panels.setdefault(html.escape(title), []).append(row)
    fig = make_subplots(cols=max(1, len(panels)), subplot_titles=list(panels) or ["no circuit"])
    for col, rows in enumerate(panels.values(), start=1):
        shown = rows[:FIGURE_COMPONENTS]
        names = [html.escape(row["target"] if row["step"] == "readers" else row["source"]) for row in shown]
        for field, color in (("necessity", ORANGE), ("necessity_control", GREY), ("sufficiency", BLUE)):
            values = [row[field] for row in shown]
            name = field.replace("_", " ")
            fig.add_bar(x=names, y=values, name=name, marker_color=color, showlegend=col == 1, row=1, col=col)
    fig.update_yaxes(tickformat=".0%")
    fig.update_yaxes(title_text="share of the effect", col=1)
    return finished(fig, result, width=max(700, 350 * len(panels)), height=460)


@dataclass(frozen=True)
class _Position:
    """A sink, and the texts on which its circuit is measured.

    Attributes:
        setup: The model and its text.
        name: The position in words.
        ids: Texts that have the same sink at the same position.
        at: The position.
        other: The typical position that it trades places with.
        layer: The layer after which the spike is read. None if there is no spike.
        sites: The neurons that make the spike. If there are none, components that are needed stand for them.
        shared_dims: Residual dimensions that are massive on all tokens and left out of norms.
    """

    setup: Setup
    name: str
    ids: TokenRows
    at: int
    other: int
    layer: int | None
    sites: Sites
    shared_dims: tuple[int, ...]

    @classmethod
    def of(
        cls, setup: Setup, sinks: FindSinks, name: str, ids: TokenRows, at: int, layer: int | None, sites: Sites
    ) -> _Position:
        """Chooses the typical position: its norms after the layer are nearest to the median of their text."""
        shared_dims = sinks.shared_dims
        window = getattr(setup.target.config, "sliding_window", None)
        if window and getattr(setup.target.config, "use_sliding_window", True):
            ids = ids[:, : max(at + 4, int(window))]  # every query sees the first position
        site = f"blocks.{setup.n_layers - 1 if layer is None else layer}.hook_resid_post"
        norms = trace(setup.target, ids, [site], lambda resid: norm_of(resid, shared_dims))[site]
        distance = (norms / norms[:, 1:].median(1, keepdim=True).values).log().abs()
        distance[:, at] = torch.inf
        length = ids.shape[1]
        begin, end = length // 8, max(length // 2, length // 8 + 1)
        other = begin + int(distance[:, begin:end].amax(0).argmin())
        return cls(setup, name, ids, at, other, layer, sites, shared_dims)

    @property
    def spike(self) -> PositionEffect:
        """The norm of the position after the layer."""
        return PositionEffect(self.setup.target, self.ids, self.at, self.other, self.layer, without=self.shared_dims)

    def random_heads(self, depth: int, excluded: Sequence[Component], size: int) -> list[Edit]:
        """Edits that replace random heads of the layers up to one, except these."""
        heads = [Component("head", layer, head) for layer in range(depth + 1) for head in range(self.setup.n_heads)]
        return random_swaps([head for head in heads if head not in excluded], size, self.setup.seed)

    def swapped(self, depth: int, chosen: tuple[Component, ...]) -> list[Edit]:
        """Edits that replace the chosen components, and as many random heads; none if nothing was chosen."""
        if not chosen:
            return []
        return [Edit(swap=chosen), *self.random_heads(depth, chosen, len(chosen))]

    def silenced(self) -> list[Edit]:
        """Edits that silence the neurons, and random sets of as many neurons of the same layers (and experts)."""
        generator = torch.Generator().manual_seed(self.setup.seed)
        return [Edit(zero=sites) for sites in (self.sites, *random_sets(self.setup.target, self.sites, (), generator))]

    def reading_effect(self) -> PositionEffect | None:
        """The attention to the position of the heads that read it; None if there are none.

        Only heads behind the spike's layer count. If there are none, all heads count, and these cannot read the spike.
        """
        target = self.setup.target
        received = effects(target, self.ids, [], at=self.at, attention=True).intact_attention
        reading = reduce(received, "text layer head -> layer head", "mean") > RATE_EPS
        behind = 0 if self.layer is None else self.layer + 1
        if bool(reading[behind:].any()):
            reading[:behind] = False
        if not bool(reading.any()):
            return None
        return PositionEffect(target, self.ids, self.at, self.other, heads=reading)


def _step(
    name: str,
    effect: PositionEffect,
    edits: dict[str, Edit],
    chosen: Sequence[str],
    together: Sequence[Edit],
    judge: PositionEffect,
    control: float | None = None,
) -> CircuitStep:
    """What is lost of an effect under each of some edits, and without all that were chosen.

    Args:
        name: Name of the step.
        effect: The effect.
        edits: What removes each component or neuron, by its name.
        chosen: Those that are called needed.
        together: The edit that removes all of these, and its controls.
        judge: The effect by which they are called needed alone.
        control: The control of a single edit. None: that of all together.
    """
    single = list(edits.values())
    lost = effect.necessity([*single, *together])
    together_control = max(lost[len(single) + 1 :], default=None)
    return CircuitStep(
        name=name,
        components=tuple(edits),
        necessity=np.array(lost[: len(single)]),
        sufficiency=np.array(effect.sufficiency(single)),
        control=together_control if control is None else control,
        chosen=tuple(chosen),
        alone=np.array(judge.necessity([edits[one] for one in chosen])),
        together=lost[len(single)] if together else None,
        together_control=together_control,
    )


def _mark_step(
    position: _Position, name: str, effect: PositionEffect, marks: Marks, depth: int, judge: PositionEffect
) -> CircuitStep:
    """What an effect needs of the components before a layer, which reads it by its MLP or by its keys."""
    control = max(effect.necessity(position.random_heads(depth, marks.chosen, 1)), default=None)
    edits = {str(one): Edit(swap=(one,)) for one in (*marks.chosen, *marks.effective)}
    together = position.swapped(depth, marks.chosen)
    return _step(name, effect, edits, tuple(map(str, marks.chosen)), together, judge, control)


def _readers(effect: PositionEffect, layer: int | None, carried_by: tuple[str, ...], edits: Sequence[Edit]) -> Readers:
    """The reading heads under an edit that removes what may carry them, and under its controls."""
    assert effect.heads is not None
    places = effect.heads.nonzero().tolist()
    behind, first = None, 0
    if layer is not None and places[0][0] > layer:
        behind, first = layer, layer + 1
    intact = effect.intact.mean(0)
    left = intact[None]
    if edits:
        left = intact - reduce(effect.removed(edits), "edit text head -> edit head", "mean")
    ranked = intact.argsort(descending=True, stable=True)
    return Readers(
        carried_by=carried_by,
        heads=tuple(head_name(*places[number]) for number in ranked.tolist()),
        of=effect.heads[first:].numel(),
        behind=behind,
        length=effect.ids.shape[1],
        attention=intact[ranked].double().numpy(),
        attention_without=left[0, ranked].double().numpy(),
        control=float(left[1:].mean(1).min()) if len(left) > 1 else None,
    )


def _traced(position: _Position, made_by_mlp: bool) -> SinkCircuit:
    """The circuit of a sink; `made_by_mlp` says whether MLPs make its spike."""
    steps = []
    reading, spike = position.reading_effect(), position.spike
    layer, sites = position.layer, position.sites
    readers: Readers | None = None
    carried = False
    if layer is not None:
        marks = spike.marks(layer)
        if reading is not None:
            carried_by: tuple[str, ...] = ("spike",)
            if sites:
                removing = position.silenced()
            elif made_by_mlp:
                removing = one_by_one([Component("mlp", layer)])
            else:
                carried_by = tuple(map(str, marks.chosen))
                removing = position.swapped(layer, marks.chosen)
            readers = _readers(reading, layer, carried_by, removing)
            carried = readers.evidence.holds
        judge = reading if reading is not None and carried else spike
        steps.append(_mark_step(position, MARK, spike, marks, layer, judge))
        if sites:
            neurons = {neuron_name(*site): Edit(zero=(site,)) for site in sites}
            steps.append(_step(NEURONS, spike, neurons, tuple(neurons), position.silenced(), judge))
    if reading is not None and reading.heads is not None and not carried:
        depth = int(reading.heads.nonzero()[:, 0].max())
        marks = reading.marks(depth)
        step = _mark_step(position, KEYS, reading, marks, depth, reading)
        steps.append(step)
        readers = _readers(reading, layer, (), [])
        if step.carried:
            readers = _readers(reading, layer, step.chosen, position.swapped(depth - 1, marks.chosen))
    return SinkCircuit(
        place=position.name,
        position=position.at,
        sink_layer=layer if made_by_mlp else None,
        steps=tuple(steps),
        readers=readers,
    )


def _with_its_texts(setup: Setup, sinks: FindSinks) -> Setup:
    """The setup with texts that have the sinks: longer ones, if shorter ones do not show them."""
    longest = 0
    if sinks.attention_sink is not None:
        longest = sinks.attention_sink.length
    if sinks.norm_spike is not None:
        longest = max(longest, 1 + max(sinks.norm_spike.positions))
    if longest > setup.ids.shape[1]:
        return with_long_texts(setup) or setup
    return setup


@dataclass(frozen=True)
class _Kind:
    """A kind of place that is a sink, as `find_sinks` found it.

    Attributes:
        rule: The places.
        stands_out: Whether their norm stands out.
        layer: The layer after which the spike is read. None if there is none, or its maker is not known.
        sites: The neurons that make the spike.
        by_mlp: Whether MLPs make it.
    """

    rule: Rule
    stands_out: bool = False
    layer: int | None = None
    sites: Sites = ()
    by_mlp: bool = False


def _kinds(sinks: FindSinks) -> list[_Kind]:
    """Every kind of place that has a spike or that heads attend to; the first one of the spike comes first."""
    kinds: dict[str, _Kind] = {}
    spike = sinks.norm_spike
    if spike is not None:
        kinds[spike.place.rules[0].words] = _first_kind(sinks)
        rules = {rule.words: rule for rule in spike.place.rules}
        for further in sinks.further_spikes:
            sites = () if further.set is None else further.set.edit_sites
            layer = max(sites)[0] if sites else None
            kinds[further.words] = _Kind(rules[further.words], True, layer, sites, bool(sites))
    if sinks.attention_sink is not None and sinks.attention_sink.place is not None:
        for rule in sinks.attention_sink.place.rules:
            kinds.setdefault(rule.words, _Kind(rule))
    return list(kinds.values())


def _first_kind(sinks: FindSinks) -> _Kind:
    """The first kind of place that has a spike."""
    spike = sinks.norm_spike
    assert spike is not None
    layer = sinks.sink_layer
    sites = []
    if layer is not None:
        if sinks.minimal is not None:
            sites += sinks.minimal.edit_sites
        sites += [site for site in sites_of(sinks.causal) if site not in sites]
        layer = max(layer, max(sites, default=(0,))[0])
    elif spike.runs:
        layer = spike.runs[0][0]
    return _Kind(spike.place.rules[0], True, layer, tuple(sites), sinks.sink_layer is not None)


def _position(setup: Setup, sinks: FindSinks, kind: _Kind) -> _Position | None:
    """A kind of place, on texts that have it; None if these have no room for it."""
    rule = kind.rule
    name = rule.words
    meant = rule.means(setup.ids)
    if rule.position is not None:
        at = rule.position
        ids = setup.ids[meant[:, at]][:TEXTS].clone()
        if not len(ids):
            return None
        if at == 0:
            ids[:, 0] = ids[0, 0]
            name = f"the first token {setup.tokenizer.decode(ids[0, :1])!r}"
    else:  # one text, the one in which it comes first
        where = meant[:, 1:-4].nonzero() + torch.tensor([0, 1])
        if not len(where):
            return None
        row, at = min(where.tolist(), key=lambda pair: pair[1])
        ids = setup.ids[row : row + 1]
    return _Position.of(setup, sinks, name, ids, at, kind.layer, kind.sites)


@measurement(group="Sinks", figure=draw, quick={"max_repeats": 64})
def circuit(setup: Setup, *, token: str | None = None, max_repeats: Positive | None = None) -> Circuit:
    """Trace the circuit of each attention sink from its mark to the heads that read it, and verify each step.

    Components are replaced at the sink by what they write at a typical token (necessity), and the reverse
    (sufficiency), with random components as the control. For a model without a spike or without a sink, the result says
    so.

    Args:
        token: The token to repeat. By default one of five words of the text, drawn by the seed.
        max_repeats: Largest number of repetitions. By default 1,024, or what the context holds.

    Example:
        sinkscope circuit --model llama-2-7b --html circuit.html
    """
    sinks = find_sinks.on(setup, tokens=None if token is None else [token], max_repeats=max_repeats)
    setup = _with_its_texts(setup, sinks)
    traced: list[SinkCircuit] = []
    positions: list[_Position] = []
    for kind in _kinds(sinks)[: LATER_SINKS + 1]:
        position = _position(setup, sinks, kind)
        if position is not None:
            found = _traced(position, kind.by_mlp)
            if found.steps:
                traced.append(replace(found, stands_out=kind.stands_out and bool(position.at)))
                positions.append(position)
    result = Circuit(
        **vars(traced[0] if traced else SinkCircuit()),
        first_token=setup.tokenizer.decode(setup.ids[0, :1].tolist()),
        lengths=sinks.lengths,
        later=tuple(traced[1:]),
        untested=_untested(setup.target),
    )
    if setup.target.adapter.learned_sinks:
        first = _position(setup, sinks, _Kind(Rule("the first token", position=0)))
        assert first is not None
        result = replace(result, **_learned_shares(first))
    if positions and result.position == 0:
        result = _with_repetition(result, positions[0], sinks)
    return result


def _learned_shares(position: _Position) -> dict[str, Any]:
    """Mean attention that the learned sink logits, and the first token, take."""
    learned: list[float] = []
    first: list[float] = []

    def read(_layer: int, _first: int, probs: Float[torch.Tensor, "text head query key"]) -> None:
        learned.append(float((1 - probs.sum(-1)).mean()))
        first.append(float(probs[..., 1:, 0].mean()))

    with attention_rows(position.setup.target, read):
        position.setup.target.forward(position.ids)
    return {"learned_share": float(np.mean(learned)), "first_share": float(np.mean(first))}


def _untested(target: Target) -> tuple[str, ...]:
    """What may carry a sink and cannot be replaced: a bias of keys that cannot be taken apart."""
    for layer in range(target.n_layers):
        if getattr(key_projection(target, layer), "bias", None) is not None and key_bias(target, layer) is None:
            return ("the bias of the keys",)
    return ()


def _with_repetition(result: Circuit, first: _Position, sinks: FindSinks) -> Circuit:
    """The mark at the last of 1.5 times as many repetitions as a sink needs, for the word that needs fewest."""
    words = [word for word in sinks.repeats.tokens if word.repeats is not None and word.repeats > 1]
    if not words or first.layer is None:
        return result
    word = min(words, key=lambda word: word.repeats or 0)
    setup, needed = first.setup, word.repeats or 0
    repeats = needed + needed // 2
    if setup.target.max_positions is not None:
        repeats = min(repeats, setup.target.max_positions - 1)
    ids = torch.tensor([[prefixes(setup, [word.id])[0], *[word.id] * repeats]])
    repeated = replace(first, ids=ids, at=repeats, other=1)
    spike = repeated.spike
    step = _mark_step(repeated, REPETITION, spike, spike.marks(first.layer), first.layer, spike)
    return replace(result, steps=(*result.steps, step), repeated=word.token, repeats=repeats)
