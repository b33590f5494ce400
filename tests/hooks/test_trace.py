"""`trace`: its reducers, batches and names agree with raw values, and nothing is left on the model."""

from __future__ import annotations

import pytest
import torch
from organisms.decoders import decoder
from organisms.tiny import tiny_model

from sinkscope.errors import SinkscopeError, UnsupportedError
from sinkscope.hooks.trace import site_names, trace
from sinkscope.opening.live import target_of

IDS = torch.randint(3, 90, (3, 11), generator=torch.Generator().manual_seed(2))


def test_bad_names_say_what_there_is():
    model, _ = tiny_model("llama")
    with pytest.raises(SinkscopeError, match=r"'blocks\.9\.hook_resid_post' matches nothing in a model of 3 layers"):
        trace(model, IDS, ["blocks.9.hook_resid_post"])
    with pytest.raises(SinkscopeError, match="no site is given"):
        trace(model, IDS)
    neox, _ = tiny_model("gpt_neox")
    with pytest.raises(UnsupportedError, match="hook_resid_mid"):
        trace(neox, IDS, ["blocks.0.hook_resid_mid"])
    moe, _ = tiny_model("mixtral")
    with pytest.raises(UnsupportedError, match="per expert"):
        trace(moe, IDS, ["blocks.0.mlp.hook_post"])
    assert len(site_names(3)) == 1 + 3 * 13 + 2


@pytest.mark.parametrize("model_type", ["lfm2", "minimax"])
def test_a_pattern_takes_the_layers_that_have_the_site(model_type):
    """A layer that is named has it or is refused, and so is what no layer has."""
    model = decoder(model_type)
    target = target_of(model)
    ids = IDS % model.config.vocab_size
    attending = [f"blocks.{layer}.attn.hook_pattern" for layer in target.attending]
    assert 0 < len(attending) < target.n_layers
    assert list(trace(model, ids, ["blocks.*.attn.hook_pattern"])) == attending
    without = next(layer for layer in range(target.n_layers) if layer not in target.attending)
    with pytest.raises(UnsupportedError, match=f"layer {without} of .* has no softmax attention"):
        trace(model, ids, ["blocks.*.hook_resid_post", f"blocks.{without}.attn.hook_pattern"])
    with pytest.raises(UnsupportedError, match="no softmax attention"):
        trace(model, ids, [f"blocks.{without}.attn.*"])
