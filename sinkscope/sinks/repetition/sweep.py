"""What is repeated, and what every reading of `repeat` has: sequences, curves, and claims beside their contrasts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import plotly.express as px
import torch
from jaxtyping import Float, Int
from torch import Tensor

from sinkscope.errors import SinkscopeError
from sinkscope.hooks.trace.run import trace
from sinkscope.measure import Setup
from sinkscope.models.draws import draws
from sinkscope.models.norms import norm_of
from sinkscope.models.text import beginning
from sinkscope.results.claims import Claim, Claims, Contrast, ContrastKind, Outcome, Search
from sinkscope.results.notation import word_form
from sinkscope.results.parts import Head, Neuron, Part, Parts, Tokens
from sinkscope.results.style import long_table
from sinkscope.sinks.chunks import token_texts
from sinkscope.sinks.find.layer_scan import LayerScan
from sinkscope.sinks.find.left import claim_of
from sinkscope.sinks.tokens import CYCLE, TokenRows, encode, repetition_limit, words_to_repeat

SEQUENCES = 4  # sequences per pass
CURVE_POINTS = 160  # numbers of repetitions on a curve, evenly spaced in their logarithm
PAPER_WORDS = {"ablation": CYCLE, "attention": ("the",), "distance": ("cat", "dog", "the", "bla")}  # Fig. 3, 1, 5
PAPER_PREFIXES = {"distance": "some prefix:", "probability": "Repeat:"}  # Fig. 5 and Table 3
CONTRASTS: dict[type[Part], tuple[str, tuple[tuple[ContrastKind, str], ...]]] = {
    Tokens: ("makes", (("one copy", ""), ("other tokens", ""))),
    Neuron: ("makes", (("intact", ""), ("random", ""))),
    Head: ("marks", (("other", "no head"), ("random", "another head"))),
}
"""The role of tokens, edited neurons, and a head alone; and what stands beside them: kinds of contrasts, and names."""


@dataclass(frozen=True)
class Sweep:
    """What was repeated.

    Attributes:
        tokens: The token that each sequence repeats.
        ids: Their ids.
        before: The tokens before the first repetition.
        max_repeats: Number of repetitions in every sequence.
        counts: The numbers of repetitions at which curves are given.
    """

    tokens: tuple[str, ...]
    ids: tuple[int, ...]
    before: tuple[str, ...]
    max_repeats: int
    counts: Int[np.ndarray, " n"]

    def curves(self, values: Float[np.ndarray, "panel token n"], panels: Sequence[str], label: str) -> Any:
        """A line per token over the number of repetitions, one panel for each name; both axes logarithmic."""
        rows = long_table({label: values}, panel=panels, token=self.tokens, repetitions=self.counts.tolist())
        axes: dict[str, Any] = {"x": "repetitions", "y": label, "color": "token", "facet_col": "panel"}
        return px.line(rows, render_mode="svg", **axes, log_x=True, log_y=True)


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What a model shows over the number of repetitions; a subclass has arrays, facts, rows and a drawing of them.

    Attributes:
        claims: What neurons do after the copies, if that was measured; then what copies do.
    """

    claims: Claims = ()


def sweep_rows(
    setup: Setup,
    read: str,
    tokens: Sequence[str] | None,
    prefix: str | None,
    max_repeats: int | None,
    after: int = 0,
) -> tuple[Sweep, TokenRows]:
    """Choose the tokens of a reading and build its sequences.

    What stands before a text (BOS, or several special tokens) and the prefix stand first; if neither, a word of the
    text does.

    Args:
        setup: The model and its text.
        read: The reading.
        tokens: The words to repeat. None: those of the paper's figure, or words of the text.
        prefix: Text before the repetitions. None: that of the paper's figure.
        max_repeats: Number of repetitions. None: 1,024, or what the context holds.
        after: Positions of the context that are kept free for what follows.

    Raises:
        SinkscopeError: A word is not one token, or occurs in the prefix, or the context is too short.
    """
    if prefix is None:
        prefix = PAPER_PREFIXES.get(read)
    words = words_to_repeat(setup, tokens, prefix, PAPER_WORDS.get(read, ()))
    leading = encode(setup, prefix)
    for token in leading:
        if token in words:  # its first occurrence would count as a repetition
            raise SinkscopeError(
                f"--prefix {prefix!r} contains the repeated token {setup.tokenizer.decode([token])!r}, so it would be "
                "one more repetition; give another --prefix or --token"
            )
    # Any token in first place is marked, so it must not be a repeated one.
    others = [token for token in setup.ids.flatten().tolist() if token not in words]
    before = [*beginning(setup.tokenizer, setup.bos), *leading] or [*others, 0][:1]
    count = repetition_limit(setup.target, max_repeats, len(before) + after)
    setup.record(max_repeats=count, prefix=prefix)
    counts = np.unique(np.geomspace(1, count, CURVE_POINTS).round().astype(int))
    labels = [text.strip() or repr(text) for text in token_texts(setup.target, words)]
    sweep = Sweep(tuple(labels), tuple(words), token_texts(setup.target, before), count, counts)
    return sweep, torch.tensor([[*before, *[word] * count] for word in words])


