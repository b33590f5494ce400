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
from plotly.subplots import make_subplots

from sinkscope.hooks.edit.sites import head_of
from sinkscope.measure import Natural, Number, Result, ScanPart, Setup, measurement
from sinkscope.models.target import Target
from sinkscope.results.notation import count_of, short_sentence, word_form, word_list
from sinkscope.results.style import BLUE, GREY, ORANGE, figure_of
from sinkscope.results.tables import Table
from sinkscope.sinks.circuit.steps import MARK, NAMED, NEURONS, REPETITION, CircuitStep, Readers
from sinkscope.sinks.circuit.traced import TracedPlace, TracedSpike, mark_step, traced_place
from sinkscope.sinks.find.attention_received import with_long_texts
from sinkscope.sinks.find.find import find_sinks
from sinkscope.sinks.find.members import sites_of
from sinkscope.sinks.find.places import Rule
from sinkscope.sinks.find.records import SHORT, NormSpike
from sinkscope.sinks.find.result import FindSinks
from sinkscope.sinks.find.sentences import nothing_found
from sinkscope.sinks.removal.components import key_bias, key_projection
from sinkscope.sinks.tokens import prefixes

FIGURE_COMPONENTS = 12
LATER_SINKS = 3  # sinks after the first token that are traced at most
GROUPS = 3  # groups of heads that are described at most


@dataclass(frozen=True, kw_only=True)
class SinkCircuit:
    """How one sink comes about, step by step.

    Attributes:
        place: The position in words: "the first token" and this token, or a later token or position. None if there is
            neither spike nor sink.
        position: The position.
        sink_layer: The last layer whose neurons make the spike. None if no MLP does.
        steps: What the spike and the attention need.
        readers: The heads that attend to the position, by what they need, the largest group first.
        n_heads: Number of heads of all layers with softmax attention.
    """

    place: str | None = None
    position: int = 0
    sink_layer: int | None = None
    steps: tuple[CircuitStep, ...] = ()
    readers: tuple[Readers, ...] = ()
    n_heads: int = 0

    def step(self, name: str) -> CircuitStep | None:
        """A step by its name; None if the circuit does not have it."""
        for step in self.steps:
            if step.name == name:
                return step
        return None

    @property
    def n_readers(self) -> int:
        """Number of heads that attend to the position."""
        return sum(len(group.heads) for group in self.readers)

    def edges(self, *, joined: bool = False) -> Table:
        """The edges, from the mark to the heads; if joined, heads that need the same are one row."""
        rows = []
        for step in self.steps:
            rows += step.rows()
        for group in self.readers:
            rows += group.rows(joined=joined)
        return [{**row, "sink": self.place} for row in rows]

    def sentence(self, place: str | None, most: int = NAMED) -> str:
        """What marks the spike that most heads need or, if they need none, what they need, with the control."""
        mark = self.step(MARK)
        of_spike = sum(len(group.heads) for group in self.readers if group.need_the_spike)
        if mark is not None and 2 * of_spike >= self.n_readers:
            return f"For the spike of {place}, {mark.in_words(most)}."
        others = [group for group in self.readers if not group.need_the_spike]
        return self.about(place, others[:1], most)

    def about(self, place: str | None, groups: Sequence[Readers], most: int = NAMED) -> str:
        """How many heads attend to the position, and what groups of them need."""
        attend = word_form(self.n_readers, "attends", "attend")
        who = f"{self.n_readers} of {count_of(self.n_heads, 'head')} {attend} to {place}"
        if len(self.readers) == 1:
            return f"{who}; {self.readers[0].in_words(most)}."
        parts = [f"for {len(group.heads)}, {group.in_words(most)}" for group in groups]
        return f"{who}: {'; '.join(parts)}."


