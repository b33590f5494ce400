"""Claims about what edits leave of a spike or of attention, and the random parts that they are held against."""

from __future__ import annotations

from collections.abc import Sequence

from jaxtyping import Float
from torch import Tensor

from sinkscope.measure import Setup
from sinkscope.measure.margin import margin_of
from sinkscope.models.draws import draws, some_of
from sinkscope.results.claims import Claim, Contrast, Outcome, Search
from sinkscope.results.parts import Component, Head, Neuron, Part, Parts
from sinkscope.sinks.removal.components import Neurons, heads_of, one_by_one
from sinkscope.sinks.removal.search import CONTROL_DRAWS, random_sets

INTACT = Contrast("intact", 1.0)
OTHER_PARTS = "the median of other components"


def claim_of(
    role: str,
    subject: Parts,
    outcome: Outcome,
    place: str,
    left: Float[Tensor, " draw"],
    contrasts: Sequence[Contrast],
    search: Search,
    edit: str = "",
) -> Claim:
    """What an edit leaves of an outcome, mean over draws, beside its contrasts."""
    return Claim(
        role=role,
        subject=subject,
        outcome=outcome,
        place=place,
        value=float(left.mean()),
        contrasts=tuple(contrasts),
        draws=len(left),
        search=search,
        margin=margin_of(left.numpy()),
        edit=edit,
    )


def by_chance(parts: Parts, left: Float[Tensor, " draw"], name: str = "") -> Contrast:
    """What is left without random parts: of neurons the least; of heads the median, as some are of the circuit."""
    if all(isinstance(part, Neuron) for part in parts):
        return Contrast("random", float(left.min()), len(left), name)
    return Contrast("random", float(left.median()), len(left), name)


def beside(
    setup: Setup, parts: Parts, excluded: Neurons, depth: int, components: Sequence[Part]
) -> tuple[list[Parts], str]:
    """What the edit of some parts is held against: 20 edits of as many random neurons of the same layers, or heads.

    If there are too few heads, other components are replaced one by one.

    Args:
        setup: The model.
        parts: The parts.
        excluded: Neurons that are not drawn.
        depth: The last layer whose heads are drawn.
        components: What may be replaced instead.

    Returns:
        The edits, and their name in a sentence if they are not random.
    """
    neurons = tuple(part for part in parts if isinstance(part, Neuron))
    swapped = tuple(part for part in parts if not isinstance(part, Neuron))
    if not swapped:
        return [*random_sets(setup.target, neurons, excluded, setup.seed)], ""
    barred: set[Part] = {*swapped}
    whole = {part.layer for part in swapped if isinstance(part, Component) and part.kind == "attention"}
    pool: list[Head] = []
    for layer in filter(setup.target.has_attention, range(depth + 1)):
        if layer not in whole:
            pool += [head for head in heads_of(setup.target, layer) if head not in barred]
    size = len(swapped)
    if size <= len(pool):
        generator = draws(setup.seed, f"heads beside {swapped}")
        edits: list[Parts] = []
        for _ in range(CONTROL_DRAWS):
            edits.append(tuple(some_of(pool, size, generator)))
        return edits, ""
    barred |= {Component("attention", part.layer) for part in swapped if isinstance(part, Head)}
    return one_by_one([one for one in components if one not in barred]), OTHER_PARTS
