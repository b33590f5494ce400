"""Identify a checkpoint or a live model without reading all of its weights."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sinkscope.models.checkpoints.checkpoint import Files, open_weights
from sinkscope.models.modules.linear import brought
from sinkscope.models.shards import local, shards_of

_FILE_SHARE = 1 << 12  # bytes of each tensor in a file that are read, and of each other file: a page of the disk
_LIVE_BYTES = 1 << 24  # weights of a live model, which are in memory: a small one is read whole
_NOT_OF_THE_MODEL = ("transformers_version", "_name_or_path", "distributed_config")  # fields of a configuration


def fingerprint(source: Files | nn.Module) -> str:
    """Identify a checkpoint or a live model by its configuration, its tensors and a sample of their bytes.

    The fingerprint is the hub's commit, if there is one. Otherwise it is a hash of the configuration, of the names,
    dtypes and shapes of the tensors, and of a few bytes from the middle of each (or, of files that are not
    safetensors, of their sizes and of a few bytes of each). Of a live model, 16 megabytes are read, so its fingerprint
    changes with its weights; it differs from that of its files.
    """
    if isinstance(source, nn.Module):
        return _of_model(source)
    if source.commit is not None:
        return source.commit
    config: dict[str, Any] = {}
    if source.gguf is None:
        config = source.config()
    parts: dict[str, Any] = {}
    for file in source.weights():
        if file.suffix == ".safetensors":
            with open_weights(file) as tensors:
                for name in tensors.keys():
                    parts[name] = _described(tensors.get_tensor(name), _FILE_SHARE)
        else:
            parts[file.name] = file.stat().st_size, _middle_of(file)
    return _digest(config, parts)


def _of_model(model: Any) -> str:
    parameters = dict(model.named_parameters())
    share = max(64, _LIVE_BYTES // max(1, len(parameters)))
    parts: dict[str, Any] = {}
    for name in parameters:
        path, _, attribute = name.rpartition(".")
        module = model.get_submodule(path)
        plain = name.replace("._original_component", "")  # a bridge around it is the same model
        with brought(module):
            parts[plain] = _described(getattr(module, attribute), share)
    return _digest(model.config.to_dict(), parts)


def _digest(config: dict[str, Any], parts: dict[str, Any]) -> str:
    config = {name: value for name, value in config.items() if name not in _NOT_OF_THE_MODEL}
    text = json.dumps([config, parts], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _described(tensor: Tensor, share: int) -> tuple[str, list[int], str]:
    """The dtype and the shape of a tensor, and a digest of some bytes."""
    return str(tensor.dtype), list(tensor.shape), _tensor_digest(tensor, share)


@torch.no_grad()
def _tensor_digest(tensor: Tensor, share: int) -> str:
    """Digest of the middle of a tensor; empty if its numbers are elsewhere."""
    if tensor.is_meta:
        return ""
    shards = shards_of(tensor)
    if shards.size > 1:
        return " ".join(shards.all(_tensor_digest(local(tensor), share)))
    if hasattr(tensor, "__tensor_flatten__"):  # quantised: it is made of tensors
        quantised: Any = tensor
        names, _ = quantised.__tensor_flatten__()
        return " ".join(_tensor_digest(getattr(quantised, name), share) for name in names)
    flat = tensor.detach().reshape(-1)
    count = share // flat.itemsize
    start = max(0, (len(flat) - count) // 2)
    middle = flat[start : start + count].cpu().contiguous()
    return hashlib.sha256(middle.view(torch.uint8).numpy().tobytes()).hexdigest()


def _middle_of(file: Path) -> str:
    """Digest of the middle of a file."""
    with file.open("rb") as content:
        content.seek(max(0, (file.stat().st_size - _FILE_SHARE) // 2))
        return hashlib.sha256(content.read(_FILE_SHARE)).hexdigest()
