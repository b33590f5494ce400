"""Whatever a model calls its cache, positions go on where the prompt ended; under an unknown name, nothing acts."""

from __future__ import annotations

import pytest
import torch
from organisms.decoders import decoder
from transformers import LlamaConfig, LlamaForCausalLM, LlamaModel
from transformers.modeling_outputs import CausalLMOutputWithPast

import sinkscope as ss
from sinkscope.engine.calls import cache_in
from sinkscope.errors import UnsupportedError
from sinkscope.models.call_cache import CACHE_NAMES, cache_argument

IDS = torch.randint(3, 64, (1, 12), generator=torch.Generator().manual_seed(5))
NEW = 6


def named(name: str, *, positional: bool = False) -> LlamaForCausalLM:
    """A Llama whose decoder takes its cache by a name, or as the fourth argument."""
    parameters = f"self, input_ids=None, attention_mask=None, position_ids=None, {name}=None, use_cache=None"
    call = f"LlamaModel.forward(self, input_ids, attention_mask, position_ids, {name}, use_cache=use_cache)"
    scope = {"LlamaModel": LlamaModel}
    exec(f"def forward({parameters}):\n    return {call}", scope)

    class Decoder(LlamaModel):
        forward = scope["forward"]

    class Named(LlamaForCausalLM):
        def __init__(self, config):
            super().__init__(config)
            self.model = Decoder(config)

        def forward(self, input_ids=None, attention_mask=None, position_ids=None, use_cache=None, **given):
            given = {name: cache_in(given)}
            if positional:
                out = self.model(input_ids, attention_mask, position_ids, given[name], use_cache)
            else:
                out = self.model(input_ids, attention_mask, position_ids, use_cache=use_cache, **given)
            return CausalLMOutputWithPast(logits=self.lm_head(out[0]), **cache_argument(stock(), cache_in(out)))

    torch.manual_seed(3)
    return Named(config()).eval()


def config() -> LlamaConfig:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaConfig(vocab_size=64, bos_token_id=1, eos_token_id=None, pad_token_id=0, **sizes)


def stock() -> LlamaForCausalLM:
    torch.manual_seed(3)
    return LlamaForCausalLM(config()).eval()


def generated(model) -> list[int]:
    options = {"max_new_tokens": NEW, "do_sample": False}
    return model.generate(IDS, attention_mask=torch.ones_like(IDS), **options)[0].tolist()


@pytest.mark.parametrize(("name", "positional"), zip(CACHE_NAMES, [False, True], strict=True))
def test_positions_go_on_and_policies_act_whatever_the_cache_is_called(name, positional):
    model, plain = named(name, positional=positional), stock()
    model.load_state_dict(plain.state_dict())
    for position in (0, IDS.shape[1] + 2):
        with ss.Ablate(layer=1, neurons=[3], positions=position).on(model) as run:
            generated(model)
        assert run.counts["ablated"] == 1
    with ss.kv.H2O(8).on(plain) as expected:
        text = generated(plain)
    with ss.kv.H2O(8).on(model) as run:
        assert generated(model) == text
    assert run.usage == expected.usage and run.usage


@pytest.mark.parametrize("positional", [False, True], ids=["by name", "by place"])
def test_a_cache_by_an_unknown_name_is_refused(positional):
    model = named("memory", positional=positional)
    expected = "its cache does not come as cache or past_key_values, or .*; rename that argument"
    edit = ss.Ablate(layer=1, neurons=[3], positions=0)
    with pytest.raises(UnsupportedError, match=expected), edit.on(model):
        generated(model)


def test_positions_go_on_where_the_first_layer_keeps_a_state():
    model = decoder("minimax")
    for positions, counts in ((IDS.shape[1] + 1, 1), (slice(IDS.shape[1] + NEW - 1, None), 0)):
        with ss.Ablate(sites=[(1, expert, 3) for expert in range(4)], value=9.0, positions=positions).on(model) as run:
            generated(model)
        assert (run.counts["ablated"] > 0) == bool(counts)
