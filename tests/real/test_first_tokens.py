"""Heads that mark the first token of a real model, against plain torch hooks on tokens that stand alone."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
import torch

from sinkscope.measure import Setup
from sinkscope.sinks.first_tokens import FirstTokens, spike_of
from sinkscope.sinks.marking_heads import heads


def state_after(model, ids, layer: int, means: dict[int, torch.Tensor] | None = None) -> torch.Tensor:
    """The state of each row's only token after a layer; in some layers all heads give their mean output."""
    seen: list[torch.Tensor] = []
    with ExitStack() as stack, torch.no_grad():
        for at, mean in (means or {}).items():
            o_proj = model.model.layers[at].self_attn.o_proj

            def swap(_module, args, mean=mean):
                return (mean.expand_as(args[0]),)

            stack.callback(o_proj.register_forward_pre_hook(swap).remove)

        def keep(_module, _args, output):
            seen.append(output[0] if isinstance(output, tuple) else output)

        stack.callback(model.model.layers[layer].register_forward_hook(keep).remove)
        model(ids, use_cache=False)
    return seen[0].reshape(len(ids), ids.shape[1], -1)[:, 0].float()


def mean_outputs(model, ids, layers: range, ordinary: torch.Tensor) -> dict[int, torch.Tensor]:
    """The mean input of the output projection at ordinary positions of typical text."""
    means: dict[int, torch.Tensor] = {}
    with ExitStack() as stack, torch.no_grad():
        for layer in layers:

            def keep(_module, args, layer=layer):
                means[layer] = args[0][ordinary].mean(0)

            o_proj = model.model.layers[layer].self_attn.o_proj
            stack.callback(o_proj.register_forward_pre_hook(keep).remove)
        model(ids, use_cache=False)
    return means


def test_smollm2_without_heads_is_that_of_plain_hooks(smollm2):
    """No head of layer 0 is needed by most tokens, and without all heads up to layer 11 nothing is left."""
    model = smollm2.model
    setup = Setup.open(model, tokenizer=smollm2.tokenizer)
    measured = spike_of(setup, None)
    spike, tokens = measured.spike, torch.tensor([1, 260, 504, 7439, 1127, 5568])
    means = mean_outputs(model, measured.survey.ids, range(12), spike.ordinary)
    intact = spike.along(state_after(model, tokens[:, None], spike.peak))
    for upto in (0, 11):
        some = {layer: means[layer] for layer in range(upto + 1)}
        without = spike.along(state_after(model, tokens[:, None], spike.peak, some))
        first = FirstTokens.of(measured, upto)
        torch.testing.assert_close(
            first.along(tokens, [first.heads]), torch.stack([intact, without]), atol=1e-3, rtol=1e-3
        )
        left = float(without.mean() / intact.mean())
        assert (left > 0.5) == (upto == 0)
    found = heads.on(setup, tokens=[smollm2.tokenizer.decode([token]) for token in tokens[1:].tolist()])
    assert len(found.tokens) == 6 and found.every.left == pytest.approx(left, abs=1e-3)
    assert found.marking.left <= 1 - 0.9 * (1 - found.every.left) + 1e-6
