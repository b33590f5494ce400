"""The callback of a Trainer: the run stays as it is bit for bit, and the numbers are those of plain hooks."""

from __future__ import annotations

import random
import warnings
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from attack_kit import text_file
from organisms import hard, organism
from raw_kit import residuals
from transformers import Trainer, TrainerCallback, TrainingArguments

import sinkscope as ss
from sinkscope.errors import SinkscopeWarning
from sinkscope.models.text import halves_of, text_rows
from sinkscope.sinks.spikes import survey

pytestmark = pytest.mark.few_texts

STEPS = 4


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


def run(m, folder, every=None, **settings):
    """Train, and what all of it comes to; rows of the log without the callback's and without what took how long."""
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    trainer, recorder = trainer_of(m, folder, **settings)
    if every is not None:
        trainer.add_callback(ss.SinkCallback(trainer, every))
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


# --- what is logged ---


def at_the_start(m, folder, **options):
    """What is logged before the first step."""
    trainer = Trainer(m.model, TrainingArguments(str(folder), use_cpu=True), processing_class=m.tokenizer)
    callback = ss.SinkCallback(trainer, **options)
    callback.on_train_begin(trainer.args, trainer.state, trainer.control)
    (row,) = trainer.state.log_history
    return row


def test_the_planted_spike_is_logged_and_of_a_model_without_one_nothing_is_said_of_it(tmp_path):
    """`tests/sinks/test_metrics.py` has the numbers that `sink_metrics` gives, too."""
    m, none = organism("llama", 0), organism("llama", 0, kind="none")
    late, mixture = hard("two_delimiters", "llama"), organism("mixtral", 0)
    text = text_file(m, tmp_path, 20)
    row = at_the_start(m, tmp_path, text=text)
    with torch.no_grad():
        half = halves_of(text.read_text()).choose
        ids = text_rows(m.tokenizer, half, survey.SURVEYED, 64, m.tokenizer.bos_token_id)
        norms = residuals(m.model.eval(), ids).norm(dim=-1)
    ratios = norms[:, :, 0].mean(1) / norms[:, :, 1:].flatten(1).median(1).values
    assert row["spike_ratio"] == pytest.approx(float(ratios.max()), rel=1e-4) and row["norm_position"] == 0
    assert (row["spike_layer"], row["spike_neuron"]) == m.truth.neurons[0]
    assert row["spike_dim"] in m.truth.residual_dims
    row = at_the_start(none, tmp_path, text=text_file(none, tmp_path))
    assert not row.keys() & {"spike_dim", "spike_layer", "spike_neuron"} and row["spike_ratio"] < 3
    row = at_the_start(late, tmp_path, text=text_file(late, tmp_path))  # not at the first token
    assert row["spike_ratio"] > 3 and {(row["spike_layer"], row["spike_neuron"])} in late.truth.sets
    row = at_the_start(mixture, tmp_path)
    assert (row["spike_layer"], row["spike_expert"], row["spike_neuron"]) == mixture.truth.neurons[0]


# --- what cannot be measured ---


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
