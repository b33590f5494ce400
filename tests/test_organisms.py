"""The organisms do what their truth says, seen with raw torch hooks only: nothing of sinkscope is used here.

Which of several neurons matter, which heads mark, which factor carries the mark and how many repetitions it takes: the
tests of the measurements of these (neurons, heads, patches, clusters, repetition) fail if the truth is wrong.
"""

from __future__ import annotations

import pytest
import torch
from covering import covering
from organisms import FAMILIES, Organism, organism
from raw_kit import attention, norms, zeroed

CASES = [(family, kind) for family in FAMILIES for kind in FAMILIES[family].kinds]
FAST = CASES[::5]  # every family, and every kind


def check(o: Organism, seed: int):
    tokens, truth = o.natural(n=4, length=40, seed=seed), o.truth
    profile = norms(o.model, tokens)
    first, rest = profile[:, :, 0].mean(1), profile[:, :, 1:]
    typical = rest.flatten(1).median(1).values
    with torch.no_grad():
        logits = o.model(tokens).logits
    assert torch.isfinite(logits).all() and 0.3 < float(logits.std(-1)[:, 1:].mean()) < 15
    if not truth.neurons:
        assert truth.sink_layer is None and truth.neurons == ()
        assert (first < 2 * typical).all()
        return
    sink = truth.sink_layer
    assert (first[sink:] > 15 * typical[sink:]).all() and (first[:sink] < 2.5 * typical[:sink]).all()
    assert rest.max() < first[sink] / 5  # nothing but the first token
    with zeroed(o.model, truth.neurons):
        without = norms(o.model, tokens[:, :1])[sink, :, 0]  # nothing later reaches the first token
    assert (without < 0.2 * profile[sink, :, 0]).all()
    rows = attention(o.model, o.natural(2, 64))[:, :, :, 16:, 0].mean((1, 3))
    assert all(rows[place] > 0.3 for place in truth.reading_heads) and (rows[: sink + 1] < 0.3).all()


@pytest.mark.parametrize(("family", "kind"), covering(CASES, FAST))
def test_organisms_do_what_their_truth_says(family, kind):
    bos = CASES.index((family, kind)) % 3 != 0  # both for every family and for every kind
    o = organism(family, 0, kind=kind, bos=bos)
    check(o, seed=0)
    assert (o.tokenizer.bos_token_id == 1) == bos
