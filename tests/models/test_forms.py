"""Forms of checkpoints that would be read wrongly in silence: quantised weights, tensors without a place, adapters."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from hub_server import hub
from organisms import Organism, organism
from organisms.decoders import decoder
from refusals import refused
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.testing import assert_close

import sinkscope as ss
from sinkscope.opening.load import load, open_stream

READERS = (load, ss.find_sinks)


@cache
def planted() -> Organism:
    return organism("llama", 3)


def changed(folder: Path, change: Callable[[str, Tensor], dict[str, Tensor]], also: dict[str, Tensor]) -> Path:
    """The organism in a folder; `change` gives the tensors in the place of each projection's."""
    planted().save(folder)
    tensors = dict(also)
    for name, weight in load_file(folder / "model.safetensors").items():
        tensors |= change(name, weight) if name.endswith("proj.weight") else {name: weight}
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(contiguous, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def plain(name: str, weight: Tensor) -> dict[str, Tensor]:
    return {name: weight}


def in_fp8(name: str, weight: Tensor) -> dict[str, Tensor]:
    return {name: weight.to(torch.float8_e4m3fn), f"{name}_scale_inv": torch.ones(2, 2)}


def in_int8(name: str, weight: Tensor) -> dict[str, Tensor]:
    return {name: weight.to(torch.int8), name.replace("weight", "SCB"): torch.ones(len(weight))}


def in_four_bits(name: str, _weight: Tensor) -> dict[str, Tensor]:
    return {name.replace("weight", "qweight"): torch.zeros(4, 4, dtype=torch.int32)}


BIAS, LORA = "model.layers.3.mlp.down_proj.bias", "model.layers.0.self_attn.q_proj.lora_A.weight"
SCALE = "model.layers.1.mlp.up_proj.weight_scale"


@pytest.mark.parametrize(
    ("change", "also", "words"),
    [
        (in_fp8, {}, ["m has the tensor", "weight_scale_inv", "no place", "quantisation"]),
        (in_int8, {}, ["m has the tensor", "SCB", "no place", "quantisation"]),
        (in_four_bits, {}, ["m lacks 35 tensors", "proj.weight"]),
        *((plain, {tensor: torch.ones(4)}, [tensor, "no place"]) for tensor in (BIAS, LORA, SCALE)),
    ],
)
def test_what_would_change_the_model_is_not_left_out(tmp_path, change, also, words):
    folder = changed(tmp_path / "m", change, also)
    for read in READERS:
        with refused(words=words):
            read(str(folder))


HARMLESS = {  # what released checkpoints hold beside the weights of a text model
    "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4),
    "model.layers.5.eh_proj.weight": torch.ones(4, 4),  # a layer that predicts further tokens
    "vision_tower.blocks.0.attn.proj.weight": torch.ones(4, 4),
    "model.layers.0.self_attn.bias": torch.ones(1, 1, 8, 8, dtype=torch.uint8),  # a mask
}


def test_harmless_tensors_are_left_out(tmp_path):
    folder = changed(tmp_path / "m", plain, HARMLESS)
    ids = torch.arange(5, 17)[None]
    assert_close(load(folder, device="cpu")(ids).logits, planted().model(ids).logits)
    streamed = open_stream(folder).forward(ids).last_hidden_state
    assert_close(streamed, planted().model.model(ids).last_hidden_state)


@pytest.mark.parametrize("beside", [False, True])
def test_an_adapter_says_what_it_is_and_how_to_load_it(tmp_path, typed, beside):
    folder = tmp_path / "m"
    folder.mkdir()
    if beside:
        planted().save(folder)
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "base_model_name_or_path": "a/b"}))
    save_file({"base_model.model.lora_A.weight": torch.ones(4, 8)}, folder / "adapter_model.safetensors")
    words = ["holds an adapter", "sinkscope.load(", "peft.PeftModel.from_pretrained(base", "without the adapter"]
    with hub(tmp_path / "cache", {("org/name", "main"): folder}):
        for read in READERS:
            for name in (str(folder), "org/name"):
                with refused(words=[name, *words]):
                    read(name)
    assert words[0] in typed(["why-sink", "--model", str(folder)], 2).err


def test_a_cut_that_cannot_be_made_is_not_blamed_on_the_files(tmp_path):
    decoder("gemma4_text").save_pretrained(tmp_path / "m")
    with refused(words=["m lacks", "gemma4_text cannot be cut to its first layers", "leave it out"]):
        load(tmp_path / "m", layers=2)
