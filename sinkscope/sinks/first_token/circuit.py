"""Tracing the circuit of each attention sink, from the mark of its position to the heads that attend to it.

`find_sinks` says which positions are sinks and which neurons make their spikes. Components are replaced there, and the
spike and the attention that are left are read (`position_effect`). What is said of a step follows the rule of
`sinkscope.measure.evidence`.
"""

from __future__ import annotations

import html
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import plotly.graph_objects as go
import torch
from jaxtyping import Float
from plotly.subplots import make_subplots

from sinkscope.files.notation import agreeing, brief, counted, listed
from sinkscope.files.tables import Table, percent
from sinkscope.measure import Number, Positive, Result, Setup, measurement
from sinkscope.measure.style import BLUE, GREY, ORANGE, finished
from sinkscope.models.target import Target
from sinkscope.sinks.first_token.attention_received import with_long_texts
from sinkscope.sinks.first_token.effects import key_bias, key_projection
from sinkscope.sinks.first_token.find import find_sinks
from sinkscope.sinks.first_token.members import RATE_EPS, Sites, sites_of
from sinkscope.sinks.first_token.places import Rule
from sinkscope.sinks.first_token.records import SHORT
from sinkscope.sinks.first_token.result import FindSinks
from sinkscope.sinks.first_token.sentences import few_heads
from sinkscope.sinks.first_token.steps import MARK, NEURONS, REPETITION, CircuitStep, Readers
from sinkscope.sinks.first_token.traced import TracedPlace, mark_step, traced_place
from sinkscope.sinks.tokens import prefixes
from sinkscope.tap.observers import attention_rows

FIGURE_COMPONENTS = 12
TEXTS = 2  # pieces of typical text
LATER_SINKS = 3  # sinks behind the first token that are traced at most
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
        stands_out: Whether the norm of the position stands out.
    """

    place: str | None = None
    position: int = 0
    sink_layer: int | None = None
    steps: tuple[CircuitStep, ...] = ()
    readers: tuple[Readers, ...] = ()
    n_heads: int = 0
    stands_out: bool = False

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

    def edges(self) -> Table:
        """The edges, from the mark to the heads."""
        rows = []
        for part in (*self.steps, *self.readers):
            rows += part.rows()
        return [{"sink": self.place, **row} for row in rows]

    def sentence(self, place: str | None) -> str:
        """What marks the spike that most heads need or, if they need none, what they need, with the control."""
        mark = self.step(MARK)
        of_spike = sum(len(group.heads) for group in self.readers if group.need_the_spike)
        keys = [group for group in self.readers if group.keys is not None and group.evidence.holds]
        if keys and 2 * of_spike < self.n_readers:
            return self._what_heads_need(place, keys[0])
        if mark is not None:
            return f"For the spike of {place}, {mark.in_words()}."
        if self.readers:
            return f"{counted(self.n_readers, 'head')} attend to {place}, and nothing that was replaced is needed."
        return f"No neurons were found that make a spike of {place}, and no head attends to it."

    def _what_heads_need(self, place: str | None, group: Readers) -> str:
        assert group.keys is not None
        if len(group.heads) < self.n_readers:
            return f"For {len(group.heads)} of {self.n_readers} readers of {place}, {group.keys.in_words()}."
        about = " without a spike"
        if self.stands_out:
            about = " and do not need its spike"
        return f"Heads attend to {place}{about}; {group.keys.in_words()}."

    def about_readers(self) -> str:
        """How many heads attend to the position, and what each group of them needs."""
        give = agreeing(self.n_readers, "gives", "give")
        who = (
            f"In texts of {self.readers[0].length} tokens, {self.n_readers} of {counted(self.n_heads, 'head')} {give} "
            f"{self.place} more than {RATE_EPS} of their attention"
        )
        if len(self.readers) == 1:
            return f"{who}; {self.readers[0].in_words()}."
        parts = [f"for {len(group.heads)}, {group.in_words()}" for group in self.readers[:GROUPS]]
        others = sum(len(group.heads) for group in self.readers[GROUPS:])
        if others:
            parts.append(f"{others} more need other parts")
        return f"{who}: {'; '.join(parts)}."


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
        for group in self.readers[:1]:
            without = float(group.attention_without.mean())
            numbers.append(Number("attention without what carries it", without, group.control))
        return numbers

    def details(self) -> list[str]:
        """The neurons, repetition, the readers, further sinks, learned sink logits, and what was not tested."""
        lines = []
        neurons, repetition = self.step(NEURONS), self.step(REPETITION)
        if neurons is not None:
            lines.append(f"Of the neurons that write the spike, {neurons.in_words()}.")
        if repetition is not None:
            times = counted(self.repeats or 0, "repetition")
            lines.append(f"After {times} of {self.repeated!r}, {repetition.in_words()}.")
        if self.readers:
            lines.append(self.about_readers())
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
        for causal_set in sinks.causal_sets:  # several, if the spike falls and rises again
            if causal_set.kind == "minimal":
                sites += causal_set.edit_sites
        sites += [site for site in sites_of(sinks.causal) if site not in sites]
        layer = max(layer, max(sites, default=(0,))[0])
    elif spike.runs:
        layer = spike.runs[0][0]
    return _Kind(spike.place.rules[0], True, layer, tuple(sites), sinks.sink_layer is not None)


def _position(setup: Setup, sinks: FindSinks, kind: _Kind) -> TracedPlace | None:
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
    return TracedPlace.of(setup, sinks, name, ids, at, kind.layer, kind.sites)


def _traced(position: TracedPlace, kind: _Kind) -> SinkCircuit:
    """The circuit of one kind of place."""
    target = position.setup.target
    steps, readers = traced_place(position, kind.by_mlp)
    return SinkCircuit(
        place=position.name,
        position=position.at,
        sink_layer=position.layer if kind.by_mlp else None,
        steps=steps,
        readers=readers,
        n_heads=target.n_heads * sum(map(target.has_attention, range(target.n_layers))),
        stands_out=kind.stands_out,
    )


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
    positions: list[TracedPlace] = []
    for kind in _kinds(sinks)[: LATER_SINKS + 1]:
        position = _position(setup, sinks, kind)
        if position is not None:
            found = _traced(position, kind)
            if found.steps or found.readers:
                traced.append(found)
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


def _learned_shares(position: TracedPlace) -> dict[str, Any]:
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


def _with_repetition(result: Circuit, first: TracedPlace, sinks: FindSinks) -> Circuit:
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
    step = mark_step(repeated, REPETITION, spike, spike.marks(first.layer), first.layer, [spike])
    return replace(result, steps=(*result.steps, step), repeated=word.token, repeats=repeats)
