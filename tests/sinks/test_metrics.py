"""Numbers for a logger beside plain transformers, in a model that is being trained."""

from __future__ import annotations

import pytest
import torch
from refusals import refused
from transformers import set_seed

import sinkscope as ss

TEXTS = [
    "The bird sang the same song again and again, and the fox ran over the hill and slept in the old barn until rain.",
    "A market opened in the village every morning, and people carried bread, honey and letters to the station there.",
]


@pytest.fixture(scope="module")
def bundled():
    return ss.load("bundled")


def by_hand(model, row):
    with torch.no_grad():
        seen = model(input_ids=row, output_attentions=True, output_hidden_states=True)
    heads = torch.stack([layer[0, :, :, 0].mean(1) for layer in seen.attentions])
    norms = torch.stack(seen.hidden_states[1:-1])[:, 0].norm(dim=-1)  # the last one is after the final norm
    return float((heads > 0.3).float().mean()), norms / norms[:, 1:].median(1, keepdim=True).values


def test_the_numbers_are_those_of_plain_transformers(bundled):
    rows = [bundled.tokenizer(text, return_tensors="pt").input_ids for text in TEXTS]
    bundled.set_attn_implementation("eager")
    rates, ratios = zip(*(by_hand(bundled, row) for row in rows), strict=True)
    bundled.set_attn_implementation("sdpa")
    metrics = ss.sink_metrics(bundled, [row[0].tolist() for row in rows])
    assert metrics["sink_rate"] == pytest.approx(sum(rates) / 2)
    assert metrics["norm_ratio"] == pytest.approx(float(sum(one.max() for one in ratios)) / 2, rel=0.05)
    assert divmod(int(ratios[0].argmax()), ratios[0].shape[1]) == (metrics["norm_layer"], metrics["norm_position"])
    padded = bundled.tokenizer(TEXTS, return_tensors="pt", padding=True)
    of_batch = ss.sink_metrics(bundled, padded.input_ids, attention_mask=padded.attention_mask)
    assert of_batch == pytest.approx(metrics, rel=1e-4)


def test_the_run_stays_as_it_is(bundled):
    ids = bundled.tokenizer(TEXTS[0], return_tensors="pt").input_ids
    set_seed(3)
    right = torch.rand(1)
    set_seed(3)
    bundled.train()
    try:
        metrics = ss.sink_metrics(bundled, ids)
        assert bundled.training and torch.equal(torch.rand(1), right)
    finally:
        bundled.eval()
    assert metrics == ss.sink_metrics(bundled, ids)
    assert all(isinstance(value, int | float) for value in metrics.values())


def test_rows_that_are_too_short_are_refused(bundled):
    with refused("the longest row has 3 tokens: a typical norm needs 4"):
        ss.sink_metrics(bundled, [[1, 5, 6]])
