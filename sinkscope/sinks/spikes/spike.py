"""Step 2, the spikes: places at which states stand out, and runs of layers in which the direction of each stays.

Sinks and spikes are sets of places. Words label a set afterwards, and decide nothing: `split_by_label` parts a set of
places by the simplest words that mean hardly anything else; what no words cover is a piece as well, or left out if it
is too little to be measured.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property, partial
from operator import attrgetter
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sinkscope.models.arithmetic import product
from sinkscope.results.notation import Component, Head, Neuron, word_list
from sinkscope.sinks.spikes.survey import Survey
from sinkscope.sinks.thresholds import (
    COUNTS,
    ENOUGH,
    HALF,
    LATER,
    LEAST_CASES,
    MOST_TEXTS,
    PLACE_SHARE,
    POSITION_SHARE,
    READS,
    SAME,
    SINK_HEADS,
    SOME_TEXTS,
    STANDS_OUT,
)
from sinkscope.sinks.tokens import Mask, TokenRows

NAMED = 3  # tokens that words name
Part = Neuron | Head | Component
Parts = tuple[Part, ...]
Matches = Callable[[TokenRows], Mask]
"""Marks the positions of any texts that some words mean."""


class PlaceKind(StrEnum):
    """How a place is found in any text."""

    FIRST = "first_token"
    POSITION = "position"
    TOKENS = "tokens"  # wherever they stand
    FIRST_OF_TOKENS = "first_of_tokens"  # where a text has one of them for the first time
    SOME_FIRST = "some_first_tokens"
    OTHER = "other_positions"


@dataclass(frozen=True)
class PlaceKey:
    """What a place is, the same in every model that has it.

    Attributes:
        kind: How it is found.
        tokens: The tokens that stand there, where it is found by them.
        position: The position, where it is found by that.
    """

    kind: PlaceKind
    tokens: tuple[str, ...] = ()
    position: int | None = None

    @property
    def words(self) -> str:
        """The place in words."""
        names = word_list([repr(token) for token in self.tokens], NAMED)
        is_one = len(self.tokens) == 1
        match self.kind:
            case PlaceKind.FIRST:
                return "the first token"
            case PlaceKind.POSITION:
                return f"{names} at position {self.position}" if is_one else f"position {self.position} (any token)"
            case PlaceKind.TOKENS:
                return f"{names} wherever {'it stands' if is_one else 'they stand'}"
            case PlaceKind.FIRST_OF_TOKENS:
                return f"the first {names} of a text" if is_one else f"the first of {names} in a text"
            case PlaceKind.SOME_FIRST:
                return "some first tokens"
            case PlaceKind.OTHER:
                return "other positions"

    def __str__(self) -> str:
        return self.words


@dataclass(frozen=True)
class PlaceWords:
    """Where a spike is.

    Attributes:
        words: The words, with what differs from text to text.
        token: The token that stands there most often.
        key: What it is in every model.
    """

    words: str
    token: str
    key: PlaceKey


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


@dataclass(frozen=True, eq=False)
class Spike:
    """A place, a direction in the residual stream, and a run of layers in which the place's norm stands out along it.

    Attributes:
        survey: The survey in whose texts it is.
        place: Where it is, in these texts.
        mean: Mean state of ordinary positions after the peak.
        direction: Unit vector from there to the mean state of the place.
        size: Projection of the place's departure on it, mean over the place.
        layers: First and last layer of the run.
        peak: The layer after which it is largest.
        highest: The layer of the run after which its norm is farthest above the typical one.
    """

    survey: Survey
    place: Place
    mean: Float[Tensor, " d_model"]
    direction: Float[Tensor, " d_model"]
    size: float
    layers: tuple[int, int]
    peak: int
    highest: int

    @property
    def name(self) -> str:
        """The spike by its layers."""
        return layers_words(*self.layers)

    @property
    def dims(self) -> tuple[int, ...]:
        """Residual dimensions that hold at least a tenth of the direction's square, the largest first."""
        square = self.direction.square()
        order = square.argsort(descending=True, stable=True)
        return tuple(order[square[order] >= COUNTS].tolist())

    def along(self, states: Float[Tensor, "*n d_model"]) -> Float[Tensor, "*n"]:
        """Project states on the direction, from the mean of ordinary positions, as a share of the spike."""
        return product(states - self.mean, self.direction) / self.size

    @cached_property
    def reading_layers(self) -> range:
        """The layers of the model whose heads can read it: from the second of the run to the one after the last."""
        first, last = self.layers
        return range(first + 1, min(last + 2, len(self.survey.mlp)))

    @cached_property
    def texts(self) -> Int[Tensor, " text"]:
        """Numbers of the texts of the survey that have the place."""
        return self.place.mask.any(1).nonzero().flatten()

    @cached_property
    def attention(self) -> Float[Tensor, "layer head text"]:
        """Attention to the place of each head in the layers that can read it, in these texts, without an edit."""
        reading = self.reading_layers
        return self.survey.received(self.place.mask)[reading.start : reading.stop, :, self.texts]

    @cached_property
    def intact(self) -> Float[Tensor, " text"]:
        """Projection of the place on the direction in each text of the survey, as a share; NaN in texts without."""
        there = self.survey.entered[self.peak + 1, self.place.mask]
        return mean_by_row(self.along(there), self.place.mask)

    @property
    def is_read(self) -> bool:
        """Whether it is at the first token, or heads attend to the place: then heads and loss are read."""
        return self.place.is_first or bool((self.attention.mean(-1) > READS).any())

    def within(self, texts: Int[Tensor, " text"]) -> Spike:
        """Return the spike in some texts of the survey alone."""
        mask = torch.zeros_like(self.place.mask)
        mask[texts] = self.place.mask[texts]
        return replace(self, place=replace(self.place, mask=mask))

    def on(self, survey: Survey) -> Spike | None:
        """Return the same spike in the texts of another survey: its direction and layers stay.

        Places that no words mean are then the positions that stand out along the direction.

        Args:
            survey: The other survey.

        Returns:
            None if its place is in none of these texts.
        """
        mask = self.place.matches(survey.ids)
        states = survey.entered[self.peak + 1]
        if not bool(self.place.matches(self.survey.ids).any()):
            mask = (self.along(states) >= HALF) & (survey.ratios[self.peak] > STANDS_OUT)
            mask &= at_position(survey.ids, 0) == self.place.is_first
        mean = states[survey.ordinary].mean(0)
        size = float(product(states[mask] - mean, self.direction).mean())  # NaN without the place
        if not size > 0:
            return None
        place = replace(self.place, mask=mask)
        return replace(self, survey=survey, place=place, mean=mean, size=size)


