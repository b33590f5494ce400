"""Nothing happens silently: decoding, patches, chat templates, copies."""

from __future__ import annotations

import copy
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
from sinkscope.hooks.edit.base import Intervention
from sinkscope.models.neurons import columns
from sinkscope.opening.live import target_of

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
        for model in (ss.load(folder), loaded("bridge", folder)):
            with ss.SinkPatch.load(here).on(model):
                pass
    model = ss.load(folder)
    with torch.no_grad():
        model.model.layers[2].mlp.up_proj.weight.mul_(1.01)  # a fine-tune
    for use in (
        lambda: entered(patch, model),
        lambda: ss.generate(model, "poem", patch=here, max_new_tokens=2),
        lambda: ss.patch(model, file=here, text=text, pieces=2, length=8, max_repeats=8),
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
    torch.testing.assert_close(
        columns(target, 1, torch.tensor([2, 3])), whole[:, [2, 3]].T.detach(), atol=1e-5, rtol=1e-4
    )
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
