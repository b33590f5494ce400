"""Nothing happens silently: decoding, patches, chat templates, copies."""

from __future__ import annotations

import warnings
from types import SimpleNamespace

import pytest
import torch
from attack_kit import text_file
from intervention_kit import loaded
from organisms import organism
from organisms.tiny import tiny_model
from refusals import refused
from torch import nn
from transformers import AutoModelForCausalLM

import sinkscope as ss
from sinkscope.errors import SinkscopeWarning
from sinkscope.opening.live import target_of


def test_a_patch_of_another_model_is_noticed_wherever_it_is_used(tmp_path):
    o = organism("llama", 3)
    folder, here = o.save(tmp_path / "m"), tmp_path / "p.json"
    patch = ss.SinkPatch.from_result(ss.find_sinks(folder))
    patch.save(here)
    with warnings.catch_warnings():  # its own model, read or loaded in any way
        warnings.simplefilter("error", SinkscopeWarning)
        for model in (ss.load(folder), loaded("bridge", folder)):
            with ss.SinkPatch.load(here).on(model):
                pass
    tuned = ss.load(folder)
    with torch.no_grad():
        tuned.model.layers[2].mlp.up_proj.weight.mul_(1.01)  # a fine-tune
    with pytest.warns(SinkscopeWarning, match="has the same shape and other weights"), patch.on(tuned):
        pass
    with pytest.warns(SinkscopeWarning, match="has the same shape and other weights"):
        ss.patch(tuned, file=here, text=text_file(o, tmp_path), pieces=2, length=8, max_repeats=8)
    other, tokenizer = tiny_model("llama")
    with refused(r"the patch was made for m, whose .* is .*: give that model"):
        ss.generate(other, "a", patch=here, tokenizer=tokenizer)


class Wrapped(nn.Module):
    """A model around a model, as peft makes it."""

    def __init__(self, model, learned_tokens: bool = False):
        super().__init__()
        self.base_model = model
        self.config = model.config
        self.peft_config = {"default": SimpleNamespace(is_prompt_learning=learned_tokens)}

    def get_base_model(self):
        return self.base_model

    def generate(self, *args, **kwargs):
        return self.base_model.generate(*args, **kwargs)


def test_a_model_that_peft_wraps_is_the_model_inside():
    made = organism("llama", 3)
    wrapped = Wrapped(made.model)
    target = target_of(wrapped, made.tokenizer)
    assert target.kind == "hf" and target.hf is made.model
    with ss.Ablate(sites=[(1, 3)]).on(wrapped) as run:
        wrapped.generate(torch.arange(5, 12)[None], max_new_tokens=2, do_sample=False)
    assert run.target.hf is made.model
    with refused("learned tokens before the text"):
        target_of(Wrapped(made.model, learned_tokens=True))


def test_a_model_without_weights_is_refused():
    made = organism("llama", 3)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(made.model.config)
    for use in (lambda: ss.find_sinks(model, tokenizer=made.tokenizer), lambda: ss.Conversation(model).ask([5])):
        with refused("holds no weights yet"):
            use()
