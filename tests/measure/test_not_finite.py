"""NaN or infinity in any weight of a live model or a folder is named by every measurement, and nothing is concluded."""

from __future__ import annotations

import math

import pytest
import torch
from refusals import refused
from torch import nn
from ways.model_copies import bundled

import sinkscope as ss

pytestmark = pytest.mark.few_texts

SAYS = "holds values that are NaN or infinite; download the checkpoint again"
USES = (
    ss.find_sinks,
    ss.sink_dims,
    lambda model: ss.generate(model, "hello", guard=True, max_new_tokens=3),
    lambda model: ss.Conversation(model, chat=False).ask("hello", max_new_tokens=3),
)


@pytest.mark.parametrize("tensor", ["lm_head.weight", "model.layers.2.mlp.down_proj.weight"])
def test_every_use_of_a_model_names_the_tensor_and_every_use_of_its_folder(tensor, tmp_path):
    model = bundled()
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())  # else it is the embedding
    with torch.no_grad():
        model.get_parameter(tensor).view(-1)[3] = math.inf
    for use in USES:
        with refused(words=[SAYS, tensor]):
            use(model)
    if tensor != "lm_head.weight":  # which the folder shares with the embedding
        model.save_pretrained(tmp_path)
        model.tokenizer.save_pretrained(tmp_path)
        for use in (ss.load, ss.find_sinks):
            with refused(words=[SAYS, "mlp.down_proj.weight"]):
                use(tmp_path)
