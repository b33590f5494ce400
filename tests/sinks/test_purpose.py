"""What the attention to the first token is for: each change of the loss is that of plain masks and plain values."""

from __future__ import annotations

from contextlib import ExitStack

import plain_hooks as plain
import pytest
import torch

from sinkscope.results.notation import Neuron
from sinkscope.sinks.spikes.edited import Batch, read
from sinkscope.sinks.spikes.find import sinks_of
from sinkscope.sinks.spikes.purpose import BEGIN, purpose_of
from sinkscope.sinks.spikes.row_edits import OtherValue, Zeroed
from sinkscope.sinks.spikes.why_tables import PurposeKey


@pytest.fixture(scope="module")
def batch(bundled):
    """The first texts of the report, as they are."""
    spike = sinks_of(bundled).spikes[0].reported
    rows = torch.arange(4)
    return Batch((spike,), spike.survey.ids[rows], spike.place.mask[rows, None], texts=rows)


def test_neurons_are_zeroed_at_the_place_alone(bundled, batch):
    sites, model = [(1, 338), (2, 5)], bundled.target.hf
    edited = batch.under(Zeroed([tuple(map(Neuron.of, sites))], torch.zeros(4, dtype=torch.long)))
    with plain.zeroed(model, sites, 0):
        expected = plain.losses(model, batch.ids)
    torch.testing.assert_close(read(edited, loss=True).loss, expected, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("value", ["zero", "mean"])
def test_another_value_is_that_of_the_plain_model(bundled, batch, value):
    """Another value stands at the first token, which itself stays as it is."""
    model, layers = bundled.target.hf, range(2, bundled.target.n_layers)
    intact = plain.residuals(model, batch.ids)

    def put(values):
        values = values.clone()
        values[:, 0] = values[:, 8:].mean((0, 1)) if value == "mean" else 0
        return values

    with ExitStack() as stack:
        for layer in layers:
            block = plain.blocks(model)[layer]
            stack.enter_context(plain.outputs_edited(block.self_attn.v_proj, put))
            keep = intact[layer, :, :1]
            stack.enter_context(plain.outputs_edited(block, lambda out, keep=keep: torch.cat([keep, out[:, 1:]], 1)))
        expected = plain.losses(model, batch.ids)[:, BEGIN:]
    seen = read(batch.under(OtherValue(value, layers)), loss=True, since=BEGIN).loss[:, BEGIN:]
    torch.testing.assert_close(seen, expected, atol=2e-4, rtol=1e-4)
    assert float((seen - plain.losses(model, batch.ids)[:, BEGIN:]).mean().abs()) > 1e-3


def test_every_way_is_there_with_its_interval_and_its_control(bundled):
    circuit = sinks_of(bundled).spikes[0]
    rows, again = purpose_of([circuit, circuit])
    purpose = {row.key: row for row in rows}
    assert rows == again
    assert [row.key for row in rows if row.is_control] == [PurposeKey.OTHER_HIDDEN]
    assert purpose[PurposeKey.HIDDEN].loss == circuit.hidden.loss  # one number, wherever it is said
    assert all(row["loss"].margin for key, row in purpose.items() if key is not PurposeKey.INTACT)
    taken = purpose[PurposeKey.HIDDEN_EVERYWHERE]["taker_heads"].value
    assert taken == purpose[PurposeKey.INTACT]["heads"].value == 20
    assert purpose[PurposeKey.HIDDEN]["heads"].value == 0
