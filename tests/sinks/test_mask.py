"""Masks of sinks: against plain hooks on planted models, under padding, and in any batch."""

from __future__ import annotations

import pytest
import torch
from organisms import mask_of, organism
from plain_hooks import attention, ratios, residuals
from refusals import refused

import sinkscope as ss

pytestmark = pytest.mark.few_texts


@torch.no_grad()
def plain(model, row: torch.Tensor) -> torch.Tensor:
    """The sinks of one text, by plain hooks and the definitions: norms over the typical one, and attention received."""
    given, length = attention(model, row[None])[:, 0], len(row)
    there = (ratios(residuals(model, row[None]))[:, 0] > 3).any(0)
    heads = len(given.flatten(0, 1))
    for at in range(length - 16):
        attending = int((given[:, :, at + 1 :, at].mean(2) > 0.3).sum())
        there[at] |= attending >= max(2, (0.01 if at == 0 else 0.05) * heads)
    return there


@pytest.mark.parametrize("kind", ["no_norm", "two_delimiters", "sink", "none"])
def test_the_mask_is_what_was_planted_and_what_plain_hooks_say(kind):
    o = organism(kind=kind)
    ids = o.natural(4, 48)
    mask = ss.sink_mask(o.model, ids)
    assert torch.equal(mask, mask_of(o.truth.places, ids))
    assert torch.equal(mask, torch.stack([plain(o.model, row) for row in ids]))


@pytest.mark.parametrize(("kind", "side"), [("no_norm", "left"), ("two_delimiters", "right")])
def test_padding_is_no_sink_and_changes_none(kind, side):
    o = organism(kind=kind)
    ids = o.natural(4, 48)
    lengths = [48, 30, 41, 30]
    padded = torch.full((4, 52), int(ids[mask_of(o.truth.places, ids)][-1]))  # the padding looks like a sink
    expected, real = torch.zeros(4, 52, dtype=torch.bool), torch.zeros(4, 52, dtype=torch.long)
    for number, length in enumerate(lengths):
        where = slice(0, length) if side == "right" else slice(52 - length, 52)
        padded[number, where], real[number, where] = ids[number, :length], 1
        expected[number, where] = plain(o.model, ids[number, :length])
    assert expected.sum() >= 4
    assert torch.equal(ss.sink_mask(o.model, padded, attention_mask=real), expected)
    ragged = ss.sink_mask(o.model, [ids[number, :length].tolist() for number, length in enumerate(lengths)])
    assert ragged.shape == (4, 48) and ragged.sum() == expected.sum()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"attention_mask": torch.ones(2, 7)}, r"\(2, 7\) for token ids of shape \(2, 8\)"),
        ({"ids": torch.full((1, 5000), 9)}, "the longest row has 5000 tokens"),
        ({"site": "blocks.14"}, "matches nothing"),
        ({"site": "blocks.0.attn.hook_pattern"}, "attention rows"),
        ({"site": "blocks.*.hook_resid_post"}, "several"),
    ],
)
def test_what_is_no_input_is_refused_in_one_line(options, message):
    with refused(message):
        ss.sink_mask(organism().model, **{"ids": torch.full((2, 8), 9)} | options)
