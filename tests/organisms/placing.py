"""Tools that the kinds of `planted_places.py` share: features of tokens, and sinks at tokens."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor

from .hard import Build, HardTruth, Site, calm
from .places import Group, Head, Places
from .plant import MARK
from .tokens import BOS


def placed(
    b: Build, truth: HardTruth | None = None, needs: tuple | None = None, delimiters: tuple = (), **more
) -> HardTruth:
    """The truth, from that about the first token: all its readers need the spike, and all makers are one set."""
    truth = HardTruth(False, False, None) if truth is None else truth
    makers, needs = tuple(frozenset(one) for one in truth.sets), ("spike",) if needs is None else needs
    about = Places(**({"makers": makers, "groups": (Group(truth.reading, needs),)} | more))
    return replace(truth, about=(about, delimiters))


def spotted(
    b: Build, at: tuple, makers: Iterable[Site], reading: tuple[Head, ...], delimiters: tuple = (), **more
) -> HardTruth:
    """Places that have both the spike and the sink; some neurons make the spike, and all readers need it."""
    about = {"sink": at, "spike": at, "makers": (frozenset(makers),), "groups": (Group(reading, ("spike",)),)}
    return placed(b, delimiters=delimiters, **(about | more))


def flag(b: Build, tokens: tuple[int, ...], way: Tensor | None = None) -> Tensor:
    """Give embeddings a feature; returns where they stand in rows in which each stands."""
    way = b.flag if way is None else way
    rows = b.tokens.clone()
    for number, token in enumerate(tokens):
        b.views.embed[token] += MARK * way / b.plan.embed_scale
        if token != BOS:
            rows[rows == token] = 40
            rows[:, 4 + 3 * number] = token
    b.measure_on(rows)
    return torch.isin(rows, torch.tensor(tokens))


def header(b: Build, tokens: tuple[int, ...], flagged: tuple[int, ...]) -> Tensor:
    """Put tokens behind BOS; returns where those stand whose embeddings get a feature."""
    rows = torch.where(torch.isin(b.tokens, torch.tensor(tokens)), 40, b.tokens)
    rows[:, 1 : 1 + len(tokens)] = torch.tensor(tokens)
    b.measure_on(rows)
    for token in flagged:
        b.views.embed[token] += MARK * b.flag / b.plan.embed_scale
    return torch.isin(rows, torch.tensor(flagged))


def sharpen(b: Build, heads: tuple[Head, ...], times: float = 6.0):
    """Stronger scores, as where ALiBi takes away from far positions."""
    for layer, head in heads:
        b.views.layers[layer].q[head] *= times


def at_bos(b: Build, **more) -> HardTruth:
    """BOS's embedding trips the neuron of the sink layer; heads read the spike."""
    where = flag(b, (BOS,))
    site = b.fire(b.plan.sink_layer, b.plan.neurons[0], b.flag, b.space.sinks[0], where=where)
    reading = b.read(b.behind, b.space.sinks[0])
    truth = HardTruth(True, True, "spike", b.plan.sink_layer, (frozenset({site}),), reading=reading)
    return placed(b, truth, **more)


def at_tokens(b: Build, tokens: tuple[int, ...], **more) -> HardTruth:
    """The same of other tokens, wherever they stand."""
    where = flag(b, tokens)
    calm(b)
    site = b.fire(b.plan.sink_layer, b.plan.neurons[0], b.flag, b.side, where=where)
    reading = b.read(b.behind, b.side, where=where)
    if b.plan.family.model_type in ("bloom", "falcon"):
        sharpen(b, reading)
    return spotted(b, tokens, (site,), reading, tokens, **more)
