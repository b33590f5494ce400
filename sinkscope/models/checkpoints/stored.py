"""How a checkpoint stores its weights: tensors that a model would cast or leave out in silence are refused."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from sinkscope.errors import SinkscopeError, UnsupportedError

_ONE_BYTE = ("I8", "U8", "F8_", "int8", "uint8", "float8_")  # how the types of quantised weights begin, also in torch
_MATRICES = (2, 3)  # dimensions of weights; masks that old checkpoints store in one byte have 4
_PACKED = (".qweight", ".weight_packed", "_blocks")  # names of weights of 4 bits, several to a number


def is_quantised(config: Any) -> bool:
    """Whether a config.json, or a configuration read from it, says how its weights are quantised."""
    fields = config
    if hasattr(config, "to_dict"):
        fields = config.to_dict()
    if not isinstance(fields, dict):  # a damaged file, which is refused where it is read
        return False
    text = fields.get("text_config")
    parts = [fields]
    if isinstance(text, dict):
        parts.append(text)
    return any(part.get("quantization_config") or part.get("compression_config") for part in parts)


def check_quantised(name: str, config: Any, dtypes: Mapping[str, tuple[str, int]]) -> None:
    """Check that quantised weights come with a configuration that says how to read them.

    Without one, transformers casts weights of one byte to the type of the model, and leaves out their scales.

    Args:
        name: Name of the model, for errors.
        config: Content of its config.json.
        dtypes: Type, as in a safetensors header, and number of dimensions of each tensor.

    Raises:
        UnsupportedError: They come without one.
    """
    if is_quantised(config):
        return
    stored: dict[str, str] = {}
    for tensor, (dtype, dimensions) in dtypes.items():
        if (dtype.startswith(_ONE_BYTE) and dimensions in _MATRICES) or tensor.endswith(_PACKED):
            stored[tensor] = dtype
    if stored:
        first = min(stored)
        raise UnsupportedError(
            f"{name} stores {len(stored)} weights quantised, such as {first} ({stored[first]}), but its config.json "
            "has no quantization_config, which says how to read them: download config.json from the revision of the "
            "weights, or give weights of 16 bits",
            page="quantised-weights",
        )


def check_pickled(name: str, config: Any, files: Iterable[Path]) -> None:
    """The same check of pickled weights, whose types are read with `weights_only` and without the numbers."""
    dtypes: dict[str, tuple[str, int]] = {}
    for file in files:
        for tensor, value in torch.load(file, map_location="meta", weights_only=True).items():
            if isinstance(value, torch.Tensor):
                dtypes[tensor] = str(value.dtype).removeprefix("torch."), value.ndim
    check_quantised(name, config, dtypes)


def check_unexpected(
    model: nn.Module, unexpected: Iterable[str], name: str, origins: Mapping[str, str] | None = None
) -> None:
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
        SinkscopeError: One does.
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
            origin = (origins or {}).get(tensor, tensor)
            raise SinkscopeError(
                f"{name} has the tensor {origin}, for which its configuration has no place, so the model would run "
                "without it: config and weights are of different models, or the weights hold an adapter or a "
                "quantisation; download both from one revision, or merge the adapter",
                page="missing-tensors",
            )
