"""The same cache under a TransformerBridge and nnsight."""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
from covering import every_nth
from intervention_kit import bridge_of
from kv_kit import Drawn, Ragged, close, decode, masks_of_run, prompts, run_policy
from kv_kit import shallow_of as model_of
from organisms.tiny import tiny_model
from torch import Tensor

from sinkscope.conformance.masked import plain_logits
from sinkscope.kv import Full, Observe

FAMILIES = every_nth("gemma2 gpt_neox opt llama gpt_oss mistral gpt2 phi3 qwen3_moe gemma3_text olmo2".split(), 6)


@cache
def bridge_and_model(family: str) -> tuple[Any, Any]:
    model = model_of(family)
    return bridge_of(model, tiny_model(family)[1]), model


class Bridged:
    """A bridge, called as a model is. It makes the positions of padded rows itself, from the mask."""

    def __init__(self, bridge):
        self.bridge, self.config = bridge, bridge.original_model.config
        self.base_model = self

    def forward(self, input_ids: Tensor, **given):
        out = self.bridge(input_ids, **given)
        return SimpleNamespace(logits=out[0] if isinstance(out, tuple) else out)

    __call__ = forward


@pytest.mark.parametrize("family", FAMILIES)
def test_a_bridge_with_the_whole_cache_and_with_parts_of_it(family):
    bridge, model = bridge_and_model(family)
    ids, mask = prompts([20, 13], 3)
    bridged = Bridged(bridge)
    stock = decode(bridged, ids, mask, 20)
    close(stock, decode(model, ids, mask, 20))
    for way in (Full(), Observe(lambda _: None)):
        with way.on(bridge):
            close(decode(bridged, ids, mask, 20), stock)
    for policy in (Drawn(budget=8), Ragged(budget=8, mode="select")):
        got, kept = run_policy(policy, bridge, ids, mask, (20,), called=bridged)
        close(run_policy(policy, bridge, ids, mask, (9, 11), called=bridged)[0], got)
        close(got, plain_logits(model, ids, mask, masks_of_run(model, kept, mask, 20))[:, 19:])
