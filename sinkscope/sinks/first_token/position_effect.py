"""Path patching in both directions: what an effect at a position needs, and what transfers it to another position."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import compress

import numpy as np
import torch
from einops import reduce
from jaxtyping import Bool, Float
from torch import Tensor

from sinkscope.measure.evidence import NEEDED
from sinkscope.models.target import Target
from sinkscope.sinks.first_token.effects import Component, Edit, effects, key_bias, mixing, one_by_one, writers
from sinkscope.sinks.first_token.members import CONTROL_DRAWS
from sinkscope.sinks.first_token.search import Removal, smallest_set
from sinkscope.sinks.tokens import TokenRows

NEARLY = 0.75  # of several components, those are needed that lose at least this share of the largest loss
EFFECTIVE = 0.1  # components that lose at least this share are named
SET_CANDIDATES = 8  # components that are tried in sets if none is needed alone
Components = tuple[Component, ...]


@dataclass(frozen=True)
class Marks:
    """What an effect needs.

    Attributes:
        chosen: The components that are needed alone or, if none is, the smallest set found; empty if no set is needed.
        effective: Components that alone take away at least a tenth, or else the one that takes away most.
    """

    chosen: Components
    effective: Components


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
    ids: TokenRows
    at: int
    other: int
    layer: int | None = None
    heads: Bool[Tensor, "layer head"] | None = None
    without: tuple[int, ...] = ()

    @cached_property
    def reversed(self) -> PositionEffect:
        """The same with both positions exchanged: edits act at the typical position."""
        return replace(self, at=self.other, other=self.at)

    @cached_property
    def intact(self) -> Float[Tensor, "text part"]:
        """The norm, or the attention of each head, without an edit."""
        return self.values([])[1]

    def values(self, edits: Sequence[Edit]) -> tuple[Float[Tensor, "edit text part"], Float[Tensor, "text part"]]:
        """Norms, or the attention of each head, under edits at the position; and the same without an edit."""
        ids = self.ids
        if self.heads is None:
            ids = ids[:, : max(self.at, self.other) + 1]  # later tokens do not change norms
        edited = effects(
            self.target,
            ids,
            edits,
            at=self.at,
            source=self.other,
            upto=self.layer,
            attention=self.heads is not None,
            without=self.without,
        )
        if self.heads is None:
            return edited.norms[..., -1:], edited.intact_norms[..., -1:]
        return edited.attention[..., self.heads], edited.intact_attention[..., self.heads]

    def removed(self, edits: Sequence[Edit]) -> Float[Tensor, "edit text part"]:
        """What each edit takes away at the position."""
        return self.intact - self.values(edits)[0]

    def shares(self, change: Float[Tensor, "edit text part"]) -> list[float]:
        """Changes as shares of the whole effect."""
        whole = (self.intact - self.reversed.intact).mean()
        return (reduce(change, "edit text part -> edit", "mean") / whole).tolist()

    def necessity(self, edits: Sequence[Edit]) -> list[float]:
        """The share of the effect that is lost under each edit."""
        if not edits:
            return []
        return self.shares(self.removed(edits))

    def sufficiency(self, edits: Sequence[Edit]) -> list[float]:
        """The share of the effect that each edit gives to the typical position; NaN for neurons and biases of keys."""
        if not edits:
            return []
        shares = self.shares(-self.reversed.removed(edits))
        for place, edit in enumerate(edits):
            if edit.zero or Component("key bias") in edit.swap:
                shares[place] = float("nan")
        return shares

    def marks(self, depth: int) -> Marks:
        """The components that make the effect, with heads in place of attention layers.

        Components before the MLP of a layer are candidates, or before its keys if heads are given.
        """
        candidates = writers(self.target, depth)
        if self.heads is None:
            candidates += mixing(self.target, depth)
        elif key_bias(self.target, depth) is not None:
            candidates.append(Component("key bias"))
        alone = self.necessity(one_by_one(candidates))
        bar = min(EFFECTIVE, max(alone))
        effective = tuple(compress(candidates, np.array(alone) >= bar))
        return Marks(self.with_heads(self.smallest(candidates, alone)), effective)

    def with_heads(self, whole: Components) -> Components:
        """The same components with heads in place of attention layers, where some heads of one are enough."""
        needed_alone = min(self.necessity(one_by_one(whole)), default=0.0) >= NEEDED
        chosen = []
        for member in whole:
            own = (member,)
            if member.kind == "attention":
                heads = [Component("head", member.layer, head) for head in range(self.target.n_heads)]
                others = tuple(component for component in whole if component != member and not needed_alone)
                of_heads = self.necessity([Edit(swap=(*others, head)) for head in heads])
                own = self.smallest(heads, of_heads, others) or own
            chosen += own
        return tuple(chosen)

    def smallest(
        self, candidates: Sequence[Component], alone: Sequence[float], removed_too: Components = ()
    ) -> Components:
        """The candidates that are needed alone or, if none is, the smallest set found that is needed together.

        Args:
            candidates: Components that may be replaced.
            alone: What is lost without each.
            removed_too: Components that are replaced all the time.
        """
        bar = max(NEEDED, NEARLY * max(alone))
        needed = tuple(compress(candidates, np.array(alone) >= bar))
        if needed:
            return needed
        order = sorted(range(len(candidates)), key=lambda index: -alone[index])
        promising = [candidates[index] for index in order[:SET_CANDIDATES]]

        def remove(sets: list[Components]) -> list[Removal]:
            lost = self.necessity([Edit(swap=(*removed_too, *members)) for members in sets])
            return [Removal(gone=share >= NEEDED, drop=share) for share in lost]

        return smallest_set(promising, remove) or ()


def random_swaps(pool: Sequence[Component], size: int, seed: int) -> list[Edit]:
    """Random sets of so many components replaced, as controls; none if the pool is too small."""
    if not 0 < size <= len(pool):
        return []
    generator = torch.Generator().manual_seed(seed)
    edits = []
    for _ in range(CONTROL_DRAWS):
        drawn = torch.randperm(len(pool), generator=generator)[:size].tolist()
        edits.append(Edit(swap=tuple(pool[index] for index in drawn)))
    return edits
