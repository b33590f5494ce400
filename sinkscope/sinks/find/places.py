"""Sinks and spikes are sets of places. Words label a set afterwards, and decide nothing.

`sink_places` finds the positions that heads attend to, and `spike_places` those whose norm stands out. `pieces` parts
such a set by the simplest words that mean hardly anything else; what no words cover is a piece as well, or left over
if it is too little to be measured. Nothing assumes a position.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import torch
from einops import rearrange, reduce
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sinkscope.models.target import KEPT_POSITIONS
from sinkscope.results.notation import word_list
from sinkscope.sinks.tokens import Mask, TokenRows

ENOUGH = 0.9  # least coverage and precision of words
SPIKE_RATIO = 3.0  # a spike: a norm this many times the typical one
SINK_HEADS = 2  # an attention sink needs at least this many heads
POSITION_SHARE = 0.01  # ... and this share of the heads, if they attend to a position in most texts
PLACE_SHARE = 0.05  # ... or this share at any other place: a few heads that prefer one word are no sink
MOST_TEXTS = 0.5  # a head attends to a position, or to a token, if it does so in at least this share of the cases
LEAST_CASES = 3  # a piece needs so many places, and a position so many different tokens
SOME_TEXTS = 0.2  # least share of the texts that have a place
FEW_PARTS, MOST_PARTS = 2, 4  # rules in one description, and if these and the simple ones do not suffice
COMMON = 3  # tokens named where no words fit
PLACE_TEXTS = 4  # texts in which a place is looked at that always has the same token; of different ones four times that
Decode = Callable[[list[int]], str]
Cases = tuple[tuple[int, int], ...]
"""Positions, as pairs of the number of a text and a position."""


def by_count(tokens: Int[Tensor, " case"]) -> list[tuple[int, int]]:
    """Tokens with their number, the most common first."""
    return sorted(Counter(tokens.tolist()).items(), key=lambda item: (-item[1], item[0]))


@dataclass(frozen=True)
class Rule:
    """Words that mean some positions of any texts. A position has to meet all conditions that are set.

    Attributes:
        words: The words, as part of a sentence.
        position: The only position. None: any.
        tokens: Ids of the tokens that may stand there. Empty: any.
        first: Whether only the first of these tokens in a text counts.
    """

    words: str
    position: int | None = None
    tokens: tuple[int, ...] = ()
    first: bool = False

    def means(self, ids: TokenRows) -> Mask:
        """The positions of some texts that the words mean."""
        fits = torch.ones_like(ids, dtype=torch.bool)
        if self.tokens:
            fits = torch.isin(ids, torch.tensor(self.tokens, device=ids.device))
        if self.first:
            fits &= fits.cumsum(1) == 1
        if self.position is not None:
            at_position = torch.zeros_like(fits)
            at_position[:, self.position : self.position + 1] = True
            fits &= at_position
        return fits


@dataclass(frozen=True)
class Place:
    """A set of positions of the texts that were surveyed, with the words that label it.

    Attributes:
        cases: The positions, as pairs of the number of a text and a position.
        rule: The words. None: no words mean these positions and hardly any others.
        coverage: Share of the whole set, of which this is a piece.
        precision: Share of the positions that the words mean which belong to it.
        share: Share of the texts that have such a position.
        common: The most common tokens.
    """

    cases: Cases
    rule: Rule | None
    coverage: float
    precision: float
    share: float
    common: tuple[str, ...]

    @classmethod
    def of(cls, ids: TokenRows, whole: Mask, there: Mask, rule: Rule | None, decode: Decode) -> Place:
        """A piece of a set of places, `whole`, in some texts."""
        piece = there & whole
        meant = piece if rule is None else rule.means(ids)
        return cls(
            cases=tuple((text, at) for text, at in piece.nonzero().tolist()),
            rule=rule,
            coverage=int(piece.sum()) / int(whole.sum()),
            precision=int((meant & whole).sum()) / max(1, int(meant.sum())),
            share=float(piece.any(1).float().mean()),
            common=tuple(decode([token]) for token, _ in by_count(ids[piece])[:COMMON]),
        )

    @property
    def words(self) -> str:
        """The words, or the size and the most common tokens."""
        if self.rule is not None:
            return self.rule.words
        tokens = word_list([repr(token) for token in self.common])
        return f"{len(self.cases):,} places without a common description (most often {tokens})"

    @property
    def is_first(self) -> bool:
        """Whether it is the first token, of all texts or of some."""
        return not any(at for _, at in self.cases)

    def there(self, ids: TokenRows) -> Mask:
        """The positions as a mask of the texts that were surveyed, which may be cut off."""
        mask = torch.zeros_like(ids, dtype=torch.bool)
        text, at = torch.tensor(self.cases).T
        within = at < ids.shape[1]
        mask[text[within], at[within]] = True
        return mask

    def means(self, ids: TokenRows) -> Mask:
        """The positions of any texts that the words mean; none if there are no words."""
        if self.rule is None:
            return torch.zeros_like(ids, dtype=torch.bool)
        return self.rule.means(ids)

    def __str__(self) -> str:
        return self.words


def texts_with(cases: Cases, ids: TokenRows) -> tuple[Int[Tensor, " some"], Int[Tensor, " some"]]:
    """Numbers of some texts with a place, and its first position in each; those in which it comes first.

    Different neurons may make the spikes of several tokens, so these take turns, and a text may stand there twice.

    Args:
        cases: The place.
        ids: The texts in which it was found, whole.
    """
    seen: Counter[int] = Counter()
    turns: dict[tuple[int, int], tuple[int, int, int]] = {}
    for text, position in sorted(cases, key=lambda case: case[1]):
        token = int(ids[text, position])
        if (token, text) not in turns:
            turns[token, text] = (seen[token], position, text)
            seen[token] += 1
    _, at, rows = torch.tensor(sorted(turns.values())).T
    number = PLACE_TEXTS
    if len(ids[rows, at].unique()) >= LEAST_CASES:
        number = min(4 * PLACE_TEXTS, max(PLACE_TEXTS, KEPT_POSITIONS // ids.shape[1]))
    return rows[:number], at[:number]


# --- finding ---------------------------------------------------------------------------------------------------------


def sink_places(above: Bool[Tensor, "layer head text at"], ids: TokenRows) -> Mask:
    """The positions that enough heads attend to.

    A twentieth of the heads, and at least two, have to attend to a place. A hundredth suffices at a position to which
    these heads attend in most texts, because then they do not prefer one word.

    Args:
        above: Whether each head attends to each position; of layers with softmax attention only.
        ids: The texts, up to the last position that was judged.
    """
    heads = above.shape[0] * above.shape[1]
    anywhere = reduce(above.int(), "layer head text at -> text at", "sum")
    there = anywhere >= max(SINK_HEADS, PLACE_SHARE * heads)
    steady = reduce(above.float(), "layer head text at -> layer head at", "mean") >= MOST_TEXTS
    steadily = (above & rearrange(steady, "layer head at -> layer head 1 at")).int().sum((0, 1))
    number = reduce(steady.int(), "layer head at -> at", "sum")
    suffice = (number >= max(SINK_HEADS, POSITION_SHARE * heads)) & _is_varied(ids)
    return there | (suffice & (steadily >= MOST_TEXTS * number))


def _is_varied(ids: TokenRows) -> Bool[Tensor, " at"]:
    """Positions at which it is no matter of the word: the first one, and those with several different tokens."""
    varied = [at == 0 or len(ids[:, at].unique()) >= LEAST_CASES for at in range(ids.shape[1])]
    return torch.tensor(varied)


def stands_out(norms: Float[Tensor, "*norm"], typical: Float[Tensor, "*typical"]) -> Bool[Tensor, "*norm"]:
    """Where norms are more than three times the typical one."""
    return norms > SPIKE_RATIO * typical


def spike_places(norms: Float[Tensor, "layer text pos"]) -> Mask:
    """The positions whose norm stands out after some layer.

    The typical norm of a layer is the median or, if more than a quarter of the positions stand out from that, the 75 %
    quantile.

    Args:
        norms: Norm of every position after each layer.
    """
    by_layer = norms.flatten(1)
    typical = by_layer.median(1).values
    upper = by_layer.quantile(0.75, 1)
    typical = torch.where(stands_out(upper, typical), upper, typical)
    return stands_out(norms, rearrange(typical, "layer -> layer 1 1")).any(0)


# --- describing ------------------------------------------------------------------------------------------------------


def pieces(
    ids: TokenRows, whole: Mask, decode: Decode, holds: Callable[[Mask], bool] = lambda _: True
) -> tuple[tuple[Place, ...], int]:
    """The parts of a set of places, and how many are left over: too few, or such as do not hold.

    Words have a precision of at least 0.9. Of single rules, then of pairs, the first one is taken whose coverage is at
    least 0.9. If there is none, the rules that add most are joined. What no words cover is a piece of its own.

    Args:
        ids: The texts.
        whole: The places in them.
        decode: Writes token ids as text.
        holds: What else a piece has to meet.
    """
    found: list[Place] = []
    rest = whole
    for rule in _rules(ids, whole, decode, holds):
        fits = rule.means(ids) & rest  # the pieces have no place in common
        if bool(fits.any()):
            found.append(Place.of(ids, whole, fits, rule, decode))
            rest = rest & ~fits
    count, size = int(rest.sum()), int(whole.sum())
    enough = count >= max(LEAST_CASES, (1 - ENOUGH) * size)
    if enough and float(rest.any(1).float().mean()) >= SOME_TEXTS and holds(rest):
        found.append(Place.of(ids, whole, rest, None, decode))
        count = 0
    return tuple(found), count


def _rules(ids: TokenRows, whole: Mask, decode: Decode, holds: Callable[[Mask], bool]) -> list[Rule]:
    """The words for the parts of a set of places."""
    precise: dict[Rule, Tensor] = {}  # with the places that they mean
    chosen: list[Rule] = []
    least, few = min(LEAST_CASES, len(ids)), (1 - ENOUGH) * int(whole.sum())
    for rules, most in ((_simple, FEW_PARTS), (_of_a_kind, MOST_PARTS)):
        for rule in rules(ids, whole, decode):
            fits = rule.means(ids)
            there = fits & whole
            if int(there.sum()) >= max(least, ENOUGH * int(fits.sum())) and holds(there):
                precise[rule] = there
        rest, chosen = whole, []
        while len(chosen) < most and precise:
            adding = {rule: int((rest & there).sum()) for rule, there in precise.items()}
            best = max(precise, key=adding.__getitem__)
            if adding[best] < least:
                break
            chosen.append(best)
            rest = rest & ~precise[best]
        if int(rest.sum()) <= few:
            break
    return sorted(chosen, key=list(precise).index)


def _simple(ids: TokenRows, there: Mask, decode: Decode) -> list[Rule]:
    """What may be said of the places in a few words: positions, single tokens, tokens that come for the first time."""
    rules = []
    for position in there.any(0).nonzero().flatten().tolist():
        rules.append(_at_position(ids, position, decode))
    for token in _tokens_behind(ids, there):
        name = decode([token])
        rules.append(Rule(f"{name!r} wherever it stands", tokens=(token,)))
        rules.append(Rule(f"the first {name!r} of a text", tokens=(token,), first=True))
    return rules


def _of_a_kind(ids: TokenRows, there: Mask, decode: Decode) -> list[Rule]:
    """What may be said of the places by a list of tokens."""
    rules = []
    seen = {token: repr(decode([token])) for token in _tokens_behind(ids, there)}
    precise: dict[int, str] = {}
    for token, name in seen.items():
        if float(there[:, 1:][ids[:, 1:] == token].float().mean()) >= ENOUGH:
            precise[token] = name
    if len(precise) > 2:  # two have a rule each, because different neurons may make their spikes
        names = word_list([*precise.values()], COMMON)
        rules.append(Rule(f"{names} wherever they stand", tokens=tuple(precise)))
    if len(seen) > 1:
        names = word_list([*seen.values()], COMMON)
        rules.append(Rule(f"the first of {names} in a text", tokens=tuple(seen), first=True))
    return rules + _first_of_a_kind(ids, there)


def _tokens_behind(ids: TokenRows, there: Mask) -> list[int]:
    """Tokens that stand at places after the first position, and not always at the same one; the most common first."""
    behind = ids[:, 1:]
    most_common = by_count(behind[there[:, 1:]])
    return [token for token, _ in most_common if int((behind == token).any(0).sum()) > 1]


def _at_position(ids: TokenRows, position: int, decode: Decode) -> Rule:
    """A position, with the token that always stands there."""
    tokens = ids[:, position].unique().tolist()
    words = f"position {position} (any token)"
    if position == 0:
        words = "the first token"
    elif len(tokens) == 1:
        words = f"{decode(tokens)!r} at position {position}"
    return Rule(words, position=position)


def _first_of_a_kind(ids: TokenRows, there: Mask) -> list[Rule]:
    """Some first tokens: of different tokens, those that are never a first token elsewhere."""
    texts = there[:, 0]
    others = ids[~texts, 0]
    tokens = [token for token in ids[texts, 0].unique().tolist() if token not in others]
    if len(tokens) < LEAST_CASES or float(texts.float().mean()) < SOME_TEXTS:
        return []
    return [Rule("some first tokens", position=0, tokens=tuple(tokens))]
