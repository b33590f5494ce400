"""Masks of sinks: against plain hooks on planted models, under padding, and in any batch."""

from __future__ import annotations

import pytest
import torch
from organisms import mask_of, organism, tiny_model
from plain_hooks import attention, ratios, residuals
from refusals import refused

import sinkscope as ss
from sinkscope.engine.attention import Attention
from sinkscope.opening.load import target_of
from sinkscope.sinks.spikes.survey import read_survey

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


@pytest.mark.parametrize(("kind", "left"), [("no_norm", True), ("two_delimiters", False)])
def test_padding_is_no_sink_and_changes_none(kind, left):
    o = organism(kind=kind)
    rows = [row[:length] for row, length in zip(o.natural(4, 48), (48, 30, 41, 30), strict=True)]
    looks_like_one = int(rows[0][mask_of(o.truth.places, rows[0][None])[0]][-1])
    padded, expected = torch.full((4, 52), looks_like_one), torch.zeros(4, 52, dtype=torch.bool)
    real = torch.zeros(4, 52, dtype=torch.long)
    for number, row in enumerate(rows):
        where = slice(52 - len(row), 52) if left else slice(0, len(row))
        padded[number, where], real[number, where], expected[number, where] = row, 1, plain(o.model, row)
    assert expected.sum() >= 4
    assert torch.equal(ss.sink_mask(o.model, padded, attention_mask=real), expected)
    assert ss.sink_mask(o.model, [row.tolist() for row in rows]).sum() == expected.sum()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"attention_mask": torch.ones(2, 7)}, r"one for each token id"),
        ({"ids": torch.full((1, 5000), 9)}, "the longest row has 5000 tokens"),
        ({"site": "blocks.14"}, "matches nothing"),
        ({"site": "blocks.0.attn.hook_pattern"}, "attention rows"),
        ({"site": "blocks.*.hook_resid_post"}, "several"),
    ],
)
def test_what_is_no_input_is_refused_in_one_line(options, message):
    with refused(message):
        ss.sink_mask(organism().model, **{"ids": torch.full((2, 8), 9)} | options)


@pytest.mark.parametrize("family", ["llama", "gpt_oss", "gemma3_text"])
def test_a_long_text_is_read_in_chunks_of_queries(family, monkeypatch):
    """With windows and learned sinks they add up to what is read at once."""
    target = target_of(tiny_model(family)[0])
    ids = torch.randint(5, 90, (2, 60), generator=torch.Generator().manual_seed(1))
    want = read_survey(target, ids)
    lengths, rows_of = [], Attention._rows

    def record(attention: Attention, part: slice) -> torch.Tensor:
        lengths.append(part.stop - part.start)
        return rows_of(attention, part)

    monkeypatch.setattr(Attention, "_rows", record)
    monkeypatch.setattr("sinkscope.engine.attention._CHUNK", 16)
    got = read_survey(target, ids)
    assert {*lengths} == {16, 12}
    for name in ("attention", "first_to_itself", "n_queries", "learned"):
        torch.testing.assert_close(getattr(got, name), getattr(want, name), rtol=1e-5, atol=1e-6)
    assert want.attention.any() and (want.learned.any() or family != "gpt_oss")
