"""The callback of a Trainer: the run stays as it is bit for bit, and the numbers are those of plain hooks."""

from __future__ import annotations

import warnings
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from attack_kit import text_file
from organisms import Organism, organism
from plain_hooks import residuals
from transformers import Trainer, TrainingArguments

import sinkscope as ss
from sinkscope.errors import SinkscopeWarning
from sinkscope.models.text import halves_of, text_rows
from sinkscope.sinks.spikes import survey

pytestmark = pytest.mark.few_texts

STEPS = 4


class Drawing(torch.utils.data.Dataset):
    """Texts that draw from numpy and torch whenever one is taken."""

    def __init__(self, ids):
        self.ids = ids

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, number):
        row = self.ids[number].clone()
        row[np.random.randint(1, len(row))] = np.random.randint(4, 40)
        row[int(torch.randint(1, len(row), ()))] = 5
        return {"input_ids": row, "labels": row}


def trainer_of(o: Organism, folder, **settings) -> Trainer:
    fixed = {"use_cpu": True, "report_to": "none", "disable_tqdm": True, "save_strategy": "no", "logging_steps": 1}
    arguments = TrainingArguments(str(folder), max_steps=STEPS, **fixed, **settings)
    return Trainer(o.model, arguments, train_dataset=Drawing(o.natural(12, 32)), processing_class=o.tokenizer)


def run(folder, every=None):
    """Train a model whose dropout acts, and return what it has logged and all else that comes of it."""
    o = organism()
    for layer in o.model.model.layers:
        layer.self_attn.attention_dropout = 0.1
    np.random.seed(1)
    torch.manual_seed(1)
    trainer = trainer_of(o, folder, bf16=True, gradient_checkpointing=True)
    if every is not None:
        trainer.add_callback(ss.SinkCallback(trainer, every))
    trainer.train()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    drawn = np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()  # beartype draws from that of Python
    hooks = [(m.training, len(m._forward_hooks), len(m._forward_pre_hooks)) for m in o.model.modules()]
    weights = {name: weight.tolist() for name, weight in o.model.state_dict().items()}
    return trainer.state.log_history, (losses, drawn, hooks, weights)


def test_a_run_with_the_callback_is_the_run_without_bit_for_bit(tmp_path):
    _, plain = run(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error", SinkscopeWarning)
        logged, watched = run(tmp_path, 2)
    assert watched == plain and len(plain[0]) == STEPS
    assert [row["step"] for row in logged if "sink_rate" in row] == [0, 2, 4]


def test_the_planted_spike_is_logged_and_of_a_model_without_one_nothing_is_said_of_it(tmp_path):
    """`tests/sinks/test_metrics.py` has the numbers that `sink_metrics` gives, too."""

    def at_the_start(o: Organism):
        trainer = trainer_of(o, tmp_path)
        callback = ss.SinkCallback(trainer, text=text_file(o, tmp_path))
        callback.on_train_begin(trainer.args, trainer.state, trainer.control)
        (row,) = trainer.state.log_history
        return row

    o, mixture = organism(), organism("mixtral")
    row = at_the_start(o)
    half = halves_of((tmp_path / "words.txt").read_text()).choose
    norms = residuals(o.model.eval(), text_rows(o.tokenizer, half, survey.SURVEYED, 64, 1)).norm(dim=-1)
    ratios = norms[:, :, 0].mean(1) / norms[:, :, 1:].flatten(1).median(1).values
    assert row["spike_ratio"] == pytest.approx(float(ratios.max()), rel=1e-4) and row["norm_position"] == 0
    assert (row["spike_layer"], row["spike_neuron"]) in o.truth.neurons and row["spike_dim"] in o.truth.dims
    row = at_the_start(organism(kind="none"))
    assert not row.keys() & {"spike_dim", "spike_layer", "spike_neuron"} and row["spike_ratio"] < 3
    row = at_the_start(mixture)
    assert (row["spike_layer"], row["spike_expert"], row["spike_neuron"]) in mixture.truth.neurons


@pytest.mark.parametrize("kind", ["deepspeed", "tensor parallelism", "another process"])
def test_only_the_main_process_measures_and_only_a_model_that_is_whole(kind, tmp_path):
    trainer = trainer_of(organism(), tmp_path)
    callback = ss.SinkCallback(trainer, every=1)
    trainer.is_deepspeed_enabled = kind == "deepspeed"
    trainer.state.is_world_process_zero = kind != "another process"
    if kind == "tensor parallelism":
        next(trainer.model.parameters()).device_mesh = "a mesh"
    said = pytest.warns(SinkscopeWarning, match="split over processes")
    with nullcontext() if kind == "another process" else said:
        callback.on_train_begin(trainer.args, trainer.state, trainer.control)
    callback.on_step_end(trainer.args, trainer.state, trainer.control)
    assert not trainer.state.log_history
