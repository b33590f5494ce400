"""Models in several places, as `device_map="auto"` makes them: layers on disk stand for those on another device."""

from __future__ import annotations

import copy

import placed
import pytest
import torch
from intervention_kit import count_hooks
from organisms import organism, tiny_model
from torch.testing import assert_close
from transformers import DynamicCache

import sinkscope as ss
from sinkscope.hooks.trace.layer_view import contributions, view_layer
from sinkscope.models.checkpoints.fingerprint import fingerprint
from sinkscope.models.grouped_heads import output_weights
from sinkscope.opening.live import target_of

IDS = torch.tensor([[1, 5, 6, 7, 8, 9], [1, 20, 21, 22, 23, 24]])
SITES = ["blocks.*.hook_resid_post", "blocks.1.mlp.hook_post", "blocks.1.attn.hook_pattern", "logits"]


def on_disk(model, folder):
    """The embedding and the layer of the sink on disk."""
    from transformers import AutoModelForCausalLM

    model.save_pretrained(folder / "m")
    places = {f"model.layers.{layer}": "cpu" for layer in range(model.config.num_hidden_layers)}
    places |= {"model.embed_tokens": "disk", "model.layers.2": "disk", "lm_head": "disk"}
    places |= {"model.norm": "cpu", "model.rotary_emb": "cpu"}
    return AutoModelForCausalLM.from_pretrained(
        folder / "m", device_map=places, offload_folder=folder / "o", dtype=torch.float32
    )


def on_the_cpu(model, _):
    from accelerate import cpu_offload

    return cpu_offload(copy.deepcopy(model), execution_device=torch.device("cpu"))


@pytest.mark.parametrize("family", ["llama", "mixtral"])
@pytest.mark.parametrize("away", [on_disk, on_the_cpu])
def test_what_neurons_write_is_read_where_weights_are_elsewhere(tmp_path, away, family):
    model = organism(family, 3).model
    moved = away(model, tmp_path)
    assert next(moved.model.embed_tokens.parameters()).is_meta
    found, before = [], count_hooks(moved)
    where = torch.ones_like(IDS, dtype=torch.bool)
    sites = [(1, 2, 3)] if family == "mixtral" else [(1, 3)]
    for target in (target_of(model), target_of(moved)):
        written = contributions(target, view_layer(target, 2, IDS, where))
        with ss.Ablate(sites=sites).on(target.hf):
            edited = target.hf(IDS).logits
        found.append((written, output_weights(target, 2), edited, fingerprint(target.hf)))
    assert_close(found[0][:3], found[1][:3], rtol=0, atol=0)
    assert count_hooks(moved) == before and next(moved.model.layers[2].parameters()).is_meta
    if away is on_the_cpu:  # a configuration that was read from a folder says more
        assert found[0][3] == found[1][3]
    with torch.no_grad():
        moved.get_input_embeddings()._hf_hook.weights_map["weight"].mul_(2)
    assert away is on_disk or fingerprint(moved) != found[1][3]


EDITS = {
    "full": ss.kv.Full(),
    "h2o": ss.kv.H2O(6),
    "streaming": ss.kv.StreamingLLM(6),
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
        with edit.on(one):
            cache = DynamicCache(config=one.config)
            parts = (ids, ids[:, :1], ids[:, 1:2])
            found = [one(input_ids=part, past_key_values=cache, use_cache=True).logits[:, -1] for part in parts]
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
