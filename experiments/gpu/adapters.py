"""Whether models of true widths are opened on a GPU, and whether their sites hold what the model holds.

    python -m experiments.gpu.adapters [--types llama gpt2 ...] [--out figures/gpu_adapters.json] [--device cuda]

Each type is made from the defaults of its configuration, mostly those of a released checkpoint, with few layers and
random weights. Opening proves its adapter with edits and sums in the model's own precision. `right` says that the norms
at the end of each layer but the last are those of the hidden states that transformers gives. The docs have a table of
all types at small widths (docs/models.md). Needs torch, transformers, accelerate, jaxtyping.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from experiments.gpu.steps import Steps
from experiments.record import Row
from experiments.script import run
from sinkscope.hooks.trace import trace
from sinkscope.models.checkpoints.config import cut_depth, new_model
from sinkscope.opening.live import target_of

TYPES = (
    "llama mistral qwen2 qwen3 gemma gemma2 gemma3_text phi phi3 gpt2 gpt_neox gptj falcon olmo2 bloom mpt opt "
    "stablelm starcoder2 cohere2 granite glm4 qwen3_moe mixtral gpt_oss deepseek_v3 qwen3_next lfm2 exaone4 smollm3"
).split()
NOT_RELEASED = {"granite": {"attention_multiplier": 1 / 128}}
"""By type: defaults that no released checkpoint has, and what these have. At 1, attention follows the rounding."""
TOLERANCE = {"float32": 1e-4, "bfloat16": 2e-2, "float16": 5e-3}
"""Of a norm: the hooks read the tensors that transformers gives, so what differs is how attention is computed."""


@torch.no_grad()
def opened(model_type: str, layers: int, device: str, dtype: str) -> Row:
    """Its adapter, and the largest relative difference of the norms from those of transformers' hidden states."""
    config: Any = AutoConfig.for_model(model_type, **NOT_RELEASED.get(model_type, {}))
    cut_depth(config.get_text_config(), layers)
    torch.manual_seed(0)
    with torch.device(device):
        model = new_model(config, getattr(torch, dtype)).eval()
    target = target_of(model)
    ids = torch.randint(3, 900, (1, 64), generator=torch.Generator().manual_seed(0)).to(device)
    sites = [f"blocks.{layer}.hook_resid_post" for layer in range(target.n_layers - 1)]
    found = trace(target, ids, sites, "norm")
    states = model(input_ids=ids, use_cache=False, output_hidden_states=True).hidden_states
    worst = 0.0
    for layer, site in enumerate(sites):
        wanted = states[layer + 1][0].float().norm(dim=-1)
        worst = max(worst, float(((found[site][0].to(wanted.device) - wanted) / wanted).abs().max()))
    row: Row = {"width": target.d_model, "layers": target.n_layers, "parameters": model.num_parameters()}
    row["not_offered"] = sorted({site.rpartition(".")[2] for site, _ in target.adapter.unproved})
    return {**row, "difference": worst, "right": worst < TOLERANCE[dtype]}


def main(
    *,
    types: Sequence[str] = TYPES,
    layers: int = 4,
    device: str = "cuda",
    dtype: str = "bfloat16",
    out: Path = Path("figures/gpu_adapters.json"),
) -> None:
    """Make what the module describes.

    Args:
        types: Model types of transformers.
        layers: Of each model.
    """
    steps = Steps("gpu-adapters", out, {"layers": layers, "dtype": dtype}, device, dtype)
    for model_type in types:
        steps.do(model_type, partial(opened, model_type, layers, device, dtype))
    steps.end()


if __name__ == "__main__":
    run(main)
