"""What marks a place for its spike: the heads, or what else writes there before the spike begins."""

from __future__ import annotations

from dataclasses import replace

import torch

from sinkscope.measure import Setup
from sinkscope.results.claims import Claim, Claims, Outcome, Search
from sinkscope.sinks.find.left import INTACT, beside, by_chance
from sinkscope.sinks.find.spikes import MadeSpike
from sinkscope.sinks.removal.components import mixing, writers
from sinkscope.sinks.removal.position_effect import PositionEffect
from sinkscope.sinks.tokens import prefixes, repeated

TEXTS = 2  # pieces of typical text


def begins(made: MadeSpike) -> int:
    """The layer after which a spike has begun."""
    if made.found.set:
        return max(neuron.layer for neuron in made.found.set)
    return made.scan.layer if made.spike.by_mlp else made.scan.spike_layers[0]


def marks_of(setup: Setup, made: MadeSpike) -> Claims:
    """What the spike of a place needs before the MLP of the layer in which it begins."""
    scan, layer = made.scan, begins(made)
    ids, at = scan.ids[:TEXTS], scan.at[:TEXTS]
    other = scan.ordinary(layer, ids.shape[1] // 2)[:TEXTS]
    return _claims(setup, made, PositionEffect(setup.target, ids, at, other, layer), made.spike.place.words, "marks")


def repetition_marks(setup: Setup, made: MadeSpike, token: int, repeats: int) -> Claims:
    """What marks the last of many repetitions of a token."""
    ids = repeated(prefixes(setup, [token]), [token], repeats)
    effect = PositionEffect(setup.target, ids, repeats, 1, begins(made))
    words = f"the last of {repeats} copies of {setup.tokenizer.decode([token])!r}"
    return _claims(setup, made, effect, words, "marks copies")


def _claims(setup: Setup, made: MadeSpike, effect: PositionEffect, place: str, role: str) -> Claims:
    """What is left of the norm above a typical one without all marks, and without each."""
    layer = begins(made)
    effect = replace(effect, without=made.scan.shared_dims)
    candidates = [*writers(setup.target, layer), *mixing(setup.target, layer)]
    marks = effect.marks(candidates)
    others, name = beside(setup, marks, (), layer, candidates)
    if not marks or not others:
        return ()
    subjects = [marks, *((mark,) for mark in marks if len(marks) > 1)]
    left = (1 - torch.tensor(effect.necessity([*subjects, *others]))).clamp(min=0)
    claims: list[Claim] = []
    for subject, kept in zip(subjects, left, strict=False):
        claim = Claim(
            role=role if subject == marks else f"{role} alone",
            subject=subject,
            outcome=Outcome("norm", layers=(layer,)),
            place=place,
            value=float(kept),
            contrasts=(INTACT, by_chance(marks, left[len(subjects) :], name)),
            draws=len(effect.ids),
            search=Search("components alone and in sets", len(candidates)),
        )
        claims.append(claim)
    return tuple(claims)
