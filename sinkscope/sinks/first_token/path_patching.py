"""Path patching in both directions: what an effect at a position needs, and what gives it to another position."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sinkscope.models.target import Target
from sinkscope.sinks.first_token.ablation import DRAWS
from sinkscope.sinks.first_token.effects import Component, Edit, effects, has_key_bias, writers

HALF = 0.5  # of an effect: from here on a component is needed, or suffices
NEARLY = 0.75  # several are needed where each loses at least this share of what the most needed one loses
ENOUGH = 0.9  # the search for a set ends where this is lost,
GAIN = 0.05  # or where one more component adds less than this
MOST = 8  # components that are replaced together in the search for a set
UNSWAPPED = ("attention bias", "sink neurons", "norm bias", "input bias")


class Proof(NamedTuple):
    """Of one edit: the share of the effect that is lost with it, and that it gives the typical position."""

    necessity: float | None
    sufficiency: float | None


class Group(NamedTuple):
    """Components that make an effect, and how.

    Attributes:
        members: the components.
        relation: "alone": there is one; "all needed": each is necessary, and none suffices; "in series": each is
            necessary, and some suffice, because the effect passes through them one after the other; "any suffices":
            none is necessary, and each is enough; "together": neither.
    """

    members: tuple[Component, ...]
    relation: str


@dataclass(frozen=True)
class Bench:
    """An effect at a position, in units in which a typical position has 0 and this one has 1.

    Attributes:
        target: the model.
        ids: the texts.
        at: the position.
        other: the typical one.
        layer: the effect is the norm after this layer;
        heads: or, where they are given, the attention that these heads pay to the position.
        without: residual dimensions that norms leave out.
    """

    target: Target
    ids: Int[Tensor, "text pos"]
    at: int
    other: int
    layer: int | None = None
    heads: Bool[Tensor, "layer head"] | None = None
    without: tuple[int, ...] = ()

    def necessity(self, edits: Sequence[Edit], each: bool = False) -> list[Any]:
        """The share of the effect that each edit at the position takes away; with `each`, of every head's part."""
        edited, top = self.values(edits, self.at, self.other)
        return shares_of(top - edited, self.span, each)

    def sufficiency(self, edits: Sequence[Edit], each: bool = False) -> list[Any]:
        """The share of the effect that each edit gives the typical position."""
        edited, floor = self.values(edits, self.other, self.at)
        return shares_of(edited - floor, self.span, each)

    @cached_property
    def span(self) -> Float[Tensor, "text part"]:
        """The whole effect."""
        return self.values([], self.at, self.other)[1] - self.values([], self.other, self.at)[1]

    def proofs(self, sets: Sequence[Sequence[Component]]) -> list[Proof]:
        """Both, of components that are replaced together; None where that cannot be done."""
        swapped = [all(c.kind not in UNSWAPPED for c in some) for some in sets]
        given = [ok and all(c.kind != "key bias" for c in some) for ok, some in zip(swapped, sets, strict=True)]
        found: list[list[float | None]] = []
        for measure, allowed in ((self.necessity, swapped), (self.sufficiency, given)):
            edits = [self.edit(some) for some, ok in zip(sets, allowed, strict=True) if ok]
            values = iter(measure(edits) if edits else [])
            found.append([next(values) if ok else None for ok in allowed])
        return [Proof(*both) for both in zip(*found, strict=True)]

    def needed(
        self, candidates: Sequence[Component], base: tuple[Component, ...] = (), judge: Bench | None = None
    ) -> Group:
        """The components that make the effect, and how they do it together.

        Args:
            candidates: what may be replaced.
            base: replaced all the time.
            judge: the effect by which the relation is told, where it is another one.
        """
        alone = self.necessity([self.edit((*base, c)) for c in candidates])
        bar = max(HALF, NEARLY * max(alone))
        chosen = [c for c, lost in zip(candidates, alone, strict=True) if lost >= bar]
        gone = self.necessity([self.edit((*base, *chosen))])[0] if chosen else 0.0
        while gone < ENOUGH and len(chosen) < MOST and (rest := [c for c in candidates if c not in chosen]):
            lost = self.necessity([self.edit((*base, *chosen, c)) for c in rest])
            best = max(range(len(rest)), key=lost.__getitem__)
            if chosen and lost[best] < gone + GAIN:
                break
            chosen, gone = [*chosen, rest[best]], lost[best]
        members = tuple(c for c in candidates if c in chosen)
        return Group(members, self._relation(members, base, judge or self))

    def _relation(self, members: tuple[Component, ...], base: tuple[Component, ...], judge: Bench) -> str:
        if len(members) == 1:
            return "alone"
        if min(judge.necessity([self.edit((*base, c)) for c in members])) >= HALF:
            given = [proof.sufficiency or 0.0 for proof in self.proofs([(c,) for c in members])]
            return "in series" if max(given) >= HALF else "all needed"
        only = judge.necessity([self.edit((*base, *(c for c in members if c != one))) for one in members])
        return "any suffices" if max(only) < HALF else "together"

    def edit(self, some: Sequence[Component]) -> Edit:
        """Replaces all of these."""
        biases = [Component("key bias", i) for i in range(self.target.n_layers) if has_key_bias(self.target, i)]
        return Edit(swap=tuple(d for c in some for d in (biases if c == ("key bias", None, None) else [c])))

    def candidates(self, depth: int) -> list[Component]:
        """Everything that writes into the stream before the MLP of a layer; before the keys, where heads are given.

        A key bias without layer stands for those of all layers.
        """
        found = writers(self.target, depth)
        if self.heads is None:
            return [*found, Component("attention", depth)]
        return found + ([Component("key bias")] if has_key_bias(self.target, depth) else [])

    def values(self, edits: Sequence[Edit], at: int, source: int) -> tuple[Tensor, Tensor]:
        """Norms, or attention of each head, `[edit text part]`, and intact `[text part]`."""
        asked = self.heads is not None
        ids = self.ids if asked else self.ids[:, : max(at, source) + 1]  # later tokens change no norm
        seen = effects(
            self.target, ids, edits, at=at, source=source, upto=self.layer, attention=asked, without=self.without
        )
        if self.heads is None or seen.attention is None or seen.intact_attention is None:
            return seen.norms[..., -1:], seen.intact_norms[..., -1:]
        return seen.attention[..., self.heads], seen.intact_attention[..., self.heads]


def shares_of(
    change: Float[Tensor, "edit text part"], span: Float[Tensor, "text part"], each: bool = False
) -> list[Any]:
    """Changes over the whole effect: of all parts together, or of each part."""
    over = 1 if each else (1, 2)
    return (change.mean(over) / span.mean(0 if each else (0, 1))).tolist()


def random_sets(pool: Sequence[Any], size: int, seed: int) -> list[tuple[Any, ...]]:
    """Random sets of a size, as controls; none where the pool is too small."""
    generator = torch.Generator().manual_seed(seed)
    draws = DRAWS if 0 < size <= len(pool) else 0
    return [tuple(pool[int(i)] for i in torch.randperm(len(pool), generator=generator)[:size]) for _ in range(draws)]
