"""Identify a checkpoint or a live model: by the hub's commit, or by its configuration and a sample of each tensor.

Of each tensor count the dtype, the shape, and some numbers at equal distances; of a file that is not of safetensors its
size and some bytes. A change of single other numbers is not seen; a fine-tune, another precision or another model is.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor, nn

from sinkscope.errors import SinkscopeError, warn
from sinkscope.models.checkpoints.checkpoint import Files
from sinkscope.models.shards import local, shards_of
from sinkscope.models.target import Target
from sinkscope.models.weights import brought

_NOT_OF_THE_MODEL = ("transformers_version", "_name_or_path", "distributed_config")  # fields of a configuration
_NUMBERS = 4096  # of each tensor, or bytes of a file of another kind
_BRIDGE = "._original_component"  # in names of tensors below the modules of a bridge, which is the same model


def fingerprint(source: Files | nn.Module) -> str:
    """Identify a checkpoint or a live model; that of a live model differs from that of its files.

    The fingerprint of a repo on the hub is its commit.
    """
    if isinstance(source, Files) and source.commit is not None:
        return source.commit
    model: Any = source
    config = source.config if isinstance(source, Files) else model.config.to_dict()
    parts = {}
    for name, tensor in _of_files(source) if isinstance(source, Files) else _of_model(model):
        parts[name] = [str(tensor.dtype), list(tensor.shape), _sample(tensor)]
    config = {name: value for name, value in config.items() if name not in _NOT_OF_THE_MODEL}
    text = json.dumps([config, parts], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _of_files(files: Files) -> Iterator[tuple[str, Tensor]]:
    for file in files.weights():
        if file.suffix == ".safetensors":
            with safe_open(file, "pt") as tensors:
                for name in tensors.keys():
                    yield name, tensors.get_tensor(name)
        else:
            yield file.name, torch.from_numpy(np.memmap(file, mode="c"))


def _of_model(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The tensors that a checkpoint of the model would hold; a bridge adds biases of zeros to it."""
    stored = model.state_dict().keys()
    for path, module in model.named_modules():
        with brought(module, recurse=False):
            own = (*module.named_parameters(path, recurse=False), *module.named_buffers(path, recurse=False))
            for name, tensor in own:
                is_added = name.endswith(f"{_BRIDGE}.bias") and (tensor.is_meta or not tensor.any())
                if name in stored and not is_added:
                    yield name.replace(_BRIDGE, ""), tensor


@torch.no_grad()
def _sample(tensor: Tensor) -> str:
    """Digest of some numbers of a tensor, at equal distances; empty if they are elsewhere."""
    if tensor.is_meta:
        return ""
    if hasattr(tensor, "device_mesh"):
        return " ".join(shards_of(tensor).all(_sample(local(tensor))))
    if hasattr(tensor, "__tensor_flatten__"):  # quantised: it is made of tensors
        quantised: Any = tensor
        return " ".join(_sample(getattr(quantised, name)) for name in quantised.__tensor_flatten__()[0])
    flat = tensor.detach().reshape(-1)
    numbers = flat[:: len(flat) // _NUMBERS | 1].cpu().contiguous()  # an odd distance, so that columns take turns
    return hashlib.sha256(numbers.view(torch.uint8).numpy().data).hexdigest()


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
    here = {"family": target.config.model_type, "n_layers": target.n_layers, "d_model": target.d_model}
    for name, size in {**here, "d_mlp": target.d_mlp}.items():
        if model.get(name, size) != size:
            raise SinkscopeError(
                f"the patch was made for {model.get('name')}, whose {name} is {model[name]}, and that of "
                f"{target.name} is {size}: give that model, or make a patch for this one"
            )
    wanted = model.get("fingerprint")
    if wanted not in (None, "", getattr(target.hf.config, "_commit_hash", None), fingerprint_of(target)):
        warn(
            f"the patch was made for {model.get('name')} (fingerprint {wanted}), and {target.name} has the same shape "
            "and other weights, or was not loaded by sinkscope: if they are others, make a patch for this model"
        )
