"""Path patching in both directions: what an effect at a position needs, and what transfers it to another position.

The effect is the norm of the position, or the attention that some heads pay to it. `find_sinks` and `circuit` both
remove components here and read what is left.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import compress

from jaxtyping import Bool, Float
from torch import Tensor

from sinkscope.models.target import Target
from sinkscope.results.claims import NEEDED
from sinkscope.results.parts import Component, Part, Parts
from sinkscope.sinks.removal.components import Heads, has_key_bias, heads_of, one_by_one, writers
from sinkscope.sinks.removal.effects import KEY_BIAS, Trial, side_by_side

NEARLY = 0.75  # of several components, those are needed that lose at least this share of the largest loss


@dataclass(frozen=True, eq=False)
class PositionEffect:
    """An effect at a position, scaled so that a typical position has 0 and this position has 1.

    Attributes:
        target: The model.
        base: The texts, the position (`at`) and the typical one (`source`) of each, and what else is read. The effect
            is the norm after its last layer, unless `heads` are given.
        heads: If given, the effect is the attention that these heads pay to the position.
    """

    target: Target
    base: Trial
    heads: Heads = ()

    def only(self, parts: Sequence[int]) -> PositionEffect:
        """The same with some of the heads."""
        return replace(self, heads=[self.heads[part] for part in parts])

    def in_texts(self, count: int) -> PositionEffect:
        """The same in the first texts alone."""
        base = self.base
        places = None if base.places is None else base.places[:count]
        some = replace(base, ids=base.ids[:count], at=base.at[:count], source=base.source[:count], places=places)
        return replace(self, base=some)

    @property
    def depth(self) -> int:
        """The last layer of a head."""
        return max(layer for layer, _ in self.heads)

    @property
    def components(self) -> list[Component]:
        """What may carry the attention of the heads: what writes before the keys of the last one, and their bias."""
        components = writers(self.target, self.depth)
        if has_key_bias(self.target):
            components.append(KEY_BIAS)
        return components

    def trial(self, edits: Sequence[Parts], reverse: bool = False) -> Trial:
        """Edits that act at the position, whose effect is read there.

        Args:
            edits: The edits.
            reverse: Whether both positions are exchanged: edits act at the typical position, which is read.
        """
        trial = replace(self.base, edits=edits)
        if reverse:
            trial = replace(trial, at=trial.source, source=trial.at, places=None)
        if not self.heads:
            return trial
        behind = min(layer for layer, _ in self.heads)
        return replace(trial, upto=self.depth, attention=True, behind=behind)

    def by_text(self, edits: Sequence[Parts], reverse: bool = False) -> Float[Tensor, "state text part"]:
        """The norm, or the attention of each head, without an edit and then under each."""
        (read,) = side_by_side(self.target, [self.trial(edits, reverse)])
        if self.heads:
            return read.attention_from(self.heads)
        return read.norms[..., -1:]

    def values(self, edits: Sequence[Parts], reverse: bool = False) -> Float[Tensor, "state part"]:
        """The mean over texts."""
        return self.by_text(edits, reverse).mean(1)

    @cached_property
    def typical(self) -> Float[Tensor, " part"]:
        """The norm, or the attention of each head, at the typical position without an edit."""
        return self.values([], reverse=True)[0]

    def lost(self, edits: Sequence[Parts]) -> Float[Tensor, "edit part"]:
        """Share of its own value that each part loses under each edit."""
        values = self.values(edits)
        return 1 - values[1:] / values[0]

    def needed_by_heads(self, components: Sequence[Part]) -> Bool[Tensor, "component part"]:
        """Which components each head needs alone.

        A head may lose its attention because a component hid something else that now stands out. What is read also
        draws attention to the typical position if it is written there; what only hides something does not. The control
        is what is drawn there by components that the head does not need. If nothing draws more, this says nothing.
        """
        alone = needed(self.lost(one_by_one(components)))
        if not bool((alone.sum(0) > 1).any()):
            return alone
        values = self.values(one_by_one(components), reverse=True)
        gained = values[1:] - values[0]
        most = gained.masked_fill(~alone, 0).amax(0)
        by_chance = gained.masked_fill(alone, 0).amax(0)
        draws = (gained >= NEEDED * most) | (most <= by_chance)
        if KEY_BIAS in components:
            draws[components.index(KEY_BIAS)] = True
        return alone & draws

    def necessity(self, edits: Sequence[Parts]) -> Float[Tensor, "edit text"]:
        """The share of the effect, mean over texts, that is lost under each edit in each text."""
        values = self.by_text(edits)
        return (values[0] - values[1:]).mean(2) / (values[0] - self.typical).mean()

    def with_heads(self, whole: Parts) -> Parts:
        """The same components, with heads in place of attention layers, where some heads are enough."""
        chosen: list[Part] = []
        for member in whole:
            own: Parts = (member,)
            if isinstance(member, Component) and member.kind == "attention":
                own = self.needed_of(heads_of(self.target, member.layer or 0)) or own
            chosen += own
        return tuple(chosen)

    def needed_of(self, candidates: Sequence[Part]) -> Parts:
        """The candidates that are needed alone."""
        lost = self.necessity(one_by_one(candidates)).mean(1)
        return tuple(compress(candidates, needed(lost).tolist()))


def needed(lost: Float[Tensor, "component ..."]) -> Bool[Tensor, "component ..."]:
    """Which components are needed alone, by the share of an effect that is lost without each of them."""
    return lost >= (NEARLY * lost.amax(0)).clamp(min=NEEDED)
