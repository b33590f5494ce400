"""NaN or infinity in any weight of a live model or a folder is named by every measurement, and nothing is concluded."""

from __future__ import annotations

import math

import pytest
import torch
from checkpoints import spoiled
from refusals import refused
from safetensors.torch import load_file, save_file
from torch import nn
from ways.model_copies import bundled

import sinkscope as ss
from sinkscope.measure.setup import Setup

pytestmark = pytest.mark.few_texts

SAYS = "holds values that are NaN or infinite; download the checkpoint again"
USES = (
    ss.find_sinks,
    ss.attack,
    ss.sink_dims,
    lambda model: ss.generate(model, "hello", guard=True, max_new_tokens=3),
    lambda model: ss.Conversation(model, chat=False).ask("hello", max_new_tokens=3),
)


@pytest.mark.parametrize(
    ("tensor", "value"), [("lm_head.weight", math.inf), ("model.layers.2.mlp.down_proj.weight", math.nan)]
)
def test_every_use_of_a_live_model_names_the_tensor(tensor, value):
    model = bundled()
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())  # else it is the embedding
    with torch.no_grad():
        model.get_parameter(tensor).view(-1)[3] = value
    for use in USES:
        with refused(words=[SAYS, tensor]):
            use(model)


@pytest.mark.parametrize("tensor", ["model.norm.weight", "model.layers.2.mlp.down_proj.weight"])
def test_a_folder_names_it_too(tensor, tmp_path):
    folder = spoiled(tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    tensors[tensor].view(-1)[3] = math.nan
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    for use in (ss.load, ss.find_sinks):
        with refused(words=[SAYS, tensor.rpartition(".layers.")[2].removeprefix("model.")]):
            use(folder)
    if "norm" in tensor:  # what surrounds the layers is checked where they are read one by one
        with refused(r"tensor norm\.weight of the part around the layers"):
            Setup.open(folder)
