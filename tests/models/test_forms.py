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


def changed(folder: Path, change) -> Path:
    """The organism in a folder; `change` gets name and tensor of each weight, and gives the tensors in its place."""
    planted().save(folder)
    tensors: dict[str, torch.Tensor] = {}
    for name, weight in load_file(folder / "model.safetensors").items():
        tensors |= change(name, weight)
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(contiguous, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def quantised(stored: Callable[[str, Tensor], dict[str, Tensor]]) -> Callable[[str, Tensor], dict[str, Tensor]]:
    """A change of the weights of projections alone; what the numbers are is never looked at."""
    return lambda name, weight: stored(name, weight) if name.endswith("proj.weight") else {name: weight}


IN_FP8 = quantised(lambda name, w: {name: w.to(torch.float8_e4m3fn), f"{name}_scale_inv": torch.ones(2, 2)})
IN_INT8 = quantised(lambda name, w: {name: w.to(torch.int8), name.replace("weight", "SCB"): torch.ones(len(w))})
IN_FOUR_BITS = quantised(lambda name, _: {name.replace("weight", "qweight"): torch.zeros(4, 4, dtype=torch.int32)})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (IN_FP8, ["m has the tensor", "weight_scale_inv", "no place", "quantisation"]),
        (IN_INT8, ["m has the tensor", "SCB", "no place", "quantisation"]),
        (IN_FOUR_BITS, ["m lacks 35 tensors", "proj.weight"]),
    ],
)
def test_quantised_weights_need_a_configuration(tmp_path, change, words):
    folder = changed(tmp_path / "m", change)
    for read in READERS:
        with refused(words=words):
            read(str(folder))


BESIDE = {  # tensors that would change what the model computes
    "bias": "model.layers.3.mlp.down_proj.bias",
    "adapter": "model.layers.0.self_attn.q_proj.lora_A.weight",
    "scale": "model.layers.1.mlp.up_proj.weight_scale",
}


@pytest.mark.parametrize("tensor", BESIDE.values(), ids=BESIDE)
def test_tensors_of_parts_that_the_model_has_are_not_left_out(tmp_path, tensor):
    folder = changed(tmp_path / "m", lambda name, weight: {name: weight, tensor: torch.ones(4)})
    for read in READERS:
        with refused(words=[tensor, "no place"]):
            read(folder)


HARMLESS = {  # what released checkpoints hold beside the weights of a text model
    "rotary frequencies of old Llamas": ("model.layers.0.self_attn.rotary_emb.inv_freq", torch.ones(4)),
    "a layer that predicts further tokens": ("model.layers.5.eh_proj.weight", torch.ones(4, 4)),
    "a tower for images": ("vision_tower.blocks.0.attn.proj.weight", torch.ones(4, 4)),
    "a mask": ("model.layers.0.self_attn.bias", torch.ones(1, 1, 8, 8, dtype=torch.uint8)),
}


@pytest.mark.parametrize("name", HARMLESS)
def test_harmless_tensors_are_left_out(tmp_path, name):
    tensor, value = HARMLESS[name]
    folder = changed(tmp_path / "m", lambda name, weight: {name: weight, tensor: value})
    ids = torch.arange(5, 17)[None]
    expected = planted().model(ids)
    assert_close(load(folder, device="cpu")(ids).logits, expected.logits)
    streamed = open_stream(folder).forward(ids).last_hidden_state
    assert_close(streamed, planted().model.model(ids).last_hidden_state)


def adapter_in(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    config = {"peft_type": "LORA", "base_model_name_or_path": "meta-llama/Llama-2-7b-hf", "r": 4}
    (folder / "adapter_config.json").write_text(json.dumps(config | {"target_modules": ["q_proj"]}))
    weight = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    save_file({weight: torch.ones(4, 8)}, folder / "adapter_model.safetensors")
    return folder


@pytest.mark.parametrize("beside", [False, True])
def test_an_adapter_says_what_it_is_and_how_to_load_it(tmp_path, typed, beside):
    folder = tmp_path / "m"
    if beside:
        planted().save(folder)
    adapter_in(folder)
    words = ["holds an adapter", "sinkscope.load(", "peft.PeftModel.from_pretrained(base", "without the adapter"]
    with hub(tmp_path / "cache") as server:
        server.add("org/name", folder)
        for read in READERS:
            with refused(words=words):
                read(str(folder))
            with refused(words=["org/name", *words]):
                read("org/name")
    assert words[0] in typed(["why-sink", "--model", str(folder)], 2).err


def test_a_cut_that_cannot_be_made_is_not_blamed_on_the_files(tmp_path):
    decoder("gemma4_text").save_pretrained(tmp_path / "m")
    with refused(words=["m lacks", "gemma4_text cannot be cut to its first layers", "leave it out"]):
        load(tmp_path / "m", layers=2)
