"""Heads that mark the first token of a real model, against plain torch hooks on tokens that stand alone."""

from __future__ import annotations

from contextlib import ExitStack

import plain
import torch

from sinkscope.measure import Setup
from sinkscope.sinks.spikes.edited import means_of
from sinkscope.sinks.spikes.find import spike_of
from sinkscope.sinks.spikes.marks import along_first, heads_that_mark, heads_up_to


def state_after(model, ids, layer: int, means: dict[int, torch.Tensor] | None = None) -> torch.Tensor:
    """The state of each row's only token after a layer; in some layers all heads give their mean output."""
    with ExitStack() as stack:
        for at, mean in (means or {}).items():
            o_proj = plain.blocks(model)[at].self_attn.o_proj
            stack.enter_context(plain.inputs_edited(o_proj, mean.expand_as))
        return plain.residuals(model, ids)[layer, :, 0].float()


def mean_outputs(model, ids, layers: range, ordinary: torch.Tensor) -> dict[int, torch.Tensor]:
    """The mean input of the output projection at ordinary positions of typical text."""
    blocks = [plain.blocks(model)[layer].self_attn.o_proj for layer in layers]
    with plain.reading(blocks, "input") as seen, torch.no_grad():
        model(ids, use_cache=False)
    return {layer: outputs[ordinary].mean(0) for layer, outputs in zip(layers, seen, strict=True)}


def test_smollm2_without_heads_is_that_of_plain_hooks(smollm2):
    """No head of layer 0 is needed by most tokens, and without all heads up to layer 11 nothing is left."""
    model = smollm2.model
    setup = Setup.open(model, tokenizer=smollm2.tokenizer)
    chosen, tokens = spike_of(setup), torch.tensor([1, 260, 504, 7439, 1127, 5568])
    assert chosen is not None
    spike = chosen.spike
    means = mean_outputs(model, spike.survey.ids, range(12), spike.ordinary)
    intact = spike.along(state_after(model, tokens[:, None], spike.peak))
    for upto in (0, 11):
        some = {layer: means[layer] for layer in range(upto + 1)}
        without = spike.along(state_after(model, tokens[:, None], spike.peak, some))
        every = heads_up_to(setup.target, upto)
        along = along_first(spike, tokens, [every], means_of(spike, every))
        torch.testing.assert_close(along, torch.stack([intact, without]), atol=1e-3, rtol=1e-3)
        left = float(without.mean() / intact.mean())
        assert (left > 0.5) == (upto == 0)
    found = heads_that_mark(setup, chosen, count=5)
    rows = {row.name: row for row in found}
    assert rows["tokens"].get("have") == 6 and rows["all heads"].get("left") < 0.05
    assert rows["fewest heads"].get("left") <= 1 - 0.9 * (1 - rows["all heads"].get("left")) + 1e-6
