"""The GPU script on a CPU: cost and bytes against what is known of the cache, and the whole of it unattended."""

from __future__ import annotations

import torch
from organisms.tiny import tiny_model

from experiments.gpu import loopguard as script
from sinkscope.models.target import Target

PROMPT, NEW, BUDGET = 80, 70, 64


def _target() -> tuple[Target, torch.Tensor]:
    model, tokenizer = tiny_model("llama", num_hidden_layers=2)
    vocab = model.config.vocab_size
    return Target.of(model, tokenizer), torch.arange(PROMPT + NEW)[None] % (vocab - 4) + 4


def test_the_guard_changes_nothing_and_every_pair_is_timed() -> None:
    target, ids = _target()
    found = script.cost(target, ids, PROMPT, pairs=2)
    assert found["same_logits"] and found["interventions"] == 0
    assert found["ratio"]["pairs"] == 2 and found["ratio"]["low"] <= found["ratio"]["median"] <= found["ratio"]["high"]
    assert found["stock_ms_per_token"] > 0


def test_bytes_are_those_of_keys_and_values() -> None:
    target, ids = _target()
    rows = script.held(target, ids, PROMPT, BUDGET)
    config = target.hf.config
    size = (
        2 * config.num_hidden_layers * config.num_key_value_heads * (config.hidden_size // config.num_attention_heads)
    )
    per_token = size * 4
    assert rows["full"]["logical_bytes"] == rows["full"]["physical_bytes"] == per_token * (PROMPT + NEW)
    assert rows["loopguard, untriggered"]["logical_bytes"] == rows["full"]["logical_bytes"]
    assert rows["loopguard, cut twice"]["interventions"] == 2
    for name in ("streaming", "h2o", "loopguard, cut twice"):
        assert rows[name]["mean_tokens"] < rows["full"]["mean_tokens"] < rows["full"]["peak_tokens"] == PROMPT + NEW
