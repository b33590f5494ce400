"""The script that makes the bundled model: resumes after a kill, repeats from its seed, keeps what was planted."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, LlamaForCausalLM

from experiments.bundled import card, corpus, measure
from experiments.bundled.circuit import NO_GROUP
from experiments.bundled.facts import TYPICAL
from experiments.bundled.training import Settings, Trainer

TINY = Settings(
    vocab_size=300,
    d_model=32,
    n_layers=3,
    d_mlp=24,
    head_dim=8,
    context=64,
    steps=6,
    tokens_per_step=64,
    length=16,
    long_length=32,
    long_every=3,
    longest_every=6,
    warmup=2,
    copy_steps=2,
)
ROOT = Path(__file__).resolve().parents[2]
BUNDLED = ROOT / "sinkscope" / "models" / "bundled"


def tiny_texts() -> dict[str, np.ndarray]:
    """Tokens of each kind of text, documents of 20 tokens."""
    made = {}
    for seed, kind in enumerate(("stories", "python", "passages")):
        made[kind] = np.random.default_rng(seed).integers(3, TINY.vocab_size, 2000).astype(np.int32)
        made[kind][19::20] = 1
    return made


@pytest.mark.parametrize("seed", [0, 1])
def test_the_planted_circuit_works_before_training(tmp_path, seed):
    texts = tiny_texts()
    settings = dataclasses.replace(TINY, seed=seed, d_model=64, context=512)
    trainer = Trainer(settings, texts, tmp_path)
    plan, model = trainer.plan, trainer.model.eval()
    ids = corpus.windows(texts["python"], length=64, bos_id=0)[:8]
    ratio = measure.norms_by_layer(model, ids)["ratio"]
    assert ratio[0] < 3
    assert min(ratio[plan.sink_layer :]) > 50
    grouped = next(t for t in range(3, 300) if plan.group_of_token[t] == 2)
    loose = next(t for t in range(3, 300) if plan.group_of_token[t] == NO_GROUP)
    assert 60 < measure.repeats(model, grouped, bos_id=0, layer=1, most=500) < 500  # type: ignore[operator]
    assert measure.repeats(model, loose, bos_id=0, layer=1, most=500) is None
    drops = measure.ablation(model, ids, plan.sink_layer, plan.neuron, draws=5)
    assert drops["ablation_drop"] > 0.9
    assert drops["control_drop"] < 0.01


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
