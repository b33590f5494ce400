"""What a patch does to repeated words and to ordinary text, beside no patch and one of random neurons: the records.

`patch make` judges the patch that it made by this, and `patch eval` any patch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float

from sinkscope.results.notation import count_of
from sinkscope.sinks.thresholds import HALF

INTACT, PATCHED, RANDOM, ONCE, OTHERS = range(5)
CASES = ("intact", "patched", "random", "one copy", "other tokens")
SENTENCES = {
    "norm": "Under the patch, copies of {words} reach at most {after:.0%} of the spike of {spike} (without it: "
    "{before:.0%}; random neurons: {random:.0%}).",
    "attention": "Heads that read the spike of {spike} give the copies {after:.0%} (without the patch: "
    "{before:.0%}; random neurons: {random:.0%}) of their attention.",
    "next token": "The model repeats the word with a probability of {after:.0%} (without the patch: {before:.0%}; "
    "random neurons: {random:.0%}).",
}
"""What is said of each reading."""


@dataclass(frozen=True)
class AfterCopies:
    """Attention and output after copies of each word: without the patch, with it, and with random neurons.

    Attributes:
        attention: Share of its attention that the text gives to the copies, mean over the heads that read each spike in
            ordinary text. NaN: no head does.
        one_more: Probability that the model writes the word once more after the last copy.
    """

    attention: Float[np.ndarray, "case spike word"]
    one_more: Float[np.ndarray, "case word"]


@dataclass(frozen=True)
class Perplexity:
    """Perplexity of held-out text.

    Attributes:
        patch: "none"; "patch"; "random patch": as many random neurons of the same layers.
        perplexity: The perplexity.
        change: Difference to the perplexity without a patch, as a share of it.
        margin: Two standard errors of the change, over paired pieces. None: fewer than three pieces.
    """

    patch: str
    perplexity: float
    change: float
    margin: float | None


@dataclass(frozen=True)
class OrdinaryText:
    """What a patch changes on held-out text.

    Attributes:
        pieces: Number of pieces.
        length: Tokens of a piece.
        perplexity: The perplexity without a patch, with it, and with a random one.
        largest_change: Largest change of a logit under the patch, in a few of the pieces.
        flips: Share of next tokens there whose likeliest prediction changes.
        largest_at: The token after which that logit is read.
    """

    pieces: int
    length: int
    perplexity: tuple[Perplexity, ...]
    largest_change: float
    flips: float
    largest_at: str

    def sentences(self) -> list[str]:
        """Say how much perplexity and logits change."""
        _, patched, random = self.perplexity
        margin = "" if patched.margin is None else f"± {patched.margin:.3%}; "
        return [
            f"The perplexity of {count_of(self.pieces, 'held-out text')} of {self.length} tokens changes by "
            f"{patched.change:+.3%} ({margin}random neurons: {random.change:+.3%}).",
            f"The largest change of a logit is {self.largest_change:.2g} (after {self.largest_at!r}); "
            f"{self.flips:.2%} of the likeliest tokens change.",
        ]


@dataclass(frozen=True)
class Reading:
    """What is read at and after copies: without the patch, with it, and with random neurons.

    Attributes:
        what: "norm": how far copies go along the spike at most; "attention": what text after the copies gives them, of
            the heads that read the spike; "next token": the probability of one more copy.
        spike: The spike, by its layers. Empty: it is not of one spike.
        words: Number of words.
        values: The numbers.
        broken: Whether copies break it in the intact model.
        repaired: In each case, whether copies do not break it: they do not reach the spike; less than half of the
            attention is left; the model writes the word once more.
    """

    what: str
    spike: str
    words: int
    values: Float[np.ndarray, " case"]
    broken: bool
    repaired: Bool[np.ndarray, " case"]


@dataclass(frozen=True)
class PatchProof:
    """What a patch does to repeated words and to ordinary text.

    Cases: "intact", "patched" and "random" are the last copy of each word without a patch, with it, and with as many
    random neurons of the same layers patched; without a patch also "one copy" behind ordinary text, and "other tokens".

    Attributes:
        words: The words that were repeated.
        repeats: How often each is repeated.
        spikes: The spikes of the first token, by their layers.
        along: Projection on the direction of each spike, as a share of the first token's.
        following: What follows copies. None: no word needs repair.
        ordinary: What changes on held-out text.
    """

    words: tuple[str, ...]
    repeats: int
    spikes: tuple[str, ...]
    along: Float[np.ndarray, "case spike word"]
    following: AfterCopies | None
    ordinary: OrdinaryText

    @property
    def has_spike(self) -> Bool[np.ndarray, "case spike word"]:
        """Return whether a position reaches half of the first token's projection."""
        return self.along >= HALF

    @property
    def failing(self) -> Bool[np.ndarray, "spike word"]:
        """Return the words that need repair: copies reach the spike in the intact model, and one copy does not."""
        return self.has_spike[INTACT] & ~self.has_spike[ONCE]

    def readings(self) -> list[Reading]:
        """Return what is read at the words that need repair in each spike; if none does, at all words."""
        norms, attention = list[Reading](), list[Reading]()
        for number, spike in enumerate(self.spikes):
            failing = self.failing[number]
            broken = bool(failing.any())
            shown = failing if broken else ~failing
            count, along = int(shown.sum()), self.along[: RANDOM + 1, number, shown].max(1)
            norms.append(Reading("norm", spike, count, along, broken, along < HALF))
            if self.following is not None and not np.isnan(self.following.attention[0, number]).all():
                given = self.following.attention[:, number, shown].mean(1)
                attention.append(Reading("attention", spike, count, given, broken, given < HALF * given[INTACT]))
        if self.following is None:
            return norms
        failing = self.failing.any(0)
        one_more = self.following.one_more[:, failing].mean(1)
        likely = one_more >= HALF
        following = Reading("next token", "", int(failing.sum()), one_more, not likely[INTACT], likely)
        return [*norms, *attention, following]

    def sentences(self) -> list[str]:
        """Say what the patch does in each spike, to attention and output after copies, and to ordinary text."""
        lines: list[str] = []
        for one in self.readings():
            before, after, random = one.values
            words = f"{one.words} of {count_of(len(self.words), 'word')}"
            values = {"before": before, "after": after, "random": random}
            lines.append(SENTENCES[one.what].format(words=words, spike=one.spike, **values))
        return [*lines, *self.ordinary.sentences()]
