"""Adapters of wide models come from narrow ones."""

from __future__ import annotations

import pytest
import torch
from organisms.decoders import decoder
from organisms.sizes import SIZES, sized_decoder

from sinkscope.opening.inference import find, sample

WIDE = (
    "llama",
    "gpt_oss",
    "qwen3_moe",
    "gemma2",
    "phi3",
    "granite",
    "mixtral",
    "olmo2",
    "qwen3_next",
    "bloom",
)


@pytest.mark.parametrize("model_type", WIDE)
def test_a_narrow_model_of_the_same_modules_has_the_same_adapter(model_type, monkeypatch):
    model = sized_decoder(model_type, next(iter(SIZES.values()))).model
    direct = find.inferred_adapter(model)
    monkeypatch.setattr(sample, "_WIDE", 0)
    calls: list[torch.nn.Module] = []
    real = find.infer

    def seen(hf):
        calls.append(hf)
        return real(hf)

    monkeypatch.setattr(find, "infer", seen)
    assert find.inferred_adapter(model) == direct
    assert calls[0] is not model  # the model itself is not called
    widths = [sum(parameter.numel() for parameter in hf.parameters()) for hf in (calls[0], model)]
    assert len(calls) == 1 and widths[0] < 0.5 * widths[1]


def test_a_model_that_its_user_changed_is_called_itself(monkeypatch):
    """A narrow model of its configuration has other modules."""
    model = decoder("llama")
    for layer in model.model.layers:
        layer.mlp.down_proj = torch.nn.Sequential(layer.mlp.down_proj)
    monkeypatch.setattr(sample, "_WIDE", 0)
    assert find.inferred_adapter(model).down == "mlp.down_proj.0"
