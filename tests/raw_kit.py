"""Raw access to Hugging Face models with plain torch hooks: what tests hold our own instruments against."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import nn

from tests.real.plain import attentions as attention  # noqa: F401
from tests.real.plain import blocks, inputs_edited, norms, part, residuals  # noqa: F401


def down(block) -> nn.Module:
    shared = ("feed_forward.w2", "mlp.shared_expert.down_proj", "mlp.shared_experts.down_proj")
    return part(block, "mlp.down_proj", "mlp.dense_4h_to_h", "mlp.c_proj", "mlp.fc2", "fc2", *shared)


@contextmanager
def zeroed(model, sites: tuple[tuple[int, ...], ...]) -> Iterator[None]:
    """Neurons set to zero at the input of the down projection; an expert's through its weights, the same thing."""
    with ExitStack() as stack:
        for layer, *expert, neuron in sites:
            block = blocks(model)[layer]
            if not expert:
                keep = torch.ones(down(block).weight.shape[1 if hasattr(down(block), "in_features") else 0])
                keep[neuron] = 0.0
                stack.enter_context(inputs_edited(down(block), lambda x, keep=keep: x * keep))
                continue
            weight = block.mlp.experts.down_proj.data
            column = weight[expert[0], neuron] if is_gpt_oss(model) else weight[expert[0], :, neuron]
            stack.callback(column.copy_, column.clone())
            column.zero_()
        yield


def is_gpt_oss(model) -> bool:
    return model.config.model_type == "gpt_oss"
