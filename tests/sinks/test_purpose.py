"""What the attention to the first token is for: each change of the loss is that of plain masks and plain attention."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace

import plain_hooks as plain
import pytest
import torch

from sinkscope.results.notation import Neuron
from sinkscope.results.row import of_table
from sinkscope.sinks.spikes.asked import BEGIN, purpose_of
from sinkscope.sinks.spikes.edited import Batch, read
from sinkscope.sinks.spikes.find import sinks_of
from sinkscope.sinks.spikes.records import PURPOSE_CONTROLS


@pytest.fixture(scope="module")
def batch(bundled):
    """The first texts of the report, as they are."""
    spike = sinks_of(bundled).spikes[0].reported
    rows = torch.arange(4)
    return Batch((spike,), spike.survey.ids[rows], (spike.place.mask[rows],), texts=rows)


def test_neurons_are_zeroed_at_the_place_alone(bundled, batch):
    sites, model = [(1, 338), (2, 5)], bundled.target.hf
    edited = replace(batch, edits=[tuple(map(Neuron.of, sites))], edit_of=torch.zeros(4, dtype=torch.long))
    with plain.zeroed(model, sites, 0):
        expected = plain.losses(model, batch.ids)
    torch.testing.assert_close(read(edited, loss=True).loss, expected, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("mean", [False, True])
@torch.no_grad()
def test_another_value_is_that_of_plain_attention(bundled, batch, mean):
    """Eager attention in which later queries read another value from the first token."""
    target, layers = bundled.target, range(2, bundled.target.n_layers)
    model, ids = target.hf, batch.ids
    seen = read(replace(batch, value="mean" if mean else "zero", layers=layers), loss=True, since=BEGIN)

    def edit(module, _args, kwargs, output):
        out, weights = output
        values = module.v_proj(kwargs["hidden_states"]).unflatten(-1, (-1, module.head_dim)).transpose(1, 2)
        values = values.repeat_interleave(weights.shape[1] // values.shape[1], 1)
        new = values[:, :, 8:].mean((0, 2), keepdim=True) if mean else 0
        given = weights[..., :1].clone()
        given[:, :, :1] = 0
        added = given * (new - values[:, :, :1])
        return out + module.o_proj(added.transpose(1, 2).flatten(2)), weights

    model.set_attn_implementation("eager")
    with ExitStack() as stack:
        for layer in layers:
            attention = plain.blocks(model)[layer].self_attn
            stack.callback(attention.register_forward_hook(edit, with_kwargs=True).remove)
        expected = plain.losses(model, ids)
    model.set_attn_implementation("sdpa")
    torch.testing.assert_close(seen.loss[:, BEGIN:], expected[:, BEGIN:], atol=2e-4, rtol=1e-4)
    assert float((seen.loss - read(batch, loss=True).loss).nanmean().abs()) > 1e-3


def test_every_way_is_there_with_its_interval_and_its_control(bundled):
    circuit = sinks_of(bundled).spikes[0]
    rows, again = purpose_of([circuit, circuit])
    purpose, controls = of_table(rows, "purpose"), of_table(rows, PURPOSE_CONTROLS)
    assert rows == again and list(controls) == ["most attended key hidden"]
    assert list(purpose) == ["intact", "hidden in all layers", "hidden", "value zero", "mean value"]
    assert purpose["hidden"].numbers["loss"] == circuit.hidden.numbers["loss"]  # one number, wherever it is said
    assert len(circuit.hidden.numbers["loss"].by_text) == len(circuit.reported.survey.ids)
    assert all(row.margin("loss") for name, row in (purpose | controls).items() if name != "intact")
    assert purpose["hidden in all layers"].get("taker_heads") == purpose["intact"].get("heads") == 20
    assert purpose["hidden"].get("heads") == 0
