"""The script that makes the bundled model: resumes after a kill, repeats from its seed, keeps what was planted."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, LlamaForCausalLM

from experiments.bundled import card, corpus, export, measure
from experiments.bundled.circuit import NO_GROUP
from experiments.bundled.facts import TYPICAL
from experiments.bundled.mixture import Mixture
from experiments.bundled.training import BLOCK, Settings, Trainer, blocked, loss_on
from experiments.bundled.typical import typical_text

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
    made: dict[str, np.ndarray] = {}
    for seed, kind in enumerate(("stories", "python", "passages")):
        made[kind] = np.random.default_rng(seed).integers(3, TINY.vocab_size, 2000).astype(np.int32)
        made[kind][19::20] = 1
    return made


@pytest.fixture(scope="module")
def texts() -> dict[str, np.ndarray]:
    return tiny_texts()


@pytest.fixture(scope="module")
def tokens(texts: dict[str, np.ndarray]) -> np.ndarray:
    return texts["python"]


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters()}


def assert_same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys()
    assert all(torch.equal(left[name], right[name]) for name in left)


@pytest.mark.parametrize("planted", [True, False])
def test_resumed_training_ends_with_the_same_weights(
    texts: dict[str, np.ndarray], tmp_path: Path, planted: bool
) -> None:
    settings = dataclasses.replace(TINY, planted=planted)
    for name in ("straight", "broken"):
        (tmp_path / name).mkdir()
    straight = Trainer(settings, texts, tmp_path / "straight")
    straight.run()
    first = Trainer(settings, texts, tmp_path / "broken")
    first.run(until=2)
    first.train_step()  # work after the last checkpoint is lost by a kill, and done again
    second = Trainer(settings, texts, tmp_path / "broken")
    second.load()
    assert second.step == 2
    second.run()
    assert_same(weights(straight), weights(second))


def test_a_checkpoint_of_other_settings_is_refused(texts: dict[str, np.ndarray], tmp_path: Path) -> None:
    Trainer(TINY, texts, tmp_path).save()
    with pytest.raises(SystemExit, match="other settings"):
        Trainer(dataclasses.replace(TINY, seed=1), texts, tmp_path).load()


@pytest.mark.parametrize("seed", [0, 1])
def test_the_planted_circuit_works_before_training(
    texts: dict[str, np.ndarray], tokens: np.ndarray, tmp_path: Path, seed: int
) -> None:
    settings = dataclasses.replace(TINY, seed=seed, d_model=64, context=512)
    trainer = Trainer(settings, texts, tmp_path)
    plan, model = trainer.plan, trainer.model.eval()
    assert plan is not None
    ids = corpus.windows(tokens, length=64, bos_id=0)[:8]
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


def mixture(texts: dict[str, np.ndarray], **changes: Any) -> Mixture:
    shares = {"stories": 0.4, "python": 0.2, "passages": 0.2, "cycles": 0.2}
    settings: dict[str, Any] = {"vocab_size": 300, "bos_id": 0, "bos_share": 0.9, "copy_share": 0.25}
    return Mixture(texts, shares, **(settings | changes))


def test_what_a_step_reads_depends_on_seed_and_step_only(texts: dict[str, np.ndarray]) -> None:
    for read in (lambda m, s, i: m.text(s, i, rows=9, length=60), lambda m, s, i: m.copies(s, i, tokens=500)):
        first, again, later, other = (read(mixture(texts), *at) for at in ((0, 3), (0, 3), (0, 4), (1, 3)))
        assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
        assert first[0].shape == first[1].shape
        assert all(x[0].shape != first[0].shape or not np.array_equal(x[0], first[0]) for x in (later, other))


def test_kinds_come_as_often_as_their_shares_say() -> None:
    marked = {kind: np.full(3000, 10 * (i + 1)) for i, kind in enumerate(("stories", "python", "passages"))}
    drawn = mixture(marked, vocab_size=5, copy_share=0.0)
    ids = np.concatenate([drawn.text(0, step, rows=8, length=40)[0] for step in range(250)])
    counts = {value: (ids[:, -1] == value).mean() for value in (10, 20, 30)}
    assert counts == pytest.approx({10: 0.4, 20: 0.2, 30: 0.2}, abs=0.02)
    assert (ids[:, -1] < 5).mean() == pytest.approx(0.2, abs=0.02)
    text = ids[ids[:, -1] >= 10]
    assert (text[:, 0] == 0).mean() == pytest.approx(0.9, abs=0.03)
    assert len(mixture({"python": marked["python"]}).kinds) == 2


@pytest.mark.parametrize("length", [7, BLOCK, 2 * BLOCK + 5])
def test_attention_in_blocks_is_causal_attention(length: int) -> None:
    torch.manual_seed(0)
    query, key, value = torch.randn(2, 4, length, 8), torch.randn(2, 2, length, 8), torch.randn(2, 2, length, 8)
    made, _ = blocked(torch.nn.Module(), query, key, value, None, scaling=0.3)
    expected = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=0.3, enable_gqa=True
    )
    torch.testing.assert_close(made, expected.transpose(1, 2))


def test_only_scored_tokens_count_in_the_loss(texts: dict[str, np.ndarray], tmp_path: Path) -> None:
    model = Trainer(TINY, texts, tmp_path).model.eval()
    ids = torch.from_numpy(corpus.windows(texts["python"], length=16, bos_id=0)[:2])
    scored = torch.zeros_like(ids, dtype=torch.bool)
    scored[0, 5] = scored[1, 9] = scored[1, 1] = True  # what the first position predicts never counts
    logits = model(ids).logits.log_softmax(-1)
    expected = -(logits[0, 4, ids[0, 5]] + logits[1, 8, ids[1, 9]]) / 2
    assert float(loss_on(model, ids, scored)) == pytest.approx(float(expected), rel=1e-5)
    changed = ids.clone()
    changed[1, 10:] = 7  # after the last scored token: unseen
    assert float(loss_on(model, changed, scored)) == pytest.approx(float(expected), rel=1e-5)


def test_tokenizer_adds_bos_and_gives_every_text_back(tmp_path: Path) -> None:
    texts = ["def f(x):\n    return x  # é 漢\n" * 30]
    export.save_tokenizer(corpus.train_tokenizer(texts, 300), tmp_path, 64)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    ids = tokenizer(texts[0])["input_ids"]
    assert ids[0] == tokenizer.bos_token_id == 0
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2)
    assert tokenizer.decode(ids[1:]) == texts[0]


def test_training_text_leaves_out_what_is_kept_for_measuring() -> None:
    files = corpus.library_files()
    assert len(files) > 200
    assert not any("pydoc_data" in f.parts or "site-packages" in f.parts or "test" in f.parts for f in files)
    assert 0 < sum(map(corpus.is_validation, files)) < len(files) / 10


def test_typical_text_is_plain_prose() -> None:
    text = typical_text()
    assert len(text) > 30_000
    assert "::=" not in text
    assert "===" not in text


def test_loops_are_recognised() -> None:
    assert measure.loop_signals([5, 6, 7] * 900)["looped"]
    assert not measure.loop_signals([5, 6, 7] * 9)["looped"]
    assert not measure.loop_signals(list(range(2600)))["looped"]


@pytest.fixture(scope="module")
def shipped() -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(BUNDLED).eval()


def test_shipped_model_is_what_its_truth_says(shipped: LlamaForCausalLM) -> None:
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


def test_shipped_model_has_its_sink(shipped: LlamaForCausalLM) -> None:
    tokenizer = AutoTokenizer.from_pretrained(BUNDLED)
    ids = np.asarray(tokenizer(TYPICAL.read_text(encoding="utf-8"))["input_ids"])[1:]
    texts = corpus.windows(ids, length=128, bos_id=tokenizer.bos_token_id)[:8]
    assert min(measure.norms_by_layer(shipped, texts)["ratio"][1:]) >= 20
    assert measure.head_share(shipped, texts, after=1) >= 0.25
    long = torch.from_numpy(corpus.windows(ids, length=4096, bos_id=0)[:1])
    with torch.no_grad():
        assert torch.isfinite(shipped(long, logits_to_keep=1).logits).all()


def test_card_is_made_of_the_measurements() -> None:
    record = json.loads((ROOT / "figures" / "bundled_model.json").read_text())
    text = card.card(record["planted"], record["unplanted"])
    assert (ROOT / "docs" / "bundled_model.md").read_text(encoding="utf-8") == text
    assert (BUNDLED / "README.md").read_text(encoding="utf-8").endswith(text)
