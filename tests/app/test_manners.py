"""Nothing happens silently: decoding, patches, chat templates, copies."""

from __future__ import annotations

import copy
import os
import warnings
from types import SimpleNamespace
from typing import Any

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
from sinkscope.bench.answer import answer_rows
from sinkscope.errors import SinkscopeWarning
from sinkscope.generation.decode import decode, noted_decoding
from sinkscope.hooks.edit.base import Intervention
from sinkscope.models.neurons import w_out
from sinkscope.opening.live import target_of

# --- Decoding --------------------------------------------------------------------------------------------------------

LOUD = {
    "repetition_penalty": 1.5,
    "num_beams": 2,
    "prompt_lookup_num_tokens": 3,
    "num_return_sequences": 2,
    "return_dict_in_generate": True,
    "do_sample": True,
    "temperature": 0.3,
    "output_scores": True,
}


def _ways(model, tokenizer) -> list[Any]:
    ids = torch.arange(5, 15)[None]
    target = target_of(model, tokenizer)
    return [
        decode(target, ids, 12)[0],
        [made.tokens for made in answer_rows(target, ids.tolist(), 12)],
        ss.Conversation(model).ask(ids[0].tolist(), max_new_tokens=12).ids,
        [made.tokens for made in ss.generate(model, "poem book tree", tokenizer=tokenizer, max_new_tokens=12)],
        [made.tokens for made in ss.generate(model, ["poem", "book"], tokenizer=tokenizer, temperature=1, seed=3)],
    ]


def test_what_the_checkpoint_says_of_decoding_changes_nothing():
    model, _ = tiny_model("llama")
    tokenizer = organism("llama", 0).tokenizer
    model.generation_config.do_sample = False  # as it would be anyway: where the caller samples, nothing is ignored
    with warnings.catch_warnings():
        warnings.simplefilter("error", SinkscopeWarning)
        plain = _ways(model, tokenizer)
    for name, value in LOUD.items():
        setattr(model.generation_config, name, value)
    with pytest.warns(SinkscopeWarning, match=r"own settings \(do_sample False.*ignores those of .*num_beams 2"):
        assert _ways(model, tokenizer) == plain
    with noted_decoding() as used, pytest.warns(SinkscopeWarning):
        decode(target_of(model), torch.arange(5, 15)[None], 2)
    assert used["repetition_penalty"] == 1.0 and used["not_used_of_checkpoint"].keys() == LOUD.keys()
    with ss.Ablate(layer=1, neurons=[3]).on(model):  # the user's own call is the user's
        own = model.generate(torch.arange(5, 15)[None], max_new_tokens=4, prompt_lookup_num_tokens=None)
    assert own.sequences.shape[0] == 2 and own.scores


# --- Patches of other models -----------------------------------------------------------------------------------------


def entered(edit: Intervention, model) -> None:
    with edit.on(model):
        pass


@pytest.mark.slow
def test_a_patch_of_another_model_is_noticed_wherever_it_is_used(tmp_path):
    o = organism("llama", 3)
    folder, text = o.save(tmp_path / "m"), text_file(o, tmp_path)
    found = ss.find_sinks(folder)
    patch, here = ss.SinkPatch.from_result(found), tmp_path / "p.json"
    patch.save(here)
    with warnings.catch_warnings():  # its own model, read or loaded in any way
        warnings.simplefilter("error", SinkscopeWarning)
        for model in (ss.load(folder), loaded("bridge", folder), AutoModelForCausalLM.from_pretrained(folder)):
            with ss.SinkPatch.load(here).on(model):
                pass
    model = ss.load(folder)
    with torch.no_grad():
        model.model.layers[2].mlp.up_proj.weight.mul_(1.01)  # a fine-tune
    for use in (
        lambda: entered(patch, model),
        lambda: ss.generate(model, "poem", patch=here, max_new_tokens=2),
        lambda: ss.patch_eval(model, patch=here, text=text, pieces=2, length=8, max_repeats=8),
    ):
        with pytest.warns(SinkscopeWarning, match="has the same shape and other weights"):
            use()
    other, tokenizer = tiny_model("llama")
    for use in (lambda: entered(patch, other), lambda: ss.generate(other, "a", patch=here, tokenizer=tokenizer)):
        with refused(r"the patch was made for m, whose .* is .*: give that model"):
            use()


# --- From Python -----------------------------------------------------------------------------------------------------


class Adapted(nn.Module):
    """A linear layer with an adapter beside it, as peft makes it."""

    def __init__(self, base: nn.Linear):
        super().__init__()
        self.base_layer = base
        self.extra = nn.Parameter(torch.randn_like(base.weight) * 0.05)

    @property
    def weight(self):
        return self.base_layer.weight

    def forward(self, x):
        return self.base_layer(x) + nn.functional.linear(x, self.extra)


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


def test_a_peft_model_is_measured_with_its_adapter():
    made = organism("llama", 3)
    model = copy.deepcopy(made.model)
    down = model.model.layers[1].mlp.down_proj
    model.model.layers[1].mlp.down_proj = Adapted(down)
    wrapped, ids = Wrapped(model), torch.arange(5, 12)[None]
    target = target_of(wrapped, made.tokenizer)
    assert target.kind == "hf" and target.hf is model
    whole = down.weight + model.model.layers[1].mlp.down_proj.extra
    torch.testing.assert_close(w_out(target, 1, [2, 3]), whole[:, [2, 3]].T.detach(), atol=1e-5, rtol=1e-4)
    assert {one.layer for one in ss.find_sinks(wrapped, tokenizer=made.tokenizer).needed} == {made.truth.sink_layer}
    with ss.Ablate(sites=[(1, 3)]).on(wrapped) as run:
        wrapped.generate(ids, max_new_tokens=2, do_sample=False)
    assert run.target.hf is model
    with refused("learned tokens before the text"):
        target_of(Wrapped(model, learned_tokens=True))


def test_a_model_without_weights_is_refused():
    made = organism("llama", 3)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(made.model.config)
    for use in (lambda: ss.find_sinks(model, tokenizer=made.tokenizer), lambda: ss.Conversation(model).ask([5])):
        with refused("holds no weights yet"):
            use()


def test_a_model_is_not_copied_while_interventions_act():
    model = tiny_model("llama")[0]
    with ss.Ablate(layer=1, neurons=[3]).on(model):
        for copied in (copy.deepcopy, lambda m: torch.save(m, os.devnull)):
            with refused("cannot be copied or pickled while interventions act"):
                copied(model)
    assert copy.deepcopy(model) is not model
