"""Numbers of the sink while a model is trained: the run stays as it is, and they are those of plain hooks."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from attack_kit import text_file
from organisms import Organism, organism
from plain_hooks import attention, residuals
from refusals import refused
from transformers import Trainer, TrainingArguments

import sinkscope as ss
from sinkscope.errors import SinkscopeWarning

pytestmark = pytest.mark.few_texts


def trainer_of(o: Organism, folder, **settings) -> Trainer:
    fixed = {"use_cpu": True, "report_to": "none", "disable_tqdm": True, "save_strategy": "no", "logging_steps": 1}
    arguments = TrainingArguments(str(folder), max_steps=4, **fixed, **settings)
    rows = [{"input_ids": row, "labels": row} for row in o.natural(12, 32)]
    return Trainer(o.model, arguments, train_dataset=rows, processing_class=o.tokenizer)


def with_dropout(model) -> None:
    for layer in model.train().model.layers:
        layer.self_attn.attention_dropout = 0.1


def test_a_run_with_the_callback_is_the_run_without_bit_for_bit(tmp_path):
    runs = []
    for every in (None, 2):
        o = organism()
        with_dropout(o.model)
        torch.manual_seed(1)
        trainer = trainer_of(o, tmp_path, bf16=True, gradient_checkpointing=True)
        if every is not None:
            trainer.add_callback(ss.SinkCallback(trainer, every))
        with warnings.catch_warnings(action="error", category=SinkscopeWarning):
            trainer.train()
        losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
        runs.append((losses, np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()))
    assert runs[0] == runs[1] and len(runs[0][0]) == 4
    assert [row["step"] for row in trainer.state.log_history if "sink_rate" in row] == [0, 2, 4]


def test_metrics_are_those_of_plain_hooks_also_while_dropout_acts():
    o = organism()
    rates, places = [], []
    rows = [*o.natural(2, 40), *o.natural(1, 30, 1)]
    for row in rows:
        rates.append((attention(o.model, row[None])[..., 0].mean(3) > 0.3).float().mean())
        norms = residuals(o.model, row[None])[:, 0].norm(dim=-1)
        places.append((norms / norms[:, 1:].median(1, keepdim=True).values).flatten().max(0))
    with_dropout(o.model)
    drawn = torch.get_rng_state()
    metrics = ss.sink_metrics(o.model, [row.tolist() for row in rows])
    assert o.model.training and torch.equal(torch.get_rng_state(), drawn)
    assert metrics["sink_rate"] == pytest.approx(float(sum(rates)) / 3)
    assert metrics["norm_ratio"] == pytest.approx(float(sum(place.values for place in places)) / 3, rel=1e-3)
    assert divmod(int(places[0].indices), 40) == (metrics["norm_layer"], metrics["norm_position"])
    with refused("the longest row has 3 tokens: a typical norm needs 4"):
        ss.sink_metrics(o.model, [[1, 5, 6]])


@pytest.mark.parametrize("kind", ["llama", "mixtral", "none"])
def test_the_planted_spike_is_logged_and_of_a_model_without_one_nothing_is_said_of_it(kind, tmp_path):
    o = organism(kind="none") if kind == "none" else organism(kind)
    trainer = trainer_of(o, tmp_path)
    callback = ss.SinkCallback(trainer, text=text_file(o, tmp_path))
    callback.on_train_begin(trainer.args, trainer.state, trainer.control)
    (row,) = trainer.state.log_history
    site = tuple(row[name] for name in ("spike_layer", "spike_expert", "spike_neuron") if name in row)
    assert (site in o.truth.neurons, row.get("spike_dim") in o.truth.dims) == (kind != "none", kind != "none")
    assert row["spike_ratio"] == pytest.approx(1 if kind == "none" else row["norm_ratio"], rel=0.1)


@pytest.mark.parametrize("kind", ["deepspeed", "another process"])
def test_only_the_main_process_measures_and_only_a_model_that_is_whole(kind, tmp_path):
    trainer = trainer_of(organism(), tmp_path)
    callback = ss.SinkCallback(trainer, every=1)
    trainer.is_deepspeed_enabled = kind == "deepspeed"
    trainer.state.is_world_process_zero = kind != "another process"
    with warnings.catch_warnings(record=True) as said:
        callback.on_train_begin(trainer.args, trainer.state, trainer.control)
        callback.on_step_end(trainer.args, trainer.state, trainer.control)
    assert ["split over processes" in str(one.message) for one in said] == [True] * (kind != "another process")
    assert not trainer.state.log_history
