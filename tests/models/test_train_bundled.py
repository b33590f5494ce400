"""The script that makes the bundled model: resumes after a kill, repeats from its seed, keeps what was planted."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, LlamaForCausalLM

from experiments.bundled import card, corpus, export, measure
from experiments.bundled.circuit import NO_GROUP, make_plan, truth
from experiments.bundled.facts import TYPICAL
from experiments.bundled.mixture import Mixture, copy_spans, cycles, facts
from experiments.bundled.training import BLOCK, SIZES, Settings, Trainer, blocked, loss_on
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


@pytest.mark.slow
def test_killed_process_resumes_to_the_same_weights(tmp_path: Path) -> None:
    """A real kill: no handler runs, only the last checkpoint is there, and another process goes on from it."""
    program = f"""
import sys, torch
from pathlib import Path
sys.path.insert(0, {str(ROOT)!r})
sys.path.insert(0, {str(Path(__file__).parent)!r})
from test_train_bundled import TINY, tiny_texts
from experiments.bundled.training import Trainer
torch.set_num_threads(1)
trainer = Trainer(TINY, tiny_texts(), Path(sys.argv[1]))
for _ in range(3):
    trainer.train_step()
trainer.save()
trainer.train_step()
print("ready", flush=True)
import time
time.sleep(600)
"""
    (tmp_path / "straight").mkdir()
    (tmp_path / "killed").mkdir()
    victim = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path / "killed")], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    straight = Trainer(TINY, tiny_texts(), tmp_path / "straight")
    straight.run()
    assert victim.stdout is not None
    assert victim.stdout.readline().strip() == "ready"
    os.kill(victim.pid, signal.SIGKILL)
    victim.wait()
    victim.stdout.close()
    resumed = Trainer(TINY, tiny_texts(), tmp_path / "killed")
    resumed.load()
    assert resumed.step == 3
    resumed.run()
    assert_same(weights(straight), weights(resumed))


def test_same_seed_same_weights_other_seed_other_weights(texts: dict[str, np.ndarray], tmp_path: Path) -> None:
    runs = [Trainer(dataclasses.replace(TINY, seed=seed), texts, tmp_path) for seed in (0, 0, 1)]
    for run in runs:
        run.train_step()
    first, again, other = map(weights, runs)
    assert_same(first, again)
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])


def test_a_checkpoint_of_other_settings_is_refused(texts: dict[str, np.ndarray], tmp_path: Path) -> None:
    Trainer(TINY, texts, tmp_path).save()
    with pytest.raises(SystemExit, match="other settings"):
        Trainer(dataclasses.replace(TINY, seed=1), texts, tmp_path).load()


def test_training_changes_the_rest_and_keeps_the_circuit(texts: dict[str, np.ndarray], tmp_path: Path) -> None:
    trainer = Trainer(TINY, texts, tmp_path)
    before = weights(trainer)
    trainer.run()
    assert trainer.frozen is not None
    for name, after in weights(trainer).items():
        mask = trainer.frozen.masks.get(name)
        if mask is not None:
            assert torch.equal(after[mask], trainer.frozen.values[name][mask]), name
            assert mask.all() or not torch.equal(after[~mask], before[name][~mask]), name
        else:
            assert not torch.equal(after, before[name]), name


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


def test_the_family_differs_in_size_alone_and_every_member_has_the_circuit(tokens: np.ndarray, tmp_path: Path) -> None:
    members = {name: Settings(**sizes) for name, sizes in SIZES.items()}
    shipped = members["base"]
    assert shipped == Settings()
    changed = {"d_model", "n_layers", "d_mlp"}
    parameters: list[int] = []
    for settings in members.values():
        assert dataclasses.replace(settings, **{name: getattr(shipped, name) for name in changed}) == shipped
        trainer = Trainer(settings, {"python": np.concatenate([tokens, np.arange(settings.vocab_size)])}, tmp_path)
        assert trainer.plan is not None
        assert any(trainer.plan.readers)
        ratio = measure.norms_by_layer(trainer.model.eval(), corpus.windows(tokens, length=64, bos_id=0)[:4])["ratio"]
        assert min(ratio[trainer.plan.sink_layer :]) > 50
        parameters.append(sum(p.numel() for p in trainer.model.parameters()))
    assert parameters == sorted(parameters)
    assert parameters[-1] > 2 * parameters[-2] > 4 * parameters[-3]


def test_groups_share_the_tokens_of_the_text(tokens: np.ndarray) -> None:
    counts = np.bincount(tokens[tokens > 1], minlength=300)
    plan = make_plan(counts, bos_id=0, d_model=32, d_mlp=24, n_layers=3, seed=0)
    groups = np.asarray(plan.group_of_token)
    share = [counts[groups == g].sum() / counts.sum() for g in (NO_GROUP, 1, 2, 3)]
    assert share == pytest.approx([0.1, 0.3, 0.3, 0.3], abs=0.04)
    assert groups[0] == 0
    assert (groups == 0).sum() == 9
    assert len(set(plan.reserved)) == 8
    assert json.loads(json.dumps(truth(plan, 0)))["group_of_token"] == list(plan.group_of_token)


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


def test_stories_are_read_from_their_start_and_python_from_anywhere(texts: dict[str, np.ndarray]) -> None:
    drawn, rng = mixture(texts), np.random.default_rng(0)
    for kind, aligned in (("stories", True), ("passages", True), ("python", False)):
        crops = [drawn.crop(rng, kind, 20) for _ in range(40)]
        assert all(crop[-1] == 1 for crop in crops) == aligned
        assert len({tuple(crop) for crop in crops}) > 10


def test_a_cycle_is_scored_exactly_where_it_was_seen_before() -> None:
    ids, scored = cycles(np.random.default_rng(0), rows=60, length=50, vocab_size=100_000)
    assert (ids[:, 0] == 0).all() and (ids[:, 1:] >= 3).all()
    periods = set()
    for row, known in zip(ids, scored, strict=True):
        seen = [i > 0 and row[i] in row[1:i] for i in range(len(row))]
        assert known.tolist() == seen
        period = int(known.argmax()) - 1
        assert np.array_equal(row[1 + period :], row[1:-period])
        periods.add(period)
    assert min(periods) == 3 and max(periods) >= 12


def test_twins_are_cycles_in_which_one_token_does_not_tell_the_next() -> None:
    ids, scored = cycles(np.random.default_rng(0), rows=40, length=90, vocab_size=100_000, twins=1.0)
    for row, known in zip(ids, scored, strict=True):
        period = int(known.argmax()) - 1
        assert np.array_equal(row[1 + period :], row[1:-period])
        assert period < 5 or len(set(row[1:])) < period


def test_random_facts_are_scored_where_a_key_is_asked_for_again() -> None:
    gaps = set()
    for seed in range(60):
        row, scored = facts(np.random.default_rng(seed), length=120, vocab_size=100_000)
        assert len(row) == len(scored) == 120 and row[0] == 0 and row[1:].min() >= 3
        first, second = np.flatnonzero(scored)[:2]
        width = int(second - first)
        known: dict[int, int] = {}
        for start in range(1, 120 - width, width):
            key, value = int(row[start]), int(row[start + width - 1])
            assert np.array_equal(row[start + 1 : start + width - 1], row[2:width]), "what stands between is the same"
            assert bool(scored[start + width - 1]) == (key in known)
            assert known.setdefault(key, value) == value
            assert not scored[start : start + width - 1].any()
        gaps.add(width - 2)
    assert gaps == {0, 1, 2, 3}


@pytest.mark.parametrize("length", [7, BLOCK, 2 * BLOCK + 5])
def test_attention_in_blocks_is_causal_attention(length: int) -> None:
    torch.manual_seed(0)
    query, key, value = torch.randn(2, 4, length, 8), torch.randn(2, 2, length, 8), torch.randn(2, 2, length, 8)
    made, _ = blocked(torch.nn.Module(), query, key, value, None, scaling=0.3)
    expected = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=0.3, enable_gqa=True
    )
    torch.testing.assert_close(made, expected.transpose(1, 2))


def test_a_copied_span_comes_again_and_the_text_goes_on() -> None:
    again = apart = random_units = 0
    for seed in range(200):
        row, scored = np.arange(1000, 1200), np.ones(200, dtype=bool)
        copy_spans(np.random.default_rng(seed), row, scored, vocab_size=900)
        assert len(row) == 200 and (row >= 3).all()
        values, counts = np.unique(row, return_counts=True)
        assert counts.max() >= 2
        unscored = np.flatnonzero(~scored)
        if len(unscored):
            # Only the first copy of a random unit is left out of the loss, and it does come again.
            random_units += 1
            assert (np.diff(unscored) == 1).all() and (row[unscored] < 900).all()
            assert all((row[scored] == token).any() for token in row[unscored])
        period = next((p for p in range(2, 96) if (row[p:][:-1] == row[:-p][:-1]).sum() >= p), None)
        again += period is not None
        apart += period is None
        assert row[-1] >= 1000 or (row[-1] == values[counts >= 2]).any()
    assert random_units == pytest.approx(60, abs=25)
    assert again > apart > 0


def test_schedule_warms_up_falls_when_text_begins_and_ends_low() -> None:
    settings = Settings(steps=2000)
    rates = [settings.rate(step) for step in range(2000)]
    first = settings.copy_steps
    assert rates[0] < rates[99] == rates[first - 1] == settings.learning_rate
    assert rates[first] == rates[999] == settings.text_rate < settings.learning_rate
    assert sorted(rates[999:], reverse=True) == rates[999:]
    assert rates[-1] < 0.01 * settings.text_rate


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
