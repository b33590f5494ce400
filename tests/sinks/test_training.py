"""The callback of a Trainer: the run stays as it is bit for bit, and the numbers are those of plain hooks."""

from __future__ import annotations

import random
import warnings

import numpy as np
import pytest
import torch
from organisms import organism
from transformers import Trainer, TrainerCallback, TrainingArguments

import sinkscope as ss
from sinkscope.errors import SinkscopeWarning

STEPS = 6


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


def run(m, folder, callback=None, **settings):
    """Train, and what all of it comes to; rows of the log without the callback's and without what took how long."""
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    trainer, recorder = trainer_of(m, folder, **settings)
    if callback is not None:
        callback.attach(trainer)
    trainer.train()
    losses = [row for _, row in recorder.rows if "loss" in row]
    generators = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    return trainer, recorder, losses, generators


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("settings", [{}, {"bf16": True}, {"gradient_checkpointing": True}])
def test_a_run_with_the_callback_is_the_run_without_bit_for_bit(family, settings, tmp_path):
    plain, _, losses, generators = run(with_dropout(family), tmp_path, **settings)
    with warnings.catch_warnings():
        warnings.simplefilter("error", SinkscopeWarning)
        watched, recorder, watched_losses, watched_generators = run(
            with_dropout(family), tmp_path, ss.SinkCallback(every=2), **settings
        )
    assert len(losses) == STEPS and watched_losses == losses
    assert watched_generators[:2] == generators[:2] and torch.equal(watched_generators[2], generators[2])
    state, expected = watched.model.state_dict(), plain.model.state_dict()
    assert state.keys() == expected.keys() and all(torch.equal(state[name], expected[name]) for name in state)
    assert [step for step, row in recorder.rows if "sink_rate" in row] == [0, 2, 4, 6]
    for module, other in zip(watched.model.modules(), plain.model.modules(), strict=True):
        assert module.training == other.training
        assert len(module._forward_hooks) == len(other._forward_hooks)
        assert len(module._forward_pre_hooks) == len(other._forward_pre_hooks)
