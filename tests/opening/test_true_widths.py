"""Models of true widths: made from the defaults of their configurations, mostly those of a released checkpoint.

They have few layers and random weights. Opening proves their adapters with edits and sums, on a GPU in bfloat16.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig

from sinkscope.hooks.trace import trace
from sinkscope.models.checkpoints.config import cut_depth, new_model
from sinkscope.opening.live import target_of

ON_GPU = torch.cuda.is_available()
SMALL = ["gpt2", "opt"]
LARGE = (
    "llama mistral qwen2 qwen3 gemma gemma2 gemma3_text phi phi3 gpt_neox gptj falcon olmo2 bloom mpt stablelm "
    "starcoder2 cohere2 granite glm4 qwen3_moe mixtral gpt_oss deepseek_v3 qwen3_next lfm2 exaone4 smollm3"
).split()
NOT_RELEASED = {"granite": {"attention_multiplier": 1 / 128}}
"""By type: defaults that no released checkpoint has, and what these have. At 1, attention follows the rounding."""
LAYERS = 4


@pytest.mark.slow
@pytest.mark.parametrize("model_type", [*SMALL, *LARGE] if ON_GPU else SMALL)
@torch.no_grad()
def test_norms_at_the_end_of_layers_are_those_of_hidden_states(model_type):
    config: Any = AutoConfig.for_model(model_type, **NOT_RELEASED.get(model_type, {}))
    cut_depth(config.get_text_config(), LAYERS)
    torch.manual_seed(0)
    device = "cuda" if ON_GPU else "cpu"
    with torch.device(device):
        model = new_model(config, torch.bfloat16 if ON_GPU else torch.float32).eval()
    target = target_of(model)
    ids = torch.randint(3, 900, (1, 64), generator=torch.Generator().manual_seed(0)).to(device)
    sites = [f"blocks.{layer}.hook_resid_post" for layer in range(target.n_layers - 1)]
    found = trace(target, ids, sites, "norm")
    states = model(input_ids=ids, use_cache=False, output_hidden_states=True).hidden_states
    for layer, site in enumerate(sites, 1):
        wanted = states[layer][0].float().norm(dim=-1)
        torch.testing.assert_close(found[site][0].to(device), wanted, rtol=2e-2 if ON_GPU else 1e-4, atol=0)
