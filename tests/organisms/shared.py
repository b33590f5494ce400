"""A sink that ordinary neurons share: zeroing a random neuron of its layer changes the first token's norm too.

The sink layer of an organism with one sink neuron is rewritten. Every neuron of it now reads what the sink neuron
reads, so all of them have one activation. In units of the spike, they write:

- the sink neuron: what is missing to 1 along the spike's direction,
- the *bystander*: `aside` at right angles to the spike, so it writes more than a helper does and matters less,
- the *helpers*: `support` along the spike,
- the *opponents*: 1.25 times that against the spike; zeroing one makes the norm larger.

Helpers and opponents cancel, up to a rest that the sink neuron makes up for. Five of nine are helpers: 20 random
neurons without one come once in ten million draws, so the largest drop of a random neuron is a helper's, and the mean
drop is about zero.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import torch

from .organism import Organism, organism
from .plan import make_plan
from .views import views


@dataclass(frozen=True)
class SharedSink:
    """An organism whose layer shares its sink; drops are shares of the first token's norm, exact up to about 0.02."""

    organism: Organism
    sink: tuple[int, ...]  # sites, as interventions take them
    bystander: tuple[int, ...]
    sink_drop: float
    bystander_drop: float
    helper_drop: float  # the largest one of a random neuron


def shared_sink(family: str, *, aside: float = 0.6, support: float = 0.4) -> SharedSink:
    """Rewrite the first organism that has one sink neuron."""
    seeds = itertools.count()
    o = organism(family, next(s for s in seeds if len(make_plan(family, s).neurons) == 1))
    site = o.truth.neurons[0]
    layer, expert, sink = site[0], site[1] if len(site) == 3 else 0, site[-1]
    view = views(o.model).layers[layer]
    down = view.down[expert]
    spike, others = down[sink].clone(), [n for n in range(len(down)) if n != sink]
    across = torch.zeros_like(spike)
    free = [d for d in range(len(spike)) if d not in o.truth.residual_dims]
    across[free[:2]] = torch.tensor([1.0, -1.0]) / math.sqrt(2)  # without a mean, which LayerNorm would take away
    bystander, *ordinary = others
    helpers = round(len(ordinary) * 5 / 9)
    shuffled = [ordinary[i] for i in torch.randperm(len(ordinary), generator=torch.Generator().manual_seed(0))]
    own = 1 - support * helpers + 1.25 * support * (len(ordinary) - helpers)
    with torch.no_grad():
        for rows in (view.gate, view.up, view.gate_bias, view.up_bias):
            if rows is not None:
                rows[expert, others] = rows[expert, sink].clone()
        down[sink] = own * spike
        down[bystander] = aside * spike.norm() * across
        down[shuffled[:helpers]] = support * spike
        down[shuffled[helpers:]] = -1.25 * support * spike
    whole = math.hypot(1, aside)
    return SharedSink(
        o,
        sink=site,
        bystander=(*site[:-1], bystander),
        sink_drop=1 - math.hypot(1 - own, aside) / whole,
        bystander_drop=1 - 1 / whole,
        helper_drop=1 - math.hypot(1 - support, aside) / whole,
    )
