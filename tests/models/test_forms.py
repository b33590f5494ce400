"""Forms of checkpoints that would be read wrongly in silence: quantised weights, tensors without a place, adapters."""

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

Tensors = dict[str, Tensor]


def changed(folder: Path, form: str = "", also: Tensors | None = None) -> Path:
    """The organism in a folder, with other tensors beside its own, or projections in another form."""
    organism("llama", 3).save(folder)
    tensors = dict(also or {})
    for name, weight in load_file(folder / "model.safetensors").items():
        if form == "fp8" and name.endswith("proj.weight"):
            tensors |= {name: weight.to(torch.float8_e4m3fn), f"{name}_scale_inv": torch.ones(2, 2)}
        elif form == "four bits" and name.endswith("proj.weight"):
            tensors[name.replace("weight", "qweight")] = torch.zeros(4, 4, dtype=torch.int32)
        else:
            tensors[name] = weight
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


BIAS, LORA = "model.layers.3.mlp.down_proj.bias", "model.layers.0.self_attn.q_proj.lora_A.weight"


@pytest.mark.parametrize(
    ("form", "also", "words"),
    [
        ("fp8", {}, ["m has the tensor", "weight_scale_inv", "no place", "quantisation"]),
        ("four bits", {}, ["m lacks 42 tensors", "proj.weight"]),
        *(("", {tensor: torch.ones(4)}, [tensor, "no place"]) for tensor in (BIAS, LORA)),
    ],
)
def test_what_would_change_the_model_is_not_left_out(tmp_path, form, also, words):
    folder = changed(tmp_path / "m", form, also)
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
    folder, model = changed(tmp_path / "m", also=HARMLESS), organism("llama", 3).model
    ids = torch.arange(5, 17)[None]
    assert_close(load(folder, device="cpu")(ids).logits, model(ids).logits)
    assert_close(open_target(folder).forward(ids).last_hidden_state, model.model(ids).last_hidden_state)


def test_an_adapter_says_what_it_is_and_how_to_load_it(tmp_path):
    """Also beside a whole model."""
    folder = changed(tmp_path / "m")
    (folder / "adapter_config.json").write_text("{}")
    words = ["holds an adapter", "sinkscope.load(", "peft.PeftModel.from_pretrained(base", "without the adapter"]
    for read in (load, ss.find_sinks):
        with refused(words=[str(folder), *words]):
            read(str(folder))
