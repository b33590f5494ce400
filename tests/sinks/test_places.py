"""Places of a sink are found without words, and words are given only if they mean these places and hardly any other."""

from __future__ import annotations

import torch

from sinkscope.sinks.spikes.spike import split_by_label

SHAPE, COMMA = (48, 40), 7
AT = torch.arange(SHAPE[1]).expand(SHAPE)


def drawn(seed: int) -> torch.Tensor:
    return torch.rand(SHAPE, generator=torch.Generator().manual_seed(seed))


def split(ids, there):
    return split_by_label(ids, there, lambda ids: " ".join(f"t{token}" for token in ids))


def test_the_simplest_words_are_taken():
    ids = (10 + 50 * drawn(0)).long()
    comma = (drawn(1) < 0.05) & (AT > 1)
    ids[comma], ids[:, 1] = COMMA, 2
    first_comma = comma & (comma.cumsum(1) == 1)
    several = torch.isin(ids, torch.tensor([11, 12, 13])) & (AT > 1)
    for there, words in {
        (AT == 0): "the first token",
        (AT == 3): "position 3 (any token)",
        (AT == 1): "'t2' at position 1",
        comma: "'t7' wherever it stands",
        first_comma: "the first 't7' of a text",
        (AT == 0) | comma: "the first token and 't7' wherever it stands",
        (comma & ~comma): "",
    }.items():
        assert " and ".join(place.label.words for place in split(ids, there)) == words
    (place,) = split(ids, several)
    assert place.label.words.endswith("wherever they stand")


def test_what_no_words_mean_are_pieces_first_tokens_apart_and_few_are_left_over():
    ids = (10 + 50 * drawn(0)).long()
    first, there = (ids < 30) & (AT == 0), (drawn(3) < 0.02) & (AT > 0)
    some, others = split(ids, there | first)
    assert some.is_first and some.label.words.startswith("some first tokens (") and some.mask.equal(first)
    assert others.mask.equal(there) and not others.matches(ids).any()
    assert others.label.words == f"{int(there.sum())} other positions (most often {others.label.token!r})"
    assert split(ids, (AT == 9) & (torch.arange(48)[:, None] == 0)) == []
