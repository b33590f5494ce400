"""Path patching in both directions: what an effect at a position needs, and what transfers it to another position."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from einops import reduce
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sinkscope.measure.evidence import NEEDED
from sinkscope.models.target import Target
from sinkscope.sinks.first_token.effects import Component, Edit, effects, has_key_bias, writers
from sinkscope.sinks.first_token.result import CONTROL_DRAWS
from sinkscope.sinks.first_token.sets import Removal, smallest_set

NEARLY = 0.75  # of several components, those are needed that lose at least this share of the largest loss
SET_CANDIDATES = 8  # components that are tried in sets if none is needed alone
NOT_SWAPPED = ("attention bias", "sink neurons", "norm bias", "input bias")


@dataclass(frozen=True)
class PositionEffect:
    """An effect at a position, scaled so that a typical position has 0 and this position has 1.

    Attributes:
        target: The model.
        ids: The texts.
        at: The position.
        other: The typical position.
        layer: The effect is the norm after this layer, unless `heads` are given.
        heads: If given, the effect is the attention that these heads pay to the position.
        without: Residual dimensions that norms leave out.
    """

    target: Target
    ids: Int[Tensor, "text pos"]
    at: int
    other: int
    layer: int | None = None
    heads: Bool[Tensor, "layer head"] | None = None
    without: tuple[int, ...] = ()

    @property
    def reversed(self) -> PositionEffect:
        """The same with both positions exchanged: edits act at the typical position."""
        return replace(self, at=self.other, other=self.at)

    @cached_property
    def intact(self) -> Float[Tensor, "text part"]:
        """The norm, or the attention of each head, without an edit."""
        return self.values([])[1]

    @cached_property
    def span(self) -> Float[Tensor, "text part"]:
        """The whole effect."""
        return self.intact - self.reversed.intact

    def values(self, edits: Sequence[Edit]) -> tuple[Float[Tensor, "edit text part"], Float[Tensor, "text part"]]:
        """Norms, or the attention of each head, under edits at the position; and the same without an edit."""
        of_heads, ids = self.heads is not None, self.ids
        if not of_heads:
            ids = ids[:, : max(self.at, self.other) + 1]  # later tokens do not change norms
        edited = effects(
            self.target,
            ids,
            edits,
            at=self.at,
            source=self.other,
            upto=self.layer,
            attention=of_heads,
            without=self.without,
        )
        if self.heads is None:
            return edited.norms[..., -1:], edited.intact_norms[..., -1:]
        return edited.attention[..., self.heads], edited.intact_attention[..., self.heads]

    def removed(self, edits: Sequence[Edit]) -> Float[Tensor, "edit text part"]:
        """What each edit takes away at the position."""
        return self.intact - self.values(edits)[0]

    def given(self, edits: Sequence[Edit]) -> Float[Tensor, "edit text part"]:
        """What each edit gives to the typical position."""
        return self.reversed.values(edits)[0] - self.reversed.intact

    def shares(self, change: Float[Tensor, "edit text part"]) -> list[float]:
        """Changes as shares of the whole effect."""
        return (reduce(change, "edit text part -> edit", "mean") / self.span.mean()).tolist()

    def shares_by_part(self, change: Float[Tensor, "edit text part"]) -> Float[Tensor, "edit part"]:
        """The same for each head."""
        return reduce(change, "edit text part -> edit part", "mean") / self.span.mean(0)

    def necessity(self, sets: Sequence[Sequence[Component]]) -> list[float]:
        """The share of the effect that is lost when components are replaced together; NaN where that cannot be done."""
        return self._swapped(sets, NOT_SWAPPED)

    def sufficiency(self, sets: Sequence[Sequence[Component]]) -> list[float]:
        """The share of the effect that components give to the typical position together; NaN where they cannot."""
        return self._swapped(sets, (*NOT_SWAPPED, "key bias"))

    def _swapped(self, sets: Sequence[Sequence[Component]], barred: tuple[str, ...]) -> list[float]:
        possible = [index for index, members in enumerate(sets) if all(c.kind not in barred for c in members)]
        shares = [float("nan")] * len(sets)
        if not possible:
            return shares
        edits = [self.edit(sets[index]) for index in possible]
        change = self.given(edits) if "key bias" in barred else self.removed(edits)
        for index, share in zip(possible, self.shares(change), strict=True):
            shares[index] = share
        return shares

    def edit(self, members: Sequence[Component]) -> Edit:
        """An edit that replaces all of these components; a key bias without a layer stands for those of all layers."""
        swap: list[Component] = []
        for component in members:
            if component == Component("key bias"):
                layers = range(self.target.n_layers)
                swap += [Component("key bias", layer) for layer in layers if has_key_bias(self.target, layer)]
            else:
                swap.append(component)
        return Edit(swap=tuple(swap))

    def candidates(self, depth: int) -> list[Component]:
        """Everything that writes into the stream before the MLP of a layer, or before its keys if heads are given."""
        components = writers(self.target, depth)
        if self.heads is None:
            components.append(Component("attention", depth))
        elif has_key_bias(self.target, depth):
            components.append(Component("key bias"))
        return components

    def marks(self, depth: int) -> tuple[Component, ...]:
        """The components that make the effect, with heads in place of attention layers.

        See `smallest_marks`: they are needed alone or, if none is, they are the smallest set found.
        """
        whole = self.smallest_marks(self.candidates(depth))
        needed_alone = min(self.necessity([(component,) for component in whole])) >= NEEDED
        marks: list[Component] = []
        for member in whole:
            if member.kind != "attention":
                marks.append(member)
                continue
            heads = [Component("head", member.layer, head) for head in range(self.target.n_heads)]
            others = tuple(component for component in whole if component != member)
            own = self.smallest_marks(heads, () if needed_alone else others)
            marks += own or (member,)
        return tuple(marks)

    def smallest_marks(
        self, candidates: Sequence[Component], removed_too: tuple[Component, ...] = ()
    ) -> tuple[Component, ...]:
        """The candidates that are needed alone or, if none is, the smallest set found that is needed together.

        Args:
            candidates: Components that may be replaced.
            removed_too: Components that are replaced all the time.
        """
        alone = self.necessity([(*removed_too, component) for component in candidates])
        bar = max(NEEDED, NEARLY * max(alone))
        needed = tuple(c for c, lost in zip(candidates, alone, strict=True) if lost >= bar)
        if needed:
            return needed
        order = sorted(range(len(candidates)), key=lambda index: -alone[index])
        promising = [candidates[index] for index in order[:SET_CANDIDATES]]

        def remove(sets: list[tuple[Component, ...]]) -> list[Removal]:
            lost = self.necessity([(*removed_too, *members) for members in sets])
            return [Removal(gone=share >= NEEDED, drop=share) for share in lost]

        return smallest_set(promising, remove) or ()


def random_sets(pool: Sequence[Any], size: int, seed: int) -> list[tuple[Any, ...]]:
    """Random sets of a given size, as controls; none if the pool is too small."""
    if not 0 < size <= len(pool):
        return []
    generator = torch.Generator().manual_seed(seed)
    draws = [torch.randperm(len(pool), generator=generator)[:size].tolist() for _ in range(CONTROL_DRAWS)]
    return [tuple(pool[index] for index in drawn) for drawn in draws]
