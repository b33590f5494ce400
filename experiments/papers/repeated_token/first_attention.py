"""How far the first attention's output at copies of a token is from that at the token alone (Fig. 5, Theorem 4.1)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import plotly.express as px
import torch
from jaxtyping import Float

from sinkscope.errors import SinkscopeError
from sinkscope.hooks.trace import trace
from sinkscope.measure import Mean, Natural, Result, Row, Setup, column, measurement
from sinkscope.results.style import figure_of

SITE = "blocks.0.hook_attn_out"
PREFIX = "some prefix:"


@dataclass(frozen=True)
class Word:
    """A word that is repeated."""

    token: str

    def __str__(self) -> str:
        return repr(self.token)


@dataclass(frozen=True, kw_only=True)
class Distance(Row, table="distances", title="distance of the first attention's output to that of the word alone"):
    """The distances of one word, over the norm of the output at the word alone."""

    key: Word
    first: Mean = column(
        "first copy", "share", "Norm of the difference at the first copy, over that at the word alone."
    )
    last: Mean = column("last copy", "share", "The same at the last copy.")
    other: Mean = column(
        "control:\nother words", "share", "The same between the words alone: mean over the other words of the list."
    )


@dataclass(frozen=True, kw_only=True)
class FirstAttention(Result):
    """Distance of the first attention's output at each copy to that at the word alone, over the norm of the latter."""

    words: tuple[Distance, ...]
    distances: Float[np.ndarray, "word copy"]

    def conclusion(self) -> str:
        """Return how far the last copies are, and of how many words they are nearer than other words are."""
        row = max(self.words, key=lambda row: row.last.value)
        nearer = [row for row in self.words if row.last.value < row.other.value]
        return (
            f"At copy {self.distances.shape[1]} the first attention's output differs from that at the word alone by "
            f"{row.text('last')} of its norm or less (at the first copy of {row.label}: {row.text('first')}). As a "
            f"control, other words alone differ more than that copy for {len(nearer)} of {len(self.words)} words."
        )

    def figure(self) -> Any:
        """Draw the distance over the number of copies, as the paper's Fig. 5."""
        copies = np.arange(1, self.distances.shape[1] + 1)
        names = [row.key.token for row in self.words]
        fig = px.line(x=np.tile(copies, len(names)), y=self.distances.flatten(), color=np.repeat(names, len(copies)))
        fig.update_layout(xaxis_title="copy", yaxis_title="distance over norm", legend_title="word")
        return figure_of(fig, self, width=900, height=460)


@measurement()
def first_attention(
    setup: Setup, *, words: Sequence[str] = ("cat", "dog", "the", "bla"), copies: Natural = 500
) -> FirstAttention:
    """Compare the first attention's output at copies behind BOS and a prefix with that at the word alone, without BOS.

    Args:
        words: The words; of each, its first token.
        copies: Number of copies.
    """
    if len({*words}) < 2:
        raise SinkscopeError(
            f"--words has {len({*words})} word: give two or more, of which each is the others' control"
        )
    encode = setup.tokenizer.encode
    ids = torch.tensor([encode(word, add_special_tokens=False)[0] for word in words])
    begin = [] if setup.bos is None else [setup.bos]
    begin += encode(PREFIX, add_special_tokens=False)
    rows = torch.cat([torch.tensor(begin).expand(len(ids), -1), ids[:, None].expand(-1, copies)], 1)
    alone = trace(setup.target, ids[:, None], SITE)[SITE][:, 0].float()
    outputs = trace(setup.target, rows, SITE, batch_size=1)[SITE][:, len(begin) :].float()
    norms = alone.norm(dim=-1)
    distances = ((outputs - alone[:, None]).norm(dim=-1) / norms[:, None]).numpy()
    between = torch.cdist(alone, alone) / norms[:, None]
    made: list[Distance] = []
    for at, word in enumerate(words):
        other = float(between[at].sum() / (len(ids) - 1))
        first, last = Mean(float(distances[at, 0])), Mean(float(distances[at, -1]))
        made.append(Distance(key=Word(word), first=first, last=last, other=Mean(other)))
    return FirstAttention(words=tuple(made), distances=distances)
