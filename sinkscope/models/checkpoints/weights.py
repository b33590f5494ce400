"""A plain model with its weights, as transformers reads them from files."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from torch import nn

from sinkscope.errors import SinkscopeError, UnsupportedError, warn
from sinkscope.models.adapters import stack_of
from sinkscope.models.checkpoints.checkpoint import Files, open_weights
from sinkscope.models.checkpoints.config import causal_class
from sinkscope.models.checkpoints.locate import ModelSource


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


def model_with_weights(source: ModelSource, files: Files, config: Any, options: dict[str, Any]) -> Any:
    """Return a model in eval mode, with the weights of the files.

    Args:
        source: Where it comes from, for errors.
        files: Its files on this machine.
        config: Its configuration.
        options: What transformers takes beside it.

    Raises:
        SinkscopeError: The weights do not belong to the configuration.
    """
    if files.gguf is not None:
        options = {**options, "gguf_file": files.gguf}
    loaded: Any = causal_class(config).from_pretrained(
        files.folder,
        config=config,
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # reported below, with names
        trust_remote_code=False,
        weights_only=True,  # no code in pickles runs
        **options,
    )
    model, info = loaded
    wrong = sorted(info["missing_keys"]) + [name for name, *_ in sorted(info["mismatched_keys"])]
    if wrong:
        raise SinkscopeError(
            f"{source.name} lacks {len(wrong)} tensors of the shape that its configuration says, such as {wrong[0]}; "
            "the weights belong to another config.json: download both from one revision; or with layers=, "
            f"{config.model_type} cannot be cut to its first layers: leave it out"
        )
    if not is_quantised(config):  # else factors belong there
        check_unexpected(model, info["unexpected_keys"], source.name, {})
    return model.eval()


def check_depth(files: Files, model: Any) -> None:
    """Warn if the files hold more decoder layers than a model that was made of them; only safetensors say so."""
    stack = stack_of(model).removeprefix(f"{model.base_model_prefix}.")
    pattern = re.compile(rf"(?:{model.base_model_prefix}\.)?{re.escape(stack)}\.(\d+)\.(.+)")
    tensors: dict[int, set[str]] = {}
    for file in files.weights():
        if file.suffix == ".safetensors":
            for match in filter(None, map(pattern.fullmatch, open_weights(file).keys())):
                tensors.setdefault(int(match[1]), set()).add(match[2])
    note_further_layers(tensors, model.config.get_text_config().num_hidden_layers, files.name)