@dataclass(frozen=True, kw_only=True)
class Circuit(SinkCircuit, Result):
    """How each sink comes about: first that of the first token or, if it is none, the next one after it.

    Attributes:
        first_token: The token that stands first in the texts.
        lengths: Lengths of the texts in which attention sinks were looked for.
        stray_norms: Number of positions whose norm stands out and that no words describe.
        scattered: Number of positions that heads attend to and that no words describe.
        later: The circuits of further sinks.
        repeated: The token that is repeated.
        repeats: How often it is repeated.
        learned_rate: Share of heads that attend to their learned sink logits; 0 if too few do.
        untested: What may carry a sink and cannot be replaced in this model.
    """

    percent = ("necessity", "necessity_control", "sufficiency")
    columns = ("sink", "step", "source", "necessity", "necessity_control", "target")
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
    stray_norms: int = 0
    scattered: int = 0
    later: tuple[SinkCircuit, ...] = ()
    repeated: str | None = None
    repeats: int | None = None
    learned_rate: float = 0.0
    untested: tuple[str, ...] = ()

    def rows(self) -> Table:
        """The edges of every sink."""
        return self._edges_of_all(joined=False)

    def shown_rows(self) -> Table:
        """The edges of every sink, where heads that need the same are one row."""
        return self._edges_of_all(joined=True)

    def _edges_of_all(self, *, joined: bool) -> Table:
        rows = self.edges(joined=joined)
        for sink in self.later:
            rows += sink.edges(joined=joined)
        return rows

    def conclusion(self) -> str:
        """What marks the first of the sinks, or what its readers need, with the control."""
        if self.place is None:
            return f"No circuit: {nothing_found(self.lengths, self.stray_norms, self.scattered)}."
        short = self.place
        if self.position == 0:
            short = "the first token"
        return short_sentence([self.sentence(self.place), self.sentence(short), self.sentence(short, most=1)])

    def numbers(self) -> list[Number]:
        """The spike without its marks, and the attention without what carries it."""
        numbers = []
        mark = self.step(MARK)
        if mark is not None:
            numbers.append(Number("spike lost without its marks", mark.together, mark.control))
        for group in self.readers[:1]:
            without = float(group.attention_without.mean())
            numbers.append(Number("attention without what carries it", without, group.control))
        return numbers

    def details(self) -> list[str]:
        """The neurons, repetition, the readers, further sinks, learned sink logits, and what was not tested."""
        lines = []
        neurons, repetition = self.step(NEURONS), self.step(REPETITION)
        if neurons is not None:
            lines.append(f"Of the norm of the spike above a typical one, {neurons.in_words()}.")
        if repetition is not None:
            times = count_of(self.repeats or 0, "repetition")
            lines.append(f"After {times} of {self.repeated!r}, {repetition.in_words()}.")
        if self.readers:
            about = self.about(self.place, self.readers[:GROUPS])
            if about != self.conclusion():
                lines.append(about)
        if self.later:
            lines.append(" ".join([sink.sentence(sink.place) for sink in self.later]))
        if self.learned_rate:
            lines.append(f"{self.learned_rate:.1%} of the heads attend to their learned sink logits.")
        if self.untested:
            lines.append(f"Not tested: {word_list(self.untested)}.")
        return lines


def draw(result: Circuit) -> go.Figure:
    """Necessity, control and sufficiency of the edges, step by step."""
    panels = {}
    for row in result.rows():
        title = f"{row['step']}, {row['sink']}" if result.later else row["step"]
        panels.setdefault(html.escape(title), []).append(row)
    panels = {_with_control(title, rows): rows for title, rows in panels.items()}
    fig = make_subplots(cols=max(1, len(panels)), subplot_titles=list(panels) or ["no circuit"])
    fig.update_yaxes(title_text="share of the effect", col=1)
    for col, rows in enumerate(panels.values(), start=1):
        if rows[0]["step"] == "readers":
            _draw_readers(fig, rows, col)
            continue
        shown = rows[:FIGURE_COMPONENTS]
        names = [html.escape(row["source"]) for row in shown]
        for field, color in (("necessity", ORANGE), ("necessity_control", GREY), ("sufficiency", BLUE)):
            values = [row[field] for row in shown]
            name = field.replace("_", " ")
            fig.add_bar(x=names, y=values, name=name, marker_color=color, showlegend=col == 1, row=1, col=col)
        fig.update_yaxes(tickformat=".0%", row=1, col=col)
    return figure_of(fig, result, width=max(700, 350 * len(panels)), height=460)


