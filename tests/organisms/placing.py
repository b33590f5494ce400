"""Tools that the kinds of planted places share: features of tokens, and sinks at tokens."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from .hard import Build, HardTruth, Head
from .places import Group, Places
from .plant import MARK
from .tokens import BOS

PLACES: dict[str, tuple[str, ...]] = {}
"""Every kind, and the families that it is built in."""


def placed(truth: HardTruth | None = None, **more) -> HardTruth:
    """The truth, from that about the first token: all its readers need the spike, and all makers are one set."""
    truth = HardTruth(False, False, None) if truth is None else truth
    about = {"makers": truth.sets, "groups": (Group(truth.reading, ("spike",)),)} | more
    return replace(truth, places=Places(**about))


def stand(b: Build, at: dict[int, int]):
    """Measure on rows in which tokens stand at positions, and nowhere else."""
    rows = b.tokens.clone()
    rows[torch.isin(rows, torch.tensor(list(at.values()), dtype=rows.dtype))] = 40
    for position, token in at.items():
        rows[:, position] = token
    b.measure_on(rows)


def flag(b: Build, tokens: tuple[int, ...]) -> Tensor:
    """Give embeddings a feature; returns where they stand in rows in which each stands."""
    at = {}
    for number, token in enumerate(tokens):
        b.views.embed[token] += MARK * b.flag / b.plan.embed_scale
        if token != BOS:
            at[4 + 3 * number] = token
    stand(b, at)
    return torch.isin(b.tokens, torch.tensor(tokens))


def header(b: Build, tokens: tuple[int, ...], flagged: tuple[int, ...]) -> Tensor:
    """Put tokens after BOS; returns where those stand whose embeddings get a feature."""
    stand(b, dict(enumerate(tokens, 1)))
    for token in flagged:
        b.views.embed[token] += MARK * b.flag / b.plan.embed_scale
    return torch.isin(b.tokens, torch.tensor(flagged))


def sharpen(b: Build, heads: tuple[Head, ...], times: float = 6.0):
    """Stronger scores, as where ALiBi takes away from far positions."""
    for layer, head in heads:
        b.views.layers[layer].q[head] *= times


def tripped(b: Build, where: Tensor, at: tuple, times: float = 1.0, **more) -> HardTruth:
    """The flag trips the neuron of the sink layer; heads read the spike, with scores as many times as strong."""
    site = b.fire(b.flag, b.side, where=where)
    reading = b.read(b.behind, b.side, where=where)
    sharpen(b, reading, times)
    groups = (Group(reading, ("spike",)),)
    return placed(sink=at, spike=at, makers=(frozenset({site}),), groups=groups, **more)
