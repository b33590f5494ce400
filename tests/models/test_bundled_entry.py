"""The entry conditions of the bundled model, each on a model whose answer is known."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from organisms import loop_organism
from organisms.tokens import BOS

from experiments.bundled import entry

BUNDLED = Path(__file__).resolve().parents[2] / "sinkscope" / "models" / "bundled"
SENTENCES = [f"The dog number {n} ran over the green hill to see his friends." for n in range(40)]


class Copier:
    """Predicts, with probability `sure`, what followed the longest earlier match of the text; else all tokens evenly.

    `match` is the least length of a match.
    """

    device = torch.device("cpu")

    def __init__(self, vocab_size: int, sure: float = 0.9, match: int = 1) -> None:
        self.config = SimpleNamespace(vocab_size=vocab_size)
        self.sure, self.match = sure, match

    def __call__(self, ids: torch.Tensor, *, use_cache: bool = False, logits_to_keep: int = 0) -> SimpleNamespace:
        assert not use_cache
        even = torch.full((*ids.shape, self.config.vocab_size), 1 / self.config.vocab_size)
        for row, probabilities in zip(ids.tolist(), even, strict=True):
            for end in range(len(row)):
                follows = self.follows(row[: end + 1])
                if follows is not None:
                    probabilities[end] = (1 - self.sure) / (self.config.vocab_size - 1)
                    probabilities[end, follows] = self.sure
        return SimpleNamespace(logits=even.log()[:, -logits_to_keep if logits_to_keep else 0 :])

    def follows(self, seen: list[int]) -> int | None:
        best, found = self.match - 1, None
        for at in range(len(seen) - 1):
            length = 0
            while length <= at and seen[at - length] == seen[-1 - length]:
                length += 1
            if length > best:
                best, found = length, seen[at + 1]
        return found


def test_the_curve_of_a_copier_is_the_probability_with_which_it_copies() -> None:
    units = torch.tensor([[5, 9, 12, 7], [30, 31, 8, 4]])
    curve = entry.copy_curve(Copier(50, sure=0.8), units, copies=(0, 1, 2, 4))  # type: ignore[arg-type]
    assert curve["0"] == pytest.approx(1 / 50, abs=1e-3)
    # The first token of the second copy follows one that has no earlier match.
    assert curve["1"] == pytest.approx((0.8 * 3 + 1 / 50) / 4, abs=1e-3)
    assert curve["2"] == curve["4"] == pytest.approx(0.8, abs=1e-3)
    # What needs a match of six tokens begins to copy one and a half copies later.
    late = entry.copy_curve(Copier(50, sure=0.8, match=6), units, copies=(1, 2, 3))  # type: ignore[arg-type]
    assert late["1"] == pytest.approx(1 / 50, abs=1e-3)
    assert late["2"] == pytest.approx((0.8 * 3 + 1 / 50) / 4, abs=0.21)
    assert late["3"] == pytest.approx(0.8, abs=1e-3)


def test_the_planted_heads_have_the_scores() -> None:
    organism = loop_organism(1)
    scores = entry.head_scores(organism.model, bos_id=BOS)
    assert scores["previous_token"].shape == (4, 6)
    named = {"previous_token": organism.truth.previous_heads, "induction": organism.truth.locking_heads}
    for name, heads in named.items():
        found = {(int(layer), int(head)) for layer, head in np.argwhere(scores[name] > 0.3)}
        assert found == set(heads), name
        best = entry.best_head(scores[name])
        assert (best["layer"], best["head"]) in heads
    # One visible match holds 1 / (1 + hold - 1/2) of the attention of a locking head.
    expected = 1 / (0.5 + organism.truth.hold)
    assert entry.best_head(scores["induction"])["score"] == pytest.approx(expected, abs=0.06)
