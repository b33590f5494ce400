"""A picture of attention that grows on the terminal while a model generates."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from einops import repeat
from jaxtyping import Float
from rich.console import Console
from rich.live import Live
from rich.text import Text
from torch import Tensor

from sinkscope.kv.session import AttentionRows, Observe

_SHADES = " ·░▒▓█"
_DARKEST = 0.25  # share of attention that is the darkest shade


@contextmanager
def live_picture(title: str, positions: int, layers: list[int]) -> Iterator[Observe | None]:
    """Context manager with an observer that draws the mean attention of all heads of some layers on standard error.

    Args:
        title: What stands above the picture.
        positions: Total length of prompt and new tokens.
        layers: Layers to watch. With none, or where there is no terminal, nothing is drawn and the observer is None.
    """
    console = Console(stderr=True)
    if not layers or not console.is_terminal:
        yield None
        return
    columns = console.width - 1
    lines: dict[int, Tensor] = {}  # mean attention by step

    def see(rows: AttentionRows) -> None:
        group = rows.probs.shape[1] // rows.pos.shape[1]
        pos = repeat(rows.pos[0], "kv_head slot -> (kv_head group) slot", group=group)
        probs = rows.probs[0, :, -1] * (pos >= 0)
        line = lines.setdefault(rows.call.step, torch.zeros(columns))
        place = pos.clamp(min=0) * columns // positions
        shares = probs / (len(probs) * len(layers))
        line.index_add_(0, place.flatten().cpu(), shares.flatten().cpu())

    def picture() -> Text:
        steps = list(lines.values())[-(console.height - 2) :]
        drawn = [f"{title}: step {len(lines)}, positions 0 to {positions - 1}"[:columns]]
        drawn += [shaded(line) for line in steps]
        return Text("\n".join(drawn), no_wrap=True)

    with Live(console=console, transient=True, refresh_per_second=10, get_renderable=picture):
        yield Observe(see, layers, last=1)


def shaded(line: Float[Tensor, " column"]) -> str:
    """A line of characters, darker where there is more attention."""
    shades = (line / _DARKEST).clamp(0, 1).sqrt() * (len(_SHADES) - 1)
    return "".join(_SHADES[shade] for shade in shades.round().int().tolist())
