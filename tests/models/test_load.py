"""`load`: what it takes, what it gives back, and what it says when it cannot."""

from __future__ import annotations

import copy
import sys
from functools import partial
from unittest import mock

import pytest
import torch
from checkpoints import checkpoint
from organisms.tiny import tiny_model
from refusals import refused
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import sinkscope as ss
from sinkscope.opening.load import load, target_of


@pytest.mark.parametrize(
    ("model", "settings", "says"),
    [
        ("llama", {"device": "cpu", "device_map": "auto"}, "exclude each other"),
        ("llama", {"dtype": torch.int8}, r"^dtype 'torch.int8' .*expected float32, bfloat16, float16"),
        (tiny_model("llama")[0], {}, "x=LlamaForCausalLM.*expected a valid string"),
        (checkpoint("llama") / "model.safetensors", {}, "unknown model .*model.safetensors"),
    ],
)
def test_what_cannot_be_loaded_is_refused(model, settings, says):
    with refused(says):
        load(checkpoint(model) if model == "llama" else model, **settings)


def test_nothing_on_stdout_and_nothing_on_stderr(monkeypatch, capfd):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setattr("transformers.utils.logging._tqdm_active", True)
    load(checkpoint("llama"))
    assert capfd.readouterr() == ("", "")


def test_overflow_to_infinity_is_found(tmp_path):
    model, _ = tiny_model("llama")
    model.model.norm.weight.data[0] = 1e6
    model.save_pretrained(tmp_path)
    with refused(r"tensor model\.norm\.weight holds values that are NaN or infinite; .*dtype=float32"):
        load(tmp_path, dtype="float16")


def test_out_of_memory_says_what_to_try(monkeypatch):
    error = RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried")
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", mock.Mock(side_effect=error))
    with refused(words=["out of memory", "llama", "dtype", "quantization_config"]):
        load(checkpoint("llama"))


def test_a_tokenizer_that_is_larger_than_the_vocabulary_is_refused():
    """Of a live model, and where only tokens that were added have no row."""
    model, tokenizer = tiny_model("llama")
    small = LlamaForCausalLM(LlamaConfig(**{**model.config.to_dict(), "vocab_size": 40, "pad_token_id": 3}))
    for use in (
        ss.find_sinks,
        ss.Conversation,
        partial(ss.generate, prompts="a"),
        partial(ss.trace, tokens="a", sites="*"),
    ):
        with refused("the tokenizer has 96 tokens and the embedding 40 rows: they belong to different models"):
            use(small, tokenizer=tokenizer)
    added = copy.deepcopy(tokenizer)
    added.add_tokens(["zebra"])
    row = torch.tensor([[1, 5, added.convert_tokens_to_ids("zebra"), 7]])
    with refused("token 96 is not in the vocabulary of .*, whose embedding has 96 rows"):
        target_of(model, added).forward(row)