def layers_words(first: int, last: int) -> str:
    """Return the layers of a spike: "layer 3", "layers 3-5"."""
    return f"layer{'s' * (first != last)} {span(first, last)}"


def span(first: int, last: int) -> str:
    """Return the numbers of the layers of a spike."""
    return str(first) if first == last else f"{first}-{last}"


def common_layers(one: tuple[int, int], other: tuple[int, int]) -> int:
    """Return how many layers two spikes have in common, each given by its first and last layer."""
    return max(0, min(one[1], other[1]) + 1 - max(one[0], other[0]))


def find_spikes(survey: Survey, tokenizer: Any) -> list[Spike]:
    """Return the spikes of each place, first layers first.

    Args:
        survey: The survey.
        tokenizer: Its `decode` gives words for places.
    """
    spikes: list[Spike] = []
    for place in split_by_label(survey.ids, (survey.ratios > STANDS_OUT).any(0), tokenizer.decode):
        spikes += sorted(spikes_at(survey, place), key=attrgetter("layers"))
    return spikes


def spikes_at(survey: Survey, place: Place) -> list[Spike]:
    """Return the spikes of a place, the highest first: each has a peak, and the layers around it in its direction."""
    states = survey.entered[1:]
    mean = states[:, survey.ordinary].mean(1)
    away = states[:, place.mask].mean(1) - mean
    size = away.norm(dim=-1)
    over = survey.norms[:, place.mask].mean(1) / torch.tensor(survey.typical_norm)
    free = survey.ratios[:, place.mask].mean(1) > STANDS_OUT
    spikes: list[Spike] = []
    while bool(free.any()):
        peak = int(size.masked_fill(~free, -1).argmax())
        direction = away[peak] / size[peak]
        first, last = run_around(peak, free & (product(away, direction) >= SAME * size))
        highest = first + int(over[first : last + 1].argmax())
        spikes.append(Spike(survey, place, mean[peak], direction, float(size[peak]), (first, last), peak, highest))
        free[first : last + 1] = False
    return spikes


def run_around(peak: int, carries: Bool[Tensor, " layer"]) -> tuple[int, int]:
    """Return the first and last of the layers around a peak that all carry its direction."""
    first = last = peak
    while first > 0 and carries[first - 1]:
        first -= 1
    while last + 1 < len(carries) and carries[last + 1]:
        last += 1
    return first, last


# --- places ---


def attended(survey: Survey) -> Mask:
    """Mark the positions that heads attend to as a sink, if enough later queries follow them.

    A twentieth of the heads, and at least two, have to attend to a place. A hundredth suffices at a position to which
    these heads attend in most texts, because then they do not prefer one word.
    """
    layers = survey.target.attending
    if not layers:
        return torch.zeros_like(survey.ids, dtype=torch.bool)
    above = survey.attention[layers] > READS
    heads = len(layers) * survey.target.n_heads
    above[..., max(0, above.shape[-1] - LATER) :] = False
    steady = above.float().mean(2, keepdim=True) >= MOST_TEXTS
    steadily = (above & steady).sum((0, 1))
    number = steady.sum((0, 1, 2))
    suffice = number >= max(SINK_HEADS, POSITION_SHARE * heads)
    often = above.sum((0, 1)) >= max(SINK_HEADS, PLACE_SHARE * heads)
    return often | (suffice & (steadily >= MOST_TEXTS * number))


def at_position(ids: TokenRows, position: int) -> Mask:
    """Mark a position in texts."""
    return (torch.arange(ids.shape[1], device=ids.device) == position).expand_as(ids)


