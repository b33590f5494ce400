"""The model in the package is what its circuit file, its card and its script say."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, LlamaForCausalLM

from experiments.bundled import card, corpus, measure
from experiments.bundled.facts import TYPICAL

ROOT = Path(__file__).resolve().parents[2]
BUNDLED = ROOT / "sinkscope" / "models" / "bundled"


@pytest.fixture(scope="module")
def shipped():
    return LlamaForCausalLM.from_pretrained(BUNDLED).eval()


def test_shipped_model_is_what_its_truth_says(shipped):
    circuit = json.loads((BUNDLED / "circuit.json").read_text())
    layer, neuron = circuit["sink_layer"], circuit["neurons"][0]["neuron"]
    column = shipped.model.layers[layer].mlp.down_proj.weight[:, neuron].detach()
    assert {str(d): float(column[d]) for d in column.nonzero()[:, 0].tolist()} == circuit["column"]
    groups = torch.tensor(circuit["group_of_token"])
    for group, dim in enumerate(circuit["group_dims"]):
        assert torch.equal(shipped.model.embed_tokens.weight[:, dim] > 0, groups == group)
    assert 1_000_000 <= sum(p.numel() for p in shipped.parameters()) <= 4_000_000
    assert {p.dtype for p in shipped.parameters()} == {torch.float32}
    assert sum(f.stat().st_size for f in BUNDLED.iterdir()) <= 16_000_000


def test_shipped_model_has_its_sink(shipped):
    tokenizer = AutoTokenizer.from_pretrained(BUNDLED)
    ids = np.asarray(tokenizer(TYPICAL.read_text(encoding="utf-8"))["input_ids"])[1:]
    texts = corpus.windows(ids, length=128, bos_id=tokenizer.bos_token_id)[:8]
    assert min(measure.norms_by_layer(shipped, texts)["ratio"][1:]) >= 20
    assert measure.head_share(shipped, texts, after=1) >= 0.25


def test_card_is_made_of_the_measurements():
    record = json.loads((ROOT / "figures" / "bundled_model.json").read_text())
    text = card.card(record["planted"], record["unplanted"])
    assert (ROOT / "docs" / "bundled_model.md").read_text(encoding="utf-8") == text
    assert (BUNDLED / "README.md").read_text(encoding="utf-8").endswith(text)
