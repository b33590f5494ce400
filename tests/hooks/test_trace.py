"""`trace`: its reducers, batches and names agree with raw values, and nothing is left on the model."""

from __future__ import annotations

import warnings

import pytest
import torch
from organisms.decoders import decoder
from organisms.tiny import tiny_model
from refusals import refused

from sinkscope.errors import SinkscopeWarning
from sinkscope.hooks.trace import trace
from sinkscope.opening.load import target_of

IDS = torch.randint(3, 90, (3, 11), generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize(
    ("model_type", "sites", "says"),
    [
        ("llama", ["blocks.9.hook_resid_post"], r"'blocks\.9\.hook_resid_post' matches nothing in a model of 3 layers"),
        ("llama", [], "no site is given"),
        ("gpt_neox", ["blocks.0.hook_resid_mid"], "hook_resid_mid"),
        ("mixtral", ["blocks.0.mlp.hook_post"], "per expert"),
    ],
)
def test_bad_names_say_what_there_is(model_type, sites, says):
    with refused(says):
        trace(tiny_model(model_type)[0], IDS, sites)


def test_a_pattern_takes_the_layers_that_have_the_site():
    """A layer that is named has it or is refused, and so is what no layer has."""
    target = target_of(decoder("lfm2"))
    ids = IDS % target.config.vocab_size
    attending = [f"blocks.{layer}.attn.hook_pattern" for layer in target.attending]
    assert 0 < len(attending) < target.n_layers
    assert list(trace(target, ids, ["blocks.*.attn.hook_pattern"])) == attending
    without = next(layer for layer in range(target.n_layers) if layer not in target.attending)
    for sites in (["blocks.*.hook_resid_post", f"blocks.{without}.attn.hook_pattern"], [f"blocks.{without}.attn.*"]):
        with refused(f"layer {without} of .* has no softmax attention"):
            trace(target, ids, sites)


def test_the_pass_ends_after_the_deepest_site():
    """Embeddings need no more than the first layer."""
    model = tiny_model("llama")[0]
    ran = list[int]()
    for number, layer in enumerate(model.model.layers):
        layer.register_forward_hook(lambda *_, number=number: ran.append(number))
    embedded = trace(model, IDS, "hook_embed")["hook_embed"]
    assert torch.equal(embedded, model.get_input_embeddings()(IDS)) and ran == [0]
    ran.clear()
    trace(model, IDS, ["hook_embed", "blocks.1.hook_resid_post"])
    assert ran == [0, 1]


def test_padding_of_rows_of_several_lengths_is_said():
    model = tiny_model("llama")[0]
    says = r"row 0 from position 2 on, row 2 from position 1 on; leave these values out"
    with pytest.warns(SinkscopeWarning, match=says):
        trace(model, [[5, 6], [7, 8, 9], [4]], "hook_embed")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trace(model, IDS, "hook_embed")
