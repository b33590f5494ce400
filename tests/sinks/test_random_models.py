"""find_sinks on random and briefly trained models: whatever it claims has to be so by the model's own outputs."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from covering import covering
from organisms.tiny import tiny_model
from raw_kit import attention
from torch import Tensor

from sinkscope.interventions import Ablate
from sinkscope.sinks.first_token.find import find_sinks

TYPES = ("llama", "gpt2", "gpt_neox", "gemma2", "qwen3", "mixtral", "gpt_oss", "phi3", "olmo2", "qwen2", "phi", "opt")
WAYS = ("as made", "large weights", "20 steps", "150 steps")
FAST = {("gpt2", "as made"), ("gpt_neox", "large weights"), ("llama", "20 steps")}
CASES = covering(product(TYPES, WAYS), FAST)
SLACK = 1.3  # between the tool's thresholds and those of the truth, which is read on other texts


def chain(vocab: int, rows: int, length: int, seed: int) -> Tensor:
    """Texts that begin with BOS, in which each token is followed by one of three."""
    followers = torch.randint(5, vocab, (vocab, 3), generator=torch.Generator().manual_seed(7))
    generator = torch.Generator().manual_seed(seed)
    ids = torch.zeros(rows, length, dtype=torch.long)
    ids[:, 1] = torch.randint(5, vocab, (rows,), generator=generator)
    for at in range(2, length):
        ids[:, at] = followers[ids[:, at - 1], torch.randint(3, (rows,), generator=generator)]
    return ids


def made(model_type: str, way: str, seed: int = 0) -> tuple[Any, Any]:
    """A model and its tokenizer."""
    model, tokenizer = tiny_model(model_type, seed)
    if way == "large weights":
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter *= 4
    if way.endswith("steps"):
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        for step in range(int(way.split()[0])):
            ids = chain(model.config.vocab_size, 8, 48, step)
            ids[:, 0] = tokenizer.bos_token_id
            model(ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return model.eval().requires_grad_(False), tokenizer


def first_over_typical(model, ids: Tensor) -> Tensor:
    """The first token's norm over the median of later ones after each layer, the last one's behind the final norm."""
    hidden = model(ids, output_hidden_states=True, use_cache=False).hidden_states[1:-1]
    norms = torch.stack(hidden).float().norm(dim=-1)
    return norms[..., 0].median(1).values / norms[..., 1:].flatten(1).median(1).values


def attending(model, ids: Tensor, least: float) -> int:
    """How many heads give the first token more than this share, from the model's own attention."""
    return int((attention(model, ids)[..., 0].mean(3).median(1).values > least).sum())


@pytest.mark.parametrize(("model_type", "way"), CASES)
def test_no_verdict_is_false(model_type, way, tmp_path):
    model, tokenizer = made(model_type, way)
    ids = chain(model.config.vocab_size, 24, 64, 1000)
    ids[:, 0] = tokenizer.bos_token_id
    text = tmp_path / "text.txt"
    text.write_text(" ".join(tokenizer.decode(row[1:]) for row in ids), encoding="utf-8")
    found = find_sinks(model, tokenizer=tokenizer, text=text, max_repeats=16)
    says = found.conclusion()
    ratio = float(first_over_typical(model, ids).max()) if model.config.num_hidden_layers > 1 else 1.0
    first_is_sink = found.attention_sink is not None and found.attention_sink.positions[:1] != ()
    first_is_sink = first_is_sink and found.attention_sink.positions[0].position == 0
    if found.norm_spike is not None and 0 in found.norm_spike.positions and found.norm_spike.plateau is not None:
        before_last = [layer for layer in found.norm_spike.plateau if layer < model.config.num_hidden_layers - 1]
        assert not before_last or ratio > 3 / SLACK, says
    if ratio > 3 * SLACK:
        assert found.norm_spike is not None, says
    if first_is_sink:
        assert attending(model, ids, 0.3 / SLACK) >= 2, says
    if attending(model, ids, 0.3 * SLACK) >= 3:
        assert found.attention_sink is not None, says
    minimal = found.minimal
    if minimal is not None and found.sink_layer is not None and found.sink_layer < model.config.num_hidden_layers - 1:
        norms = []
        for sites in ((), minimal.edit_sites):
            with Ablate(sites=sites).on(model):
                hidden = model(ids[:4, :1], output_hidden_states=True, use_cache=False).hidden_states
                norms.append(float(hidden[found.sink_layer + 1].float().norm(dim=-1).median()))
        assert 1 - norms[1] / norms[0] == pytest.approx(minimal.drop_sink_layer, abs=0.02), says
        assert minimal.drop_sink_layer > minimal.control
