"""Forms of checkpoints that would be read wrongly in silence: quantised weights, tensors without a place."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from organisms import organism
from refusals import refused
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.testing import assert_close

import sinkscope as ss
from sinkscope.opening.load import load, open_target

PROJECTION = "model.layers.3.mlp.down_proj."


def changed(folder: Path, also: dict[str, Tensor], without: str = "") -> Path:
    """The organism in a folder, with other tensors beside its own, or without one."""
    organism("llama", 3).save(folder)
    tensors = load_file(folder / "model.safetensors") | also
    tensors.pop(without, None)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize(
    ("also", "without", "words"),
    [
        ("qweight", f"{PROJECTION}weight", ["m lacks 1 tensors", f"{PROJECTION}weight"]),
        ("lora_A.weight", "", ["m has the tensor", f"{PROJECTION}lora_A.weight", "no place", "quantisation"]),
    ],
)
def test_what_would_change_the_model_is_not_left_out(tmp_path, also, without, words):
    folder = changed(tmp_path / "m", {PROJECTION + also: torch.ones(4)}, without)
    for read in (load, ss.find_sinks):
        with refused(words=words):
            read(str(folder))


HARMLESS = {  # what released checkpoints hold beside the weights of a text model
    "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4),
    "model.layers.6.eh_proj.weight": torch.ones(4, 4),  # a layer that predicts further tokens
    "vision_tower.blocks.0.attn.proj.weight": torch.ones(4, 4),
    "model.layers.0.self_attn.bias": torch.ones(1, 1, 8, 8, dtype=torch.uint8),  # a mask
}


def test_harmless_tensors_are_left_out(tmp_path):
    folder, model = changed(tmp_path / "m", HARMLESS), organism("llama", 3).model
    ids = torch.arange(5, 17)[None]
    assert_close(load(folder, device="cpu")(ids).logits, model(ids).logits)
    streamed = open_target(folder)
    assert not streamed.resident
    assert_close(streamed.forward(ids).last_hidden_state, model.model(ids).last_hidden_state)