def beside_copies(setup: Setup, rows: TokenRows, before: int) -> tuple[TokenRows, TokenRows, TokenRows]:
    """The rows of copies; one copy behind other tokens at the last position; and other tokens everywhere.

    Args:
        setup: The model and its text, from which the other tokens are drawn.
        rows: The sequences.
        before: Number of tokens before the copies, which stay.
    """
    ids = setup.ids[:, 1:].unique()
    generator = draws(setup.seed, "tokens beside copies")
    others = rows.clone()
    for row in others:
        ordinary = ids[ids != row[-1]]
        row[before:] = ordinary[torch.randint(len(ordinary), (len(row) - before,), generator=generator)]
    return rows, one_copy(others, rows), others


def one_copy(others: TokenRows, rows: TokenRows) -> TokenRows:
    """Other tokens, with one copy where the last copy of each row stands."""
    return torch.cat([others[:, :-1], rows[:, -1:]], 1)


def claim_of_cases(
    subject: Parts,
    place: str,
    outcome: Outcome,
    values: Float[Tensor, "kind case"],
    tried: int = 0,
    edit: str = "",
) -> Claim:
    """What tokens, neurons or a head do, mean over cases.

    Args:
        subject: The tokens, neurons or head.
        place: Where it was read.
        outcome: What was read.
        values: The outcome, and that of the two contrasts.
        tried: Number of cases of which these were taken. 0: all of them.
        edit: How neurons were edited, if they were not zeroed.
    """
    role, beside = CONTRASTS[type(subject[0])]
    controls = values[1:].mean(1).tolist()
    contrasts = [Contrast(kind, control, 1, name) for (kind, name), control in zip(beside, controls, strict=True)]
    most = None if isinstance(subject[0], Neuron) else float(values[0].max())  # of what an edit leaves it says nothing
    count = tried or values.shape[1]
    search = Search(word_form(count, "case", "cases"), count, most)
    return claim_of(role, subject, outcome, place, values[0], contrasts, search, edit)


def claim_of_copies(count: int, outcome: Outcome, values: Float[Tensor, "kind case"], tried: int = 0) -> Claim:
    """What a number of copies does, beside one copy at the position of the last and other tokens there."""
    return claim_of_cases((Tokens("copies", count),), f"the last of {count} copies", outcome, values, tried)


@torch.no_grad()
def norms_at(
    scan: LayerScan, sites: Sequence[str], ids: TokenRows, size: int = SEQUENCES
) -> Float[Tensor, "row pos site"]:
    """Norms of the residual stream, as those of the spike: without the dimensions that are massive on all tokens."""
    norms = trace(scan.target, ids, sites, partial(norm_of, without=scan.shared_dims), batch_size=size)
    return torch.stack([norms[site] for site in sites], dim=2)


def norms_at_sink(scan: LayerScan, ids: TokenRows, size: int = SEQUENCES) -> Float[Tensor, "row pos"]:
    """Norms after the sink layer, where each pass of so many sequences ends."""
    return norms_at(scan, [f"blocks.{scan.layer}.hook_resid_post"], ids, size)[..., 0]


def rounded(values: Tensor) -> np.ndarray:
    """The values with seven significant digits, so that a JSON file stays small."""
    digits = [f"{value:.7g}" for value in values.flatten().tolist()]
    return np.array(digits, dtype=float).reshape(tuple(values.shape))
