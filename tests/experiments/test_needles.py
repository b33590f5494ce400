"""Needles: prompts hold what they say at the depth they say, and the recall models find it."""

from __future__ import annotations

import pytest
import torch
from refusals import refused

import sinkscope as ss
from experiments import make_two_hops
from experiments.needles import KINDS, needle


@pytest.mark.parametrize("kind", KINDS)
def test_prompts_are_as_long_and_as_deep_as_asked(kind):
    before = -1.0
    for depth in (0.0, 0.5, 1.0):
        row = needle(kind, 1200, depth)
        text, (answer,) = row["prompt"], row["answers"]
        assert 1100 <= len(text.split()) <= 1199, "and BOS"
        place = text.index(answer) / len(text)
        assert place > before and (kind != "needle" or abs(place - depth) < 0.12)
        before = place
    with refused(f"length 10: {kind} needs .* tokens at least; give longer prompts"):
        needle(kind, 10, 0.5)


@pytest.fixture(scope="module")
def two_hops(tmp_path_factory):
    folder = tmp_path_factory.mktemp("made") / "recall-2hop"
    make_two_hops.main(out=folder)
    return folder


@pytest.mark.parametrize("name", ["recall", "recall-2hop"])
@pytest.mark.parametrize("kind", KINDS)
def test_recall_models_answer_every_kind(name, kind, two_hops):
    """By plain greedy `generate`; seeds from the system, so that nothing can have been tuned to them."""
    seed = int(torch.empty((), dtype=torch.int64).random_(10**9).item())
    turn = KINDS.index(kind) + (name == "recall")  # another depth and length in every kind and model
    row = needle(kind, (150, 300, 600)[turn % 3], (0.0, 0.5, 1.0)[turn // 2 % 3], seed)
    model = ss.load(two_hops if name == "recall-2hop" else name)
    inputs = model.tokenizer(row["prompt"], return_tensors="pt")
    output = model.generate(**inputs, do_sample=False, max_new_tokens=8)
    assert row["answers"][0] in model.tokenizer.decode(output[0, inputs["input_ids"].shape[1] :]), (seed, row)
