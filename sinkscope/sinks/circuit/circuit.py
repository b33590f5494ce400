"""The circuit of each sink: what marks its place, the neurons that make its spike, and the heads that attend to it.

The claims about neurons and heads are those of `find_sinks`; what marks the place is measured here: the heads, or what
else writes there before the spike begins.
"""

from __future__ import annotations

import html
from dataclasses import dataclass
from typing import ClassVar

import plotly.graph_objects as go
import torch

from sinkscope.measure import Natural, Setup, measurement
from sinkscope.results.claims import Claim, Claims, Outcome, Search, without_example
from sinkscope.results.parts import in_words
from sinkscope.results.style import BLUE, GREY, figure_of
from sinkscope.results.tables import Table
from sinkscope.sinks.find.find import find_sinks
from sinkscope.sinks.find.layer_scan import PerText
from sinkscope.sinks.find.left import INTACT, beside, by_chance, claim_of
from sinkscope.sinks.find.result import SinkPlaces
from sinkscope.sinks.find.spikes import MadeSpike, surveyed
from sinkscope.sinks.removal.components import mixing, writers
from sinkscope.sinks.removal.effects import Trial
from sinkscope.sinks.removal.position_effect import PositionEffect
from sinkscope.sinks.tokens import TokenRows, prefix_of, repeated
from sinkscope.sinks.values import HeadValue, values_of

TEXTS = 2  # pieces of typical text in which they are looked for
MARKS, COPIES = "marks", "marks copies"
"""Roles of the claims about what marks a place, and the last of many copies of a token."""


@dataclass(frozen=True, kw_only=True)
class Circuit(SinkPlaces):
    """How each sink comes about.

    Attributes:
        claims: What marks the places, what the heads need, what they write by the values there, and what makes the
            spikes; what marks the first spike comes first if the heads of the first sink need it.
        values: What each head that attends to a sink writes by the value there.
    """

    percent = ("left", "control")
    columns = ("role", "subject", "left", "control", "place")
    glossary: ClassVar = {
        "role": "what the subject does: it marks a place, makes its spike, carries attention to it, or is written",
        "subject": "the parts that were removed",
        "left": "what stays of the effect without them",
        "control": "the same under the contrast that comes nearest",
        "contrast": "that contrast",
        "outcome": "what was read: the spike along its direction, the norm, attention, or the output of heads",
        "draws": "independent texts",
        "verdict": "needed, sufficient, not shown or undecided, against every contrast",
    }

    claims: Claims = ()
    values: tuple[HeadValue, ...] = ()

    def of(self, role: str) -> list[Claim]:
        """The claims of a role."""
        return [claim for claim in self.claims if claim.role == role]

    def rows(self) -> Table:
        """A row for each claim."""
        return [claim.row() for claim in self.claims]

    def readers(self) -> Table:
        """A row for each head that attends to a sink: what it keeps of that attention, and what its value does."""
        kinds = {(value.head, value.place): value.kind for value in self.values}
        rows: Table = []
        for sink in self.sinks:
            for group in sink.groups:
                for head, before, after in zip(group.heads, group.attention, group.left, strict=True):
                    row = {"role": "reads", "subject": str(head), "place": sink.words, "left": after / before}
                    rows.append({**row, "value": kinds.get((head, sink.words))})
        return rows


def draw(result: Circuit) -> go.Figure:
    """What is left of each effect without its subject, and under the nearest contrast, from the mark down."""
    steps: list[str] = []
    for claim in result.claims:
        steps.append(html.escape(f"{claim.role}: {in_words(claim.subject)} ({without_example(claim.place)})"))
    left, control = [claim.value for claim in result.claims], [claim.control.value for claim in result.claims]
    fig = go.Figure()
    places = list(range(len(steps)))  # rows of the same words stay apart
    for name, values, colour in (("without it", left, BLUE), ("control", control, GREY)):
        fig.add_bar(x=values, y=places, name=name, marker_color=colour, orientation="h")
    fig.update_xaxes(title_text="share of the effect that is left", tickformat=".0%")
    fig.update_yaxes(autorange="reversed", automargin=True, tickvals=places, ticktext=steps)
    return figure_of(fig, result, width=1100, height=260 + 48 * len(steps))


