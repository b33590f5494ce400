"""Recomputed attention rows against the model's own, and a model left as it was."""

from __future__ import annotations

import pytest
import torch
from organisms.tiny import tiny_model
from torch.testing import assert_close

import sinkscope as ss
from sinkscope import kv
from sinkscope.sparse import AShape

ASKED = [ss.Knockout("first", heads=["L1.H1"]), kv.AdaKV(8, window=2), AShape(first=1, local=4)]


@pytest.mark.parametrize("edit", ASKED, ids=repr)
def test_rows_that_are_asked_for_are_given_for_each_layer(edit):
    """transformers leaves out what is None, which would shift the rows of later layers."""
    model = tiny_model("llama", num_hidden_layers=2)[0]
    model.set_attn_implementation("eager")
    ids = torch.arange(5, 17)[None]
    options = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    with edit.on(model):
        output = model.generate(ids, **options, output_attentions=True, return_dict_in_generate=True)
    assert [len(step) for step in output.attentions] == [2] * 4
    for step in output.attentions:
        for rows in step:
            assert_close(rows.sum(-1), torch.ones(rows.shape[:-1]))
