"""A terminal for tests: what stands on its screen after everything that was written to it."""

from __future__ import annotations

import re

_PART = re.compile(r"\x1b\[\??([\d;]*)([A-Za-z])|\x1b.|[^\x1b]", re.DOTALL)


class Screen:
    """The lines of a terminal that never scrolls; it knows what rich and our commands write.

    Attributes:
        lines: The characters of each line.
    """

    def __init__(self, width: int) -> None:
        self.width = width
        self.lines: list[list[str]] = [[]]
        self._row = self._column = 0

    def write(self, text: str) -> None:
        """Take text as a terminal does: with line feeds, carriage returns, and the cursor's moves."""
        for part in _PART.finditer(text):
            character = part[0]
            if part[2]:
                self._steer(part[1], part[2])
            elif character == "\r":
                self._column = 0
            elif character == "\n":
                self._move(self._row + 1)
            elif len(character) == 1:
                self._put(character)

    def text(self) -> str:
        """What is seen, without the blanks at the end of lines and of the screen."""
        return "\n".join("".join(line).rstrip() for line in self.lines).rstrip()

    def _move(self, row: int) -> None:
        self._row = max(0, row)
        while len(self.lines) <= self._row:
            self.lines.append([])

    def _put(self, character: str) -> None:
        if self._column >= self.width:
            self._column = 0
            self._move(self._row + 1)
        line = self.lines[self._row]
        while len(line) <= self._column:
            line.append(" ")
        line[self._column] = character
        self._column += 1

    def _steer(self, numbers: str, what: str) -> None:
        if what == "A":
            self._move(self._row - int(numbers or 1))
        elif what == "K" and numbers == "2":
            self.lines[self._row].clear()
        elif what == "K":
            del self.lines[self._row][self._column :]
        else:
            assert what in "mhl", f"this terminal does not know {numbers}{what}"
