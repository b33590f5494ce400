"""The parts of a circuit: what a step needs, and the heads that read a sink, each with its sentence."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from sinkscope.measure.evidence import NEEDED, Evidence, percent_pair
from sinkscope.results.notation import word_list
from sinkscope.results.style import long_table
from sinkscope.results.tables import Table

NAMED, WORDS_OF_NAMES = 3, 10  # components that a sentence names at most, and the words that they may take
MARK, NEURONS, REPETITION = "mark", "neurons", "repetition"
SPIKE = "spike"


@dataclass(frozen=True)
class CircuitStep:
    """What one step of a circuit needs. The effect is the norm of the spike.

    Attributes:
        name: "mark": what marks the position for the spike; "neurons": the neurons that make the spike; "repetition":
            what marks the last of many repetitions.
        components: The components that were replaced, the chosen ones first; or the neurons.
        necessity: Share of the effect that is lost if the component writes at the position what it writes at a typical
            one, or if the neuron is zero.
        sufficiency: Share of the effect that a typical position gains from the component. NaN where that cannot be
            tested: neurons, and biases of keys.
        chosen: What is needed alone or, if nothing is, the smallest set found.
        together: What is lost without all of them; 0 if nothing was chosen.
        control: Largest loss without as many random heads, or neurons of the same layers. None: there are too few.
    """

    name: str
    components: tuple[str, ...]
    necessity: Float[np.ndarray, " component"]
    sufficiency: Float[np.ndarray, " component"]
    chosen: tuple[str, ...]
    together: float
    control: float | None

    def rows(self) -> Table:
        """A row for each component."""
        columns = {
            "necessity": self.necessity,
            "necessity_control": [self.control] * len(self.components),
            "sufficiency": self.sufficiency,
        }
        return long_table(columns, step=[self.name], source=self.components, target=[SPIKE])

    def in_words(self, most: int = NAMED) -> str:
        """What is lost without the chosen components, of which so many are named, beside random ones."""
        if self.together < NEEDED:
            return "nothing tried is needed"
        lost, chance = percent_pair(self.together, self.control)
        control = ""
        if self.control is not None:
            control = f" (random {'neurons' if self.name == NEURONS else 'heads'}: at most {chance})"
        names = named(self.chosen, most)
        if not Evidence(self.together, self.control).holds or (self.control or 0.0) >= NEEDED:
            return f"what is needed is undecided: {lost} is lost without {names}{control}"
        if len(self.chosen) == 1 and self.name != NEURONS:
            return f"{names} is needed: {lost} is lost without it{control}"
        return f"{lost} is lost without {names}{control}"


@dataclass(frozen=True)
class Readers:
    """Heads that give a position at least 0.3 of their attention and need the same, those with most attention first.

    Attributes:
        needs: What each of these heads needs: "spike", or neurons that make it if other heads need others, or
            components. Empty if nothing was found.
        heads: The heads.
        attention: Mean attention of each head to the position.
        attention_without: The same without all that they need; equal to `attention` if nothing was found.
        control: The lowest attention of all heads together without as many random neurons or heads. None if there are
            too few.
    """

    needs: tuple[str, ...]
    heads: tuple[str, ...]
    attention: Float[np.ndarray, " head"]
    attention_without: Float[np.ndarray, " head"]
    control: float | None

    @property
    def evidence(self) -> Evidence:
        """The attention that is lost without what the heads need."""
        intact = float(self.attention.mean())
        control = None if self.control is None else intact - self.control
        return Evidence(intact - float(self.attention_without.mean()), control, intact)

    @property
    def need_the_spike(self) -> bool:
        """Whether the heads need the spike, or neurons that make it."""
        return bool(self.needs) and (self.needs[0] == SPIKE or ".N" in self.needs[0])

    def rows(self, *, joined: bool = False) -> Table:
        """A row per head or, if joined, one with the means of all; none if nothing was found that they need."""
        if not self.needs:
            return []
        control = None if self.control is None else 1 - self.control / float(self.attention.mean())
        heads, before, after = self.heads, self.attention, self.attention_without
        if joined and len(heads) > 1:
            heads = (f"{len(heads)} heads, mean",)
            before, after = before.mean(keepdims=True), after.mean(keepdims=True)
        columns = {
            "necessity": 1 - after / before,
            "necessity_control": [control] * len(heads),
            "sufficiency": [None] * len(heads),
        }
        return long_table(columns, step=["readers"], source=[word_list(self.needs)], target=heads)

    def in_words(self, most: int = NAMED) -> str:
        """The attention with and without what the heads need."""
        if not self.needs or not self.evidence.holds:
            return "nothing that was replaced, alone or in pairs, takes it away"
        control = "" if self.control is None else f" (random control: {self.control:.2f})"
        before, after = self.attention.mean(), self.attention_without.mean()
        return f"without {named(self.needs, most)} their mean attention falls from {before:.2f} to {after:.2f}{control}"


def named(components: tuple[str, ...], most: int = NAMED) -> str:
    """Components in a sentence: heads and neurons by their names, others with an article."""
    names = []
    for name in components:
        names.append(name if name.startswith("L") else f"the {name}")
    while most > 1 and len(word_list(names, most).split()) > WORDS_OF_NAMES:
        most -= 1
    return word_list(names, most)
