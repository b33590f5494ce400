"""The entry conditions of the bundled model, each on a model whose answer is known."""

from __future__ import annotations

import numpy as np
import pytest
from organisms import loop_organism
from organisms.loop import HOLD
from organisms.tokens import BOS

from experiments.bundled import entry


def test_the_planted_heads_have_the_scores():
    organism = loop_organism(1)
    scores = entry.head_scores(organism.model, bos_id=BOS)
    assert scores["previous_token"].shape == (4, 6)
    named = {"previous_token": organism.truth.previous_heads, "induction": organism.truth.locking_heads}
    for name, heads in named.items():
        found = {(int(layer), int(head)) for layer, head in np.argwhere(scores[name] > 0.3)}
        assert found == set(heads), name
        best = entry.best_head(scores[name])
        assert (best["layer"], best["head"]) in heads
    # One visible match holds 1 / (1 + HOLD - 1/2) of the attention of a locking head.
    expected = 1 / (0.5 + HOLD)
    assert entry.best_head(scores["induction"])["score"] == pytest.approx(expected, abs=0.06)
