"""Everything that `generate` does, with a policy beside: it works as it should, or is refused in one line."""

from __future__ import annotations

import threading

import pytest
import torch
from kv_kit import Drawn, Ragged, decode, prompts
from kv_kit import shallow_of as model_of

from sinkscope.errors import UnsupportedError
from sinkscope.kv import Full, Observe, StreamingLLM


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
