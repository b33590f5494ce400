"""Streaming gives what the resident model gives, and reads and holds only what is called."""

from __future__ import annotations

import json
import re
from itertools import product

import pytest
import torch
from covering import covering
from organisms import MODEL_TYPES, tiny_model
from refusals import refused
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.testing import assert_close

from sinkscope.models.checkpoints.checkpoint import Files
from sinkscope.models.hooks import on_hidden
from sinkscope.models.neurons import columns
from sinkscope.models.target import Target
from sinkscope.opening.live import target_of
from sinkscope.opening.load import open_stream

IDS = torch.randint(3, 90, (2, 40), generator=torch.Generator().manual_seed(1))
MASK = torch.ones_like(IDS)
MASK[0, :5] = 0


def every_output(target: Target) -> list[Tensor]:
    """Output of each layer, and the last hidden state; a stream holds two layers on the way."""
    outputs = []

    def keep(hidden: Tensor) -> None:
        outputs.append(hidden.clone())
        held = [layer for layer in target.layers if not any(weight.is_meta for weight in layer.parameters())]
        assert target.store is None or len(held) <= 2

    with target.hooks(*[(layer, "post", on_hidden(keep)) for layer in target.layers]):
        last = target.forward(IDS, MASK).last_hidden_state
    return [*outputs, last]


@pytest.fixture
def read(monkeypatch) -> list[str]:
    """Names of the tensors that are read."""
    names, tensors = list[str](), Files.tensors
    monkeypatch.setattr(Files, "tensors", lambda files, some: names.extend(some) or tensors(files, some))
    return names


# Every third architecture, in turns in one file and in half precision and shards; what else there is is slow.
QUICK = {(name, number % 6 == 3) for number, name in enumerate(MODEL_TYPES) if number % 3 == 0}


@pytest.mark.parametrize(("model_type", "half"), covering(product(MODEL_TYPES, (False, True)), QUICK))
def test_equals_the_resident_model(model_type, half, tmp_path, read):
    model, _ = tiny_model(model_type)
    (model.half() if half else model).save_pretrained(tmp_path, max_shard_size="20KB" if half else "1GB")
    # Some versions of transformers choose SDPA for Gemma 2, which drops the soft cap that a stream keeps.
    capped = {"attn_implementation": "eager"} if model_type == "gemma2" else {}
    resident = target_of(type(model).from_pretrained(tmp_path, dtype=torch.float32, **capped))
    streamed = open_stream(tmp_path, resident=2)
    assert streamed.dtype == torch.float32 and not streamed.resident
    assert_close(every_output(streamed), every_output(resident), atol=1e-6, rtol=0)
    assert not [n for n in read if "lm_head" in n or "embed_out" in n]
    for layer in range(resident.n_layers):
        expert = 1 if layer in resident.mixtures else 0
        every = expert * resident.d_mlp + torch.arange(resident.width(layer, expert or None))
        assert_close(columns(streamed, layer, every), columns(resident, layer, every))


def test_reads_only_the_layers_that_are_called(tmp_path, read):
    tiny_model("llama", num_hidden_layers=6)[0].save_pretrained(tmp_path, max_shard_size="20KB")
    streamed = open_stream(tmp_path, resident=2)
    with streamed.hooks((streamed.layers[2], "post", streamed.stop)):
        assert streamed.forward(IDS, MASK) is None
    assert {*read} == {
        n for n in streamed.store.source.weight_map if re.match(r"model\.(layers\.[012]\.|embed_tokens|norm)", n)
    }


@pytest.mark.parametrize(
    ("left_out", "config", "message"),
    [
        ("model.norm.weight", {}, "the part around the layers of .* lacks 1 tensors .* norm"),
        ("model.layers.2.mlp.down_proj.weight", {}, r"layer 2 of .* lacks 1 tensors .* layers\.0\.mlp"),
        ("", {"quantization_config": {"quant_method": "mxfp4"}}, r"is quantised.*sinkscope\.load"),
    ],
)
def test_what_cannot_be_streamed_is_refused(left_out, config, message, tmp_path):
    tiny_model("llama", num_hidden_layers=6)[0].save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors.pop(left_out, None)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    settings = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(settings | config))
    with refused(message):
        open_stream(tmp_path, resident=2).forward(IDS, MASK)