def among_tokens(ids: TokenRows, tokens: tuple[int, ...], first: bool) -> Mask:
    """Mark where tokens stand in texts, or only the first of them in each text."""
    fits = torch.isin(ids, torch.tensor(tokens, device=ids.device))
    return fits & (fits.cumsum(1) == 1) if first else fits


def mean_by_row(cases: Float[Tensor, " case"], place: Mask) -> Float[Tensor, " row"]:
    """Return the mean over the positions of a place in each row; NaN in a row without."""
    return torch.zeros(len(place)).index_add_(0, place.nonzero()[:, 0], cases.float()) / place.sum(1)


@dataclass(frozen=True, eq=False)
class Label:
    """What positions of texts may have in common.

    Attributes:
        key: What it is.
        matches: Marks the positions of any texts that have it.
    """

    key: PlaceKey
    matches: Matches


Decode = Callable[[list[int]], str]
"""Writes token ids as text."""


def split_by_label(ids: TokenRows, positions: Mask, decode: Decode) -> list[Place]:
    """Split a set of positions into places, by the simplest words; what is left over is too few positions.

    Words are taken if nine tenths of the positions that they mean are in the set. What no words mean is a place of its
    own, first tokens apart.

    Args:
        ids: The texts.
        positions: The positions.
        decode: Writes token ids as text.
    """
    places: list[Place] = []
    rest = positions
    for label in [*_position_labels(ids, positions, decode), *_token_labels(ids, positions, decode)]:
        meant = label.matches(ids)
        is_precise = int((meant & positions).sum()) >= ENOUGH * int(meant.sum())
        if is_precise and _is_place(meant & rest):
            places.append(_place(ids, meant & rest, label, decode))
            rest = rest & ~meant
    first = at_position(ids, 0)
    for kind, unnamed in ((PlaceKind.SOME_FIRST, rest & first), (PlaceKind.OTHER, rest & ~first)):
        if _is_place(unnamed):
            label = Label(PlaceKey(kind), partial(torch.zeros_like, dtype=torch.bool))
            places.append(_place(ids, unnamed, label, decode))
    return places


def _is_place(positions: Mask) -> bool:
    """Whether positions are enough for a place: three, and in a fifth of the texts."""
    texts = float(positions.any(1).float().mean())
    return int(positions.sum()) >= min(LEAST_CASES, len(positions)) and texts >= SOME_TEXTS


def _place(ids: TokenRows, positions: Mask, label: Label, decode: Decode) -> Place:
    """Positions, with their label and the token that stands there most often."""
    ((token_id, _),) = Counter(ids[positions].tolist()).most_common(1)
    token = decode([token_id])
    words = label.key.words
    if label.key.kind is PlaceKind.OTHER:
        words = f"{int(positions.sum()):,} {words}"
    if label.key.kind in (PlaceKind.OTHER, PlaceKind.SOME_FIRST):
        words = f"{words} (most often {token!r})"
    return Place(positions, PlaceWords(words, token, label.key), label.matches)


def _position_labels(ids: TokenRows, positions: Mask, decode: Decode) -> list[Label]:
    """A label for each position at which the set has members, whatever the token."""
    labels: list[Label] = []
    for position in positions.any(0).nonzero().flatten().tolist():
        token_ids = ids[:, position].unique().tolist()
        key = PlaceKey(PlaceKind.POSITION, position=position)
        if position == 0:
            key = PlaceKey(PlaceKind.FIRST)
        elif len(token_ids) == 1:
            key = replace(key, tokens=(decode(token_ids),))
        labels.append(Label(key, partial(at_position, position=position)))
    return labels


def _token_labels(ids: TokenRows, positions: Mask, decode: Decode) -> list[Label]:
    """Labels of tokens: wherever they stand, then where a text has them for the first time.

    A token counts if members of the set after the first position have it, and if it stands at several positions.
    """
    later = ids[:, 1:]
    members = positions[:, 1:]
    tokens: list[int] = []
    always: list[int] = []  # tokens that are members nearly wherever they stand
    for token, _ in Counter(later[members].tolist()).most_common():
        stands = later == token
        if int(stands.any(0).sum()) > 1:
            tokens.append(token)
            if float(members[stands].float().mean()) >= ENOUGH:
                always.append(token)
    sets: list[tuple[PlaceKind, list[int]]] = []
    if len(always) > 2:  # two get a label each, because different neurons may make their spikes
        sets.append((PlaceKind.TOKENS, always))
    for token in always:
        sets.append((PlaceKind.TOKENS, [token]))
    for token in tokens:
        sets.append((PlaceKind.FIRST_OF_TOKENS, [token]))
    if len(tokens) > 1:
        sets.append((PlaceKind.FIRST_OF_TOKENS, tokens))
    labels: list[Label] = []
    for kind, members_of_set in sets:
        key = PlaceKey(kind, tuple(decode([token]) for token in members_of_set))
        is_first = kind is PlaceKind.FIRST_OF_TOKENS
        labels.append(Label(key, partial(among_tokens, tokens=tuple(members_of_set), first=is_first)))
    return labels
