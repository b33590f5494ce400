"""Streaming gives what the resident model gives, and reads and holds only what is called."""

from __future__ import annotations

import json
import re
from itertools import product
from pathlib import Path

import pytest
import torch
from covering import covering
from organisms import MODEL_TYPES, tiny_model
from refusals import refused
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.testing import assert_close

from sinkscope.errors import UnsupportedError
from sinkscope.models.checkpoints.checkpoint import Files
from sinkscope.models.checkpoints.config import read_config
from sinkscope.models.hooks import first_tensor
from sinkscope.models.neurons import columns
from sinkscope.models.target import Target
from sinkscope.opening.live import target_of
from sinkscope.opening.load import dtype_on, open_stream


def ids_and_mask() -> tuple[Tensor, Tensor]:
    ids = torch.randint(3, 90, (2, 40), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    return ids, mask


def every_output(target: Target) -> list[Tensor]:
    """Output of each layer, and the last hidden state; counts on the way what a stream holds."""
    outputs = []

    def keep(_module, _args, _kwargs, output):
        outputs.append(first_tensor(output).clone())
        if target.store is not None:
            assert len(held(target)) <= 2

    with target.hooks(*[(layer, "post", keep) for layer in target.layers]):
        last = target.forward(*ids_and_mask()).last_hidden_state
    return [*outputs, last]


def assert_same_outputs(resident: Target, streamed: Target):
    expected = every_output(resident)
    assert len(expected) == 1 + resident.n_layers
    for a, b in zip(expected, every_output(streamed), strict=True):
        assert_close(a, b, atol=1e-6, rtol=0)


def held(target: Target) -> list[int]:
    return [i for i, layer in enumerate(target.layers) if not any(p.is_meta for p in layer.parameters())]


def layers_read(target: Target) -> set[int]:
    found = (re.search(r"\b(?:layers|h)\.(\d+)\.", name) for name in target.store.source.read)
    return {int(match[1]) for match in found if match}


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """A resident model of 6 layers, and the folder it was saved in, in several shards."""
    model, _ = tiny_model("llama", num_hidden_layers=6)
    folder = tmp_path_factory.mktemp("llama")
    model.save_pretrained(folder, max_shard_size="20KB")
    return model, folder


# Every third architecture, in turns in one file and in half precision and shards; what else there is is slow.
QUICK = {(name, number % 6 == 3) for number, name in enumerate(MODEL_TYPES) if number % 3 == 0}
SAVED = covering(product(MODEL_TYPES, (False, True)), QUICK)


@pytest.mark.parametrize(("model_type", "half"), SAVED)
def test_equals_the_resident_model(model_type, half, tmp_path):
    model, _ = tiny_model(model_type)
    (model.half() if half else model).save_pretrained(tmp_path, max_shard_size="20KB" if half else "1GB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1 or not half
    # Some versions of transformers choose SDPA for Gemma 2, which drops the soft cap that a stream keeps.
    capped = {"attn_implementation": "eager"} if model_type == "gemma2" else {}
    resident = target_of(type(model).from_pretrained(tmp_path, dtype=torch.float32, **capped))
    streamed = open_stream(tmp_path, resident=2)
    assert streamed.dtype == torch.float32 and not streamed.resident
    assert_same_outputs(resident, streamed)
    assert layers_read(streamed) == set(range(resident.n_layers))
    assert not [n for n in streamed.store.source.read if "lm_head" in n or "embed_out" in n]
    for layer in range(resident.n_layers):
        expert = 1 if layer in resident.mixtures else 0
        every = expert * resident.d_mlp + torch.arange(resident.width(layer, expert or None))
        assert_close(columns(streamed, layer, every), columns(resident, layer, every))


@pytest.mark.parametrize("kind", [torch.float32, torch.float16, torch.bfloat16])
def test_on_a_gpu_a_checkpoint_keeps_its_dtype(kind, tmp_path):
    tiny_model("llama")[0].to(kind).save_pretrained(tmp_path)
    config = read_config("m", tmp_path)
    assert dtype_on(torch.device("cuda:0"), config) == kind
    assert dtype_on(torch.device("cpu"), config) == torch.float32


def test_reads_only_the_layers_that_are_called(llama):
    streamed = open_stream(Files(llama[1]), resident=2)
    assert layers_read(streamed) <= {0, 1}  # in which the adapter was proved

    def stop(*_):
        streamed.stop()

    with streamed.hooks((streamed.layers[2], "post", stop)):
        assert streamed.forward(*ids_and_mask()) is None
    source = streamed.store.source
    wanted = {n for n in source.weight_map if re.match(r"model\.(layers\.[012]\.|embed_tokens|norm)", n)}
    assert source.read == wanted


def spoil(folder: Path, into: Path, change) -> Path:
    """A copy of a checkpoint in one file, with `change` applied to its tensors."""
    tensors = {}
    for shard in folder.glob("*.safetensors"):
        tensors |= load_file(shard)
    change(tensors)
    save_file(tensors, into / "model.safetensors", {"format": "pt"})
    (into / "config.json").write_text((folder / "config.json").read_text())
    return into


NORM, DOWN = "model.norm.weight", "model.layers.2.mlp.down_proj.weight"


def test_broken_checkpoints(llama, tmp_path):
    for tensor, message in (
        (NORM, "the part around the layers of .* has no norm"),
        (DOWN, r"layer 2 of .* has no layers\.0\.mlp"),
    ):
        with refused(message):
            open_stream(spoil(llama[1], tmp_path, lambda t, tensor=tensor: t.pop(tensor))).forward(*ids_and_mask())


def test_refuses_what_it_cannot_stream(llama, tmp_path):
    config = json.loads((llama[1] / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config))
    torch.save({}, tmp_path / "pytorch_model.bin")
    with pytest.raises(UnsupportedError, match=r"no safetensors weights.*sinkscope\.load"):
        open_stream(tmp_path, resident=2)
    spoil(llama[1], tmp_path, lambda tensors: None)
    config["quantization_config"] = {"quant_method": "mxfp4"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedError, match=r"is quantised.*sinkscope\.load"):
        open_stream(tmp_path, resident=2)
