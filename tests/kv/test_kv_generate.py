"""Everything that `generate` does, with a policy beside: it works as it should, or is refused in one line."""

from __future__ import annotations

import torch
from kv_kit import prompts
from kv_kit import shallow_of as model_of
from refusals import refused

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
        with refused("without an assistant"):
            model.generate(ids, **ask)
        assert run.usage == []
    assert torch.equal(model.generate(ids, **ask), stock)
    with StreamingLLM(budget=6).on(assistant):  # it drafts worse, and what it drafts is checked
        assert torch.equal(model.generate(ids, **ask), stock)