@measurement(
    group="Sinks",
    help="Trace the circuit of the sink.",
    figure=draw,
)
def circuit(setup: Setup, *, token: str | None = None, max_repeats: Natural | None = None) -> Circuit:
    """Trace the circuit of each attention sink from its mark to the heads that read it, and verify each step.

    Components are replaced at the sink by what they write at a typical token, with random components as the control.
    For a model without a spike or without a sink, the result says so.

    Args:
        token: The token to repeat. By default one of five words of the text, drawn by the seed.
        max_repeats: Largest number of repetitions in which a sink is looked for; its mark is traced after a quarter
            more than it needs. By default 1,024, or what the context holds.

    Example:
        sinkscope circuit --model llama-2-7b --html circuit.html
    """
    sinks = find_sinks.on(setup, tokens=None if token is None else [token], max_repeats=max_repeats)
    survey, made = surveyed(setup)
    claims: list[Claim] = []
    for each in made:
        ids, at = each.scan.ids, each.scan.at
        other = each.scan.ordinary(begins(each), ids.shape[1] // 2)
        claims += marks_of(setup, each, MARKS, each.spike.place.words, ids, at, other)
    copies = sinks.repetition
    if copies is not None:
        ids = repeated(prefix_of(setup, [copies.id]), [copies.id], copies.repeats)
        place = f"the last of {copies.repeats} copies of {copies.token!r}"
        claims += marks_of(setup, made[0], COPIES, place, ids, torch.tensor([copies.repeats]), torch.tensor([1]))
    values, of_values = values_of(setup.target, survey)
    attended = [claim for claim in sinks.claims if claim.role == "carries"]
    parts = [*attended, *claims]
    if sinks.sinks and any(group.by_spike for group in sinks.sinks[0].groups[:1]):
        parts = [*claims, *attended]
    return Circuit(
        claims=(*parts, *of_values, *(claim for claim in sinks.claims if claim not in attended)),
        spikes=sinks.spikes,
        sinks=sinks.sinks,
        most_attended=sinks.most_attended,
        layers_read=sinks.layers_read,
        values=values,
    )


def begins(made: MadeSpike) -> int:
    """The layer after which a spike has begun."""
    if made.spike.set:
        return max(neuron.layer for neuron in made.spike.set)
    return made.scan.layer if made.scan.stages else made.scan.spike_layers[0]


def marks_of(
    setup: Setup, made: MadeSpike, role: str, place: str, ids: TokenRows, at: PerText, other: PerText
) -> Claims:
    """What is left of the norm above a typical one where a spike has begun, without all marks.

    Args:
        setup: The model.
        made: The spike.
        role: The role of the claim.
        place: The words for the place.
        ids: Texts.
        at: The place in each.
        other: A typical position in each.
    """
    layer = begins(made)
    ids = ids[:, : int(torch.maximum(at, other).max()) + 1]  # later tokens do not change norms
    trial = Trial(ids, (), at=at, source=other, upto=layer, without=made.scan.shared_dims)
    effect = PositionEffect(setup.target, trial)
    candidates = [*writers(setup.target, layer), *mixing(setup.target, layer)]
    few = effect.in_texts(TEXTS)
    marks = few.with_heads(few.needed_of(candidates))
    others = beside(setup, marks, candidates)
    if not marks or not others:
        return ()
    left = 1 - effect.necessity([marks, *others])
    kind = "norm" if role == MARKS else "norm of copies"
    outcome = Outcome(kind, layers=(layer,), effect="the mark at {}", lost_of="the spike")
    contrasts = [INTACT, by_chance(marks, left[1:].mean(1).clamp(min=0))]
    search, left = Search("components", len(candidates)), left[0].clamp(min=0)
    return (claim_of(role, marks, outcome, place, left, contrasts, search, exact=role == COPIES),)
