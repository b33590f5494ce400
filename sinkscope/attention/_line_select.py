"""Choices of lines: the heaviest, random ones, what they cover, and what two choices share."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sinkscope.errors import SinkscopeError


@dataclass(frozen=True, eq=False)
class Lines:
    """Chosen lines of every head of a layer, several choices of them.

    Attributes:
        vertical: which key positions.
        slash: which offsets.
    """

    vertical: Bool[Tensor, "choice head key"]
    slash: Bool[Tensor, "choice head key"]

    def counts(self) -> Int[Tensor, "choice head"]:
        """How many lines."""
        return self.vertical.sum(2) + self.slash.sum(2)

    def cells(self) -> Float[Tensor, "choice head"]:
        """Share of the cells that a causal square of this size has which lie on a chosen line, each counted once."""
        keys = self.vertical.shape[2]
        length = torch.arange(keys, 0, -1, device=self.slash.device)  # of line i of either kind
        own = ((self.vertical.long() + self.slash.long()) * length).sum(2)
        # Column b crosses the offsets up to keys - 1 - b.
        twice = (self.vertical * self.slash.long().cumsum(2).flip(2)).sum(2)
        return (own - twice) / (keys * (keys + 1) / 2)

    def random(self, generator: torch.Generator, *, cells: bool) -> Lines:
        """Lines drawn at random, of each kind as many, or with `cells` as many as have the same length together."""
        return Lines(_drawn(self.vertical, generator, cells), _drawn(self.slash, generator, cells))


def checked_etas(etas: Sequence[float], option: str = "--eta") -> tuple[float, ...]:
    """The shares in rising order; `option` is what the message calls them.

    Raises:
        SinkscopeError: none was given, or one outside (0, 1].
    """
    found = tuple(sorted({float(eta) for eta in etas}))
    if not found:
        raise SinkscopeError(f"no {option} was given: expected at least one share, such as 0.1")
    for eta in found:
        if not 0 < eta <= 1:
            raise SinkscopeError(f"{option} {eta:g}: expected a share above 0 and up to 1, such as 0.1")
    return found


def top_lines(
    vertical: Float[Tensor, "head key"],
    slash: Float[Tensor, "head key"],
    etas: Sequence[float],
    length: int | None = None,
) -> Lines:
    """The heaviest `eta * 2 * length` lines of both kinds together, at least one; lines without weight never.

    Args:
        vertical: weights.
        slash: weights.
        etas: a choice for each.
        length: None: as many as there are key positions.
    """
    both = torch.cat([vertical, slash], 1)
    order = torch.argsort(both, dim=1, descending=True, stable=True)
    rank = torch.empty_like(order).scatter_(1, order, torch.arange(both.shape[1], device=both.device).expand_as(order))
    size = vertical.shape[1] if length is None else length
    most = torch.tensor([max(1, math.floor(eta * 2 * size + 1e-9)) for eta in etas], device=both.device)
    chosen = (rank < most[:, None, None]) & (both > 0)
    return Lines(*(part.contiguous() for part in chosen.split(vertical.shape[1], 2)))


def jaccard(a: Lines, b: Lines) -> Float[Tensor, "choice head"]:
    """Lines in both over lines in either."""
    both = _shared(a, b)
    return both / (a.counts() + b.counts() - both).clamp(min=1)


def covered(a: Lines, b: Lines) -> Float[Tensor, "choice head"]:
    """Lines in both over lines of `b`."""
    return _shared(a, b) / b.counts().clamp(min=1)


def _shared(a: Lines, b: Lines) -> Int[Tensor, "choice head"]:
    keys = min(a.vertical.shape[2], b.vertical.shape[2])  # what only one of them can have is not shared
    return sum((x[:, :, :keys] & y[:, :, :keys]).sum(2) for x, y in ((a.vertical, b.vertical), (a.slash, b.slash)))  # pyright: ignore[reportReturnType]


def _drawn(chosen: Bool[Tensor, "choice head key"], generator: torch.Generator, cells: bool) -> Tensor:
    _, heads, keys = chosen.shape
    order = torch.rand(heads, keys, generator=generator).argsort(1).to(chosen.device)
    length = torch.arange(keys, 0, -1, device=chosen.device) if cells else order.new_ones(keys)
    drawn = length[order]
    reached = drawn.cumsum(1) - drawn / 2  # a line is taken if more than half of it still fits
    wanted = (chosen * length).sum(2, keepdim=True)
    return torch.zeros_like(chosen).scatter_(2, order.expand_as(chosen), reached < wanted)
