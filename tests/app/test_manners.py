"""Nothing happens silently: patches of other models, learned tokens, missing weights."""

from __future__ import annotations

import warnings
from types import SimpleNamespace

import pytest
import torch
from intervention_kit import loaded
from organisms import organism
from organisms.tiny import tiny_model
from refusals import refused
from transformers import AutoModelForCausalLM

import sinkscope as ss
from sinkscope.errors import SinkscopeWarning
from sinkscope.opening.load import target_of


def test_a_patch_of_another_model_is_noticed_wherever_it_is_used(tmp_path):
    folder, here = organism("llama", 3).save(tmp_path / "m"), tmp_path / "p.json"
    ss.SinkPatch.from_result(ss.find_sinks(folder)).save(here)
    patch, tuned = ss.SinkPatch.load(here), ss.load(folder)
    with warnings.catch_warnings(action="error", category=SinkscopeWarning):  # its own model, loaded in any way
        for model in (tuned, loaded("bridge", folder)):
            with patch.on(model):
                pass
    with torch.no_grad():
        tuned.model.layers[2].mlp.up_proj.weight.mul_(1.01)  # a fine-tune
    with pytest.warns(SinkscopeWarning, match="has the same shape and other weights"), patch.on(tuned):
        pass
    other, tokenizer = tiny_model("llama")
    with refused(r"the patch was made for m, whose .* is .*: give that model"):
        ss.generate(other, "a", patch=here, tokenizer=tokenizer)


def test_what_peft_wraps_is_the_model_inside_and_learned_tokens_and_missing_weights_are_refused():
    made, inside = organism("llama", 3), organism("llama", 3).model
    adapter = SimpleNamespace(is_prompt_learning=False)
    made.model.peft_config, made.model.get_base_model = {"default": adapter}, lambda: inside
    assert target_of(made.model, made.tokenizer).hf is inside
    adapter.is_prompt_learning = True
    with refused("learned tokens before the text"):
        target_of(made.model, made.tokenizer)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(inside.config)
    for use in (lambda: ss.find_sinks(model, tokenizer=made.tokenizer), lambda: ss.Conversation(model).ask([5])):
        with refused("holds no weights yet"):
            use()
