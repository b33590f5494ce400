"""find_sinks on random and briefly trained models: whatever it says has to be so by the model's own outputs."""

from __future__ import annotations

from itertools import product
from typing import Any

import plain_spikes as plain
import pytest
import torch
from covering import covering
from organisms.tiny import tiny_model
from raw_kit import residuals, zeroed
from torch import Tensor

from sinkscope.measure import Setup
from sinkscope.sinks.spikes.edited import SpikeTexts
from sinkscope.sinks.spikes.find import find_sinks, sinks_of

TYPES = ("llama", "gpt2", "gpt_neox", "gemma2", "qwen3", "mixtral", "gpt_oss", "phi3", "olmo2", "qwen2", "phi", "opt")
WAYS = ("as made", "large weights", "20 steps", "150 steps")
FAST = {("gpt2", "as made"), ("gpt_neox", "large weights"), ("llama", "20 steps")}
CASES = covering(product(TYPES, WAYS), FAST)


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


@pytest.mark.parametrize(("model_type", "way"), CASES)
def test_no_statement_is_false(model_type, way, tmp_path):
    model, tokenizer = made(model_type, way)
    ids = chain(tokenizer, 24, 64, 1000)
    text = tmp_path / "text.txt"
    text.write_text(" ".join(tokenizer.decode(row[1:]) for row in ids), encoding="utf-8")
    setup = Setup.open(model, tokenizer=tokenizer, text=text)
    found = find_sinks.on(setup)
    own = sinks_of(setup).report.ids
    plain.check_heads(model, own, found.heads)
    for spike, measured in zip(found.spikes, sinks_of(setup).spikes, strict=True):
        if not spike.needed_neurons:
            continue
        left = spike.named("spike", "needed").get("left")
        reported = measured.reported
        texts = SpikeTexts.of(reported).rows
        rows, place = reported.survey.ids[texts], reported.place.mask[texts]
        intact = reported.along(residuals(model, rows)[spike.peak][place]).mean()
        with zeroed(model, [one.site for one in spike.needed_neurons]):
            edited = reported.along(residuals(model, rows)[spike.peak][place]).mean()
        assert abs(left) < 0.25 or spike.held_out
        if place[:, 0].all() and int(place.sum()) == len(place):  # nothing stands before, so it is edited alone
            assert float(edited / intact) == pytest.approx(left, abs=0.01)
    said = found.conclusion() + " ".join(found.details())
    assert found.spikes or "No norm spike" in said or "learned sink logit" in said
