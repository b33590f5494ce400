"""What a model is given to read: one look-up of its tokenizer, and what is no input is refused in one line."""

from __future__ import annotations

import pytest
import torch
from organisms import tiny_model
from refusals import refused
from transformers import AutoModelForCausalLM

import sinkscope as ss
from sinkscope.generation.generate import generate
from sinkscope.hooks.trace import trace

SITES = "logits"


def test_one_look_up_of_the_tokenizer(tmp_path):
    """Given, or beside the weights that a live model says it came from: the same for all."""
    model, tokenizer = tiny_model("llama")
    with refused("no tokenizer"):
        trace(model, "the dog", SITES)
    want = trace(model, "the dog", SITES, tokenizer=tokenizer)["logits"]
    for part in (model, tokenizer):
        part.save_pretrained(tmp_path)
    live = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(trace(live, "the dog", "logits")["logits"], want)
    assert generate(live, "the dog", max_new_tokens=2)[0].prompt_tokens == 3
    assert ss.Conversation(live, None).ask("the dog", max_new_tokens=2).prompt_tokens == 3


def masked(ids, mask) -> dict:
    return {"input_ids": ids, "attention_mask": mask}


@pytest.mark.parametrize(
    ("tokens", "words"),
    [
        (None, ["tokens=None: expected a valid list"]),
        ([[1, 2], []], ["tokens[1]=[]: List should have at least 1 item"]),
        (torch.tensor([[1, 96]]), ["tokens[0][1]=96: expected less than 96"]),
        ([1.0, 2.0], ["tokens[0][0]=1.0: expected a valid integer"]),
        (["the dog", " "], ["prompt 2 is empty"]),
        (["the dog", 5], ["tokens[0][0]='the dog': expected a valid integer"]),
        (masked([[1, 2], [3]], [[1, 1], [1, 0]]), ["attention_mask", "one for each token id"]),
        (masked([[1, 2]], [[0, 0]]), ["real token in every row"]),
    ],
)
def test_what_cannot_be_read(tokens, words):
    model, tokenizer = tiny_model("llama")
    with refused(words=words):
        trace(model, tokens, SITES, tokenizer=tokenizer)
