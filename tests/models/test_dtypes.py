"""Half precision: what is summed is summed in float32."""

from __future__ import annotations

import pytest
import torch
from organisms import tiny_model

import sinkscope as ss
from sinkscope.hooks.trace import trace
from sinkscope.models.neurons import norms_of

IDS = torch.tensor([[1, 5, 6, 7, 8, 9]])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_norms_and_sums_of_a_spike_are_of_float32(dtype):
    """A residual stream of norm 6,000 has a square beyond 65,504: every number that is reported stays finite."""
    live = tiny_model("llama")[0].to(dtype)
    live.model.embed_tokens.weight.data *= 0.5
    live.model.layers[1].mlp.down_proj.weight.data[5] = 0
    site, vector = "blocks.1.hook_resid_post", torch.zeros(32)
    vector[5] = 6000.0
    with ss.Add(vector, site, positions="first").on(live):
        norm = trace(live, IDS, [site], norms_of)[site]
        logits = trace(live, IDS, "logits", lambda tensor: tensor.float().mean(1))["logits"]
    assert norm.dtype == torch.float32 and float(norm[0, 0]) == pytest.approx(6000, rel=0.01)
    assert logits.isfinite().all()
