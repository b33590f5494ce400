"""When something may be called needed, sufficient, or a cause: the one rule that every sentence of a result follows.

A component is called needed only if at least half of an effect is lost without it, and more than without random
components; it is called sufficient only if at least half of the effect comes with it, and more than with random ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isnan

NEEDED = 0.5
"""Share of an effect that a component must take away to be needed, or bring to be sufficient."""


@dataclass(frozen=True)
class Evidence:
    """What removing a component takes away from an effect, or what the component alone brings of it.

    Attributes:
        change: The change of the effect. NaN or None: it was not measured.
        control: The largest change that random components make. None: there are too few others to draw from.
        total: The whole effect.
    """

    change: float | None
    control: float | None = None
    total: float = 1.0

    @property
    def holds(self) -> bool:
        """Whether the component is needed (or sufficient): at least half of the effect changes, and more than in the
        control.
        """
        if self.change is None or isnan(self.change) or not self.total > 0:
            return False
        return self.change >= NEEDED * self.total and (self.control is None or self.change > self.control)


def percent_pair(share: float, control: float | None) -> tuple[str, str]:
    """A share and its control in per cent, with as many digits as it takes to tell them apart (at most three).

    Args:
        share: The share, 1 for all of it.
        control: The control; below 0 it counts as 0. None: there is none, and its string is "-".
    """
    if control is None:
        return f"{share:.0%}".replace("-0%", "0%"), "-"
    texts, control = ("", ""), max(0.0, control)
    for digits in range(4):
        texts = f"{share:.{digits}%}".replace("-0%", "0%"), f"{control:.{digits}%}".replace("-0%", "0%")
        if share == control or texts[0] != texts[1]:
            break
    return texts
