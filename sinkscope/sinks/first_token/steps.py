"""The parts of a circuit: what a step needs, and the heads that read a sink, each with its sentence."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from sinkscope.display.notation import word_form, word_list
from sinkscope.display.style import long_table
from sinkscope.display.tables import Table
from sinkscope.measure.evidence import NEEDED, Evidence, percent_pair

NAMED, WORDS_OF_NAMES = 3, 6  # components that a sentence names at most, and the words that they may take
MARK, NEURONS, REPETITION, KEYS = "mark", "neurons", "repetition", "keys"
SPIKE = "spike"


@dataclass(frozen=True)
class CircuitStep:
    """What one step of a circuit needs.

    Attributes:
        name: "mark": what marks the position for the spike; "neurons": the neurons that make the spike; "repetition":
            what marks the last of many repetitions; "keys": what a group of heads needs that does not need the
            spike.
        components: The components that were replaced, the chosen ones first; or the neurons.
        necessity: Share of the effect that is lost if the component writes at the position what it writes at a typical
            one, or if the neuron is zero.
        sufficiency: Share of the effect that a typical position gains from the component. NaN where that cannot be
            tested: neurons, and biases of keys.
        control: Largest loss of 20 single random heads; for neurons, `together_control`. None: there are too few.
        chosen: What is needed alone or, if nothing is, the smallest set found.
        alone: What is lost without each of the chosen. If the attention needs the spike, this is a loss of attention,
            because heads may read a spike of half the size as well.
        together: What is lost without all of them. None if nothing was chosen.
        together_control: Largest loss without as many random heads, or neurons of the same layers.
    """

    name: str
    components: tuple[str, ...]
    necessity: Float[np.ndarray, " component"]
    sufficiency: Float[np.ndarray, " component"]
    control: float | None
    chosen: tuple[str, ...]
    alone: Float[np.ndarray, " chosen"]
    together: float | None
    together_control: float | None

    @property
    def carried(self) -> bool:
        """Whether the chosen components are needed together."""
        return Evidence(self.together, self.together_control).holds

    @property
    def undecided(self) -> bool:
        """Whether random heads or neurons take away half of the effect, too, so that nothing can be said of these."""
        return self.together_control is not None and self.together_control >= NEEDED

    @property
    def needed_alone(self) -> tuple[str, ...]:
        """Those of the chosen that are needed alone, if all are needed together."""
        pairs = zip(self.chosen, self.alone.tolist(), strict=True)
        return tuple(name for name, lost in pairs if self.carried and Evidence(lost, self.control).holds)

    def rows(self) -> Table:
        """A row for each component."""
        columns = {
            "necessity": self.necessity,
            "necessity_control": [self.control] * len(self.components),
            "sufficiency": self.sufficiency,
        }
        target = "keys" if self.name == KEYS else "spike"
        return long_table(columns, step=[self.name], source=self.components, target=[target])

    def in_words(self, most: int = NAMED) -> str:
        """What is lost without the chosen components, of which so many are named, beside random ones."""
        if not self.carried and np.isnan(self.necessity).all():
            return "nothing tried is needed"
        if not self.carried:
            largest = int(np.nanargmax(self.necessity))
            lost, control = self._beside_random(float(self.necessity[largest]), self.control)
            return (
                f"nothing tried is needed; most, {lost}, is lost without {named((self.components[largest],))}{control}"
            )
        lost, control = self._beside_random(self.together or 0.0, self.together_control)
        if self.undecided:
            return f"what is needed is undecided: {lost} is lost without {named(self.chosen, most)}{control}"
        count, names, alone = len(self.chosen), named(self.chosen, most), self.needed_alone
        if self.name == MARK and count == 1 and self.alone[0] < NEEDED:  # which is a loss of attention
            return f"{lost} is lost without {names}{control}, but the attention stays"
        if len(alone) == count:
            are, them = word_form(count, "is", "are each"), word_form(count, "it", "them")
            return f"{names} {are} needed: {lost} is lost without {them}{control}"
        if not alone:
            return f"none is needed alone; {lost} is lost without {names}{control}"
        every = "both" if count == 2 else f"all {count}"
        are = word_form(len(alone), "is", "are")
        some = f"only {named(alone, most)} {are}"
        if most == 1 and len(alone) > 1:
            some = f"{len(alone)} of {count} are"
        return f"{some} needed alone; {lost} is lost without {every}{control}"

    def _beside_random(self, lost: float, control: float | None) -> tuple[str, str]:
        """A loss, and its control in brackets."""
        text, chance = percent_pair(lost, control)
        if control is None:
            return text, ""
        return text, f" (random {'neurons' if self.name == NEURONS else 'heads'}: at most {chance})"


@dataclass(frozen=True)
class Readers:
    """Heads that give a position at least 0.3 of their attention and need the same, those with most attention first.

    Attributes:
        needs: What each of these heads needs: "spike", or neurons that make it if other heads need others, or
            components. Empty if nothing was found.
        heads: The heads.
        length: Length of the texts in which attention was read; a window cuts them.
        attention: Mean attention of each head to the position.
        attention_without: The same without all that they need; equal to `attention` if nothing was found.
        control: The lowest attention of all heads together without as many random neurons or heads. None if there are
            too few.
        keys: The components that were replaced. None if the heads need the spike.
    """

    needs: tuple[str, ...]
    heads: tuple[str, ...]
    length: int
    attention: Float[np.ndarray, " head"]
    attention_without: Float[np.ndarray, " head"]
    control: float | None
    keys: CircuitStep | None = None

    @property
    def evidence(self) -> Evidence:
        """The attention that is lost without what the heads need."""
        intact = float(self.attention.mean())
        control = None if self.control is None else intact - self.control
        return Evidence(intact - float(self.attention_without.mean()), control, intact)

    @property
    def need_the_spike(self) -> bool:
        """Whether the heads need the spike, or neurons that make it."""
        return bool(self.needs) and self.keys is None and self.evidence.holds

    def rows(self, *, joined: bool = False) -> Table:
        """A row per head, behind those of the components; if joined, one row with the means of all heads."""
        rows = [] if self.keys is None else self.keys.rows()
        if not self.needs:
            return rows
        source = "marks" if self.keys is not None else word_list(self.needs)
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
        return rows + long_table(columns, step=["readers"], source=[source], target=heads)

    def in_words(self) -> str:
        """The attention with and without what the heads need."""
        if not self.needs or not self.evidence.holds:
            return "nothing that was replaced takes it away"
        control = "" if self.control is None else f" ({self.control:.2f} in the random control)"
        before, after = self.attention.mean(), self.attention_without.mean()
        return f"without {named(self.needs)} the mean of that attention falls from {before:.2f} to {after:.2f}{control}"


def named(components: tuple[str, ...], most: int = NAMED) -> str:
    """Components in a sentence: heads and neurons by their names, others with an article."""
    names = []
    for name in components:
        names.append(name if name.startswith("L") else f"the {name}")
    while most > 1 and len(word_list(names, most).split()) > WORDS_OF_NAMES:
        most -= 1
    return word_list(names, most)
