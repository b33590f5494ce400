"""What is repeated, and what every reading of `repeat` has: sequences, numbers of repetitions, curves over them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import plotly.express as px
import plotly.graph_objects as go
import torch
from jaxtyping import Float, Int
from torch import Tensor

from sinkscope.errors import SinkscopeError
from sinkscope.measure import Setup
from sinkscope.models.text import beginning
from sinkscope.results.notation import word_form, word_list
from sinkscope.results.result import Number
from sinkscope.results.style import long_table
from sinkscope.results.tables import Table
from sinkscope.sinks.chunks import token_texts
from sinkscope.sinks.tokens import (
    CYCLE,
    TokenRows,
    encode,
    known_token,
    repetition_limit,
    words_to_repeat,
)

NO_LAYER = "there is no layer to read repetitions at"
CURVE_POINTS = 160  # numbers of repetitions on a curve, evenly spaced in their logarithm
PAPER_WORDS = {"attention": ("the",), "distance": ("cat", "dog", "the", "bla")}  # Fig. 1 and 5 of Yona et al. 2025
PAPER_PREFIXES = {"distance": "some prefix:", "probability": "Repeat:"}  # Fig. 5 and Table 3


@dataclass(frozen=True)
class Sweep:
    """What was repeated.

    Attributes:
        tokens: The text that each sequence repeats.
        ids: The ids that each sequence repeats in turn. More than one form a cycle, and repetitions then count tokens.
        before: The tokens before the first repetition.
        max_repeats: Number of repetitions in every sequence.
        counts: The numbers of repetitions at which curves are given.
        replaced: Words of the paper's figure that are not one token of their own here, each with the word instead; and
            a prefix with words that are unknown here, with what it became.
    """

    tokens: tuple[str, ...]
    ids: tuple[tuple[int, ...], ...]
    before: tuple[str, ...]
    max_repeats: int
    counts: Int[np.ndarray, " n"]
    replaced: tuple[tuple[str, str], ...] = ()

    @property
    def times(self) -> str:
        """The number of repetitions in words."""
        return f"{self.max_repeats} {word_form(self.max_repeats, 'repetition', 'repetitions')}"

    @property
    def single(self) -> list[int]:
        """Rows that repeat one token, so without the cycle."""
        return [row for row, ids in enumerate(self.ids) if len(ids) == 1]

    @property
    def places(self) -> Int[np.ndarray, " n"]:
        """Positions of the last repetition after each number of repetitions in `counts`."""
        return self.counts + len(self.before) - 1

    def replacement(self) -> list[str]:
        """A line about words that were replaced; no line if none were."""
        if not self.replaced:
            return []
        words = word_list([f"{taken!r} for {wanted!r}" for wanted, taken in self.replaced])
        return [f"Words that are not one token of this tokenizer, or unknown to it, were replaced: {words}."]

    def curves(self, values: Float[np.ndarray, "panel token n"], panels: Sequence[str], label: str) -> Any:
        """A line per token over the number of repetitions, one panel for each name; both axes logarithmic."""
        rows = long_table({label: values}, panel=panels, token=self.tokens, repetitions=self.counts.tolist())
        return px.line(
            rows, render_mode="svg", x="repetitions", y=label, color="token", facet_col="panel", log_x=True, log_y=True
        )


@dataclass(frozen=True)
class Reading:
    """What a model shows over the number of repetitions: arrays, a conclusion, rows and a drawing of them."""

    def conclusion(self) -> str:
        """The finding."""
        raise NotImplementedError

    def rows(self) -> Table:
        """The table."""
        return []

    def draw(self) -> Any:
        """The figure."""
        return go.Figure()

    def details(self) -> list[str]:
        """Further lines."""
        return []

    def numbers(self) -> list[Number]:
        """The numbers by which two models are compared."""
        return []


@dataclass(frozen=True)
class NoReading(Reading):
    """What there is instead, if a reading needs the layer of a norm spike and no MLP makes one."""

    absence: str

    def conclusion(self) -> str:
        """Why there is no reading."""
        return self.absence


def sweep_rows(
    setup: Setup,
    read: str,
    tokens: Sequence[str] | None,
    prefix: str | None,
    max_repeats: int | None,
    *,
    cycle: bool = False,
    after: int = 0,
) -> tuple[Sweep, TokenRows]:
    """Choose the tokens of a reading and build its sequences.

    Args:
        setup: The model and its text.
        read: The reading.
        tokens: The words to repeat. None: those of the paper's figure, or words of the text.
        prefix: Text before the repetitions. None: that of the paper's figure.
        max_repeats: Number of repetitions. None: 1,024, or what the context holds.
        cycle: Whether all words are also repeated in turn.
        after: Positions of the context that are kept free for what follows.

    Raises:
        SinkscopeError: A word is not one token, or occurs in the prefix, or the context is too short.
    """
    if prefix is None:
        prefix = PAPER_PREFIXES.get(read)
    paper = CYCLE if cycle else PAPER_WORDS.get(read, ())
    words = words_to_repeat(setup, tokens, prefix, paper)
    replaced: list[tuple[str, str]] = []
    for wanted, word in zip(() if tokens else paper, words, strict=False):
        if known_token(setup.tokenizer, wanted) != word:
            replaced.append((wanted, token_texts(setup.target, [word])[0].strip()))
    cycles: list[tuple[int, ...]] = [(word,) for word in words]
    if cycle and len(words) > 1:
        cycles.append(tuple(words))
    before = tokens_before(setup, prefix, words)
    count = repetition_limit(setup.target, max_repeats, len(before) + after)
    setup.record(max_repeats=count, prefix=prefix)
    rows = []
    labels = []
    for repeated in cycles:
        rows.append([*before, *(repeated * count)[:count]])
        labels.append(" ".join(string.strip() or repr(string) for string in token_texts(setup.target, repeated)))
    before_words = token_texts(setup.target, before)
    unknown = getattr(setup.tokenizer, "unk_token_id", None)
    if prefix is not None and unknown in (known := encode(setup, prefix)):
        replaced.append((prefix, setup.tokenizer.decode(known)))
    sweep = Sweep(tuple(labels), tuple(cycles), before_words, count, curve_counts(count), tuple(replaced))
    return sweep, torch.tensor(rows)


def tokens_before(setup: Setup, prefix: str | None, repeated: list[int]) -> list[int]:
    """What stands before every text (BOS, or several special tokens) and the prefix; if neither, a word of the text.

    Raises:
        SinkscopeError: The prefix contains a repeated token.
    """
    before = encode(setup, prefix)
    for token in before:
        if token in repeated:  # its first occurrence would count as a repetition
            raise SinkscopeError(
                f"--prefix {prefix!r} contains the repeated token {setup.tokenizer.decode([token])!r}, so it would be "
                "one more repetition; give another --prefix or --token"
            )
    before = [*beginning(setup.tokenizer, setup.bos), *before]
    if before:
        return before
    # Any token in first place is marked, so it must not be a repeated one.
    others = [token for token in setup.ids.flatten().tolist() if token not in repeated]
    return [*others, 0][:1]


def curve_counts(most: int) -> Int[np.ndarray, " n"]:
    """Numbers of repetitions from 1 to `most`: all small ones, then evenly spaced in their logarithm."""
    return np.unique(np.geomspace(1, most, CURVE_POINTS).round().astype(int))


def rounded(values: Tensor) -> np.ndarray:
    """The values with seven significant digits, so that a JSON file stays small."""
    digits = [float(f"{value:.7g}") for value in values.flatten().tolist()]
    return np.array(digits, dtype=float).reshape(tuple(values.shape))
