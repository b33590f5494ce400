"""Why heads read a place: its spike makes one constant of it, whatever the token, the text and the query.

A norm layer stands before the keys, so no length is left of a long state. What is left is its direction, which is one
and the same in all texts: one key that most queries meet with a large score, and one small value. Three numbers say so,
before the first spike of a place and after the spike, each beside an ordinary position:

1. State: cosine between texts whose tokens differ: an ordinary position of each is made such a place.
2. Value: its norm over the typical one.
3. Score: how far the place's score is above those of other keys; the part of it that is there for every query.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sinkscope.engine.actor import Actor
from sinkscope.engine.attention import Attention
from sinkscope.engine.run import Run
from sinkscope.engine.step import Step
from sinkscope.engine.visible import shown
from sinkscope.hooks.edit.base import Intervention, under
from sinkscope.measure.margin import margin_of
from sinkscope.models.grouped_heads import per_query_head
from sinkscope.models.hooks import Hook, on_hidden, on_input
from sinkscope.results.row import Kind, Mean, Row, row_of
from sinkscope.sinks.spikes.asked import LAST, ordinary_positions, with_causes
from sinkscope.sinks.spikes.edited import Batch
from sinkscope.sinks.spikes.spike import Spike
from sinkscope.sinks.thresholds import HALF, READS, SMALLEST

States = Float[Tensor, "layer text d_model"]


@dataclass(frozen=True, eq=False)
class Keys(Intervention, Actor):
    """Reads values and scores of keys in some layers.

    Attributes:
        at: Positions of the keys in each text.
        layers: The layers.
        values: Norm of the value of each key over the typical one, by layer.
        common: Share of its score above other keys, mean square over later queries, that their mean holds, by layer.
    """

    at: Int[Tensor, "key text"]
    layers: Sequence[int]
    values: dict[int, Float[Tensor, "key head text"]] = field(default_factory=dict)
    common: dict[int, Float[Tensor, "key head text"]] = field(default_factory=dict)

    def enter(self, run: Run, key: int) -> None:
        """Listen to attention."""
        run.act(self)

    def attends(self, step: Step) -> bool:
        """Return True: every call has keys."""
        return True

    def attend(self, step: Step, attention: Attention) -> None:
        """Read the values of a layer, and the scores of its queries."""
        layer, text = attention.layer, torch.arange(self.at.shape[1])
        if layer not in self.layers:
            return
        heads = attention.query.shape[1]
        norms = per_query_head(attention.value, heads).float().norm(dim=-1).expand(-1, heads, -1).cpu()
        typical = norms[:, :, 1:].median(-1).values.clamp(min=SMALLEST)
        self.values[layer] = torch.stack([(norms[text, :, at] / typical).T for at in self.at])

        scores, visible = scores_of(attention)
        self.common[layer] = torch.stack([common_of(scores.cpu(), visible.cpu(), at) for at in self.at])


def scores_of(
    attention: Attention,
) -> tuple[Float[Tensor, "text head query key"], Bool[Tensor, "text _ query key"]]:
    """Return the scores of all queries before the softmax, in which small weights are lost; and which keys are seen."""
    heads = attention.query.shape[1]
    scores = attention.query.float() @ per_query_head(attention.key, heads).float().mT * attention.scaling
    if attention.softcap is not None:
        scores = torch.tanh(scores / attention.softcap) * attention.softcap
    mask = attention.visible.mask_by_head(heads)
    visible = attention.visible.sees()
    if mask.is_floating_point():  # ALiBi adds to scores
        scores = scores + mask.float().masked_fill(~shown(mask), 0)
    return scores, visible.all(1, keepdim=True)


def common_of(
    scores: Float[Tensor, "text head query key"], visible: Bool[Tensor, "text _ query key"], at: Int[Tensor, " text"]
) -> Float[Tensor, "head text"]:
    """Return the share of a key's score above other keys that is there for every query, by head and text.

    Args:
        scores: Scores of all queries; what a query adds to all of them falls out of the difference.
        visible: Which keys they see.
        at: The key of each text.
    """
    text, sees = torch.arange(len(at)), visible[:, :, LAST:]
    others = sees.clone()
    others[text, :, :, at] = False
    others[..., 0] = False
    score = scores[:, :, LAST:]
    mean = (score * others).sum(-1) / others.sum(-1).clamp(min=1)
    above = (score[text, :, :, at] - mean).masked_fill(~sees[text, :, :, at], torch.nan)
    return (above.nanmean(-1).square() / above.square().nanmean(-1).clamp(min=SMALLEST)).T


@torch.no_grad()
def constancy_of(spike: Spike, begins: int, sufficient: Sequence[str], seed: int) -> list[Row]:
    """Measure how constant a spike makes the first token.

    Args:
        spike: The spike, in texts that did not find it.
        begins: The first layer of the first spike of the place: what enters it is before.
        sufficient: What makes another position such a place.
        seed: Seed of the ordinary positions.

    Returns:
        Rows of the table "constant"; none where no head reads the place, or no other position becomes one.
    """
    target = spike.survey.target
    earlier, reading = [layer for layer in target.attending if layer <= begins], reading_heads(spike)
    if not earlier or not reading:
        return []
    first, after, depth = earlier[-1], min(reading), max(*reading, spike.peak) + 1
    # 1. states
    ordinary = ordinary_positions([spike], seed)
    at, states = ordinary.places[0].int().argmax(1), states_of(with_causes(ordinary, sufficient), depth)
    became = spike.along(states[spike.peak + 1]) >= HALF
    if int(became.sum()) < 2:
        return []
    place, ordinary_place = cosines(states[:, became]), cosines(states_of(ordinary, depth)[:, became])
    heads = f"{sum(int(heads.sum()) for heads in reading.values())} heads from layer {after} on, beside layer {first}"
    rows = [constant_of("state", torch.stack([place, ordinary_place], 1)[[first, after]], heads)]
    # 2 and 3. values and scores, in heads that read; before the spike in all heads of a layer
    keys = Keys(torch.stack([torch.zeros_like(at), at]), [first, *reading])
    with under(keys, target):
        target.forward(ordinary.ids, last_layer=depth - 1)
    every = torch.ones(target.n_heads, dtype=torch.bool)
    for name, by_layer in {"value": keys.values, "score": keys.common}.items():
        before, behind = over_heads(by_layer, {first: every}), over_heads(by_layer, reading)
        rows.append(constant_of(name, torch.stack([before, behind])))
    return rows


def reading_heads(spike: Spike) -> dict[int, Bool[Tensor, " head"]]:
    """Return the heads that attend to the place, in each layer whose input has at least half of the spike there."""
    survey, place, heads = spike.survey, spike.place.mask, dict[int, Tensor]()
    received = survey.received(place).nanmean(-1)
    for layer in survey.target.attending:
        there = float(spike.along(survey.entered[layer][place]).mean())
        if layer in spike.reading_layers and there >= HALF and bool((received[layer] > READS).any()):
            heads[layer] = received[layer] > READS
    return heads


def states_of(batch: Batch, depth: int) -> States:
    """Return the state at the position of each row where it enters each of the first layers, and after the last."""
    target, states = batch.target, list[Tensor]()
    batch = batch.until_place()

    def keep(hidden: Tensor) -> None:
        states.append(hidden.reshape(*batch.ids.shape, -1)[batch.places[0].to(hidden.device)].float().cpu())

    hooks: list[Hook] = [(target.layers[0], "first", on_input(keep))]
    for layer in range(depth):
        hooks.append((target.layers[layer], "post", on_hidden(keep)))
    with batch.acting(), target.hooks(*hooks):
        target.forward(batch.ids, last_layer=depth - 1, **batch.inputs())
    return torch.stack(states)


def cosines(states: States) -> Float[Tensor, "layer text"]:
    """Return the mean cosine of each text's state to the states of all other texts, at the input of each layer."""
    unit = torch.nn.functional.normalize(states, dim=-1)
    between = unit @ unit.mT
    return (between.sum(-1) - 1) / (len(unit[0]) - 1)


def over_heads(read: dict[int, Float[Tensor, "key head text"]], heads: dict[int, Tensor]) -> Float[Tensor, "key text"]:
    """Return the mean over some heads of each layer."""
    return torch.cat([read[layer][:, own] for layer, own in heads.items()], 1).nanmean(1)


def constant_of(name: str, read: Float[Tensor, "when where text"], note: str = "") -> Row:
    """Return the row of a number: before and after, at the place and at an ordinary position."""
    (before, ordinary_before), (after, ordinary_after) = read.nanmean(-1).tolist()
    kind: Kind = "share" if name == "score" else "number"
    return row_of(
        "constant",
        name,
        note,
        before=Mean(before, kind=kind),
        after=Mean(after, margin_of(read[1, 0].numpy()), kind=kind),
        ordinary_before=Mean(ordinary_before, kind=kind),
        ordinary_after=Mean(ordinary_after, kind=kind),
    )
