"""The ways of using a model: one row each; and what is read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from .caches import (
    by_hand,
    chunks,
    copied,
    cropped,
    evicted,
    forward,
    gradients,
    reordered,
    repeated,
    second_turn,
    static,
    steps,
)
from .calls import Use
from .edits import EDITS, Draw
from .families import FAMILIES, PAD, VOCAB
from .masks import put_image, put_padding
from .texts import conversation, generate, looping, ss_generate, steered, turns


@dataclass(frozen=True)
class Way:
    """What is done with the model and its cache.

    Attributes:
        run: Does it.
        alone: The plainest way with the same answer for a row by itself.
        fits: Draws to which it belongs.
        tokens: Whether new tokens are written, after the whole of the ids.
        nothing: Whether right is 0, because differences are returned.
    """

    run: Callable[[Use], Tensor]
    alone: str | None = None
    fits: Callable[[Draw], bool] = field(default=lambda draw: True)
    tokens: bool = False
    nothing: bool = False


def _rows_move(draw: Draw) -> bool:
    return draw["rows"] > 1 and _long(draw)


def _long(draw: Draw) -> bool:
    return draw["length"] >= 20


def _crops(draw: Draw) -> bool:
    """A window has dropped what a crop needs, and so has a policy."""
    return _long(draw) and FAMILIES[draw["family"]].window is None and not EDITS[draw["edit"]].budget


def _bare(draw: Draw) -> bool:
    """Whether the model stands by itself, in full precision."""
    return draw["wrapper"] == "bare" and draw["dtype"] == "float32"


def _one_row(draw: Draw) -> bool:
    return draw["rows"] == 1 and _bare(draw) and _long(draw) and draw["hooks"] == "none"


def _replays(draw: Draw) -> bool:
    """Whether a mask of one's own and positions are taken, and no window hides more."""
    family = FAMILIES[draw["family"]]
    takes = family.positions and family.dispatches and family.window is None and draw["attention"] in ("sdpa", "eager")
    return takes and EDITS[draw["edit"]].acts and draw["wrapper"] == "bare" and draw["hooks"] == "none"


def _walked(draw: Draw) -> bool:
    """Whether a plain call can be made first, which tells what layers are given."""
    return _bare(draw) and draw["call"] == "keyword" and draw["other"] == "nothing"


def _cached(draw: Draw) -> bool:
    generates = draw["padding"] != "right" and draw["family"] != "mpt"  # whose settings say use_cache=False
    return _bare(draw) and _long(draw) and generates


WAYS = {
    "none": Way(forward, "none", lambda draw: not EDITS[draw["edit"]].budget),
    "steps": Way(steps, "steps"),
    "second turn": Way(second_turn, "second turn", _long),
    "chunks": Way(chunks, None, _long),
    "evicted": Way(evicted, None, _long),
    "by hand": Way(by_hand, None, _walked),
    "copied": Way(copied, "steps", _long),
    "copied from": Way(partial(copied, goes_on=0), "steps", _long),
    "reordered": Way(reordered, "steps", _rows_move),
    "repeated": Way(repeated, "steps", _long),
    "cropped": Way(cropped, "steps", _crops),
    "static": Way(static, None, _long),
    # What is read again has no queries of the prompt: Progressive lets those vote that it saw.
    "turns": Way(turns, "turns", _cached, tokens=True),
    "gradients": Way(gradients, None, lambda draw: draw["dtype"] == "float32" and draw["wrapper"] != "nnsight"),
    "generate": Way(generate, "generate", tokens=True),
    "looping": Way(looping, None, _replays, tokens=True, nothing=True),
    "steered": Way(steered, "steered", lambda draw: draw["edit"] == "guard steers" and _bare(draw), tokens=True),
    "ss.generate": Way(
        ss_generate, "ss.generate", lambda draw: _bare(draw) and draw["padding"] != "right", tokens=True
    ),
    "conversation": Way(conversation, None, _one_row, tokens=True),
}


def _drawn(rows: int, length: int, generator: torch.Generator) -> Tensor:
    return torch.randint(3, VOCAB, (rows, length), generator=generator)


def _with_pads(rows: int, length: int, generator: torch.Generator) -> Tensor:
    """Some real tokens are what padding is, too."""
    ids = _drawn(rows, length, generator)
    ids[torch.rand(ids.shape, generator=generator) < 0.3] = PAD
    return ids


def _repeating(rows: int, length: int, generator: torch.Generator) -> Tensor:
    """A piece of three tokens again and again."""
    return _drawn(rows, 3, generator).repeat(1, length // 3 + 1)[:, :length]


TEXTS = {"random": _drawn, "has pads": _with_pads, "repeats": _repeating}
"""The ids that are read."""


def inputs(draw: Draw, seed: int) -> tuple[Tensor, Tensor]:
    """Ids `[row pos]` and their mask."""
    generator = torch.Generator().manual_seed(seed)
    length, rows = draw["length"], draw["rows"]
    ids = TEXTS[draw["text"]](rows, length, generator)
    mask = torch.ones_like(ids)
    if draw["padding"] != "none" and length > 4:
        for row in range(1, rows):
            count = int(torch.randint(1, max(2, length // 2), (1,), generator=generator))
            where = slice(0, count) if draw["padding"] == "left" else slice(length - count, length)
            ids[row, where], mask[row, where] = PAD, 0
    put_padding(draw, ids, mask)
    put_image(draw, ids)
    return ids.to(draw["device"]), mask.to(draw["device"])
