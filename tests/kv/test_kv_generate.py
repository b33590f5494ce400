"""Everything that `generate` does, with a policy beside: it works as it should, or is refused in one line."""

from __future__ import annotations

import threading

import pytest
import torch
from kv_kit import Drawn, Ragged, close, decode, dense, masks_of, prompts
from kv_kit import shallow_of as model_of
from transformers import DynamicCache

from sinkscope.errors import UnsupportedError
from sinkscope.kv import Full, Observe, StreamingLLM


def test_beams_carry_their_caches():
    """Rows change places at every step, so a cache that does not follow gives sequences other scores than these."""
    model = model_of("gemma2")
    ids, mask = prompts([14, 9])
    ask = {
        "attention_mask": mask,
        "max_new_tokens": 6,
        "do_sample": False,
        "num_beams": 3,
        "num_return_sequences": 3,
        "return_dict_in_generate": True,
        "output_scores": True,
        "length_penalty": 0.0,
    }
    stock = model.generate(ids, **ask)
    with Full().on(model):
        full = model.generate(ids, **ask)
    assert torch.equal(full.sequences, stock.sequences)
    policy = Drawn(budget=6, rows=(1,) * 6)  # beams of one prompt keep the same
    ones = mask.repeat_interleave(3, 0)
    with policy.on(model):
        out = model.generate(ids, **ask)
    longer = torch.cat([ones, torch.ones(6, 6, dtype=torch.long)], 1)
    logits = dense(model, out.sequences, longer, masks_of(model, policy, longer, 14))[:, 13:-1]
    close(out.sequences_scores, logits.log_softmax(-1).gather(2, out.sequences[:, 14:, None]).sum((1, 2)))
    moved = (out.beam_indices[:, 1:] % 3 != out.beam_indices[:, :-1] % 3).any()
    assert moved and not torch.equal(out.sequences, stock.sequences)


def test_assisted_generation(model):
    """With the whole cache as ever, although tokens are taken back; with fewer it is refused before it begins."""
    assistant = model_of("llama", seed=1, num_hidden_layers=1)
    ids, _ = prompts([19])
    ask = {"assistant_model": assistant, "max_new_tokens": 12, "do_sample": False}
    stock = model.generate(ids, **ask)
    assert torch.equal(stock, model.generate(ids, max_new_tokens=12))
    for way in (Full(), Full() | Observe(lambda _: None), Observe(lambda _: None)):
        with way.on(model):
            assert torch.equal(model.generate(ids, **ask), stock)
    with StreamingLLM(budget=6).on(model) as run:
        with pytest.raises(UnsupportedError, match="without an assistant") as raised:
            model.generate(ids, **ask)
        assert "\n" not in str(raised.value) and run.usage == []
    assert torch.equal(model.generate(ids, **ask), stock)
    with StreamingLLM(budget=6).on(assistant):  # it drafts worse, and what it drafts is checked
        assert torch.equal(model.generate(ids, **ask), stock)


def test_two_threads_and_two_models_at_once():
    """Worker threads see the policy. Calls are made to overlap: each waits inside its own for the other."""
    models = [model_of("llama"), model_of("llama", seed=1)]
    policies = [Drawn(budget=6), Ragged(budget=6)]
    ids, mask = prompts([14, 9], 5)
    want = []
    for model, policy in zip(models, policies, strict=True):
        with policy.on(model):
            want.append(decode(model, ids, mask, 14))
    meet = threading.Barrier(2, timeout=20)

    def wait(_module, _args):
        meet.wait()

    for model in models:
        model.model.layers[1].register_forward_pre_hook(wait)
    got = {}

    def work(name: str, model):
        got[name] = decode(model, ids, mask, 14)

    def at_once(**each):
        threads = [threading.Thread(target=work, args=item) for item in each.items()]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    with policies[0].on(models[0]), policies[1].on(models[1]):
        at_once(first=models[0], second=models[1])
        at_once(third=models[0], fourth=models[0])  # two threads on one model share its run
    for name, number in {"first": 0, "second": 1, "third": 0, "fourth": 0}.items():
        assert torch.equal(got[name], want[number])


@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
def test_a_second_turn_sees_what_the_first_one_left(family):
    """Evict in the first turn, read another prompt in chunks on top, evict again."""
    model = model_of(family)
    ids, mask = prompts([20, 15], 14)
    policy = Ragged(budget=9, every="prefill")
    cache = DynamicCache()
    with policy.on(model):
        decode(model, ids[:, :24], mask[:, :24], 20, cache)
        got = decode(model, ids, mask, 30, cache, chunks=[4, 2])
    # The mask of it: before columns 20 and 30 the policy acted, and all that a query saw of what was held then stays.
    first, second = (masks_of(model, policy, mask, n, every=None) for n in (20, 30))
    sees = []
    for layer, both in zip(first, second, strict=True):
        see = layer.clone()
        see[:, :, 30:] &= both[:, :, 30:]
        sees.append(see)
    close(got, dense(model, ids, mask, sees)[:, 29:])
