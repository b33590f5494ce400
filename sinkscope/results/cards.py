"""Cards: a title, and rows of a label and its numbers; the same on a terminal, a page and in a notebook."""

from __future__ import annotations

from dataclasses import dataclass
from textwrap import wrap

LONGEST = 200  # characters of a line where a reader gives no width


@dataclass(frozen=True)
class Card:
    """What a result says of one thing.

    Attributes:
        title: What it is.
        rows: Labels, each with its numbers. A row without numbers is left out by whoever makes the card.
    """

    title: str
    rows: tuple[tuple[str, str], ...]

    def text(self, width: int | None = None) -> str:
        """Return the card as lines; what does not fit goes on under its own numbers.

        Args:
            width: Characters of a line. None: 200.
        """
        width = width or LONGEST
        margin = 4 + max((len(label) for label, _ in self.rows), default=0)
        lines = wrap(self.title, width)
        for label, numbers in self.rows:
            start = f"  {label}".ljust(margin)
            room = max(20, width - margin)
            lines += wrap(
                numbers, room + margin, initial_indent=start, subsequent_indent=" " * margin, break_on_hyphens=False
            )
        return "\n".join(lines)
