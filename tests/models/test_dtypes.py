"""Half precision, and a type that the caller set for all new tensors of torch: the same answers."""

from __future__ import annotations

import pytest
import torch
from checkpoints import checkpoint
from organisms import tiny_model

import sinkscope as ss
from sinkscope.hooks.trace import trace
from sinkscope.opening.live import target_of

IDS = torch.tensor([[1, 5, 6, 7, 8, 9]])


def test_under_another_default_a_model_is_loaded_and_generates_as_before(monkeypatch):
    want = ss.load(checkpoint("gemma2"), device="cpu")
    policy, options = ss.kv.H2O(8), {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    torch.set_default_dtype(torch.float64)
    try:
        loaded = ss.load(checkpoint("gemma2"), device="cpu")
        assert torch.get_default_dtype() == torch.float64
        with policy.on(loaded):
            found = loaded.generate(IDS, **options)
    finally:
        torch.set_default_dtype(torch.float32)
    with policy.on(want):
        assert torch.equal(found, want.generate(IDS, **options))
    assert target_of(loaded).adapter == target_of(want).adapter
    assert torch.equal(loaded(IDS).logits, want(IDS).logits)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_norms_and_sums_of_a_spike_are_of_float32(dtype):
    """A residual stream of norm 6,000 has a square beyond 65,504: every number that is reported stays finite."""
    live = tiny_model("llama")[0].to(dtype)
    live.model.embed_tokens.weight.data *= 0.5
    live.model.layers[1].mlp.down_proj.weight.data[5] = 0
    site, vector = "blocks.1.hook_resid_post", torch.zeros(32)
    vector[5] = 6000.0
    with ss.Add(vector, site, positions="first").on(live):
        norm = trace(live, IDS, [site], "norm")[site]
        logits = trace(live, IDS, "logits", lambda tensor: tensor.float().mean(1))["logits"]
    assert norm.dtype == torch.float32 and float(norm[0, 0]) == pytest.approx(6000, rel=0.01)
    assert logits.isfinite().all()
