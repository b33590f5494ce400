"""LoopServe on whole models: sparse prompts against dense masks, both halves together, and what it goes with."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from kv_kit import attended, beside_ids, close, decode, prompts
from kv_kit import shallow_of as model_of
from refusals import refused
from torch import Tensor
from transformers import DynamicCache

from sinkscope.conformance.masked import plain_logits
from sinkscope.hooks.edit.knockout import Knockout
from sinkscope.kv import StreamingLLM
from sinkscope.opening.load import target_of
from sinkscope.sparse.attention import Scores
from sinkscope.sparse.serve import SHORTEST, LoopServe
from sinkscope.sparse.shapes import AShape

SPARSE = {"alpha": 0.5, "shortest": 0, "dense_above": 9.0, "sample": 12, "dense_rows": 3, "begin": 1}
SERVE = LoopServe(**SPARSE, decode=False)


def every_head(family: str = "llama"):
    """As many kv heads as query heads, since the reference masks are per kv head."""
    return model_of(family, num_key_value_heads=4) if family != "gpt2" else model_of(family)


def line_masks(model, ids: Tensor, mask: Tensor, turns: list[int], serve: LoopServe) -> dict[int, Tensor]:
    """Per layer `[row head query key]`: for each turn (columns from one entry to the next) the lines of its queries."""
    rows, total = ids.shape
    target = target_of(model)
    causal = (torch.ones(total, total).tril() * mask[:, None]).bool()
    sees = {layer: causal[:, None].repeat(1, target.n_heads, 1, 1) for layer in range(target.n_layers)}
    for layer in range(target.n_layers):
        query, key, _, scaling = attended(model, ids, mask, sees)[layer]
        for row in range(rows):
            pad = int(total - mask[row].sum())
            for start, stop in pairwise(turns):
                begin = max(start, pad)
                lines = serve.lines(Scores(query[row, :, begin:stop], key[row, :, pad:stop], scaling), layer)
                sees[layer][row, :, begin:stop, :stop] = False
                sees[layer][row, :, begin:stop, pad:stop] = lines.rows(torch.arange(begin - pad, stop - pad))
    return sees


@pytest.mark.parametrize(("family", "variant"), [("qwen3", "bands"), ("gpt2", "faithful")])
def test_prompts_of_two_turns_equal_passes_under_the_masks_of_their_lines(family, variant):
    # The faithful variant takes nearly all lines of attention as flat as that of a random model.
    serve = LoopServe(**{**SPARSE, "alpha": 0.5 if variant == "bands" else 0.1}, variant=variant, decode=False, seed=5)
    model = every_head(family)
    ids, mask = prompts([330, 271], 150)
    cache = DynamicCache(config=model.config)
    logits = []
    with serve.on(model) as run, torch.no_grad():
        for part in (slice(0, 330), slice(330, 480)):
            given = beside_ids(model, mask, part)
            logits.append(model(input_ids=ids[:, part], past_key_values=cache, use_cache=True, **given).logits)
    sees = line_masks(model, ids, mask, [0, 330, 480], serve)
    expected = plain_logits(model, ids, mask, sees)
    real = mask.bool()
    close(torch.cat(logits, 1)[real], expected[real])
    events = [event for event in run.events if event.kind == "prefill"]
    assert len(events) == 2 * 2 * target_of(model).n_layers
    for event in events:
        queries, keys = event.data["queries"], event.data["keys"]
        assert event.position + 1 == keys == (330, 271)[event.row] + (queries == 150) * 150
        some = sees[event.layer][event.row, :, 480 - 150 :] if queries == 150 else sees[event.layer][event.row, :, :330]
        every = sum(range(keys - queries + 1, keys + 1))
        assert event.data["attended"] == pytest.approx(float(some.sum() / 4 / every))
    assert min(event.data["attended"] for event in events) < 0.75


def test_short_prompts_are_left_to_the_model_and_heads_that_need_much_to_pytorch(model):
    ids, mask = prompts([40, 25], 20)
    plain, short = decode(model, ids, mask, 40), f"fewer than {SHORTEST['cpu']} keys"
    with LoopServe(budget=100, first=0, interval=4).on(model) as run:
        assert torch.equal(decode(model, ids, mask, 40), plain)
    assert {event.data["dense"] for event in run.events} == {short}
    said = f"LoopServe computed 100% of the attention of prompts; what the model's own attention read: {short}."
    assert run.summary().startswith(said)
    with LoopServe(alpha=0.9, shortest=0, dense_above=0.0, decode=False).on(model) as run:
        close(decode(model, ids, mask, 40), plain)
    assert {event.data["dense_heads"] for event in run.events} == {4}


@pytest.mark.parametrize(
    ("family", "why"), [("mistral", "sliding window"), ("gemma2", "soft cap"), ("gpt_oss", "learned sinks")]
)
def test_layers_that_need_their_own_attention_keep_it_and_say_so(family, why):
    model, (ids, mask) = model_of(family), prompts([40, 30])
    plain = decode(model, ids, mask, 40)
    with SERVE.on(model) as run:
        close(decode(model, ids, mask, 40), plain)
    assert why in {event.data["dense"] for event in run.events}


def test_prompts_under_other_masks_and_in_caches_that_lost_tokens_are_refused(model):
    ids, cache = prompts([24])[0], DynamicCache(config=model.config)
    with (Knockout([3]) | SERVE).on(model), torch.no_grad(), refused("LoopServe reads prompts under causal masks"):
        model(ids)
    with (StreamingLLM(budget=12) | AShape(first=4, local=8)).on(model), torch.no_grad():
        for part in (ids[:, :20], ids[:, 20:21]):  # now tokens are evicted
            model(part, past_key_values=cache)
        with refused("AShape reads prompts along lines of all tokens, and the cache has lost some: begin a new cache"):
            model(ids[:, 21:], past_key_values=cache)


def test_a_row_of_padding_alone_changes_nothing_for_the_others(model):
    ids, mask = prompts([40, 30])
    with SERVE.on(model), torch.no_grad():
        alone = model(ids[:1], attention_mask=mask[:1]).logits
        mask[1] = 0
        close(model(ids, attention_mask=mask).logits[:1], alone)
