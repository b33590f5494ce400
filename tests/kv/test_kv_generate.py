"""Everything that `generate` does, with a policy beside: it works as it should, or is refused in one line."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from kv_kit import Drawn, decode, prompts
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


def test_worker_threads_see_the_policy_and_do_not_meet():
    """Two calls on one model overlap: each waits inside its own for the other."""
    model, policy = model_of("llama"), Drawn(budget=6)
    texts = [prompts([14, 9], 5, seed) for seed in (0, 1)]
    meet = threading.Barrier(2, timeout=20)

    def wait(*_):
        meet.wait()

    def work(text):
        return decode(model, *text, 14)

    with policy.on(model):
        want = [work(text) for text in texts]
        model.model.layers[1].register_forward_pre_hook(wait)
        with ThreadPoolExecutor(2) as threads:
            got = list(threads.map(work, texts))
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
