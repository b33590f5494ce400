"""Sinks and spikes are sets of places. Words label a set afterwards, and decide nothing.

`sink_places` finds the positions that heads attend to. `split_by_label` parts a set of places by the simplest words
that mean hardly anything else; what no words cover is a piece as well, or left out if it is too little to be measured.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import torch
from einops import rearrange, reduce
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


@dataclass(frozen=True)
class Rule:
    """Words that mean some positions of any texts.

    Attributes:
        words: The words, as part of a sentence.
        position: The only position. None: the tokens decide.
        tokens: Ids of the tokens that stand there.
        first: Whether only the first of these tokens in a text counts.
    """

    words: str
    position: int | None = None
    tokens: tuple[int, ...] = ()
    first: bool = False

    def matches(self, ids: TokenRows) -> Mask:
        """Return the positions of some texts that the words mean."""
        if self.position is not None:
            return (torch.arange(ids.shape[1], device=ids.device) == self.position).expand_as(ids)
        fits = torch.isin(ids, torch.tensor(self.tokens, device=ids.device))
        if self.first:
            fits &= fits.cumsum(1) == 1
        return fits


@dataclass(frozen=True, eq=False)
class Place:
    """A set of positions of the texts that were surveyed, with the words that label it.

    Attributes:
        mask: The positions.
        rule: The words. None: no words mean these positions and hardly anything else.
        common: The most common tokens.
    """

    mask: Mask
    rule: Rule | None
    common: tuple[str, ...]

    @classmethod
    def of(cls, ids: TokenRows, piece: Mask, rule: Rule | None, decode: Decode) -> Place:
        """Return the place of some positions of texts."""
        return cls(piece, rule, tuple(decode([token]) for token, _ in Counter(ids[piece].tolist()).most_common(COMMON)))

    @property
    def share(self) -> float:
        """Share of the texts that have such a position."""
        return float(self.mask.any(1).float().mean())

    @property
    def words(self) -> str:
        """The words, or the size and the most common tokens."""
        if self.rule is not None:
            return self.rule.words
        tokens = word_list([repr(token) for token in self.common])
        if self.is_first:
            return f"some first tokens (most often {tokens})"
        return f"{int(self.mask.sum()):,} other positions (most often {self.common[0]!r})"

    @property
    def is_first(self) -> bool:
        """Whether it is the first token of all or some texts."""
        return not bool(self.mask[:, 1:].any())

    def matches(self, ids: TokenRows) -> Mask:
        """Return the positions of any texts that the words mean; none if there are no words."""
        if self.rule is None:
            return torch.zeros_like(ids, dtype=torch.bool)
        return self.rule.matches(ids)

    def __str__(self) -> str:
        return self.words


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
    anywhere = reduce(above.int(), "layer head text at -> text at", "sum")
    there = anywhere >= max(SINK_HEADS, PLACE_SHARE * heads)
    steady = reduce(above.float(), "layer head text at -> layer head at", "mean") >= MOST_TEXTS
    steadily = (above & rearrange(steady, "layer head at -> layer head 1 at")).int().sum((0, 1))
    number = reduce(steady.int(), "layer head at -> at", "sum")
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
    first = torch.arange(ids.shape[1]).expand_as(ids) == 0
    labelled = [(rule, rule.matches(ids)) for rule in _rules(ids, whole, decode)]
    for rule, fits in [*labelled, (None, first), (None, ~first)]:
        piece = fits & rest
        precise = rule is None or int((fits & whole).sum()) >= ENOUGH * int(fits.sum())
        enough = int(piece.sum()) >= least and float(piece.any(1).float().mean()) >= SOME_TEXTS
        if precise and enough:
            found.append(Place.of(ids, piece, rule, decode))
            rest = rest & ~piece
    return found


def _rules(ids: TokenRows, there: Mask, decode: Decode) -> list[Rule]:
    """What may be said of the places in a few words, the simplest first.

    Positions; tokens wherever they stand (more than two share their words); and tokens that come for the first time.
    Tokens count if they stand at places after the first position, and at more than one position.
    """
    rules = [_at_position(ids, position, decode) for position in there.any(0).nonzero().flatten().tolist()]
    behind, here = ids[:, 1:], there[:, 1:]
    seen = Counter(behind[here].tolist()).most_common()
    tokens = [token for token, _ in seen if int((behind == token).any(0).sum()) > 1]
    always = [token for token in tokens if float(here[behind == token].float().mean()) >= ENOUGH]
    if len(always) > 2:  # two have words each, because different neurons may make their spikes
        rules.append(_of_tokens(always, decode))
    rules += [_of_tokens([token], decode) for token in always]
    rules += [_of_tokens([token], decode, first=True) for token in tokens]
    if len(tokens) > 1:
        rules.append(_of_tokens(tokens, decode, first=True))
    return rules


def _of_tokens(tokens: list[int], decode: Decode, *, first: bool = False) -> Rule:
    """Tokens wherever they stand, or where the first of them stands in a text."""
    names = word_list([repr(decode([token])) for token in tokens], COMMON)
    if first and len(tokens) > 1:
        words = f"the first of {names} in a text"
    elif first:
        words = f"the first {names} of a text"
    else:
        words = f"{names} wherever {'it stands' if len(tokens) == 1 else 'they stand'}"
    return Rule(words, tokens=tuple(tokens), first=first)


def _at_position(ids: TokenRows, position: int, decode: Decode) -> Rule:
    """A position, with the token that always stands there."""
    tokens = ids[:, position].unique().tolist()
    words = f"position {position} (any token)"
    if position == 0:
        words = "the first token"
    elif len(tokens) == 1:
        words = f"{decode(tokens)!r} at position {position}"
    return Rule(words, position=position)
