"""Positions go on where the prompt ended, also beside states; of a cache by an unknown name they cannot."""

from __future__ import annotations

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


class Decoder(LlamaModel):
    """Takes its cache by a name of its own."""

    def forward(self, input_ids=None, attention_mask=None, position_ids=None, memory=None, use_cache=None):
        return LlamaModel.forward(self, input_ids, attention_mask, position_ids, memory, use_cache=use_cache)


class Causal(LlamaForCausalLM):
    def forward(self, input_ids=None, attention_mask=None, position_ids=None, use_cache=None, **given):
        out = self.model(input_ids, attention_mask, position_ids, memory=cache_in(given))
        found = cache_argument(cache_in(out))
        return CausalLMOutputWithPast(logits=self.lm_head(out[0]), **found)


def generated(model) -> list[int]:
    settings = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None}
    return model.generate(IDS, attention_mask=torch.ones_like(IDS), **settings)[0].tolist()


def test_a_cache_by_an_unknown_name_is_refused():
    model = tiny_model("llama")[0]
    model.__class__, model.model.__class__ = Causal, Decoder
    with refused("its cache does not come as cache or past_key_values, or .*; rename that argument"):
        with ss.Ablate(layer=1, neurons=[3], positions=0).on(model):
            generated(model)


def test_a_new_cache_is_of_the_class_that_the_model_asks_for():
    model = decoder("minimax")
    with ss.LoopGuard().on(model):  # which watches a cache
        assert "MiniMax" in type(model(IDS).past_key_values).__name__


def test_positions_go_on_where_the_first_layer_keeps_a_state():
    model = decoder("minimax")
    for positions, acts in ((IDS.shape[1] + 1, True), (slice(IDS.shape[1] + NEW - 1, None), False)):
        with ss.Ablate(sites=[(1, expert, 3) for expert in range(4)], value=9.0, positions=positions).on(model) as run:
            generated(model)
        assert bool(run.counts["ablated"]) == acts
