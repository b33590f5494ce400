"""How a checkpoint stores its weights: tensors that a model would leave out in silence are refused."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from torch import nn

from sinkscope.errors import UnsupportedError, warn


def is_quantised(config: Any) -> bool:
    """Return whether a configuration says how its weights are quantised."""
    for part in (config, config.get_text_config()):
        if getattr(part, "quantization_config", None) or getattr(part, "compression_config", None):
            return True
    return False


def check_unexpected(model: nn.Module, unexpected: Iterable[str], name: str, origins: Mapping[str, str]) -> None:
    """Check that no tensor that was left out belongs to a part that the model has.

    Whole parts that a model does not have are harmless: towers for images, heads of training, layers that predict
    further tokens. So are the buffers that transformers ignores, which are not among its unexpected tensors. A bias, a
    scale or an adapter of a weight that the model has changes what it computes.

    Args:
        model: The model, or a part of it, that was loaded.
        unexpected: Tensors that transformers reports as unexpected.
        name: Name of the model, for errors.
        origins: Names in the checkpoint of tensors that were loaded by others.

    Raises:
        UnsupportedError: One does.
    """
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    for tensor in sorted(unexpected):
        path = tensor
        if not hasattr(model, prefix[:-1]):
            path = tensor.removeprefix(prefix)
        part = model  # the innermost module on the path
        for step in path.split("."):
            children = dict(part.named_children())
            if step not in children:
                break
            part = children[step]
        if next(part.parameters(recurse=False), None) is not None:
            raise UnsupportedError(
                f"{name} has the tensor {origins.get(tensor, tensor)}, for which its configuration has no place, so "
                "the model would run without it: config and weights are of different models, or the weights hold an "
                "adapter or a quantisation; download both from one revision, or merge the adapter"
            )


def note_further_layers(tensors: Mapping[int, Collection[str]], count: int, name: str) -> None:
    """Warn of decoder layers that a checkpoint holds and the model does not run.

    A layer that predicts further tokens has tensors that no other layer has; it is no decoder layer.

    Args:
        tensors: Names of the tensors of each layer, by its number.
        count: Number of layers that the configuration says.
        name: Name of the model.
    """
    known = set[str]()
    for layer in range(count):
        known.update(tensors.get(layer, ()))
    further = [layer for layer in tensors if layer >= count and known.issuperset(tensors[layer])]
    if further:
        warn(
            f"{name} holds {max(further) + 1} decoder layers and its configuration says {count} (num_hidden_layers), "
            f"so only the first {count} run: config and weights may be of different models"
        )
