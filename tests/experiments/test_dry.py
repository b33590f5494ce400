"""The sampler DRY, against losses that were counted by hand."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

from experiments.papers.loopguard.dry import DRY


def digits(ids: str) -> list[int]:
    return [int(digit) for digit in ids]


@pytest.mark.parametrize(
    ("ids", "settings", "losses"),
    [
        ("56756", {}, {7: 0.8}),
        # The longest copy counts, of all that stand before a token.
        ("456786967456", {"allowed_length": 1, "base": 2.0}, {7: 0.8 * 4, 9: 0.8}),
        ("36736", {"ignore": [3]}, {}),
        ("56356", {"ignore": [3]}, {}),  # a breaker that followed a copy loses nothing
    ],
)
def test_dry_lowers_what_followed_earlier_copies(ids, settings, losses):
    scores, expected = torch.zeros(2, 40), torch.zeros(2, 40)
    for token, loss in losses.items():
        expected[0, token] = -loss
    assert_close(DRY(**settings)(torch.tensor([digits(ids), [*range(10, 10 + len(ids))]]), scores), expected)
    assert not scores.any(), "the scores of the caller stay"


def test_a_loss_beyond_all_numbers():
    scores = DRY(base=1e6)(torch.tensor([[5, 6] * 40]), torch.zeros(1, 9, dtype=torch.float16))
    assert scores[0, 5] <= -6e4 and not scores.isnan().any()
