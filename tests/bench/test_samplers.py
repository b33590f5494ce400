"""What is done at the sampler, against plain definitions, and alone against in a padded batch."""

from __future__ import annotations

from collections import Counter

import torch
from transformers import NoRepeatNGramLogitsProcessor, RepetitionPenaltyLogitsProcessor

from sinkscope.bench.samplers import (
    PerRow,
    sampled,
    stock,
)

VOCAB = 5


def test_padding_and_neighbours_play_no_part():
    """Token 0 is the padding: the stock processors of a batch would punish it in short rows."""
    makers = [
        lambda name: stock(RepetitionPenaltyLogitsProcessor(1.1)),
        lambda name: stock(NoRepeatNGramLogitsProcessor(2)),
        lambda name: sampled(0.7, 3, name),
    ]
    ids = [[1, 2, 1, 2, 1], [3, 4, 3]]
    padded = torch.tensor([ids[0], [0, 0, *ids[1]]])
    scores = torch.randn(2, VOCAB)
    for make in makers:
        together = PerRow([make("a"), make("b")], [3, 1])(padded, scores.clone())  # prompts of 3 and of 1
        alone = [
            PerRow([make(name)], [3 - 2 * i])(torch.tensor([row]), scores[i : i + 1].clone())[0]
            for i, (name, row) in enumerate(zip("ab", ids, strict=True))
        ]
        torch.testing.assert_close(together, torch.stack(alone))
    batch = RepetitionPenaltyLogitsProcessor(1.1)(padded, scores.clone())  # pyright: ignore[reportArgumentType]
    assert batch[1, 0] != scores[1, 0]  # the trap is real


def test_sampling_follows_the_softmax_and_the_prompt_alone():
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, -9.0])
    process = sampled(0.7, 0, "dc-0001")
    draws = [int(process(torch.empty(0), logits).argmax()) for _ in range(4000)]
    expected = (logits / 0.7).softmax(-1)
    counts = Counter(draws)
    for token, p in enumerate(expected.tolist()):
        assert abs(counts[token] / 4000 - p) < 4 * (p * (1 - p) / 4000) ** 0.5 + 1e-3
    again, other = sampled(0.7, 0, "dc-0001"), sampled(0.7, 0, "dc-0002")
    assert [int(again(torch.empty(0), logits).argmax()) for _ in range(100)] == draws[:100]
    assert [int(other(torch.empty(0), logits).argmax()) for _ in range(100)] != draws[:100]
