"""Sinks and spikes are sets of places. Words label a set afterwards, and decide nothing.

`sink_places` finds the positions that heads attend to. `split_by_label` parts a set of places by the simplest words
that mean hardly anything else; what no words cover is a piece as well, or left out if it is too little to be measured.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from sinkscope.results.notation import word_list
from sinkscope.sinks.thresholds import (
    ENOUGH,
    LEAST_CASES,
    MOST_TEXTS,
    PLACE_SHARE,
    POSITION_SHARE,
    SINK_HEADS,
    SOME_TEXTS,
)
from sinkscope.sinks.tokens import Mask, TokenRows

COMMON = 3  # tokens named where no words fit
Decode = Callable[[list[int]], str]
Matches = Callable[[TokenRows], Mask]
"""Marks the positions of any texts that some words mean."""


@dataclass(frozen=True)
class PlaceWords:
    """Where a spike is.

    Attributes:
        words: The words.
        token: The token that stands there most often.
        share: Share of the texts that have such a position.
    """

    words: str
    token: str
    share: float


@dataclass(frozen=True, eq=False)
class Place:
    """A set of positions of the texts that were surveyed, with the words that label it.

    Attributes:
        mask: The positions.
        label: What a result says of it.
        matches: Marks the positions of any texts that the words mean; none if no words mean these positions.
    """

    mask: Mask
    label: PlaceWords
    matches: Matches

    @property
    def is_first(self) -> bool:
        """Whether it is the first token of all or some texts."""
        return not bool(self.mask[:, 1:].any())


def at_position(ids: TokenRows, position: int) -> Mask:
    """Mark a position in texts."""
    return (torch.arange(ids.shape[1], device=ids.device) == position).expand_as(ids)


def among_tokens(ids: TokenRows, tokens: tuple[int, ...], first: bool) -> Mask:
    """Mark where tokens stand in texts, or only the first of them in each text."""
    fits = torch.isin(ids, torch.tensor(tokens, device=ids.device))
    if first:
        fits &= fits.cumsum(1) == 1
    return fits


def per_text(values: Float[Tensor, "*n case"], mask: Mask) -> Float[Tensor, "*n some"]:
    """Return the mean of values of some positions over each text that has any."""
    texts = mask.nonzero()[:, 0]
    return torch.stack([values[..., texts == text].float().mean(-1) for text in texts.unique()], -1)


# --- finding ---------------------------------------------------------------------------------------------------------


def sink_places(above: Bool[Tensor, "layer head text at"]) -> Mask:
    """Return the positions that enough heads attend to.

    A twentieth of the heads, and at least two, have to attend to a place. A hundredth suffices at a position to which
    these heads attend in most texts, because then they do not prefer one word.

    Args:
        above: Whether each head attends to each position; of layers with softmax attention only.
    """
    heads = above.shape[0] * above.shape[1]
    there = above.sum((0, 1)) >= max(SINK_HEADS, PLACE_SHARE * heads)
    steady = above.float().mean(2, keepdim=True) >= MOST_TEXTS
    steadily, number = (above & steady).sum((0, 1)), steady.sum((0, 1, 2))
    suffice = number >= max(SINK_HEADS, POSITION_SHARE * heads)
    return there | (suffice & (steadily >= MOST_TEXTS * number))


# --- describing ------------------------------------------------------------------------------------------------------


def split_by_label(ids: TokenRows, whole: Mask, decode: Decode) -> list[Place]:
    """Return the parts of a set of places; what is left over is too few positions.

    Words have a precision of at least 0.9, and the first ones that have it are taken. What no words cover is a piece of
    its own, with first tokens apart. A fifth of the texts have to have a piece.

    Args:
        ids: The texts.
        whole: The places in them.
        decode: Writes token ids as text.
    """
    found: list[Place] = []
    rest, least = whole, min(LEAST_CASES, len(ids))
    nowhere, first = partial(torch.zeros_like, dtype=torch.bool), at_position(ids, 0)
    labelled = [(words, matches, matches(ids)) for words, matches in _words_for(ids, whole, decode)]
    for words, matches, fits in [*labelled, ("", nowhere, first), ("", nowhere, ~first)]:
        piece = fits & rest
        precise = not words or int((fits & whole).sum()) >= ENOUGH * int(fits.sum())
        share = float(piece.any(1).float().mean())
        if precise and int(piece.sum()) >= least and share >= SOME_TEXTS:
            common = [decode([token]) for token, _ in Counter(ids[piece].tolist()).most_common(COMMON)]
            if not words and fits is first:
                words = f"some first tokens (most often {word_list(list(map(repr, common)))})"
            elif not words:
                words = f"{int(piece.sum()):,} other positions (most often {common[0]!r})"
            found.append(Place(piece, PlaceWords(words, common[0], share), matches))
            rest = rest & ~piece
    return found


def _words_for(ids: TokenRows, there: Mask, decode: Decode) -> list[tuple[str, Matches]]:
    """Return what a few words can say of the places, the simplest first, with the positions that they mean.

    Positions come first, then tokens wherever they stand (more than two share their words), then tokens that a text has
    for the first time. A token counts if it stands at a place after the first position, and at more than one position.
    """
    found: list[tuple[str, Matches]] = []
    for position in there.any(0).nonzero().flatten().tolist():
        tokens = ids[:, position].unique().tolist()
        words = f"position {position} (any token)"
        if position == 0:
            words = "the first token"
        elif len(tokens) == 1:
            words = f"{decode(tokens)!r} at position {position}"
        found.append((words, partial(at_position, position=position)))
    behind, here = ids[:, 1:], there[:, 1:]
    seen = Counter(behind[here].tolist()).most_common()
    tokens = [token for token, _ in seen if int((behind == token).any(0).sum()) > 1]
    always = [token for token in tokens if float(here[behind == token].float().mean()) >= ENOUGH]
    sets = [(always, False)] if len(always) > 2 else []  # two have words each: different neurons may make their spikes
    sets += [([token], False) for token in always] + [([token], True) for token in tokens]
    if len(tokens) > 1:
        sets.append((tokens, True))
    for some, first in sets:
        names = word_list([repr(decode([token])) for token in some], COMMON)
        if first:
            words = f"the first of {names} in a text" if len(some) > 1 else f"the first {names} of a text"
        else:
            words = f"{names} wherever {'it stands' if len(some) == 1 else 'they stand'}"
        found.append((words, partial(among_tokens, tokens=tuple(some), first=first)))
    return found
