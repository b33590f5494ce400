"""Claims about what edits leave of a spike or of attention, and the other parts that they are held against."""

from __future__ import annotations

from collections.abc import Sequence

from jaxtyping import Float
from torch import Tensor

from sinkscope.measure import Setup
from sinkscope.measure.margin import margin_of
from sinkscope.models.draws import draws, some_of
from sinkscope.results.claims import Claim, Contrast, Outcome, Search
from sinkscope.results.parts import Component, Head, Neuron, Part, Parts
from sinkscope.sinks.removal.components import one_by_one
from sinkscope.sinks.removal.search import CONTROL_DRAWS

INTACT = Contrast("intact", 1.0)


def claim_of(
    role: str,
    subject: Parts,
    outcome: Outcome,
    place: str,
    left: Float[Tensor, " draw"],
    contrasts: Sequence[Contrast],
    search: Search,
    edit: str = "",
    exact: bool = False,
) -> Claim:
    """What an edit leaves of an outcome, mean over draws, beside its contrasts; `exact` if it is about these alone."""
    margin = margin_of(left.numpy())
    if margin is None and exact:
        margin = 0.0
    return Claim(
        role=role,
        subject=subject,
        outcome=outcome,
        place=place,
        value=float(left.mean()),
        contrasts=tuple(contrasts),
        draws=len(left),
        search=search,
        margin=margin,
        edit=edit,
    )


def by_chance(parts: Parts, left: Float[Tensor, " draw"]) -> Contrast:
    """What is left without random neurons, the least; or without other components, the median: some are needed, too."""
    if all(isinstance(part, Neuron) for part in parts):
        return Contrast("random", float(left.min()), len(left))
    return Contrast("random", float(left.median()), len(left), "the median of other components")


def beside(setup: Setup, parts: Parts, components: Sequence[Part]) -> list[Parts]:
    """What the edit of components or heads is held against: up to 20 other components, each replaced alone."""
    barred: set[Part] = {*parts}
    barred |= {Component("attention", part.layer) for part in parts if isinstance(part, Head)}
    others = [one for one in components if one not in barred]
    return one_by_one(some_of(others, CONTROL_DRAWS, draws(setup.seed, f"components beside {parts}")))