def _with_control(title: str, rows: list[dict[str, Any]]) -> str:
    """The title of a panel; that of the readers says what random components take away at most."""
    controls = [row["necessity_control"] for row in rows if row["necessity_control"] is not None]
    if rows[0]["step"] == "readers" and controls:
        return f"{title}: attention lost (random: at most {max(controls):.0%})"
    return title


def _draw_readers(fig: go.Figure, rows: list[dict[str, Any]], col: int) -> None:
    """What each head loses without what it reads, layer by head, so that all heads are in sight."""
    lost = {head_of(row["target"]): row["necessity"] for row in rows}
    layers, heads = np.array([*lost]).max(0) + 1
    grid = np.full((layers, heads), np.nan)
    for place, share in lost.items():
        grid[place] = np.nan if share is None else share
    bar = {"tickformat": ".0%"}
    fig.add_heatmap(z=grid, zmin=0, zmax=1, colorscale=["#f7f7f7", ORANGE], colorbar=bar, row=1, col=col)
    fig.update_xaxes(title_text="head", row=1, col=col)
    fig.update_yaxes(title_text="layer", row=1, col=col)


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


def _kinds(sinks: FindSinks) -> list[tuple[Rule, TracedSpike]]:
    """Every kind of place that has a spike or that heads attend to; the first one of the spike comes first.

    Places that heads attend to are no further kind if words for the spike mean all of them.
    """
    kinds: dict[str, tuple[Rule, TracedSpike]] = {}
    if sinks.norm_spike is not None:
        first, *others = sinks.norm_spike.place.rules
        kinds[first.words] = first, _first_spike(sinks, sinks.norm_spike)
        sets = {further.words: further.set for further in sinks.further_spikes}
        for rule in others:
            spike = TracedSpike()
            causal_set = sets[rule.words]
            if causal_set is not None:
                layer = max(causal_set.edit_sites)[0]
                spike = TracedSpike(True, causal_set.edit_sites, layer, layer)
            kinds[rule.words] = rule, spike
    if sinks.attention_sink is not None and sinks.attention_sink.place is not None:
        known = list(kinds.values())
        for rule in sinks.attention_sink.place.rules:
            within = [spike for whole, spike in known if rule.is_within(whole)]
            if not within:
                kinds[rule.words] = rule, TracedSpike()
    return list(kinds.values())


def _first_spike(sinks: FindSinks, spike: NormSpike) -> TracedSpike:
    """The spike of the first kind of place that has one."""
    layer = sinks.sink_layer
    if layer is None:
        begun = next((begin for begin, _ in spike.runs), None)
        return TracedSpike(False, (), begun, begun)
    sites: dict[tuple[int, ...], None] = {}
    ends: list[int] = []
    for part in sinks.causal_sets:  # several, if the spike falls and rises again
        sites |= dict.fromkeys(part.edit_sites)
        ends.append(max(part.edit_sites)[0])
    sites |= dict.fromkeys(sites_of(sinks.causal))
    layer = max(layer, max(sites, default=(0,))[0])
    return TracedSpike(True, tuple(sites), layer, min(ends) if len(ends) > 1 else layer)


def _place(setup: Setup, sinks: FindSinks, rule: Rule, spike: TracedSpike) -> TracedPlace | None:
    """A kind of place, on texts that have it; None if these have no room for it."""
    name = rule.words
    meant = rule.means(setup.ids)
    if rule.position is not None:
        at = rule.position
        ids = setup.ids[meant[:, at]].clone()
        if not len(ids):
            return None
        if at == 0:
            ids[:, 0] = ids[0, 0]
            name = f"the first token {setup.tokenizer.decode(ids[0, :1])!r}"
        return TracedPlace.of(setup, name, ids, at, spike, sinks.shared_dims)
    meant[:, 0] = False
    meant[:, -4:] = False
    if not bool(meant.any()):
        return None
    at, row = min((at, row) for row, at in meant.nonzero().tolist())
    if len(rule.tokens) > 1:  # different neurons may make the spikes of the others
        name = repr(setup.tokenizer.decode(setup.ids[row, at : at + 1]))
    return TracedPlace.of(setup, name, setup.ids[row : row + 1], at, spike, sinks.shared_dims)


