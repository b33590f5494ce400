"""Who sees whom, and at which positions tokens stand, as a call says it: one row each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .edits import EDITS, ROWS_SEEN, Draw
from .families import FAMILIES, HEADS, IMAGE, IMAGE_TOKENS, PAD

SECOND = 4
"""Tokens that are read after the prompt."""
JUMP = 7
"""How far positions jump."""


def columns(real: Tensor) -> Tensor:
    """The number of each column, for each row."""
    return torch.arange(real.shape[1], device=real.device).expand(real.shape)


def counted(real: Tensor) -> Tensor:
    """The place of each token among those of its row, padding left out."""
    return (real.long().cumsum(1) - 1).clamp(min=0)


def _cut(real: Tensor) -> Tensor:
    """Where the second part of each row begins, among its tokens: rows differ."""
    row = torch.arange(len(real), device=real.device)
    return (real.long().sum(1) * 2) // 5 + row


def in_second(real: Tensor) -> Tensor:
    """Tokens of the second part `[row pos]`."""
    return counted(real) >= _cut(real)[:, None]


def _packed(real: Tensor) -> Tensor:
    return counted(real) - _cut(real)[:, None] * in_second(real)


POSITIONS: dict[str, Position] = {}


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
    takes = draw["cache"] not in ("looping", "steered", "ss.generate", "beam scores", "turns", "prefix")
    return _told(draw) and takes and "conversation" not in draw["cache"] and draw["options"] == "greedy"


def _told_apart(draw: Draw) -> bool:
    return _told_in_calls(draw) and draw["length"] >= 20


POSITIONS |= {
    "counted": Position(),
    "given": Position(counted, lambda draw: _told(draw) and draw["cache"] != "generate"),
    "shifted": Position(lambda real: counted(real) + 5, _told_in_calls),
    "packed": Position(_packed, _told_apart),
    "jumps": Position(lambda real: counted(real) + JUMP * in_second(real), _told_apart),
}


def causal(real: Tensor) -> Tensor:
    """Which real keys come no later than a query, and each column itself `[row query key]`."""
    size = real.shape[1]
    square = torch.ones(size, size, dtype=torch.bool, device=real.device)
    sees = square.tril() & real.bool()[:, None] & real.bool()[:, :, None]
    return sees | square.tril().triu()


def _block(real: Tensor) -> Tensor:
    """Two documents, which do not see each other."""
    second = in_second(real)
    return causal(real) & (second[:, :, None] == second[:, None])


def _prefix(real: Tensor) -> Tensor:
    """The tokens of the first part see one another."""
    first = real.bool() & ~in_second(real)
    return causal(real) | (first[:, :, None] & first[:, None])


def _sibling(real: Tensor) -> Tensor:
    """The last token of the first part, which those of the second do not see."""
    return real.bool() & (counted(real) == _cut(real)[:, None] - 1)


def _tree(real: Tensor) -> Tensor:
    """Two branches: one of a token, and all that follows."""
    return causal(real) & ~(in_second(real)[:, :, None] & _sibling(real)[:, None])


def _as_bool(sees: Tensor, dtype: torch.dtype) -> Tensor:
    return sees


def additive(sees: Tensor, dtype: torch.dtype) -> Tensor:
    """The mask that is added to scores."""
    return torch.zeros(sees.shape, dtype=dtype, device=sees.device).masked_fill(~sees, torch.finfo(dtype).min)


def _infinite(sees: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(sees.shape, dtype=dtype, device=sees.device).masked_fill(~sees, -torch.inf)


def _biased(sees: Tensor, dtype: torch.dtype) -> Tensor:
    """Beside what is hidden, each head likes near keys as much more as ALiBi says."""
    place = torch.arange(sees.shape[-1], device=sees.device)
    slopes = 0.5 ** torch.arange(1, HEADS + 1, device=sees.device)
    bias = -slopes[:, None, None] * (place[:, None] - place).abs()
    return additive(sees, dtype) + bias.to(dtype).masked_fill(~sees, 0)


def _of_one_row(sees: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask for all rows."""
    return sees[:1]


@dataclass(frozen=True)
class Mask:
    """How a call says who sees whom.

    Attributes:
        sees: Which keys each query sees `[row query key]`, from which columns are real; None: it has two dimensions.
        form: The mask that is passed for it `[row head query key]`.
        bare: Whether no mask is passed, and no cache made, so that positions say which documents there are.
        fits: Draws to which it belongs.
    """

    sees: Callable[[Tensor], Tensor] | None = None
    form: Callable[[Tensor, torch.dtype], Tensor] = additive
    bare: bool = False
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
    ways = draw["cache"] not in ("ss.generate", "conversation", "conversation kept")
    return _long(draw) and not counts and ways and draw["padding"] != "right" and _has_mask(draw)


def _has_later_turn(draw: Draw) -> bool:
    return _has_hole(draw) and draw["cache"] in ("turns", "second turn")


def _takes_whole(draw: Draw) -> bool:
    """Whether a mask of queries and keys can be passed: the attention takes it, and `generate` makes none."""
    family = FAMILIES[draw["family"]]
    takes = family.positions and family.dispatches and _has_mask(draw)
    generates = draw["cache"] in _GENERATING or draw["cache"] == "static"
    windowed = family.window is not None and draw["cache"] not in ("none", "gradients")
    traced = EDITS[draw["edit"]].site not in (None, ROWS_SEEN)
    return takes and not generates and not windowed and not traced and _long(draw)


_GENERATING = (
    *("generate", "turns", "prefix", "beam scores", "looping", "steered", "ss.generate", "conversation"),
    "conversation kept",
)


