"""What is known of the heads that mark the first token for a norm spike (Yona et al. 2025, section 4.3)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from sinkscope.results.cards import Card
from sinkscope.results.notation import count_of, percent_with_margin, word_list
from sinkscope.results.parts import Head, Neuron
from sinkscope.results.row import Mean, Row, row_beside
from sinkscope.sinks.spikes.marks import Without
from sinkscope.sinks.thresholds import HALF, RAISED

NAMED = 6  # heads that a sentence names


@dataclass(frozen=True, kw_only=True)
class MarkingHeads:
    """Which heads mark the first token for a spike.

    Attributes:
        spike: The spike of the first token, by its layers. None: no spike with known neurons.
        instead: What there is instead of a finding.
        neurons: The neurons that the spike needs.
        tokens: The tokens that have the spike when they stand first, each alone: they reach half of the first token's
            projection. BOS comes first, if there is one.
        unmarked: The tokens that do not.
        heads: The heads of all layers with softmax attention up to that of the first neuron.
        left: What is left of each token's projection with one head replaced.
        marking: The fewest heads found that take away nine tenths of what all heads take, as one set. None: without
            all heads, more than three quarters of the spike are left.
        every: All heads as one set. None: no token has the spike.
        count_margin: Half of the 95 % interval of the number of these heads, by a bootstrap over tokens.
        random: The least that is left without as many random heads. None: there are too few.
        alike: What is left without as many other heads of about equal attention to the first token of typical text.
            None: there are too few.
    """

    spike: str | None
    instead: str | None = None
    neurons: tuple[Neuron, ...] = ()
    tokens: tuple[str, ...] = ()
    unmarked: tuple[str, ...] = ()
    heads: tuple[Head, ...] = ()
    left: Float[np.ndarray, "token head"] | None = None
    marking: Without | None = None
    every: Without | None = None
    count_margin: float | None = None
    random: float | None = None
    alike: float | None = None

    @property
    def control(self) -> tuple[str, float] | None:
        """The other heads without which least is left, in words, and how much. None: there are too few."""
        controls = {"random heads": self.random, "others of equal attention": self.alike}
        known = {name: left for name, left in controls.items() if left is not None}
        return min(known.items(), key=lambda item: item[1]) if known else None

    def findings(self) -> list[Row]:
        """Return how many heads mark, and what is left of the spike without them, beside the nearest control."""
        if self.marking is None or self.control is None:
            return []
        count = Mean(float(len(self.marking.heads)), self.count_margin, kind="count")
        left, (control, control_left) = Mean(self.marking.left, self.marking.margin, kind="share"), self.control
        heads = Row(
            "findings", "heads that mark the first token", {"value": count}, word_list(self.marking.heads, NAMED)
        )
        return [heads, row_beside("left of the spike without these heads", left, control_left, control)]

    def sentence(self) -> str:
        """Say which heads mark, or that none does, with what is left without them."""
        if self.every is None:
            return self.instead or "No neurons are known that a norm spike at the first token needs."
        tokens = count_of(len(self.tokens), "token")
        if self.marking is None:
            left = percent_with_margin(self.every.left, self.every.margin)
            remains = f"{left} of the spike of {self.spike} remains at {tokens}"
            return f"No head marks the first token: without all {len(self.heads)}, {remains} (with them: 100%)."
        left, heads = percent_with_margin(self.marking.left, self.marking.margin), self.marking.heads
        names = word_list(heads)
        if len(heads) > NAMED:
            within = "" if self.count_margin is None else f" (± {self.count_margin:.0f})"
            names = f"{len(heads)} of {len(self.heads)} heads{within}"
        remains = f"{left} of the spike of {self.spike} remains at {tokens}"
        if self.control is None:
            return f"Without {names}, {remains}; too few others are left to compare with."
        control, control_left = self.control
        if control_left <= self.marking.left + (self.marking.margin or 0.0):
            return f"Without {names}, {remains}, but as little without others ({control}: {control_left:.0%})."
        mark = "marks" if len(heads) == 1 else "mark"
        return f"{names} {mark} the first token: without them, {remains} ({control}: {control_left:.0%})."

    def card(self) -> Card | None:
        """Return what is measured: the tokens, the set of heads, all heads, and heads that work against the spike."""
        if self.spike is None or self.every is None:
            return None
        tried = count_of(len(self.tokens) + len(self.unmarked), "token")
        rows = [("tokens", f"{len(self.tokens)} of {tried}, each alone in first place, have the spike")]
        if self.marking is not None and self.left is not None:
            without = f"without {word_list(self.marking.heads, NAMED)}"
            left = f"{percent_with_margin(self.marking.left, self.marking.margin)} left"
            beside = "" if self.control is None else f"; {self.control[0]}: {self.control[1]:.0%}"
            rows.append(("fewest heads", f"{without}, {left}{beside}"))
            own = self.heads[int(self.left[0].argmin())]
            if self.left[0].min() < HALF and own not in self.marking.heads:
                rows.append((f"head of {self.tokens[0]!r}", f"without {own}, {self.left[0].min():.0%} left"))
        every = percent_with_margin(self.every.left, self.every.margin)
        rows.append(("all heads", f"without all {len(self.heads)} up to layer {self.heads[-1].layer}, {every} left"))
        if self.random is not None and self.random >= RAISED and self.left is not None:
            mean = self.left.mean(0)
            alone = f"{self.heads[int(mean.argmax())]} alone {mean.max():.0%}"
            rows.append(("heads against it", f"without as many random others {self.random:.0%} left, without {alone}"))
        return Card(f"Heads that mark the first token: spike of {self.spike}", tuple(rows))