@measurement(
    group="Sinks",
    order=2,
    help="Trace the circuit of the sink.",
    scan=ScanPart(2, topic="Circuit", quick={"max_repeats": 300}, streams=False),
    figure=draw,
    quick={"max_repeats": 64},
)
def circuit(setup: Setup, *, token: str | None = None, max_repeats: Natural | None = None) -> Circuit:
    """Trace the circuit of each attention sink from its mark to the heads that read it, and verify each step.

    Components are replaced at the sink by what they write at a typical token (necessity), and the reverse
    (sufficiency), with random components as the control. For a model without a spike or without a sink, the result says
    so.

    Args:
        token: The token to repeat. By default one of five words of the text, drawn by the seed.
        max_repeats: Largest number of repetitions in which a sink is looked for; its mark is traced after half as many
            again as it needs. By default 1,024, or what the context holds.

    Example:
        sinkscope circuit --model llama-2-7b --html circuit.html
    """
    sinks = find_sinks.on(setup, tokens=None if token is None else [token], max_repeats=max_repeats)
    setup = _with_its_texts(setup, sinks)
    traced: list[SinkCircuit] = []
    first = None
    for rule, spike in _kinds(sinks)[: LATER_SINKS + 1]:
        place = _place(setup, sinks, rule, spike)
        if place is None or place.name in [sink.place for sink in traced]:
            continue
        steps, readers = traced_place(place)
        if steps or readers:
            first = first or place
            sink = SinkCircuit(
                place=place.name,
                position=place.at,
                sink_layer=spike.layer if spike.by_mlp else None,
                steps=steps,
                readers=readers,
                n_heads=setup.n_heads * sum(map(setup.target.has_attention, range(setup.n_layers))),
            )
            traced.append(sink)
    result = Circuit(
        **vars(traced[0] if traced else SinkCircuit()),
        first_token=setup.tokenizer.decode(setup.ids[0, :1].tolist()),
        lengths=sinks.lengths,
        stray_norms=sinks.stray_norms.count,
        scattered=sinks.scattered.count,
        later=tuple(traced[1:]),
        learned_rate=0.0 if sinks.attention_sink is None else sinks.attention_sink.learned_rate,
        untested=_untested(setup.target),
    )
    if first is not None and first.at == 0:
        result = _with_repetition(result, first, sinks)
    return result


def _untested(target: Target) -> tuple[str, ...]:
    """What may carry a sink and cannot be replaced: a bias of keys that cannot be taken apart."""
    for layer in range(target.n_layers):
        if getattr(key_projection(target, layer), "bias", None) is not None and key_bias(target, layer) is None:
            return ("the bias of the keys",)
    return ()


def _with_repetition(result: Circuit, first: TracedPlace, sinks: FindSinks) -> Circuit:
    """The mark at the last of 1.5 times as many repetitions as a sink needs, for the word that needs fewest."""
    words = [word for word in sinks.repeats.tokens if word.repeats is not None and word.repeats > 1]
    if not words or first.spike.begun is None:
        return result
    word = min(words, key=lambda word: word.repeats or 0)
    setup, needed = first.setup, word.repeats or 0
    repeats = needed + needed // 2
    if setup.target.max_positions is not None:
        repeats = min(repeats, setup.target.max_positions - 1)
    ids = torch.tensor([[prefixes(setup, [word.id])[0], *[word.id] * repeats]])
    step = mark_step(replace(first, ids=ids, at=repeats, other=1), REPETITION)
    return replace(result, steps=(*result.steps, step), repeated=word.token, repeats=repeats)
