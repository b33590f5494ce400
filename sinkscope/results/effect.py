"""Effects: how much an edit changes, beside what its controls change, and the sentence that says so.

An effect is a share: 0 is what the intact model shows, and 1 all that an edit can take away or bring.
"""

from __future__ import annotations

from dataclasses import dataclass

from sinkscope.results.notation import percent

STANDS = 0.5
"""Share by which an effect must exceed every control, beyond its margin, to stand."""


@dataclass(frozen=True)
class Effect:
    """What an edit takes away or brings, mean over samples.

    Attributes:
        value: The share.
        margin: Two standard errors over independent samples; 0 if it is about these alone. None: too few samples.
        controls: The same share under other edits, by what they are in a sentence; of several draws the largest.
    """

    value: float
    margin: float | None
    controls: dict[str, float]

    @property
    def stands(self) -> bool:
        """Whether it exceeds the intact model and every control by more than its margin and a half."""
        if self.margin is None or not self.controls:
            return False
        return self.value - self.margin - max(0.0, *self.controls.values()) >= STANDS

    @property
    def control(self) -> tuple[str, float]:
        """The name and share of the control that is nearest."""
        return min(self.controls.items(), key=lambda named: abs(named[1] - self.value))

    def sentence(self, template: str, **words: str) -> str:
        """Return a sentence with {value}, {control} and other words in their places; a margin is before the control.

        Shares have as many digits as it takes to tell them apart, two at most.
        """
        name, control = self.control
        value, control_value = percent(self.value), percent(control)
        for digits in (1, 2):
            if value == control_value and abs(self.value - control) >= 1e-3:
                value, control_value = percent(self.value, digits), percent(control, digits)
        margin = f"± {percent(self.margin)}; " if self.margin else ""
        return template.format(value=value, control=f"{margin}{name}: {control_value}", **words)
