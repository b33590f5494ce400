"""generate: the model's own greedy text, with and without a patch, alone and in batches."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from intervention_kit import loud_model
from organisms import tiny_model
from refusals import refused
from tokenizers.processors import TemplateProcessing

from experiments.loopguard.variants import Timed
from sinkscope.generation.generate import generate
from sinkscope.hooks.edit import Event, SinkPatch
from sinkscope.kv import StreamingLLM
from sinkscope.loops.guard import LoopGuard

SITES = loud_model()[2]
PROMPTS = ["poem poem book cat", "the dog", "a cat and you it is was of"]


def test_a_patch_is_given_as_it_is_or_by_its_path(tmp_path):
    model, tokenizer, _ = loud_model()
    settings = {"tokenizer": tokenizer, "max_new_tokens": 8}
    patch = SinkPatch(sites=SITES)
    patch.save(tmp_path / "patch.json")
    results = generate(model, PROMPTS, patch=tmp_path / "patch.json", **settings)
    assert results == generate(model, PROMPTS, patch=patch, **settings)
    assert all(r.summary.startswith("SinkPatch patched") for r in results)


GUARD = LoopGuard.paper(budget=12, anchors=2, monitor=Timed(window=16, warmup=0, every=9))


def endless() -> tuple[Any, Any]:
    model, tokenizer, _ = loud_model()
    model.generation_config.eos_token_id = None
    return model, tokenizer


def acts(events: list[Event]) -> list[tuple[int, int]]:
    return [(event.step, event.position) for event in events if event.kind == "guard"]


def test_a_patch_a_policy_and_a_guard_act_together_alone_and_in_a_batch():
    """As if they were put together by hand."""
    model, tokenizer = endless()
    settings = {"tokenizer": tokenizer, "max_new_tokens": 14}
    acting = {"patch": SinkPatch(sites=SITES), "policy": "streaming:16", "guard": GUARD}
    plain = [one.tokens for one in generate(model, PROMPTS, **settings)]
    rows = []
    for prompt in PROMPTS:
        ids = torch.tensor([tokenizer(prompt)["input_ids"]])
        with (SinkPatch(sites=SITES) | StreamingLLM(budget=16) | GUARD).on(model) as run:
            out = model.generate(ids, max_new_tokens=14, do_sample=False)[0, ids.shape[1] :].tolist()
        rows.append((out, acts(run.events)))
    got = generate(model, PROMPTS, **acting, **settings)
    assert [(one.tokens, acts(one.events)) for one in got] == rows
    assert all(len(events) == 1 for _, events in rows) and rows[0][0] != plain[0]
    # Shorter than the warm-up: the guard's own settings leave the text alone.
    assert [r.tokens for r in generate(model, PROMPTS, guard=True, **settings)] == plain


def test_sampling_follows_the_seed_whatever_else_is_drawn():
    model, tokenizer, _ = loud_model()

    def drawn(seed: int) -> list[int]:
        return generate(model, PROMPTS[0], tokenizer=tokenizer, temperature=1.0, max_new_tokens=12, seed=seed)[0].tokens

    one, other = drawn(1), drawn(2)
    with ThreadPoolExecutor(3) as pool:  # torch's own numbers are those of all threads
        assert list(pool.map(drawn, [1, 2] * 6)) == [one, other] * 6 and one != other


def test_bos_stands_before_a_prompt_unless_it_is_refused():
    model, tokenizer, _ = loud_model()

    def length(bos: bool | None) -> int:
        return generate(model, "the dog", tokenizer=tokenizer, bos=bos, max_new_tokens=1)[0].prompt_tokens

    assert [length(bos) for bos in (None, True, False)] == [3, 3, 2]
    tokenizer.bos_token = None
    assert length(True) == 3  # the token that it puts before every text
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="$A", pair="$A $B")
    with refused("no BOS"):
        length(True)


@pytest.mark.parametrize("guard", [False, True])
def test_a_model_with_nan_weights_is_refused_by_the_name_of_the_tensor(guard):
    model, tokenizer = tiny_model("llama")
    prompt = {"prompts": PROMPTS, "guard": guard, "tokenizer": tokenizer, "max_new_tokens": 3}
    model.model.layers[1].mlp.up_proj.weight.data[3, 2] = torch.nan
    with refused("tensor model.layers.1.mlp.up_proj.weight holds values that are NaN or infinite"):
        generate(model, **prompt)
    model.model.layers[1].mlp.up_proj.weight.data[3, 2] = 0
    with model.lm_head.register_forward_hook(lambda *_: torch.full((1, 1, 100), torch.nan)):
        with refused(r"the logits of .* are NaN after \d+ tokens, .* finite: load it with dtype=float32"):
            generate(model, **{**prompt, "guard": False})
