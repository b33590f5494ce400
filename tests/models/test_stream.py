"""Streaming gives what the resident model gives, and reads and holds only what is called."""

from __future__ import annotations

import re

import pytest
import torch
from covering import every_nth
from organisms import MODEL_TYPES, tiny_model
from safetensors.torch import load_file
from torch.testing import assert_close

from sinkscope.models.checkpoints.checkpoint import Files, fingerprint_of
from sinkscope.models.hooks import on_hidden
from sinkscope.models.neurons import columns
from sinkscope.opening.load import load, open_target, target_of

IDS = torch.randint(3, 90, (2, 40), generator=torch.Generator().manual_seed(1))
MASK = torch.ones_like(IDS)
MASK[0, :5] = 0


@pytest.mark.parametrize("model_type", every_nth(MODEL_TYPES, 3))
def test_equals_the_resident_model(model_type, tmp_path):
    """Every second type from shards in half precision; experts that transformers fuses are loaded whole."""
    model, is_half = tiny_model(model_type)[0], MODEL_TYPES.index(model_type) % 2
    (model.half() if is_half else model).save_pretrained(tmp_path, max_shard_size="20KB" if is_half else "1GB")
    # Some versions of transformers choose SDPA for Gemma 2, which drops the soft cap that a stream keeps.
    capped = {"attn_implementation": "eager"} if model_type == "gemma2" else {}
    whole = target_of(type(model).from_pretrained(tmp_path, dtype=torch.float32, **capped))
    streamed = open_target(tmp_path, dtype="float32")
    assert streamed.resident == (bool(whole.mixtures) and model_type != "gpt_oss")
    assert fingerprint_of(streamed) == fingerprint_of(whole)
    assert_close(streamed.forward(IDS, MASK).last_hidden_state, whole.forward(IDS, MASK).last_hidden_state)
    every = torch.arange(whole.d_mlp)
    for layer in whole.with_neurons:
        assert_close(columns(streamed, layer, every), columns(whole, layer, every))


def test_reads_and_holds_only_the_layers_that_are_called(tmp_path, monkeypatch):
    names, tensor = list[str](), Files.tensor
    monkeypatch.setattr(Files, "tensor", lambda files, name: names.append(name) or tensor(files, name))
    tiny_model("llama", num_hidden_layers=6)[0].save_pretrained(tmp_path)
    streamed = open_target(tmp_path)
    streamed.store.resident = 2

    def see(_: object) -> None:
        held = [layer for layer in streamed.layers if not any(weight.is_meta for weight in layer.parameters())]
        assert len(held) <= 2

    with streamed.hooks(*[on_hidden(layer, "post", see) for layer in streamed.layers]):
        streamed.forward(IDS, MASK, last_layer=2)
    stored = load_file(tmp_path / "model.safetensors")
    assert {*names} == {name for name in stored if re.match(r"model\.(layers\.[012]\.|embed_tokens|norm)", name)}
    assert fingerprint_of(streamed) == fingerprint_of(target_of(load(tmp_path, dtype="bfloat16")))
