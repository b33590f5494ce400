"""What marks a place for its spike: the heads, or what else writes there before the spike begins."""

from __future__ import annotations

from dataclasses import replace

import torch
from jaxtyping import Int
from torch import Tensor

from sinkscope.measure import Setup
from sinkscope.measure.margin import margin_of
from sinkscope.models.target import Target
from sinkscope.results.claims import Claim, Contrast, Outcome, Search
from sinkscope.results.parts import Component, Head
from sinkscope.sinks.find.readers import by_chance, random_edits
from sinkscope.sinks.find.spikes import MadeSpike
from sinkscope.sinks.find.survey import SinkContext
from sinkscope.sinks.removal.components import Edit, mixing, one_by_one, writers
from sinkscope.sinks.removal.position_effect import Components, PositionEffect
from sinkscope.sinks.tokens import TokenRows

TEXTS = 2  # pieces of typical text
MORE_POSITIONS = 8  # typical positions, if the token embedding seems to be needed


def begins(made: MadeSpike) -> int:
    """The layer after which a spike has begun: an earlier one, if it falls and rises again."""
    ends = [max(neuron.layer for neuron in found.neurons) for found in made.spike.sets]
    if ends:
        return min(ends)
    return made.context.layer if made.spike.by_mlp else made.context.scan.spike_layers[0]


def marks_of(setup: Setup, made: MadeSpike) -> tuple[Claim, ...]:
    """What the spike of a place needs before the MLP of the layer in which it begins."""
    context, layer = made.context, begins(made)
    ids, at = context.ids[:TEXTS], context.at[:TEXTS]
    effect = _norm(setup, context, ids, at, context.ordinary(layer)[:TEXTS], layer)
    marks = effect.marks(before_mlp(setup.target, layer))
    if len(marks) > 1 and Component("token embedding") in marks:
        effect = _at_more_positions(effect)
        marks = effect.marks(before_mlp(setup.target, layer))
    return _claims(setup, effect, marks, made.spike.place.words, "marks")


def repetition_marks(setup: Setup, made: MadeSpike, prefix: int, token: int, repeats: int) -> tuple[Claim, ...]:
    """What marks the last of many repetitions of a token."""
    ids = torch.tensor([[prefix, *[token] * repeats]])
    at, other = torch.tensor([repeats]), torch.tensor([1])
    effect = _norm(setup, made.context, ids, at, other, begins(made))
    marks = effect.marks(before_mlp(setup.target, begins(made)))
    words = f"the last of {repeats} copies of {setup.tokenizer.decode([token])!r}"
    return _claims(setup, effect, marks, words, "marks copies")


def _norm(
    setup: Setup, context: SinkContext, ids: TokenRows, at: Int[Tensor, " row"], other: Int[Tensor, " row"], layer: int
) -> PositionEffect:
    return PositionEffect(setup.target, ids, at, other, layer, without=tuple(context.scan.shared_dims))


def _at_more_positions(effect: PositionEffect) -> PositionEffect:
    """The effect beside several typical positions of each text: a token there may be one that heads do not mark."""
    length = effect.ids.shape[1]
    typical = list(range(length // 8, length // 2)) or [1]
    typical = typical[:: max(1, len(typical) // MORE_POSITIONS)]
    ids, at = (values.repeat_interleave(len(typical), 0) for values in (effect.ids, torch.as_tensor(effect.at)))
    other = torch.tensor(typical).repeat(len(effect.ids))
    other = torch.where(other == at, other + 1, other)
    return replace(effect, ids=ids, at=at, other=other)


def _claims(setup: Setup, effect: PositionEffect, marks: Components, place: str, role: str) -> tuple[Claim, ...]:
    """What is left of the norm above a typical one without all marks, and without each.

    The contrast is random heads or, if there are too few, other components that write before.
    """
    if not marks:
        return ()
    layer = effect.layer or 0
    together = Edit(swap=marks)
    alone = one_by_one(marks) if len(marks) > 1 else []
    beside = random_edits(setup, together, (), layer)
    name = ""
    if not beside:
        name = "the median of other components"
        layers = {mark.layer for mark in marks if isinstance(mark, Head)}
        others = [one for one in before_mlp(setup.target, layer) if one not in marks]
        beside = one_by_one([one for one in others if one.kind != "attention" or one.layer not in layers])
    if not beside:
        return ()
    values = effect.values([together, *alone, *beside])
    whole = float((values[0] - effect.typical).mean())
    left = (1 - (values[0] - values[1:]).mean(1) / whole).clamp(min=0).tolist()
    control = replace(by_chance(marks, torch.tensor(left[1 + len(alone) :])), name=name)
    search = Search("components alone and in sets", len(before_mlp(setup.target, layer)))
    claims = []
    for number, subject in enumerate((marks, *((mark,) for mark in marks[: len(alone)]))):
        claims.append(
            Claim(
                role=role if number == 0 else f"{role} alone",
                subject=subject,
                outcome=Outcome("norm", layers=(layer,)),
                place=place,
                value=left[number],
                contrasts=(Contrast("intact", 1.0), control),
                draws=len(effect.ids),
                search=search,
                margin=margin_of(None),
            )
        )
    return tuple(claims)


def before_mlp(target: Target, layer: int) -> list[Component]:
    """What writes before the MLP of a layer."""
    return [*writers(target, layer), *mixing(target, layer)]
