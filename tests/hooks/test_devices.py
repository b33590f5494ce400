"""Models on several devices, as `device_map="auto"` spreads them."""

from __future__ import annotations

import placed
import pytest
import torch
from organisms import tiny_model
from transformers import DynamicCache

import sinkscope as ss

EDITS = {
    "h2o": ss.kv.H2O(6),
    "loopserve": ss.LoopServe(6, prefill=False),
    "heads": ss.Ablate(heads=[(1, 2)]),
    "patch": ss.SinkPatch(layer=1, neurons=[3]),
}


def test_layers_on_two_devices():
    """The devices do not exist, but an operation that mixes tensors of both fails, as it would."""
    model, _ = tiny_model("llama")
    ids = torch.arange(24).view(2, 12) + 4

    @torch.no_grad()
    def read(one, edit, ids):
        cache, found = DynamicCache(config=one.config), []
        with edit.on(one):
            for part in (ids, ids[:, :1], ids[:, 1:2]):
                found.append(one(input_ids=part, past_key_values=cache, use_cache=True).logits[:, -1])
        return torch.cat(found, 1), cache.layers

    wanted = {name: read(model, edit, ids)[0] for name, edit in EDITS.items()}
    with placed.places():
        placed.spread(model, ["ipu:0", "ipu:1", "ipu:0"])
        with pytest.raises(RuntimeError, match="tensors on ipu:0, ipu:1"):
            placed.to(ids, "ipu:0") + placed.to(ids, "ipu:1")
        for name, edit in EDITS.items():
            found, layers = read(model, edit, placed.to(ids, "ipu:0"))
            assert torch.equal(found.held, wanted[name]), name
            assert [str(layer.keys.device) for layer in layers] == ["ipu:0", "ipu:1", "ipu:0"], name
            # The flash kernel of SDPA needs this, and no more: keys are views of larger buffers.
            assert all(held.stride(-1) == 1 for layer in layers for held in (layer.keys, layer.values)), name
