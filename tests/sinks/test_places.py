"""Places of a sink are found without words, and words are given only if they mean these places and hardly any other."""

from __future__ import annotations

import torch
from torch import Tensor

from sinkscope.sinks.spikes.spike import split_by_label

TEXTS, LENGTH, VOCAB = 48, 40, 60
BOS, COMMA = 1, 7


def texts(seed: int = 0, bos: bool = True) -> Tensor:
    ids = torch.randint(10, VOCAB, (TEXTS, LENGTH), generator=torch.Generator().manual_seed(seed))
    if bos:
        ids[:, 0] = BOS
    return ids


def decode(ids: list[int]) -> str:
    return " ".join(f"t{token}" for token in ids)


def put(ids: Tensor, token: int, often: int, seed: int = 0) -> Tensor:
    """A token at random positions after the first of every text."""
    generator = torch.Generator().manual_seed(seed)
    for row in ids:
        row[1 + torch.randperm(LENGTH - 1, generator=generator)[:often]] = token
    return ids


def said(ids: Tensor, there: Tensor) -> str | None:
    found = split_by_label(ids, there, decode)
    return " and ".join(place.label.words for place in found) or None


def test_the_simplest_words_are_taken():
    ids = put(texts(), COMMA, 2)
    at = torch.arange(LENGTH).expand_as(ids)
    comma = ids == COMMA
    first_comma = comma & (comma.cumsum(1) == 1)
    assert said(ids, at == 0) == "the first token"
    assert said(ids, at == 3) == "position 3 (any token)"
    assert said(ids, comma) == "'t7' wherever it stands"
    assert said(ids, first_comma) == "the first 't7' of a text"
    assert said(ids, (at == 0) | comma) == "the first token and 't7' wherever it stands"
    assert said(ids, torch.isin(ids, torch.tensor([11, 12, 13]))).endswith("wherever they stand")
    assert said(ids, torch.zeros_like(comma)) is None
    ids[:, 1] = 2
    assert said(ids, at == 1) == "'t2' at position 1"


def test_what_no_words_mean_are_pieces_first_tokens_apart_and_few_are_left_over():
    ids = texts(bos=False)
    first = (ids < 30) & (torch.arange(LENGTH) == 0)
    there = torch.rand(TEXTS, LENGTH, generator=torch.Generator().manual_seed(3)) < 0.02
    there[:, 0] = False
    some, others = split_by_label(ids, there | first, decode)
    assert some.is_first and some.label.words.startswith("some first tokens (") and some.mask.equal(first)
    assert others.mask.equal(there) and not others.matches(ids).any()
    assert others.label.words == f"{int(there.sum())} other positions (most often {others.label.token!r})"
    few = torch.zeros_like(there)
    few[0, 9] = True
    assert split_by_label(ids, few, decode) == []
