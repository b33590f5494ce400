"""A barcode that grows while the model writes: in a terminal, or in a notebook's cell; nowhere else anything."""

from __future__ import annotations

import shutil
import sys
import time
from typing import Any

import torch
from torch import Tensor

_SHADES = " ·░▒▓█"
_EVERY = 0.1  # seconds between two pictures
_FULL = 0.25  # share of attention that is the darkest shade


class Live:
    """Shows rows of attention as they come.

    `with Live("title") as live: live(step, row)`; rows are `[column]` and sum to one. On a terminal the picture is on
    standard error and gone at the end; in a notebook it stays in the cell.
    """

    def __init__(self, title: str, enabled: bool = True) -> None:
        self.title = title
        self.place = _place() if enabled else None
        self.rows: list[Tensor] = []
        self._shown = 0.0
        self._screen: Any = None

    def __enter__(self) -> Live:
        if self.place == "terminal":
            from rich.console import Console
            from rich.live import Live as Screen

            self._screen = Screen(console=Console(stderr=True), transient=True, auto_refresh=False)
            self._screen.start()
        elif self.place == "notebook":
            from IPython.display import display

            self._screen = display({"text/plain": self.title}, raw=True, display_id=True)
        return self

    def __call__(self, step: int, row: Tensor) -> None:
        """One more row."""
        if self.place is None:
            return
        self.rows.append(row)
        if time.perf_counter() - self._shown >= _EVERY:
            self.draw()

    def draw(self) -> None:
        """The picture as it is now."""
        self._shown = time.perf_counter()
        if self.place == "terminal":
            size = shutil.get_terminal_size()
            self._screen.update(_text(self.picture(size.columns - 1, size.lines - 2)), refresh=True)
        elif self.rows:
            body = "\n".join(self.picture(120, 40))
            self._screen.update({"text/plain": body, "text/html": _cell(body)}, raw=True)

    def picture(self, width: int, height: int) -> list[str]:
        """Lines of at most `width` characters: a title, then the last steps, or groups of steps where they are many."""
        lines = max(1, height - 1)
        rows = torch.stack(self.rows).float() if self.rows else torch.zeros(0, 1)
        group = -(-len(rows) // lines) if len(rows) else 1
        shown = [f"{self.title}: step {len(self.rows)}, position 0 to {rows.shape[1] - 1}, down: steps"[:width]]
        for start in range(0, len(rows), group):
            mean = rows[start : start + group].mean(0)
            columns = torch.stack([part.sum() for part in mean.split(-(-len(mean) // width))])
            shade = ((columns / _FULL).clamp(0, 1).sqrt() * (len(_SHADES) - 1)).round().long()
            shown.append("".join(_SHADES[int(s)] for s in shade))
        return shown

    def __exit__(self, *_: object) -> None:
        if self.place == "terminal":
            self._screen.stop()
        elif self.place == "notebook" and self.rows:
            self.draw()


def _text(lines: list[str]) -> Any:
    from rich.text import Text

    return Text("\n".join(lines), no_wrap=True)


def _cell(body: str) -> str:
    import html

    return f'<pre style="line-height:1; font-size:9px">{html.escape(body)}</pre>'


def _place() -> str | None:
    """Where a picture can be shown."""
    shell = sys.modules.get("IPython")
    if shell is not None and getattr(shell.get_ipython(), "kernel", None) is not None:
        return "notebook"
    return "terminal" if sys.stderr.isatty() else None
