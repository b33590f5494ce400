"""How texts of real models are judged: bits per byte, excerpts, variance, and vectors of length."""

from __future__ import annotations

import math

import pytest
import torch
from sklearn.decomposition import PCA

from experiments.loopguard.reading import FEWEST, SHOWN, bits_per_byte, hook_points_of, reading
from experiments.real.masks import LENGTH, first_component, steering
from sinkscope.opening.load import load


@pytest.fixture(scope="module")
def live():
    return load()


def test_bits_per_byte_are_those_of_the_second_text_alone(live):
    before, text = "Once upon a time there was", " a little dog, who was happy."
    start = live.tokenizer(before)["input_ids"]
    ids = [*start, *live.tokenizer(text, add_special_tokens=False)["input_ids"]]
    with torch.no_grad():
        logs = live(torch.tensor([ids])).logits[0].log_softmax(-1)
    total = -sum(float(logs[place - 1, ids[place]]) for place in range(len(start), len(ids)))
    assert bits_per_byte(live, before, text) == pytest.approx(total / math.log(2) / len(text.encode()), rel=1e-5)


def test_an_excerpt_begins_where_the_text_of_the_guard_goes_on(live, monkeypatch):
    monkeypatch.setattr("experiments.loopguard.reading.unknown_words", lambda text: (1, 4))
    tokens = live.tokenizer("The dog ran to the park and saw a ball. " * 40, add_special_tokens=False)["input_ids"]
    acts = [{"generated": 90, "taken_back": 40}, {"generated": 200, "taken_back": 9}]
    row = {"number": 3, "tokens": tokens, "acts": acts}
    places = hook_points_of({3: row, 4: {"number": 4, "tokens": tokens, "acts": []}})
    assert places == {3: 50}
    read: list[tuple[str, str]] = []
    found = reading(
        [(row, 50), (row, len(tokens) - FEWEST + 1)], live.tokenizer, lambda *texts: read.append(texts) or 2.0
    )
    assert len(read) == 1 == found["excerpts"], "an end with fewer tokens is no excerpt"
    assert read[0][0].endswith(live.tokenizer.decode(tokens[:50])[-20:])
    assert read[0][1] == live.tokenizer.decode(tokens[50 : 50 + SHOWN])
    assert (found["bits"], found["unknown"], found["words"]) == (2.0, 0.25, 4)


def test_the_share_of_the_first_component_is_that_of_scikit_learn():
    activations = torch.randn(200, 12, generator=torch.Generator().manual_seed(0)) * torch.arange(1, 13)
    share = PCA(1).fit(activations.numpy()).explained_variance_ratio_[0]
    assert first_component(activations) == pytest.approx(share, rel=1e-4)


def test_a_difference_of_means_leaves_out_what_is_masked():
    resid = torch.zeros(4, LENGTH, 3)
    resid[:, 0, 1] = 64.0  # the sink, one of 16 tokens in the short texts, and one of 64 in the long ones
    resid[:2, :, 0] += 1.0
    keep = torch.ones(4, LENGTH, dtype=torch.bool)
    assert steering(resid, keep).tolist() == [1.0, 3.0, 0.0]
    keep[:, 0] = False
    assert steering(resid, keep).tolist() == [1.0, 0.0, 0.0]
