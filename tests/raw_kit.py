"""Raw access to Hugging Face models with plain torch hooks: what tests hold our own instruments against."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import torch
from organisms.hard import attentions as attention  # noqa: F401  (beside the other views of a model)
from torch import Tensor, nn


def blocks(model) -> nn.ModuleList:
    return part(model, "transformer.h", "gpt_neox.layers", "model.decoder.layers", "model.layers")


def part(block, *names: str):
    """The first of these submodules (dotted) that the block has."""
    for name in names:
        try:
            return block.get_submodule(name)
        except AttributeError:
            continue
    raise AttributeError(names)


def down(block) -> nn.Module:
    shared = ("mlp.shared_expert.down_proj", "mlp.shared_experts.down_proj")
    return part(block, "mlp.down_proj", "mlp.dense_4h_to_h", "mlp.c_proj", "mlp.fc2", "fc2", *shared)


@contextmanager
def inputs_edited(module: nn.Module, edit: Callable[[Tensor], Tensor]) -> Iterator[None]:
    handle = module.register_forward_pre_hook(lambda _m, args: (edit(args[0]), *args[1:]))
    try:
        yield
    finally:
        handle.remove()


@torch.no_grad()
def residuals(model, tokens: Tensor) -> Tensor:
    """The residual stream after each layer: [layer, row, position, d_model]."""
    seen = []

    def hook(_module: nn.Module, _args, output):
        seen.append(output[0] if isinstance(output, tuple) else output)

    handles = [block.register_forward_hook(hook) for block in blocks(model)]
    model(tokens.to(model.device), use_cache=False)
    for handle in handles:
        handle.remove()
    return torch.stack(seen).cpu()


def norms(model, tokens: Tensor) -> Tensor:
    """Norm of the residual stream after each layer: [layer, row, position]."""
    return residuals(model, tokens).norm(dim=-1)


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
