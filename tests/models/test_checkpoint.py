"""Is a folder a whole checkpoint? What is missing is named; what is whole passes; no weights are read for it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import checkpoint
from intervention_kit import loaded
from organisms import tiny_model
from refusals import refused
from safetensors.torch import load_file, save_file
from transformers import PretrainedConfig

from sinkscope.models.checkpoints.checkpoint import Files, SafetensorsSource
from sinkscope.models.checkpoints.fingerprint import fingerprint, fingerprint_of
from sinkscope.opening.live import target_of
from sinkscope.opening.load import load

INDEX = "model.safetensors.index.json"


@pytest.fixture
def folder(tmp_path):
    return Path(shutil.copytree(checkpoint("llama", "20KB"), tmp_path / "model"))


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def cut(keep: int) -> Callable[[Path], Any]:
    """The first bytes of a file, or all but the last ones."""

    def change(folder: Path):
        file = shards(folder)[1]
        file.write_bytes(file.read_bytes()[:keep])

    return change


def rewrite(content: bytes, name: str = "") -> Callable[[Path], Any]:
    return lambda folder: (folder / name if name else shards(folder)[0]).write_bytes(content)


def only_weights(*names: str) -> Callable[[Path], Any]:
    def change(folder: Path):
        for file in folder.glob("model*"):
            file.unlink()
        for name in names:
            (folder / name).write_bytes(b"GGUF")

    return change


def indexed(shards: Any) -> Callable[[Path], Any]:
    return rewrite(json.dumps({"weight_map": shards}).encode(), INDEX)


def drop_one_shard(folder: Path):
    shards(folder)[2].unlink()


def bin_without_shard(folder: Path):
    only_weights()(folder)
    index = {"metadata": {}, "weight_map": {"a": "pytorch_model-00001-of-00001.bin"}}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda f: (f / "config.json").unlink(), "cannot read config.json.*give the folder of"),
        (rewrite(b"{oops", "config.json"), "config.json is not a JSON file"),
        (only_weights("q4.gguf"), r"lacks its weights.* or give a .gguf file itself"),
        (lambda f: (f / INDEX).unlink(), "lacks its weights"),
        (drop_one_shard, r"lacks its weights, such as model-00003-of-\d+.safetensors"),
        (bin_without_shard, "lacks its weights, such as pytorch_model-00001-of-00001.bin"),
        (rewrite(b"[]", INDEX), "model.safetensors.index.json has no map .*download it again"),
        (indexed({}), "model.safetensors.index.json has no map"),
        *((cut(keep), "SafetensorError: .*check that the files are whole") for keep in (-100, 0)),
        (rewrite(b"version https://git-lfs.github.com/spec/v1\n"), "SafetensorError: .*git lfs pull"),
    ],
)
def test_what_is_wrong_is_named(folder, change, message):
    load(folder)
    change(folder)
    with refused(message):
        load(folder)


def test_fingerprint_is_of_config_and_weights(folder):
    first = fingerprint(Files(folder))
    assert first == fingerprint(Files(checkpoint("llama", "20KB"))) == fingerprint(SafetensorsSource(folder))
    assert len(first) == 16
    config = json.loads((folder / "config.json").read_text())
    file = shards(folder)[-1]

    def with_config(**changes):
        (folder / "config.json").write_text(json.dumps(config | changes))
        return fingerprint(Files(folder))

    assert with_config(transformers_version="0.0.1", _name_or_path="elsewhere") == first
    assert with_config(rms_norm_eps=0.5) != first
    assert with_config() == first
    tensors = load_file(file)
    save_file({n: t.half() for n, t in tensors.items()}, file)
    assert fingerprint(Files(folder)) != first
    for name in tensors:  # a fine-tune of any single tensor is another model
        save_file({n: t * 1.001 if n == name else t for n, t in tensors.items()}, file, {"format": "pt"})
        assert fingerprint(Files(folder)) != first, name
    save_file(tensors, file, {"format": "pt"})
    assert fingerprint(Files(folder)) == first


@pytest.mark.parametrize("kind", ["safetensors", "gguf", "live"])
def test_a_fingerprint_changes_with_the_weights_of_every_kind_of_source(kind, tmp_path):
    weight = torch.zeros(1 << 11, 1 << 10)
    changed = weight + 1e-3

    def of(values: torch.Tensor) -> str:
        if kind == "live":
            model = torch.nn.Linear(1 << 10, 1 << 11, bias=False)
            model.weight.data = values
            model.config = PretrainedConfig()
            return fingerprint(model)
        if kind == "gguf":
            (tmp_path / "x.gguf").write_bytes(values.numpy().tobytes())
            return fingerprint(Files(tmp_path / "x.gguf"))
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
        save_file({"w": values}, tmp_path / "model.safetensors")
        return fingerprint(Files(tmp_path))

    first = of(weight)
    assert of(changed) != first == of(weight)


def test_a_buffer_of_the_checkpoint_is_part_of_the_model():
    model = tiny_model("llama")[0]
    model.register_buffer("bias_of_experts", torch.zeros(4))
    model.register_buffer("frequencies", torch.zeros(4), persistent=False)
    first = fingerprint(model)
    model.frequencies += 1
    assert fingerprint(model) == first
    model.bias_of_experts += 1
    assert fingerprint(model) != first


def test_fingerprint_of_live_models():
    first = fingerprint(tiny_model("llama")[0])
    assert first == fingerprint(tiny_model("llama")[0])
    changed = tiny_model("llama")[0]
    with torch.no_grad():
        changed.model.layers[1].mlp.down_proj.weight.mul_(1.001)
    smaller = tiny_model("llama", num_hidden_layers=2)[0]
    for other in (changed, smaller, tiny_model("llama", seed=3)[0], tiny_model("llama")[0].half()):
        assert fingerprint(other) != first


def test_a_bridge_has_the_fingerprint_of_the_files_until_its_weights_change(folder):
    bridge = loaded("bridge", folder)
    assert fingerprint_of(target_of(bridge)) == fingerprint(Files(folder))
    bridge.unembed.original_component.bias.fill_(1.0)  # zeros, which the bridge added
    assert fingerprint_of(target_of(bridge)) != fingerprint(Files(folder))
