"""Whatever a decoder calls its cache, positions go on where the prompt ended; under an unknown name, nothing acts."""

from __future__ import annotations

import pytest
import torch
from organisms.decoders import decoder
from organisms.tiny import tiny_model
from refusals import refused
from transformers import LlamaForCausalLM, LlamaModel
from transformers.modeling_outputs import CausalLMOutputWithPast

import sinkscope as ss
from sinkscope.engine.calls import cache_in
from sinkscope.models.call_cache import cache_argument

IDS = torch.randint(5, 60, (1, 12), generator=torch.Generator().manual_seed(5))
NEW = 6


def named(name: str) -> LlamaForCausalLM:
    """A Llama whose decoder takes its cache by a name, or, by that of transformers, as the fourth argument."""
    scope = {"LlamaModel": LlamaModel}
    exec(
        f"def forward(self, input_ids=None, attention_mask=None, position_ids=None, {name}=None, use_cache=None):\n"
        f"    return LlamaModel.forward(self, input_ids, attention_mask, position_ids, {name}, use_cache=use_cache)",
        scope,
    )
    model = tiny_model("llama")[0]
    model.model.__class__ = type("Decoder", (LlamaModel,), {"forward": scope["forward"]})

    class Named(LlamaForCausalLM):
        def forward(self, input_ids=None, attention_mask=None, position_ids=None, use_cache=None, **given):
            cache = cache_in({name: None} | given)
            told = [cache] if name == "past_key_values" else []
            named = {} if told else {name: cache}
            out = self.model(input_ids, attention_mask, position_ids, *told, **named)
            found = cache_argument(tiny_model("llama")[0], cache_in(out))
            return CausalLMOutputWithPast(logits=self.lm_head(out[0]), **found)

    model.__class__ = Named
    return model


def generated(model) -> list[int]:
    settings = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None}
    return model.generate(IDS, attention_mask=torch.ones_like(IDS), **settings)[0].tolist()


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
def test_positions_go_on_and_policies_act_whatever_the_cache_is_called(name):
    model = named(name)
    for position in (0, IDS.shape[1] + 2):
        with ss.Ablate(layer=1, neurons=[3], positions=position).on(model) as run:
            generated(model)
        assert run.counts["ablated"] == 1
    plain = tiny_model("llama")[0]
    with ss.kv.H2O(8).on(plain) as expected:
        text = generated(plain)
    with ss.kv.H2O(8).on(model) as run:
        assert generated(model) == text
    assert run.usage == expected.usage and run.usage


def test_a_cache_by_an_unknown_name_is_refused():
    with refused("its cache does not come as cache or past_key_values, or .*; rename that argument"):
        with ss.Ablate(layer=1, neurons=[3], positions=0).on(named("memory")) as run:
            generated(run.target.hf)


def test_positions_go_on_where_the_first_layer_keeps_a_state():
    model = decoder("minimax")
    for positions, acts in ((IDS.shape[1] + 1, True), (slice(IDS.shape[1] + NEW - 1, None), False)):
        with ss.Ablate(sites=[(1, expert, 3) for expert in range(4)], value=9.0, positions=positions).on(model) as run:
            generated(model)
        assert bool(run.counts["ablated"]) == acts
