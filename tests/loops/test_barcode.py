"""Barcodes and locking heads against planted ones and against the attention of stock eager runs."""

from __future__ import annotations

import secrets
from functools import partial
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from organisms import LoopOrganism, tiny_model
from organisms import loop_organism as new_loop_organism
from raw_kit import attention
from refusals import refused
from torch import Tensor
from torch.testing import assert_close

import sinkscope as ss
from sinkscope.kv import Observe
from sinkscope.loops.barcode import LOCK_GAIN, Barcode, HeadTracks, barcode
from sinkscope.loops.text.signals import end_loop

loop_organism = partial(new_loop_organism, n_layers=3, vocab_size=1024)
PROMPT = [1, *range(10, 30)]


def measured(organism: LoopOrganism, prompt: Tensor, new: int, **options) -> Barcode:
    """A barcode beside a walk on the ring, which for an organism is ordinary text."""
    walk = organism.healthy_prompt(prompt.shape[1] + new, start=400)
    with mock.patch("sinkscope.loops.barcode.text_rows", lambda *_: walk):
        return barcode(organism.model, prompt[0].tolist(), max_new_tokens=new, tokenizer=organism.tokenizer, **options)


def test_pictures_are_the_last_steps_of_an_eager_run(monkeypatch):
    """With a size for which few tokens are enough."""
    monkeypatch.setattr("sinkscope.loops.barcode.PICTURE_STEPS", 8)
    model, tokenizer = tiny_model("gpt_oss")
    model.generation_config.eos_token_id = None
    heads = [(0, 1), (2, 3)]
    new = 15
    result = barcode(model, PROMPT, heads=heads, max_new_tokens=new, tokenizer=tokenizer)
    assert (result.shown, result.layers, result.steps) == (("L0.H1", "L2.H3"), (0, 2), new)
    inputs = torch.tensor([PROMPT])
    with torch.no_grad():
        out = model.generate(inputs, max_new_tokens=new, do_sample=False, pad_token_id=3)[0].tolist()
    words = tokenizer((Path(ss.__file__).parent / "models/text/typical.txt").read_text()[:4000])["input_ids"]
    ordinary = [tokenizer.bos_token_id, *[i for i in words if i != tokenizer.bos_token_id]][: len(out)]
    for ids, whole in ((out, result.attention), (ordinary, result.control_attention)):
        for number, (layer, head) in enumerate(heads):
            rows = attention(model, torch.tensor([ids]))[
                layer, 0, head, -9:-1, -25:-1
            ]  # the last of all chose no token
            np.testing.assert_allclose(whole[number], rows.numpy(), atol=6e-4)
            assert (whole[number].sum(1) < 1).all(), "a learned sink takes part and is dropped"


def test_the_default_number_of_tokens_fits_the_context():
    """A model whose context is shorter than the default is measured to its end, and does not refuse its own default."""
    model, tokenizer = tiny_model("llama", max_position_embeddings=96)
    result = barcode(model, PROMPT, tokenizer=tokenizer, heads=[(0, 0)])
    assert result.prompt_tokens + result.steps == 96


@torch.no_grad()
def test_the_score_of_a_text_in_pieces_equals_its_definition():
    model, _ = tiny_model("mistral")
    ids = torch.randint(4, 90, (1, 40))
    shift = 4
    suffix = 9
    layer = 1
    tracks = HeadTracks(4, 41, 20, shift, suffix)
    with Observe(tracks.add, [layer]).on(model):
        cache = None
        for start in range(0, 40, 3):
            cache = model(ids[:, start : start + 3], past_key_values=cache, use_cache=True).past_key_values
    dense = attention(model, ids)[layer, 0]
    rows = torch.zeros(4, 40, suffix)  # head query offset
    for t in range(40):
        for offset in range(min(suffix, t)):  # the first position belongs to no suffix
            rows[:, t, offset] = dense[:, t, t - offset]
    score = torch.cat(tracks.scores, 1)
    shared = torch.minimum(rows[:, shift:], rows[:, :-shift]).sum(-1)
    assert_close(score[:, shift:], shared, rtol=1e-3, atol=1e-5)
    assert (score[:, :shift] == 0).all()
    assert_close(torch.cat(tracks.pictures, 1), dense[:, 20:], rtol=1e-3, atol=1e-5)


def test_planted_heads_rank_first_and_are_shown():
    seed = secrets.randbits(32)
    for i, (period, delay) in enumerate(((9, 4), (1, 0))):
        organism = loop_organism(seed + i)
        prompt = organism.looping_prompt(period, delay=delay)
        result = measured(organism, prompt.ids, max(48, 8 * period - 2))
        planted = set(organism.truth.locking_heads)
        rows = result.rows()
        top = {(row["layer"], row["head"]) for row in rows[: len(planted)]}
        assert top == planted, f"seed {seed + i}, period {period}: {top}, planted {planted}"
        weakest = rows[len(planted) - 1]
        after = rows[len(planted)]
        assert weakest["gain"] >= LOCK_GAIN and weakest["gain"] > after["gain"] + 0.02
        assert weakest["score"] > 0.5 and weakest["control_score"] < 0.1
        assert (result.period, result.onset) == (period, end_loop(result.ids).start)
        strongest, share = result.findings()
        assert share.get("share") == len(result.locked) / result.score.size
        beside = strongest.get("share"), strongest.get("control")
        assert beside == (rows[0]["score"], rows[0]["control_score"])
        assert set(result.shown) & {f"L{layer}.H{head}" for layer, head in planted}
        assert len({name.partition(".")[0] for name in result.shown}) == len(result.shown)


def test_without_planted_heads_nothing_locks():
    organism = loop_organism(1, induction=False)
    prompt = organism.looping_prompt(5)
    walk = measured(organism, prompt.ids, 60)
    assert walk.period is None and walk.locked == []
    assert walk.conclusion() == "The 60 generated tokens end in no loop, so no head can lock onto one."
    assert walk.findings() == []


def test_bad_input_of_barcode_is_refused():
    model, tokenizer = tiny_model("llama")
    cases = [
        ({"heads": [(0, 4)]}, "head 4 is not in .*: give one from 0 to 3"),
        ({"max_new_tokens": 5000}, "ask for at most"),
        ({"prompt": [5, 200]}, "token id 200 is none of"),
        ({"ids": [5], "prompt": "word"}, "ids are a whole sequence: give no prompt"),
    ]
    for options, message in cases:
        with refused(message):
            barcode(model, tokenizer=tokenizer, **options)


@pytest.mark.parametrize("ids", [[5, 6], [5]])
def test_too_few_tokens_are_refused_and_three_are_enough(ids):
    model, tokenizer = tiny_model("llama")
    with refused(words=["a barcode needs 2"]):
        barcode(model, ids=ids, tokenizer=tokenizer)
    found = barcode(model, ids=[5, 6, 7], tokenizer=tokenizer)
    assert np.isfinite(found.score).all() and np.isfinite(found.control_score).all()
    with refused(words=["give no prompt and no max_new_tokens"]):
        barcode(model, ids=[5, 6, 7], max_new_tokens=3, tokenizer=tokenizer)
