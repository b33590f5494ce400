"""Barcodes and locking heads against planted ones and against the attention of stock eager runs."""

from __future__ import annotations

import secrets
from unittest import mock

import numpy as np
import pytest
import torch
from organisms import kept_loop, tiny_model
from organisms.tokens import BOS
from plain_hooks import attention
from refusals import refused

from sinkscope.kv import StreamingLLM
from sinkscope.loops.barcode import LOCK_GAIN, barcode
from sinkscope.loops.text.signals import end_loop

PROMPT = [1, *range(10, 30)]


def measured(seed: int, period: int, new: int, onset: int = 0, causes: tuple[str, ...] = ("copies",)):
    """A barcode beside a walk on the ring, which for an organism is ordinary text; and the planted heads."""
    made = kept_loop(causes, seed, period=period)
    ids = made.prompt(onset)
    walk = torch.tensor([[BOS, *made.walk(400, len(ids) + new - 1)]])
    with mock.patch("sinkscope.loops.barcode.text_rows", lambda *_: walk):
        return barcode(made.model, ids, max_new_tokens=new, tokenizer=made.tokenizer), made.locking_heads


def test_scores_and_pictures_are_those_of_an_eager_run(monkeypatch):
    """With sizes for which few tokens are enough; read in one pass, and token by token where an intervention acts."""
    monkeypatch.setattr("sinkscope.loops.barcode.PICTURE_STEPS", 8)
    monkeypatch.setattr("sinkscope.loops.barcode.SUFFIX", 9)
    model, tokenizer = tiny_model("gpt_oss")
    model.generation_config.eos_token_id = None
    ordinary = torch.randint(4, 90, (1, 36), generator=torch.Generator().manual_seed(1))
    monkeypatch.setattr("sinkscope.loops.barcode.text_rows", lambda *_: ordinary)
    options = {"heads": [(0, 1), (2, 3)], "max_new_tokens": 15, "tokenizer": tokenizer}
    result, again = (barcode(model, PROMPT, **options, interventions=edit) for edit in (None, StreamingLLM(1000)))
    assert (result.shown, result.layers, result.steps) == (("L0.H1", "L2.H3"), (0, 2), 15)
    shift, late = result.period or 1, ((result.onset or result.prompt_tokens) + 35) // 2
    whole = (result.ids, result.attention, result.score), (ordinary[0], result.control_attention, result.control_score)
    for ids, picture, score in whole:
        dense = attention(model, torch.tensor([[*ids]]))[[0, 2], 0]  # layer head query key
        drawn = dense[:, :, -9:-1, -25:-1]  # the last of all chose no token
        np.testing.assert_allclose(picture, torch.stack([drawn[0, 1], drawn[1, 3]]).numpy(), atol=6e-4)
        assert (picture.sum(2) < 1).all(), "a learned sink takes part and is dropped"
        rows = torch.zeros(*dense.shape[:3], max(9, 3 * shift))
        for t in range(36):
            for offset in range(min(rows.shape[3], t)):  # the first position belongs to no suffix
                rows[:, :, t, offset] = dense[:, :, t, t - offset]
        shared = torch.minimum(rows[:, :, shift:], rows[:, :, :-shift]).sum(-1)[:, :, late - shift : -1]
        np.testing.assert_allclose(score, shared.mean(-1).numpy(), atol=1e-4)
    np.testing.assert_allclose(again.score, result.score, atol=1e-4)
    np.testing.assert_allclose(again.attention, result.attention, atol=2e-3)


@pytest.mark.parametrize(("period", "onset", "new"), [(9, 4, 70), (1, 0, 48)])
def test_planted_heads_rank_first_and_are_shown(period, onset, new):
    seed = secrets.randbits(32)
    result, planted = measured(seed, period, new, onset)
    rows = result.by_head()
    last, after = rows[len(planted) - 1 : len(planted) + 1]
    assert {(row.key.layer, row.key.head) for row in rows[: len(planted)]} == planted, f"seed {seed}"
    assert last.gain.value >= LOCK_GAIN
    assert last.gain.value > after.gain.value + 0.02
    assert last.score.value > 0.5
    assert last.control_score.value < 0.1
    assert (result.period, result.onset) == (period, end_loop(result.ids).start)
    (subject,) = result.compared()
    (locked,) = subject.rows
    assert locked["share"].value == len(result.locked) / result.score.size
    assert (locked["strongest"], locked["strongest_control"]) == (rows[0].score, rows[0].control_score)
    assert locked["opposite"].value == 0
    assert set(result.shown) & {f"L{layer}.H{head}" for layer, head in planted}


def test_without_planted_heads_nothing_locks():
    walk, _ = measured(1, 5, 60, causes=())
    assert walk.period is None and walk.locked == [] and walk.compared() == []
    assert walk.conclusion() == "The 60 generated tokens end in no loop, so no head can lock onto one."


def test_a_head_that_locks_onto_ordinary_text_as_well_is_not_locked():
    """Here the ordinary text is the loop itself: the same heads score as high, so none gains."""
    made = kept_loop(("copies",), 3, period=9)
    ids = made.prompt(4)
    options = {"max_new_tokens": 70, "tokenizer": made.tokenizer}
    with mock.patch("sinkscope.loops.barcode.text_rows", lambda *_: torch.tensor([[BOS, *made.walk(400, 200)]])):
        found = barcode(made.model, ids, **options)
    with mock.patch("sinkscope.loops.barcode.text_rows", lambda *_: torch.tensor([[*found.ids]])):
        beside_itself = barcode(made.model, ids, **options)
    heads = found.score.size
    assert set(found.locked) == made.locking_heads and found.conclusion().startswith(f"{len(found.locked)} of {heads}")
    assert beside_itself.score.max() > 0.5 and beside_itself.locked == []
    assert beside_itself.conclusion().startswith(f"0 of {heads} heads lock onto the loop of 9 tokens")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"heads": [(0, 4)]}, "head 4 is not in .*: give one from 0 to 3"),
        ({"max_new_tokens": 5000}, "ask for fewer"),
        ({"prompt": [5, 200]}, r"tokens\[0\]\[1\]=200: expected less than"),
        ({"ids": [5], "prompt": "word"}, "ids are a whole sequence: give no prompt and no max_new_tokens"),
        ({"ids": [5, 6]}, "a barcode needs 2"),
        ({"ids": [5] * 2000}, "the input has 2000"),
    ],
)
def test_bad_input_of_barcode_is_refused(options, message):
    model, tokenizer = tiny_model("llama")
    with refused(message):
        barcode(model, tokenizer=tokenizer, **options)


def test_the_default_fits_the_context_and_few_ids_are_enough():
    model, tokenizer = tiny_model("llama", max_position_embeddings=96)
    result = barcode(model, PROMPT, tokenizer=tokenizer, heads=[(0, 0)])
    assert result.prompt_tokens + result.steps == 96
    assert np.isfinite(barcode(model, ids=[5, 6, 7], tokenizer=tokenizer).gain).all()
