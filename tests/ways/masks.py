"""Who sees whom, and at which positions tokens stand, as a call says it: one row each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .edits import EDITS, ROWS_SEEN, Draw
from .families import FAMILIES, IMAGE, IMAGE_TOKENS, PAD

SECOND = 4
"""Tokens that are read after the prompt."""


def counted(real: Tensor) -> Tensor:
    """The place of each token among those of its row, padding left out."""
    return (real.long().cumsum(1) - 1).clamp(min=0)


@dataclass(frozen=True)
class Position:
    """Positions that a call says.

    Attributes:
        of: The positions of columns `[row pos]` from which columns are real; None: the call says none.
        fits: Draws to which they belong.
    """

    of: Callable[[Tensor], Tensor] | None = None
    fits: Callable[[Draw], bool] = lambda draw: True


def _told(draw: Draw) -> bool:
    """Whether a call can say positions, and `ss.trace` is none."""
    return FAMILIES[draw["family"]].positions and EDITS[draw["edit"]].site in (None, ROWS_SEEN)


def _told_in_calls(draw: Draw) -> bool:
    """Whether positions of one's own can be said: `generate` makes them by itself in other ways."""
    takes = draw["cache"] not in ("looping", "steered", "ss.generate", "turns")
    return _told(draw) and takes and "conversation" not in draw["cache"] and draw["options"] == "greedy"


POSITIONS = {
    "counted": Position(),
    "given": Position(counted, lambda draw: _told(draw) and draw["cache"] != "generate"),
    "shifted": Position(lambda real: counted(real) + 5, _told_in_calls),
}


@dataclass(frozen=True)
class Mask:
    """What is special in the text under a mask of tokens: draws to which it belongs."""

    fits: Callable[[Draw], bool] = lambda draw: True


def _long(draw: Draw) -> bool:
    return draw["length"] >= 20 and draw["call"] != "no mask"


def _has_mask(draw: Draw) -> bool:
    """Whether the attention is given a mask by transformers, or the one of the call.

    nnsight reads ids that come without names as a text, and makes a mask of its own.
    """
    passes_mask = draw["wrapper"] != "nnsight" or draw["call"] != "positional"
    return passes_mask and draw["attention"] in ("sdpa", "eager", "own")


def _has_hole(draw: Draw) -> bool:
    """Whether padding may stand among the tokens of a row, which is what it is alone.

    MPT and windows count the columns between tokens, whatever they are.
    """
    family = FAMILIES[draw["family"]]
    counts = (draw["family"] == "mpt" or family.window is not None) and EDITS[draw["edit"]].alone
    ways = draw["cache"] not in ("ss.generate", "conversation")
    return _long(draw) and not counts and ways and draw["padding"] != "right" and _has_mask(draw)


def _has_later_turn(draw: Draw) -> bool:
    return _has_hole(draw) and draw["cache"] in ("turns", "second turn")


_SAME_CALLS = ("greedy", "min", "penalty")


def _has_image(draw: Draw) -> bool:
    calls = draw["call"] in ("keyword", "tuple", "everything", "no mask")
    ways = ("none", "steps", "second turn", "gradients", "generate", "copied", "copied from", "repeated", "cropped")
    attends = _has_mask(draw) and draw["options"] in _SAME_CALLS
    whole = draw["cache"] in ways and draw["length"] >= 20 and EDITS[draw["edit"]].site in (None, ROWS_SEEN)
    return draw["family"] in IMAGE and calls and attends and whole and draw["wrapper"] not in ("nnsight", "offloaded")


MASKS = {
    "usual": Mask(),
    "hole": Mask(_has_hole),
    "later turn": Mask(_has_later_turn),
    "image": Mask(_has_image),
}


@dataclass
class Layout:
    """What calls say beside the ids.

    Attributes:
        places: Positions that are said `[row pos]`; None: none are.
        pixels: Images `[row channel height width]`; None: there are none.
        kinds: 1 at tokens of an image `[row pos]`; None: the model does not ask.
    """

    places: Tensor | None
    pixels: Tensor | None = None
    kinds: Tensor | None = None

    def some(self, row: int, chosen: Tensor, places: Tensor | None) -> Layout:
        """What is said of some tokens of a row, by themselves, at these places."""
        one = slice(row, row + 1)
        pixels, kinds = self.pixels, self.kinds
        if pixels is not None and kinds is not None:
            pixels, kinds = pixels[one], kinds[one, chosen]
        return Layout(places, pixels, kinds)

    def told(self, start: int, stop: int, rows: Tensor | None) -> dict[str, Any]:
        """Arguments of a call that reads these columns of these rows, beside ids, mask and cache."""
        said: dict[str, Any] = {}
        if self.places is not None:
            places = self.places if rows is None else self.places[rows]
            said["position_ids"] = places[:, start:stop]
        if self.pixels is not None and self.kinds is not None and start == 0:
            said |= {"pixel_values": self.pixels, "token_type_ids": self.kinds[:, :stop]}
        return said


def layout_of(draw: Draw, ids: Tensor, real: Tensor, dtype: torch.dtype) -> Layout:
    """What the calls of a draw say of these rows."""
    of = POSITIONS[draw["positions"]].of
    places = None if of is None else of(real)
    if draw["mask"] != "image":
        return Layout(places)
    kinds = (ids == IMAGE_TOKENS[0]).long()
    pixels = torch.randn(len(ids), 3, 28, 28, generator=torch.Generator().manual_seed(1)).to(ids.device, dtype)
    return Layout(places, pixels, kinds)


def put_padding(draw: Draw, ids: Tensor, real: Tensor) -> None:
    """Write padding among the tokens, where a draw has it there; each row but the first, if there are several."""
    length = ids.shape[1]
    begins = {"hole": length // 2 + 2, "later turn": length - SECOND}
    if draw["mask"] not in begins or length < 20:
        return
    first = begins[draw["mask"]]
    for row in range(min(1, len(ids) - 1), len(ids)):
        where = slice(first, first + 1 + row % 2)  # two tokens are left of a later turn: one would be a step
        ids[row, where], real[row, where] = PAD, 0


def put_image(draw: Draw, ids: Tensor) -> None:
    """Write an image before the end of the prompt; elsewhere no token means one."""
    if draw["family"] not in IMAGE:
        return
    ids[ids >= min(IMAGE_TOKENS)] = 5
    if draw["mask"] == "image":
        end = ids.shape[1] - SECOND
        ids[:, end - 4 : end] = IMAGE_TOKENS[0]
