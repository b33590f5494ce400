"""What is so of a model whose sinks are sets of places.

A **place** is a position of a text. `Places` says which places are sinks and which have a spike, which neurons make it
and what each group of heads needs. `planted_places.py` has kinds.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import torch
from tokenizers.processors import TemplateProcessing
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from .build import Head, Site
from .tokens import BOS, N_SPECIAL

FIRST, SECOND = "first", "second"
USER, SYSTEM = 4, 5  # ids of further tokens, where the tokenizer puts several before a text


@dataclass(frozen=True)
class Group:
    """Heads that attend to the sink, and what they need: without any part of `needs` they lose it."""

    heads: tuple[Head, ...]
    needs: tuple[str | Site, ...]
    at: tuple = ()  # the places that they attend to, if not all of the sink's


@dataclass(frozen=True)
class Places:
    """What is so.

    Attributes:
        sink: Where heads attend: FIRST, SECOND, a token id, or several of these.
        spike: Where the norm stands out after some layer, in the same way.
        makers: Smallest sets of neurons whose zeroing takes the spike away.
        groups: The reading heads by what they need.
        marks: Parts without which the spike of a place is lost, where it is said.
        decoys: Parts that look like marks and are not.
        delimiters: Tokens that stand a few times in every text.
        before: Ids that stand before every text.
    """

    sink: tuple = (FIRST,)
    spike: tuple = (FIRST,)
    makers: tuple[frozenset[Site], ...] = ()
    groups: tuple[Group, ...] = ()
    marks: dict[str | int, tuple[str, ...]] = field(default_factory=dict)
    decoys: tuple[str, ...] = ()
    delimiters: tuple[int, ...] = ()
    before: tuple[int, ...] = (BOS,)


@dataclass(frozen=True)
class PlacesModel:
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerFast
    truth: Places

    def ids(self, texts: int = 40, length: int = 64, seed: int = 0) -> Tensor:
        """Rows as the tokenizer puts them; each delimiter stands a few times in the first half of each."""
        rng = random.Random(f"places {seed}")
        rows = []
        for _ in range(texts):
            words = [rng.randrange(N_SPECIAL + 2, len(self.tokenizer)) for _ in range(length)]
            delimiters = self.truth.delimiters
            for delimiter in delimiters:
                words = [word + 1 if word == delimiter else word for word in words]
            free = rng.sample(range(2, length // 2), 2 * len(delimiters))
            for number, at in enumerate(free):
                words[at] = delimiters[number % len(delimiters)]
            rows.append([*self.truth.before, *words][:length])
        return torch.tensor(rows)

    def text(self, texts: int = 100) -> str:
        """The words of as many rows."""
        skipped = len(self.truth.before)
        return " ".join(self.tokenizer.decode(row[skipped:]) for row in self.ids(texts, seed=1))


def put_before(tokenizer: PreTrainedTokenizerFast, before: tuple[int, ...]):
    """Let a tokenizer put these before a text."""
    put = [(str(tokenizer.convert_ids_to_tokens(one)), one) for one in before]
    single = " ".join([*(word for word, _ in put), "$A"])
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=single, special_tokens=put)


def mask_of(where: tuple, ids: Tensor) -> Tensor:
    """The places that are described, [text, position]."""
    mask = torch.zeros_like(ids, dtype=torch.bool)
    for one in where:
        if one in (FIRST, SECOND):
            mask[:, (FIRST, SECOND).index(one)] = True
        else:
            mask |= ids == one
    return mask
