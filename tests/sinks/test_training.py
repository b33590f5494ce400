"""The callback of a Trainer: the run stays as it is bit for bit, and the numbers are those of plain hooks."""

from __future__ import annotations

import random
import warnings
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from attack_kit import text_file
from covering import slow
from organisms import hard, organism
from raw_kit import attention, residuals
from transformers import Trainer, TrainerCallback, TrainingArguments

import sinkscope as ss
from sinkscope.errors import SinkscopeWarning
from sinkscope.sinks.spikes import survey

pytestmark = pytest.mark.few_texts

STEPS = 4
SPIKE = ["spike_dim", "spike_layer", "spike_neuron"]
ALWAYS = ["sink_rate", "norm_ratio", "norm_position", "spike_ratio"]


class Recorder(TrainerCallback):
    """What a callback that reports gets: it comes before those that a user adds, as that of TensorBoard does."""

    def __init__(self):
        self.rows = []

    def on_log(self, args, state, control, logs=None, **_):
        self.rows.append((state.global_step, dict(logs)))


class Drawing(torch.utils.data.Dataset):
    """Texts that draw from every generator whenever one is taken."""

    def __init__(self, ids):
        self.ids = ids

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, number):
        row = self.ids[number].clone()
        row[random.randrange(1, len(row))] = np.random.randint(4, 40)
        row[int(torch.randint(1, len(row), ()))] = 5
        return {"input_ids": row, "labels": row}


def with_dropout(family):
    """A planted model whose dropout acts while it trains."""
    m = organism(family, 0)
    for module in m.model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.1
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.1
    return m


def trainer_of(m, folder, **settings):
    options = {"max_steps": STEPS, "logging_steps": 1, "learning_rate": 1e-4, "per_device_train_batch_size": 2}
    fixed = {"use_cpu": True, "report_to": "none", "disable_tqdm": True, "save_strategy": "no"}
    recorder = Recorder()
    arguments = TrainingArguments(str(folder), **{**options, **fixed, **settings})
    data = Drawing(m.natural(12, 32))
    trainer = Trainer(m.model, arguments, train_dataset=data, processing_class=m.tokenizer, callbacks=[recorder])
    return trainer, recorder


def run(m, folder, every=None, text=None, **settings):
    """Train, and what all of it comes to; rows of the log without the callback's and without what took how long."""
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    trainer, recorder = trainer_of(m, folder, **settings)
    if every is not None:
        trainer.add_callback(ss.SinkCallback(trainer, every, text=text))
    trainer.train()
    losses = [row for _, row in recorder.rows if "loss" in row]
    generators = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    return trainer, recorder, losses, generators


@pytest.mark.parametrize(
    ("family", "settings"), [("llama", {"bf16": True}), ("gpt2", {"gradient_checkpointing": True})]
)
def test_a_run_with_the_callback_is_the_run_without_bit_for_bit(family, settings, tmp_path):
    plain, _, losses, generators = run(with_dropout(family), tmp_path, **settings)
    with warnings.catch_warnings():
        warnings.simplefilter("error", SinkscopeWarning)
        watched, recorder, watched_losses, watched_generators = run(with_dropout(family), tmp_path, 2, **settings)
    assert len(losses) == STEPS and watched_losses == losses
    assert watched_generators[:2] == generators[:2] and torch.equal(watched_generators[2], generators[2])
    state, expected = watched.model.state_dict(), plain.model.state_dict()
    assert state.keys() == expected.keys() and all(torch.equal(state[name], expected[name]) for name in state)
    assert [step for step, row in recorder.rows if "sink_rate" in row] == [0, 2, 4]
    for module, other in zip(watched.model.modules(), plain.model.modules(), strict=True):
        assert module.training == other.training
        assert len(module._forward_hooks) == len(other._forward_hooks)
        assert len(module._forward_pre_hooks) == len(other._forward_pre_hooks)


# --- what is logged ---------------------------------------------------------------------------------------------------


def text_of(m, path):
    """A file with 20 pieces of 63 tokens of the planted model's language, and these with BOS before each."""
    ids = m.natural(20, 64)
    half = " ".join(m.tokenizer.decode(row) for row in ids[:, 1:].tolist())
    path.write_text(f"{half} {half}", encoding="utf-8")
    return ids


