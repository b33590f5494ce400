"""Identify a checkpoint or a live model by its configuration and all bytes of its weights.

1. Each tensor is described by its dtype, its shape and a digest of its bytes (XXH3, 128 bits: as fast as memory).
2. The fingerprint is a hash of the configuration and of these descriptions, so that neither the order of tensors nor
   their distribution over files has a part in it.
3. What was read of a file is kept in the user's cache, with what the file system says of the file: its
   place, size and times. As long as that is the same, the file is not read again.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import torch
import xxhash
from huggingface_hub import constants
from torch import Tensor, nn

from sinkscope.errors import SinkscopeError, warn
from sinkscope.files.output import write_atomic
from sinkscope.models.checkpoints.checkpoint import Files, open_weights
from sinkscope.models.shards import local, shards_of
from sinkscope.models.target import Target
from sinkscope.models.weights import brought

_NOT_OF_THE_MODEL = ("transformers_version", "_name_or_path", "distributed_config")  # fields of a configuration
_JUST_WRITTEN = 2.0  # seconds within which a file may change again without another time of modification
_BLOCK = 1 << 20

_BRIDGE = "._original_component"  # in names of tensors below the modules of a bridge, which is the same model
Described = dict[str, Any]
"""The dtype, shape and digest of each tensor by name; the size and digest of a file of another kind by its name."""


def fingerprint(source: Files | nn.Module) -> str:
    """Identify a checkpoint or a live model by its configuration and all bytes of its weights.

    The fingerprint of a repo on the hub is its commit. That of a live model differs from that of its files.
    """
    parts: Described = {}
    if isinstance(source, Files):
        if source.commit is not None:
            return source.commit
        config: dict[str, Any] = source.config
        for file in source.weights():
            parts |= _described_once(file)
    else:
        model: Any = source
        config = model.config.to_dict()
        stored = {name.replace(_BRIDGE, "") for name in model.state_dict()}
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            plain = name.replace(_BRIDGE, "")
            path, _, attribute = name.rpartition(".")
            own = isinstance(tensor, nn.Parameter) or (plain in stored and not _added(name, tensor))
            if own:  # other buffers do not belong to a checkpoint
                module = model.get_submodule(path)
                with brought(module) if tensor.is_meta else nullcontext():
                    parts[plain] = _described(getattr(module, attribute))
    config = {name: value for name, value in config.items() if name not in _NOT_OF_THE_MODEL}
    text = json.dumps([config, parts], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _added(name: str, buffer: Tensor) -> bool:
    """Whether a buffer is the bias of zeros that a bridge gives to the unembedding of a model without one."""
    return name.endswith(f"{_BRIDGE}.bias") and (buffer.is_meta or not buffer.any())


def _described_file(file: Path) -> Described:
    if file.suffix != ".safetensors":
        with file.open("rb") as content:
            digest = xxhash.xxh3_128()
            while block := content.read(_BLOCK):
                digest.update(block)
        return {file.name: [file.stat().st_size, digest.hexdigest()]}
    parts: Described = {}
    with open_weights(file) as tensors:
        for name in tensors.keys():
            parts[name] = _described(tensors.get_tensor(name))
    return parts


def _described_once(file: Path) -> Described:
    """What is read of a file, from the user's cache if the file is as it was."""
    path = file.resolve()
    place = hashlib.sha256(os.fsencode(path)).hexdigest()[:32]
    stored = Path(constants.HF_HOME) / "sinkscope" / "fingerprints" / f"{place}.json"
    state = _state_of(path)
    with suppress(OSError, ValueError, TypeError, KeyError):
        earlier = json.loads(stored.read_text("utf-8"))
        if earlier["state"] == state:
            return dict(earlier["parts"])
    parts = _described_file(path)
    if _state_of(path) == state and time.time() - path.stat().st_mtime > _JUST_WRITTEN:
        with suppress(OSError, ValueError):  # no cache, or none that can be written
            stored.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(stored, json.dumps({"state": state, "parts": parts}))
    return parts


def _state_of(path: Path) -> list[int]:
    """What the file system says of a file; it changes with the content."""
    stat = path.stat()
    return [stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns]


def _described(tensor: Tensor) -> list[Any]:
    """The dtype and the shape of a tensor, and a digest of its bytes."""
    return [str(tensor.dtype), list(tensor.shape), _tensor_digest(tensor)]


@torch.no_grad()
def _tensor_digest(tensor: Tensor) -> str:
    """Digest of the bytes of a tensor; empty if its numbers are elsewhere."""
    if tensor.is_meta:
        return ""
    if hasattr(tensor, "device_mesh"):
        shards = shards_of(tensor)
        return " ".join(shards.all(_tensor_digest(local(tensor))))
    if hasattr(tensor, "__tensor_flatten__"):  # quantised: it is made of tensors
        quantised: Any = tensor
        names, _ = quantised.__tensor_flatten__()
        return " ".join(_tensor_digest(getattr(quantised, name)) for name in names)
    flat = tensor.detach().reshape(-1).cpu().contiguous()
    return xxhash.xxh3_128_hexdigest(flat.view(torch.uint8).numpy().data)


def fingerprint_of(target: Target) -> str:
    """Return the fingerprint of the checkpoint that a model is read or was loaded from, or of the live model.

    A model whose weights have changed since it was loaded gets a fingerprint of its own.
    """
    if target.store is not None:
        return fingerprint(target.store.source)
    here = fingerprint(target.hf)
    files, loaded = getattr(target.hf, "sinkscope_origin", ("", ""))
    if here == loaded:
        return files
    return here


def check_made_for(target: Target, model: Mapping[str, Any]) -> None:
    """Compare a model with the description of the model for which a patch was made.

    A fine-tuned version is accepted, and a `SinkscopeWarning` says so.

    Args:
        target: The model.
        model: Name, family, sizes and fingerprint of the other.

    Raises:
        SinkscopeError: The model has another shape.
    """
    origin = model.get("name")
    shape = {
        "family": target.config.model_type,
        "n_layers": target.n_layers,
        "d_model": target.d_model,
        "d_mlp": target.d_mlp,
    }
    for name, here in shape.items():
        there = model.get(name, here)
        if there != here:
            raise SinkscopeError(
                f"the patch was made for {origin}, whose {name} is {there}, and that of {target.name} is {here}: "
                "give that model, or make a patch for this one"
            )
    wanted, config = model.get("fingerprint"), target.hf.config
    if not wanted or wanted in (getattr(config, "_commit_hash", None), fingerprint_of(target)):
        return
    where = Path(getattr(config, "_name_or_path", "") or "/dev/null")  # from where transformers says it was loaded
    with suppress(SinkscopeError, OSError):
        if not hasattr(target.hf, "sinkscope_origin") and where.is_dir() and fingerprint(Files(where)) == wanted:
            return
    warn(
        f"the patch was made for {origin} (fingerprint {wanted}), and {target.name} has the same shape "
        f"and other weights, so its sink may have other neurons: make a patch for this model"
    )
