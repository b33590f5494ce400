"""Identify a checkpoint or a live model without reading all of its weights."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sinkscope.models.checkpoints.checkpoint import Files, read_header, weight_files
from sinkscope.models.loading.config import read_checkpoint_json
from sinkscope.models.modules.linear import brought
from sinkscope.models.shards import local, shards_of

_FILE_BYTES = 1 << 20  # weights of files that are read, as far as every tensor gives some
_LIVE_BYTES = 1 << 24  # weights of a live model, which are in memory: a small one is read whole
_NOT_OF_THE_MODEL = ("transformers_version", "_name_or_path", "distributed_config")  # fields of a configuration


def fingerprint(source: Files | Path | nn.Module) -> str:
    """Identify a checkpoint by its configuration, its tensors and a sample of their bytes.

    The fingerprint is the hub's commit, if there is one. Otherwise it is a hash of the configuration, of the names,
    dtypes and shapes of the tensors, and of a few bytes from the middle of each tensor (or, if the files are not
    safetensors, from the middle of each file). About one megabyte is read, whatever the model's size. For a live
    model, 16 megabytes are read in the same way, so its fingerprint changes with its weights; it differs from that of
    its files.
    """
    if isinstance(source, nn.Module):
        return _of_model(source)
    if isinstance(source, Files):
        if source.commit is not None:
            return source.commit
        source = source.folder / (source.gguf or "")
    if source.is_file():
        return _of_files([source], {})
    return _of_files(weight_files(source), read_checkpoint_json(source / "config.json"))


def _of_model(model: Any) -> str:
    parameters = dict(model.named_parameters())
    share = _share(len(parameters), _LIVE_BYTES)
    parts: dict[str, Any] = {}
    for name, parameter in parameters.items():
        path, _, attribute = name.rpartition(".")
        module = model.get_submodule(path)
        with brought(module):
            digest = _parameter_digest(getattr(module, attribute), share)
        parts[name] = str(parameter.dtype), list(parameter.shape), digest
    return _digest(model.config.to_dict(), parts)


def _of_files(files: list[Path], config: dict[str, Any]) -> str:
    headers: dict[Path, dict[str, Any]] = {}
    for file in files:
        headers[file] = read_header(file) if file.suffix == ".safetensors" else {}
    share = _share(sum(map(len, headers.values())), _FILE_BYTES)
    parts: dict[str, Any] = {}
    for file, header in headers.items():
        parts[file.name] = header or file.stat().st_size, _file_digest(file, header, share)
    return _digest(config, parts)


def _digest(config: dict[str, Any], parts: dict[str, Any]) -> str:
    config = {name: value for name, value in config.items() if name not in _NOT_OF_THE_MODEL}
    text = json.dumps([config, parts], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _share(places: int, total: int) -> int:
    """Bytes to read at each of this many places."""
    return max(64, total // max(1, places))


@torch.no_grad()
def _parameter_digest(parameter: Tensor, share: int) -> str:
    """Digest of the middle of a parameter; empty if its weights are elsewhere."""
    if parameter.is_meta:
        return ""
    shards = shards_of(parameter)
    if shards.size > 1:
        return " ".join(shards.all(_parameter_digest(local(parameter), share)))
    if hasattr(parameter, "__tensor_flatten__"):  # quantised: it is made of tensors
        quantised: Any = parameter
        names, _ = quantised.__tensor_flatten__()
        return " ".join(_parameter_digest(getattr(quantised, name), share) for name in names)
    part = parameter.detach()
    while part.ndim > 1 and not part.is_contiguous():  # it is not worth a copy
        part = part[len(part) // 2]
    flat = part.reshape(-1)
    count = share // flat.itemsize
    start = max(0, (len(flat) - count) // 2)
    middle = flat[start : start + count].cpu().contiguous()
    return hashlib.sha256(middle.view(torch.uint8).numpy().tobytes()).hexdigest()


def _file_digest(file: Path, header: dict[str, Any], share: int) -> str:
    """Digest of the middle of each tensor in a file; without a list of tensors, of the middle of the file."""
    digest, size = hashlib.sha256(), file.stat().st_size
    with file.open("rb") as content:
        data = 8 + int.from_bytes(content.read(8), "little")
        spans = [(data + start, data + end) for start, end in (entry["data_offsets"] for entry in header.values())]
        for start, end in spans or [(0, size)]:
            content.seek(max(start, (start + end - share) // 2))
            digest.update(content.read(min(share, end - start)))
    return digest.hexdigest()