@torch.no_grad()
def by_hand(m, ids):
    """The numbers, by plain hooks and their definitions, of the texts that are surveyed."""
    model, ids = m.model.eval(), ids[: survey.SURVEYED]
    rate = (attention(model, ids)[..., 0].mean(3) > 0.3).float().mean()
    norms = residuals(model, ids).norm(dim=-1)
    ratios = norms[:, :, 0].mean(1) / norms[:, :, 1:].flatten(1).median(1).values
    largest = (norms / norms[:, :, 1:].flatten(1).median(1).values[:, None, None]).amax((0, 2)).mean()
    numbers = {"sink_rate": float(rate), "spike_ratio": float(ratios.max())}
    return numbers | {"norm_ratio": float(largest), "norm_position": 0}


@pytest.mark.parametrize("family", ["llama", slow("gpt2")])
def test_the_numbers_are_those_of_plain_hooks_before_and_after_training(family, tmp_path):
    m = organism(family, 0)
    ids = text_of(m, tmp_path / "text.txt")
    before = by_hand(m, ids)
    _, recorder, _, _ = run(m, tmp_path, STEPS, tmp_path / "text.txt", learning_rate=1e-5)
    after = by_hand(m, ids)
    logged = [row for _, row in recorder.rows if "sink_rate" in row]
    assert before != pytest.approx(after, rel=1e-3)
    for row, expected in zip(logged, (before, after), strict=True):
        assert {name: row[name] for name in ALWAYS} == pytest.approx(expected, rel=1e-4)
        layer, neuron = m.truth.neurons[0]
        assert (row["spike_layer"], row["spike_neuron"]) == (layer, neuron)
    assert logged[0]["spike_dim"] in m.truth.residual_dims


def at_the_start(m, folder, **options):
    """What is logged before the first step."""
    trainer = Trainer(m.model, TrainingArguments(str(folder), use_cpu=True), processing_class=m.tokenizer)
    callback = ss.SinkCallback(trainer, **options)
    callback.on_train_begin(trainer.args, trainer.state, trainer.control)
    return trainer.state.log_history


def test_of_a_model_without_a_spike_nothing_is_said_of_one(tmp_path):
    m = organism("llama", 0, kind="none")
    text_of(m, tmp_path / "text.txt")
    (row,) = at_the_start(m, tmp_path, text=tmp_path / "text.txt")
    assert not row.keys() & set(SPIKE) and row["sink_rate"] < 0.05 and row["spike_ratio"] < 3


def test_a_spike_that_is_not_at_the_first_token_is_found_and_the_expert_of_a_mixture_named(tmp_path):
    m = hard("two_delimiters", "llama")
    (row,) = at_the_start(m, tmp_path, text=text_file(m, tmp_path))
    assert row["spike_ratio"] > 3 and {(row["spike_layer"], row["spike_neuron"])} in m.truth.sets
    m = organism("mixtral", 0)
    (row,) = at_the_start(m, tmp_path)
    assert (row["spike_layer"], row["spike_expert"], row["spike_neuron"]) == m.truth.neurons[0]


# --- when, and by whom ------------------------------------------------------------------------------------------------


# --- what cannot be measured ------------------------------------------------------------------------------------------


class Broken(torch.nn.Module):
    """A layer that fails in the middle of a pass, unless the model trains."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, *args, **options):
        if not self.training:
            raise RuntimeError("it broke")
        return self.layer(*args, **options)


@pytest.mark.parametrize("kind", ["deepspeed", "fsdp", "tensor parallelism", "another process"])
def test_only_the_main_process_measures_and_only_a_model_that_is_whole(kind, tmp_path):
    trainer, recorder = trainer_of(organism("llama", 0), tmp_path)
    callback, mlp = ss.SinkCallback(trainer, every=1), trainer.model.model.layers[0].mlp
    if kind == "deepspeed":
        trainer.is_deepspeed_enabled = True
    elif kind == "fsdp":
        mlp.__class__ = type("FSDPModule", (type(mlp),), {})
    elif kind == "tensor parallelism":
        next(trainer.model.parameters()).device_mesh = "a mesh"
    trainer.state.is_world_process_zero = kind != "another process"
    said = pytest.warns(SinkscopeWarning, match="split over processes")
    with nullcontext() if kind == "another process" else said:
        callback.on_train_begin(trainer.args, trainer.state, trainer.control)
    callback.on_step_end(trainer.args, trainer.state, trainer.control)
    assert not recorder.rows
