"""What is repeated, and what every reading of `repeat` has: sequences, and claims beside their contrasts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from sinkscope.errors import SinkscopeError
from sinkscope.measure import Setup
from sinkscope.measure.margin import margin_of
from sinkscope.models.draws import draws
from sinkscope.models.text import beginning
from sinkscope.results.claims import Claim, Contrast, ContrastKind, Outcome, SearchSpace
from sinkscope.results.notation import word_form
from sinkscope.results.parts import Neuron, Parts, Tokens
from sinkscope.sinks.tokens import TokenRows, pick_tokens, prefix_of, repeated, repetition_limit

CURVE_POINTS = 160  # numbers of repetitions on a curve, evenly spaced in their logarithm


@dataclass(frozen=True)
class Sweep:
    """What is repeated.

    Attributes:
        setup: The model and its text.
        before: Number of tokens before the first repetition.
        rows: The sequences, each of which repeats a token.
        named: Whether the caller named the tokens: claims are then about these, and else about words like those drawn.
    """

    setup: Setup
    before: int
    rows: TokenRows
    named: bool = False

    @property
    def count(self) -> int:
        """Return the number of repetitions in each sequence."""
        return self.rows.shape[1] - self.before

    @property
    def counts(self) -> Int[np.ndarray, " n"]:
        """Return the numbers of repetitions at which curves are given."""
        return np.unique(np.geomspace(1, self.count, CURVE_POINTS).round().astype(int))

    @property
    def words(self) -> list[int]:
        """Return the repeated tokens."""
        return self.rows[:, -1].tolist()

    def contrasts(self) -> tuple[TokenRows, TokenRows]:
        """Make rows with one copy after other tokens of the text, at the last position; and with other tokens alone."""
        ids, others = self.setup.ids[:, 1:].unique(), self.rows.clone()
        ordinary, places = ids[~torch.isin(ids, self.rows[:, -1])], others[:, self.before :]
        generator = draws(self.setup.seed, "tokens beside copies")
        places[:] = ordinary[torch.randint(len(ordinary), places.shape, generator=generator)]
        return append_copy(others, self.rows), others


def sweep_of(
    setup: Setup, tokens: Sequence[str] | None, prefix: str | None, max_repeats: int | None, after: int = 0
) -> Sweep:
    """Choose the tokens of a reading and build its sequences.

    What stands before a text (BOS, or several special tokens) and the prefix stand first; if neither, a word of the
    text does.

    Args:
        setup: The model and its text.
        tokens: The words to repeat. None: words of the text.
        prefix: Text before the repetitions.
        max_repeats: Number of repetitions. None: 1,024, or what the context holds.
        after: Positions of the context that are kept free for what follows.

    Raises:
        SinkscopeError: A word is not one token, or occurs in the prefix, or the context is too short.
    """
    words = pick_tokens(setup, tokens)
    leading = setup.tokenizer(prefix or "", add_special_tokens=False)["input_ids"]
    if not {*leading}.isdisjoint(words):
        raise SinkscopeError(f"--prefix {prefix!r} contains a repeated token, which would be one more repetition")
    # Any token in first place is marked, so it must not be a repeated one.
    before = [*beginning(setup.tokenizer, setup.bos), *leading] or prefix_of(setup, words)
    count = repetition_limit(setup.target, max_repeats, len(before) + after)
    setup.record(max_repeats=count)
    return Sweep(setup, len(before), repeated(before, words, count), named=tokens is not None)


def append_copy(others: TokenRows, rows: TokenRows) -> TokenRows:
    """Put one copy after other tokens, where the last copy of each row stands."""
    return torch.cat([others[:, :-1], rows[:, -1:]], 1)


def claim_of_cases(
    subject: Parts,
    place: str,
    outcome: Outcome,
    values: Float[Tensor, "kind case"],
    edit: str = "",
    exact: bool = False,
) -> Claim:
    """Make the claim about what tokens or neurons do, mean over cases.

    Args:
        subject: The tokens or neurons.
        place: Where it was read.
        outcome: What was read.
        values: The outcome, and that of the two contrasts.
        edit: How neurons were edited, if they were not zeroed.
        exact: Whether the claim is about these cases and no others.
    """
    kinds: tuple[ContrastKind, ...] = ("one copy", "other tokens")
    if isinstance(subject[0], Neuron):
        kinds = ("intact", "random")
    value, *others = values.mean(1).tolist()
    count = values.shape[1]
    return Claim(
        role="makes",
        subject=subject,
        outcome=outcome,
        place=place,
        value=value,
        contrasts=tuple(map(Contrast, kinds, others)),
        draws=count,
        search=SearchSpace(word_form(count, "case", "cases"), count),
        margin=0.0 if exact else margin_of(values[0].numpy()),
        edit=edit,
    )


def claim_of_copies(count: int, outcome: Outcome, values: Float[Tensor, "kind case"], exact: bool = False) -> Claim:
    """Make the claim about a number of copies, beside one copy at the position of the last and other tokens there."""
    return claim_of_cases((Tokens("copies", count),), f"the last of {count} copies", outcome, values, exact=exact)