def _takes_bool(draw: Draw) -> bool:
    """Eager attention adds a mask, whatever it is."""
    return _takes_whole(draw) and draw["attention"] != "eager"


def _takes_one(draw: Draw) -> bool:
    return _takes_bool(draw) and draw["padding"] == "none" and draw["rows"] > 1 and draw["cache"] != "selected"


def _takes_packed(draw: Draw) -> bool:
    """Whether transformers reads positions that begin again as documents: it makes the mask, and has no cache."""
    family = FAMILIES[draw["family"]]
    takes = _has_mask(draw) and family.positions and family.masked
    traced = EDITS[draw["edit"]].site not in (None, ROWS_SEEN)
    takes = takes and draw["wrapper"] != "nnsight"  # which passes a mask
    return takes and not traced and draw["cache"] in ("none", "gradients") and draw["padding"] == "none" and _long(draw)


_SAME_CALLS = ("greedy", "min", "penalty")


def _has_image(draw: Draw) -> bool:
    calls = draw["call"] in ("keyword", "tuple", "everything", "no mask")
    ways = ("none", "steps", "second turn", "gradients", "generate", "copied", "copied from", "repeated", "cropped")
    attends = _has_mask(draw) and draw["options"] in _SAME_CALLS
    whole = draw["cache"] in ways and draw["length"] >= 20 and EDITS[draw["edit"]].site in (None, ROWS_SEEN)
    return draw["family"] in IMAGE and calls and attends and whole and draw["wrapper"] not in ("nnsight", "offloaded")


MASKS = {
    "usual": Mask(),
    "hole": Mask(fits=_has_hole),
    "later turn": Mask(fits=_has_later_turn),
    "4-D bool": Mask(causal, _as_bool, fits=_takes_bool),
    "4-D additive": Mask(causal, fits=_takes_whole),
    "4-D infinite": Mask(causal, _infinite, fits=_takes_whole),
    "4-D bias": Mask(causal, _biased, fits=_takes_whole),
    "4-D of one row": Mask(causal, _of_one_row, fits=_takes_one),
    "packed": Mask(bare=True, fits=_takes_packed),
    "block": Mask(_block, fits=_takes_whole),
    "prefix": Mask(_prefix, fits=_takes_whole),
    "tree": Mask(_tree, _as_bool, fits=_takes_bool),
    "image": Mask(fits=_has_image),
}


@dataclass
class Layout:
    """What calls say beside the ids.

    Attributes:
        whole: The mask of queries and keys that is passed `[row head query key]`; None: the one of two dimensions.
        places: Positions that are said `[row pos]`; None: none are.
        pixels: Images `[row channel height width]`; None: there are none.
        kinds: 1 at tokens of an image `[row pos]`; None: the model does not ask.
    """

    whole: Tensor | None
    places: Tensor | None
    pixels: Tensor | None = None
    kinds: Tensor | None = None

    def some(self, row: int, chosen: Tensor, places: Tensor | None) -> Layout:
        """What is said of some tokens of a row, by themselves, at these places."""
        whole = self.whole
        if whole is not None:
            whole = whole[min(row, len(whole) - 1)][None][:, :, chosen][..., chosen]
        one = slice(row, row + 1)
        pixels, kinds = self.pixels, self.kinds
        if pixels is not None and kinds is not None:
            pixels, kinds = pixels[one], kinds[one, chosen]
        return Layout(whole, places, pixels, kinds)

    def told(self, start: int, stop: int, rows: Tensor | None) -> dict[str, Any]:
        """Arguments of a call that reads these columns of these rows, beside ids, mask and cache."""
        said: dict[str, Any] = {}
        if self.places is not None:
            places = self.places if rows is None else self.places[rows]
            said["position_ids"] = places[:, start:stop]
        if self.pixels is not None and self.kinds is not None and start == 0:
            said |= {"pixel_values": self.pixels, "token_type_ids": self.kinds[:, :stop]}
        return said

    def mask(self, start: int, stop: int, rows: Tensor | None) -> Tensor | None:
        """The mask of queries and keys of a call that reads these columns of these rows; None: there is none."""
        if self.whole is None:
            return None
        whole = self.whole
        if rows is not None and len(whole) > 1:
            whole = whole[rows]
        return whole[:, :, start:stop, :stop]


def reads_documents(draw: Draw) -> bool:
    """Whether transformers reads documents from positions: no mask is passed, and no cache where masks are made.

    A model of several parts makes its masks before its cache.
    """
    if draw["cache"] not in ("none", "gradients"):
        return False
    if MASKS[draw["mask"]].bare:
        return draw["positions"] in ("counted", "packed", "jumps")
    makes_cache_later = draw["family"] in IMAGE and draw["call"] == "no mask"
    return makes_cache_later and draw["positions"] in ("packed", "jumps")


def layout_of(draw: Draw, ids: Tensor, real: Tensor, dtype: torch.dtype) -> Layout:
    """What the calls of a draw say of these rows."""
    mask, position = MASKS[draw["mask"]], POSITIONS[draw["positions"]]
    of = position.of
    if mask.bare and of is None:
        of = _packed
    places = None if of is None else of(real)
    if places is not None and mask.sees is _tree:  # siblings stand at one place, but no text begins before 0
        places = (places - in_second(real).long()).clamp(min=0)
    whole = None if mask.sees is None else mask.form(mask.sees(real)[:, None], dtype)
    if draw["mask"] != "image":
        return Layout(whole, places)
    kinds = (ids == IMAGE_TOKENS[0]).long()
    pixels = torch.randn(len(ids), 3, 28, 28, generator=torch.Generator().manual_seed(1)).to(ids.device, dtype)
    return Layout(whole, places, pixels, kinds)


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
