"""Our policies against what kvpress kept, recorded by tools/kvpress_fixture.py in an environment of its own.

Weights, prompts and options are the same; the two never share a process. Where kvpress defines something else than the
paper, its definition is taken here by an option of ours, or only the part that both define is compared.
"""

from __future__ import annotations

import json

import pytest
import torch
from repository import ROOT
from torch import Tensor
from transformers import DynamicCache

from sinkscope.kv import TOVA, Policy, SnapKV, StreamingLLM
from tools import kvpress_fixture as recorded

FIXTURE = json.loads((ROOT / "tests/fixtures/kvpress.json").read_text())
PREFILL = FIXTURE["prefill"]


@pytest.fixture(scope="module")
def model():
    """The model of the recording, made again."""
    model = recorded.tiny_llama()
    assert recorded.SIZES == FIXTURE["model"]
    torch.testing.assert_close(recorded.checksum(model), FIXTURE["logits"], atol=1e-4, rtol=0)
    model.set_attn_implementation("sdpa")
    return model


@torch.no_grad()
def kept(model, policy: Policy, ids: Tensor, prompt: int) -> list[list[list[list[int]]]]:
    """Positions `[step][layer][kv_head]` that are held when each token after the prompt comes in."""
    cache, out = DynamicCache(), []
    with policy.on(model):
        model(ids[:, :prompt], past_key_values=cache)
        for i in range(prompt, ids.shape[1]):
            model(ids[:, i : i + 1], past_key_values=cache)
            out.append([[head[:-1] for head in layer.pos[0].tolist()] for layer in cache.layers])
    return out


POLICIES = {
    "streaming_llm": lambda case: StreamingLLM(budget=case["kept"], first=case["sinks"]),
    "snapkv": lambda case: SnapKV(budget=case["kept"], window=case["window"], kernel=case["kernel"]),
    "tova": lambda case: TOVA(budget=case["kept"], last=1),  # kvpress keeps the newest token by rule
}


@pytest.mark.parametrize("name", POLICIES)
def test_what_is_kept_of_a_prompt(model, name):
    # Below its window, kvpress keeps an arbitrary part of the window; here such a budget is refused.
    cases = [case for case in PREFILL[name] if case["kept"] >= case.get("window", 0)]
    assert len(cases) >= 12 or name != "snapkv"
    for case in cases:
        ids = torch.cat([recorded.prompt(case["length"], case["length"]), torch.tensor([[3]])], 1)
        assert kept(model, POLICIES[name](case), ids, case["length"])[0] == case["positions"]
