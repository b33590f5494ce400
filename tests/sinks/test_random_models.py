"""find_sinks on random and briefly trained models: whatever it claims has to be so by the model's own outputs."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from covering import covering
from organisms.tiny import tiny_model
from raw_kit import attention, norms, residuals, zeroed
from sinkscope.sinks.find.find import find_sinks
from torch import Tensor

from sinkscope.results.parts import sites_of

TYPES = ("llama", "gpt2", "gpt_neox", "gemma2", "qwen3", "mixtral", "gpt_oss", "phi3", "olmo2", "qwen2", "phi", "opt")
WAYS = ("as made", "large weights", "20 steps", "150 steps")
FAST = {("gpt2", "as made"), ("gpt_neox", "large weights"), ("llama", "20 steps")}
CASES = covering(product(TYPES, WAYS), FAST)
SLACK = 1.3  # between the tool's thresholds and those of the truth, which is read on other texts


def chain(tokenizer, rows: int, length: int, seed: int) -> Tensor:
    """Texts that begin with BOS, in which each token is followed by one of three."""
    vocab = len(tokenizer)
    followers = torch.randint(5, vocab, (vocab, 3), generator=torch.Generator().manual_seed(7))
    generator = torch.Generator().manual_seed(seed)
    ids = torch.full((rows, length), tokenizer.bos_token_id)
    ids[:, 1] = torch.randint(5, vocab, (rows,), generator=generator)
    for at in range(2, length):
        ids[:, at] = followers[ids[:, at - 1], torch.randint(3, (rows,), generator=generator)]
    return ids


def made(model_type: str, way: str) -> tuple[Any, Any]:
    """A model and its tokenizer."""
    model, tokenizer = tiny_model(model_type)
    if way == "large weights":
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.data *= 4
    if way.endswith("steps"):
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        for step in range(int(way.split()[0])):
            ids = chain(tokenizer, 8, 48, step)
            model(ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return model.eval().requires_grad_(False), tokenizer


def attending(model, ids: Tensor, least: float) -> int:
    """How many heads give the first token more than this share, from the model's own attention."""
    return int((attention(model, ids)[..., 0].mean(3).median(1).values > least).sum())


@pytest.mark.parametrize(("model_type", "way"), CASES)
def test_no_verdict_is_false(model_type, way, tmp_path):
    model, tokenizer = made(model_type, way)
    ids = chain(tokenizer, 24, 64, 1000)
    text = tmp_path / "text.txt"
    text.write_text(" ".join(tokenizer.decode(row[1:]) for row in ids), encoding="utf-8")
    found = find_sinks(model, tokenizer=tokenizer, text=text, max_repeats=16)
    says = found.conclusion()
    length = norms(model, ids)[:-1]
    ratio = float((length[..., 0].median(1).values / length[..., 1:].flatten(1).median(1).values).max())
    first = [spike for spike in found.spikes if spike.place.is_first]
    if first:
        before_last = min(min(run) for run in first[0].layers) < model.config.num_hidden_layers - 1
        assert ratio > 3 / SLACK or not before_last, says
    if ratio > 3 * SLACK:
        assert found.spikes, says
    if found.sink is not None and found.sink.place is not None and found.sink.place.is_first:
        assert attending(model, ids, 0.3 / SLACK) >= 2, says
    if attending(model, ids, 0.3 * SLACK) >= 3:
        assert found.sinks, says
    if found.minimal and found.sink_layer is not None:
        claim = found.spikes[0].claims[0]
        (layer,) = claim.outcome.layers
        intact = residuals(model, ids[:4, :1])[layer, :, 0]
        with zeroed(model, sites_of(found.minimal)):
            edited = residuals(model, ids[:4, :1])[layer, :, 0]
        left = ((edited @ intact.mean(0)) / (intact @ intact.mean(0))).clamp(min=0)
        assert float(left.mean()) == pytest.approx(claim.value, abs=0.02), says
        assert claim.value < claim.control.value
