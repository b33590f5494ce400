"""What the attention to the first token is for: each change of the loss is that of plain masks and plain attention."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from raw_kit import blocks, part
from test_spikes import bundled  # noqa: F401  (a fixture)
from torch import nn

from sinkscope.results.row import of_table
from sinkscope.sinks.spikes.asked import BEGIN, purpose_of
from sinkscope.sinks.spikes.edited import Batch, read
from sinkscope.sinks.spikes.find import sinks_of
from sinkscope.sinks.spikes.records import PURPOSE_CONTROLS


def plain_loss(model, ids) -> torch.Tensor:
    with torch.no_grad():
        logits = model(ids, use_cache=False).logits.float()
    return nn.functional.cross_entropy(logits[:, :-1].transpose(1, 2), ids[:, 1:], reduction="none")[:, BEGIN:]


class PlainValues:
    """Eager attention in which later queries read another value from the first token."""

    def __init__(self, model, layers, mean: bool):
        self.model, self.layers, self.mean = model, layers, mean

    def __enter__(self):
        self.kept = self.model.config._attn_implementation
        self.model.set_attn_implementation("eager")
        self.handles, self.values = [], {}
        for layer in self.layers:
            attention = part(blocks(self.model)[layer], "self_attn")
            self.handles.append(
                attention.v_proj.register_forward_hook(
                    lambda _m, _a, out, layer=layer: self.values.__setitem__(layer, out)
                )
            )
            self.handles.append(
                attention.register_forward_hook(lambda m, _a, out, layer=layer: self.edit(m, out, layer))
            )

    def edit(self, module, out, layer):
        weights, width = out[1], module.head_dim
        values = self.values[layer].unflatten(-1, (-1, width)).transpose(1, 2)
        values = values.repeat_interleave(weights.shape[1] // values.shape[1], 1)
        new = values[:, :, 8:].mean((0, 2), keepdim=True) if self.mean else 0
        given = weights[..., :1].clone()
        given[:, :, :1] = 0
        added = given * (new - values[:, :, :1])
        return (out[0] + module.o_proj(added.transpose(1, 2).flatten(2)), *out[1:])

    def __exit__(self, *_):
        for handle in self.handles:
            handle.remove()
        self.model.set_attn_implementation(self.kept)


@pytest.fixture(scope="module")
def batch(bundled):  # noqa: F811
    """The first texts of the report, as they are."""
    spike = sinks_of(bundled).spikes[0].reported
    rows = torch.arange(4)
    return Batch((spike,), spike.survey.ids[rows], (spike.place.mask[rows],), texts=rows)


@pytest.mark.parametrize("mean", [False, True])
def test_another_value_is_that_of_plain_attention(bundled, batch, mean):  # noqa: F811
    target, layers = bundled.target, range(2, bundled.target.n_layers)
    seen = read(replace(batch, value="mean" if mean else "zero", layers=layers), loss=True, since=BEGIN)
    with PlainValues(target.hf, layers, mean):
        expected = plain_loss(target.hf, batch.ids)
    torch.testing.assert_close(seen.loss[:, BEGIN:], expected, atol=2e-4, rtol=1e-4)
    assert float((seen.loss - read(batch, loss=True).loss).nanmean().abs()) > 1e-3


def test_every_way_is_there_with_its_interval_and_its_control(bundled):  # noqa: F811
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


def test_a_pass_that_begins_where_it_acts_reads_what_a_whole_pass_reads(bundled, batch):  # noqa: F811
    target, length = bundled.target, batch.ids.shape[1]
    unseen = batch.places[0][:, None].expand(-1, length, -1)
    late = replace(batch, unseen=unseen, layers=range(2, target.n_layers))
    asked = {"heads": [2, 3], "loss": True}
    ran = []
    with target.sub(0, "mlp").register_forward_hook(lambda *_: ran.append(0)):
        begun = read(late, **asked)
        assert not ran  # in the first layer
        read(replace(late, texts=None), **asked)
        assert ran
    for name, one in begun._asdict().items():
        other = getattr(read(replace(late, texts=None), **asked), name)
        torch.testing.assert_close(one, other, equal_nan=True, atol=1e-5, rtol=1e-5, msg=name)
