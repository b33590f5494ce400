"""What `circuit` returns, and the words in which it reports it. The steps are measured in `circuit`.

What is said of a step follows the rule of `sinkscope.measure.evidence`.
"""

from __future__ import annotations

import html
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import plotly.graph_objects as go
from jaxtyping import Float
from plotly.subplots import make_subplots

from sinkscope.files.notation import agreeing, brief, counted, listed
from sinkscope.files.tables import Table
from sinkscope.measure import Number, Result
from sinkscope.measure.evidence import NEEDED, Evidence, beside
from sinkscope.measure.style import BLUE, GREY, ORANGE, finished, unfolded
from sinkscope.sinks.first_token.result import RATE_EPS, SHORT, few_heads

FIGURE_COMPONENTS = 12
NAMED, WORDS_OF_NAMES = 3, 6  # components that a sentence names at most, and the words that they may take
MARK, NEURONS, REPETITION, KEYS = "mark", "neurons", "repetition", "keys"


@dataclass(frozen=True)
class CircuitStep:
    """What one step of a circuit needs.

    Attributes:
        name: "mark": what marks the position for the spike; "neurons": the neurons that make the spike; "repetition":
            what marks the last of many repetitions; "keys": what heads read that do not need the spike.
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
        return unfolded(columns, step=[self.name], source=self.components, target=[target])

    def in_words(self) -> str:
        """What is lost without the chosen components, beside random ones."""
        if not self.carried:
            return "nothing tried is needed"
        lost, chance = beside(self.together or 0.0, self.together_control)
        control = ""
        if self.together_control is not None:
            control = f" (random {'neurons' if self.name == NEURONS else 'heads'}: at most {chance})"
        count, names, alone = len(self.chosen), _named(self.chosen), self.needed_alone
        if self.name == MARK and count == 1 and self.alone[0] < NEEDED:  # which is a loss of attention
            return f"{lost} is lost without {names}{control}, but the attention stays"
        if len(alone) == count:
            are, them = agreeing(count, "is", "are each"), agreeing(count, "it", "them")
            return f"{names} {are} needed: {lost} is lost without {them}{control}"
        if not alone:
            return f"none is needed alone; {lost} is lost without {names}{control}"
        every = "both" if count == 2 else f"all {count}"
        are = agreeing(len(alone), "is", "are")
        return f"only {_named(alone)} {are} needed alone; {lost} is lost without {every}{control}"


@dataclass(frozen=True)
class Readers:
    """The heads that give a position at least 0.3 of their attention, those with most attention first.

    If there are any behind the layer of the spike, only these count.

    Attributes:
        carried_by: What their keys need: "spike", or components. Empty if nothing was found.
        heads: The heads.
        length: Length of the texts in which attention was read; a window cuts them.
        attention: Mean attention of each head to the position.
        attention_without: The same without what carries it; equal to `attention` if nothing was found.
        control: The lowest attention of all heads together without as many random neurons or heads. None if there are
            too few.
    """

    carried_by: tuple[str, ...]
    heads: tuple[str, ...]
    length: int
    attention: Float[np.ndarray, " head"]
    attention_without: Float[np.ndarray, " head"]
    control: float | None

    @property
    def evidence(self) -> Evidence:
        """The attention that is lost without what carries it."""
        intact = float(self.attention.mean())
        control = None if self.control is None else intact - self.control
        return Evidence(intact - float(self.attention_without.mean()), control, intact)

    def rows(self) -> Table:
        """A row per head."""
        if not self.carried_by:
            return []
        source = "spike" if self.carried_by == ("spike",) else "marks"
        control = None if self.control is None else 1 - self.control / float(self.attention.mean())
        columns = {
            "necessity": 1 - self.attention_without / self.attention,
            "necessity_control": [control] * len(self.heads),
            "sufficiency": [None] * len(self.heads),
        }
        return unfolded(columns, step=["readers"], source=[source], target=self.heads)

    def in_words(self) -> str:
        """The attention with and without what carries it."""
        if not self.evidence.holds:
            return "nothing that was replaced takes it away"
        carried = _named(self.carried_by)
        control = "" if self.control is None else f" ({self.control:.2f} in the random control)"
        before, after = self.attention.mean(), self.attention_without.mean()
        return f"without {carried} the mean of that attention falls from {before:.2f} to {after:.2f}{control}"


@dataclass(frozen=True, kw_only=True)
class Circuit(Result):
    """How the sink comes about, step by step: that of the first token or, if it is none, the next one behind it.

    Attributes:
        first_token: The token that stands first in the texts.
        lengths: Lengths of the texts in which attention sinks were looked for.
        place: The position in words: "the first token" and this token, or a later token or position. None if there is
            neither spike nor sink.
        position: The position.
        sink_layer: The last layer whose neurons make the spike. None if no MLP does.
        steps: What the spike and the attention need.
        readers: The heads that attend to the position. None if there are none.
        stands_out: Whether the norm of a later position stands out.
        repeated: The token that is repeated.
        repeats: How often it is repeated.
        untested: What may carry a sink and cannot be replaced in this model.
    """

    percent = ("necessity", "necessity_control", "sufficiency")
    columns = ("step", "source", "target", "necessity", "necessity_control")
    glossary: ClassVar = {
        "step": "what the edge belongs to",
        "target": "the input, or the head, that reads the source",
        "necessity": "share of the effect that is lost without the source",
        "necessity_control": "largest loss with random heads or neurons instead",
        "sufficiency": "share of the effect that a typical position gains from the source",
    }

    first_token: str
    lengths: tuple[int, ...] = (SHORT,)
    place: str | None = None
    position: int = 0
    sink_layer: int | None = None
    steps: tuple[CircuitStep, ...] = ()
    readers: Readers | None = None
    stands_out: bool = False
    repeated: str | None = None
    repeats: int | None = None
    untested: tuple[str, ...] = ()

    def step(self, name: str) -> CircuitStep | None:
        """A step by its name; None if the circuit does not have it."""
        for step in self.steps:
            if step.name == name:
                return step
        return None

    def rows(self) -> Table:
        """The edges, from the mark to the heads."""
        rows = []
        for step in self.steps:
            rows += step.rows()
        if self.readers is not None:
            rows += self.readers.rows()
        return rows

    def conclusion(self) -> str:
        """What marks the sink or, without a spike, what its readers need, with the control."""
        if self.place is None:
            return f"No circuit: no norm stands out, and {few_heads(self.lengths)}."
        places = [self.place]
        if self.position == 0:
            places.append("the first token")
        mark, keys = self.step(MARK), self.step(KEYS)
        if mark is not None:
            return brief(f"For the spike of {place}, {mark.in_words()}." for place in places)
        if keys is not None:
            spike = ", whose spike has no known neurons" if self.stands_out else " without a spike"
            return brief(f"Heads attend to {place}{spike}; {keys.in_words()}." for place in places)
        return f"No neurons were found that make a spike of {self.place}, and no head attends to it."

    def numbers(self) -> list[Number]:
        """The spike without its marks, and the attention without what carries it."""
        numbers = []
        mark = self.step(MARK)
        if mark is not None:
            numbers.append(Number("spike lost without its marks", mark.together, mark.together_control))
        if self.readers is not None:
            without = float(self.readers.attention_without.mean())
            numbers.append(Number("attention without what carries it", without, self.readers.control))
        return numbers

    def details(self) -> list[str]:
        """The neurons, repetition, the readers, and what was not tested."""
        lines = []
        neurons, repetition, readers = self.step(NEURONS), self.step(REPETITION), self.readers
        if neurons is not None:
            lines.append(f"Of the neurons that write the spike, {neurons.in_words()}.")
        if repetition is not None:
            times = counted(self.repeats or 0, "repetition")
            lines.append(f"After {times} of {self.repeated!r}, {repetition.in_words()}.")
        if readers is not None:
            heads = f"{counted(len(readers.heads), 'head')} {agreeing(len(readers.heads), 'gives', 'give')}"
            lines.append(
                f"In texts of {readers.length} tokens, {heads} {self.place} more than {RATE_EPS} of their attention; "
                f"{readers.in_words()}."
            )
        if self.untested:
            lines.append(f"Not tested: {listed(self.untested)}.")
        return lines


def _named(components: tuple[str, ...], most: int = NAMED) -> str:
    """Components in a sentence: heads and neurons by their names, others with an article."""
    names = []
    for name in components:
        names.append(name if name.startswith("L") else f"the {name}")
    while most > 1 and len(listed(names, most).split()) > WORDS_OF_NAMES:
        most -= 1
    return listed(names, most)


def draw(result: Circuit) -> go.Figure:
    """Necessity, control and sufficiency of the edges, step by step."""
    panels = {}
    for row in result.rows():
        panels.setdefault(row["step"], []).append(row)
    fig = make_subplots(cols=max(1, len(panels)), subplot_titles=list(panels) or ["no circuit"])
    for col, rows in enumerate(panels.values(), start=1):
        shown = rows[:FIGURE_COMPONENTS]
        names = [html.escape(row["target"] if row["step"] == "readers" else row["source"]) for row in shown]
        for field, color in (("necessity", ORANGE), ("necessity_control", GREY), ("sufficiency", BLUE)):
            values = [row[field] for row in shown]
            name = field.replace("_", " ")
            fig.add_bar(x=names, y=values, name=name, marker_color=color, showlegend=col == 1, row=1, col=col)
    fig.update_yaxes(tickformat=".0%")
    fig.update_yaxes(title_text="share of the effect", col=1)
    return finished(fig, result, width=max(700, 350 * len(panels)), height=460)
