"""What the attention to the first token is for: each change of the loss is that of plain masks and plain attention."""

from __future__ import annotations

import pytest
import torch
from raw_kit import blocks, part
from test_spikes import bundled  # noqa: F401  (a fixture)
from torch import nn

from sinkscope.sinks.spikes.find import sinks_of
from sinkscope.sinks.spikes.purpose import BEGIN, TAKERS, TEXTS, hidden, intact, purposes_of, read_way, valued


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


@pytest.mark.parametrize("mean", [False, True])
def test_another_value_is_that_of_plain_attention(bundled, mean):  # noqa: F811
    target, ids = bundled.target, sinks_of(bundled).report.ids[:4]
    layers = range(2, target.n_layers)
    read = read_way(target, ids, valued(target, 0, layers, mean), TAKERS)
    with PlainValues(target.hf, layers, mean):
        expected = plain_loss(target.hf, ids)
    torch.testing.assert_close(read.loss[:, BEGIN:], expected, atol=2e-4, rtol=1e-4)
    assert float((read.loss - read_way(target, ids, intact, TAKERS).loss).nanmean().abs()) > 1e-3


def test_hidden_keys_are_those_of_a_plain_mask(bundled):  # noqa: F811
    target, ids = bundled.target, sinks_of(bundled).report.ids[:4]
    length = ids.shape[1]
    read = read_way(target, ids, hidden(target, 5, None, length), TAKERS)
    mask = torch.full((length, length), torch.finfo(torch.float32).min).triu(1)
    mask[6:, 5] = torch.finfo(torch.float32).min
    with torch.no_grad():
        logits = target.hf(ids, attention_mask=mask.expand(4, 1, -1, -1), use_cache=False).logits.float()
    expected = nn.functional.cross_entropy(logits[:, :-1].transpose(1, 2), ids[:, 1:], reduction="none")[:, BEGIN:]
    torch.testing.assert_close(read.loss[:, BEGIN:], expected, atol=2e-4, rtol=1e-4)


def test_every_way_is_there_with_its_interval_and_controls(bundled):  # noqa: F811
    (purpose,) = purposes_of(sinks_of(bundled).report, [1], 0)
    assert purpose.texts == TEXTS and purpose.layers == (2, bundled.target.n_layers - 1)
    assert [one.name for one in purpose.changes][:2] == ["hidden in all layers", "hidden"]
    assert all(one.interval is not None for one in purpose.changes)
    assert [one.spread is None for one in purpose.changes] == [False] * 4 + [True] * 2
    assert purpose.change("hidden").heads < purpose.heads


def test_a_pass_that_begins_where_a_way_acts_reads_what_a_whole_pass_reads(bundled):  # noqa: F811
    target, survey = bundled.target, sinks_of(bundled).report
    ids, way = survey.ids[:4], hidden(target, 0, range(2, target.n_layers), survey.ids.shape[1])
    plain = read_way(target, ids, intact, TAKERS, kept_layers=[2])
    begin = plain.begins(survey, 2)
    assert begin is not None and plain.begins(survey, 3) is None
    whole, late = read_way(target, ids, way, TAKERS), read_way(target, ids, way, TAKERS, begin=begin)
    for name in ("loss", "attention", "states"):
        torch.testing.assert_close(getattr(late, name), getattr(whole, name), equal_nan=True, atol=1e-5, rtol=1e-5)
