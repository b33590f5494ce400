"""generate: what is put together by hand, drawn tokens, and logits that are no numbers."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch
from organisms import tiny_model
from refusals import refused

from sinkscope.generation.generate import generate
from sinkscope.hooks.edit import SinkPatch
from sinkscope.kv import StreamingLLM

PROMPTS = ["poem poem book cat", "the dog", "a cat and you it is was of"]


def test_what_is_named_acts_on_each_prompt_as_if_it_were_put_together_by_hand():
    model, tokenizer = tiny_model("llama")
    model.generation_config.eos_token_id = None
    patch, settings = SinkPatch(sites=[(1, 3), (2, 0)]), {"tokenizer": tokenizer, "max_new_tokens": 14}
    got = generate(model, PROMPTS, patch=patch, policy="streaming:16", **settings)
    for prompt, one in zip(PROMPTS, got, strict=True):
        ids = torch.tensor([tokenizer(prompt)["input_ids"]])
        with (patch | StreamingLLM(budget=16)).on(model) as run:
            out = model.generate(ids, max_new_tokens=14, do_sample=False)[0, ids.shape[1] :].tolist()
        assert (one.tokens, one.summary) == (out, run.summary())


def test_sampling_follows_the_seed_whatever_else_is_drawn():
    model, tokenizer = tiny_model("llama")

    def drawn(seed: int) -> list[int]:
        return generate(model, PROMPTS[0], tokenizer=tokenizer, temperature=1.0, max_new_tokens=12, seed=seed)[0].tokens

    one, other = drawn(1), drawn(2)
    with ThreadPoolExecutor(3) as pool:  # torch's own numbers are those of all threads
        assert list(pool.map(drawn, [1, 2] * 6)) == [one, other] * 6 and one != other


def test_a_model_with_nan_weights_is_refused_by_the_name_of_the_tensor():
    model, tokenizer = tiny_model("llama")
    weight = model.model.layers[1].mlp.up_proj.weight.data
    weight[3, 2] = torch.nan
    with refused("tensor model.layers.1.mlp.up_proj.weight holds values that are NaN or infinite"):
        generate(model, PROMPTS, guard=True, tokenizer=tokenizer, max_new_tokens=3)
    weight[3, 2] = 0
    with model.lm_head.register_forward_hook(lambda *_: torch.full((1, 1, 100), torch.nan)):
        with refused(r"the logits of .* are NaN or infinite after \d+ tokens, .* finite: load it with dtype=float32"):
            generate(model, PROMPTS, tokenizer=tokenizer, max_new_tokens=3)
