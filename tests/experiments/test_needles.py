"""Needles: prompts hold what they say at the depth they say, and the recall models find it."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch
from refusals import refused

import sinkscope as ss
from experiments import make_two_hops
from experiments.needles import KINDS, SENTENCES, needle

model = cache(ss.load)
WRITTEN = [*(("recall", kind) for kind in KINDS), *(("bundled", kind) for kind in SENTENCES)]


@pytest.mark.parametrize(("name", "kind"), WRITTEN)
def test_prompts_are_as_long_and_as_deep_as_asked(name, kind):
    tokenizer, before = model(name).tokenizer, -1.0
    for depth in (0.0, 0.5, 1.0):
        text, (answer,) = (needle(tokenizer, name, kind, 1200, depth)[field] for field in ("prompt", "answers"))
        assert 1100 <= len(tokenizer(text)["input_ids"]) <= 1200, "with BOS"
        place = text.index(answer) / len(text)
        assert place > before and (kind != "needle" or abs(place - depth) < 0.12)
        before = place


@pytest.mark.parametrize("name", ["recall", "recall-2hop"])
@pytest.mark.parametrize("kind", KINDS)
def test_recall_models_answer_every_kind(name, kind):
    """By plain greedy `generate`; seeds from the system, so that nothing can have been tuned to them."""
    seed = int(torch.empty((), dtype=torch.int64).random_(10**9).item())
    turn = KINDS.index(kind) + (name == "recall")  # another depth and length in every kind and model
    tokenizer = model(name).tokenizer
    row = needle(tokenizer, name, kind, (150, 300, 600)[turn % 3], (0.0, 0.5, 1.0)[turn // 2 % 3], seed)
    inputs = tokenizer(row["prompt"], return_tensors="pt")
    output = model(name).generate(**inputs, do_sample=False, max_new_tokens=8)
    said = tokenizer.decode(output[0, inputs["input_ids"].shape[1] :])
    assert row["answers"][0] in said, (seed, row)


def test_script_makes_the_numbers_of_the_package():
    made = make_two_hops.changes()
    with np.load(make_two_hops.RECALL / "two_hops.npz") as kept:
        assert made.keys() == {*kept.keys()}
        assert all(np.array_equal(made[name], kept[name], equal_nan=True) for name in made)


def test_impossible_needles_are_refused():
    for name, kind, length, says in (
        ("recall", "needle", 10, "length 10: needle needs .* tokens at least; give longer prompts"),
        ("bundled", "tracking", 600, "--kinds tracking: for bundled there are needle, multi-key"),
    ):
        with refused(says):
            needle(model(name).tokenizer, name, kind, length, 0.5)
