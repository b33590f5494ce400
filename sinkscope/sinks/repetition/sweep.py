"""What is repeated, and what every reading of `repeat` has: sequences, and effects beside their controls."""

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
from sinkscope.results.effect import Effect
from sinkscope.sinks.tokens import TokenRows, pick_tokens, prefix_of, repeated, repetition_limit

CURVE_POINTS = 160  # numbers of repetitions on a curve, evenly spaced in their logarithm


@dataclass(frozen=True)
class Sweep:
    """What is repeated.

    Attributes:
        setup: The model and its text.
        before: Number of tokens before the first repetition.
        rows: The sequences, each of which repeats a token.
        named: Whether the caller named the tokens: effects are then about these, and else about words like those drawn.
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


def effect_of_copies(values: Float[Tensor, "kind case"], exact: bool = False) -> Effect:
    """Return the effect of copies, mean over cases, beside one copy at the position of the last and other tokens.

    Args:
        values: What copies have, and one copy, and other tokens.
        exact: Whether the effect is about these cases and no others.
    """
    value, single, others = values.mean(1).tolist()
    margin = 0.0 if exact else margin_of(values[0].numpy())
    return Effect(value, margin, {"one copy": single, "other tokens": others})
