"""Open a model as a `Target`, and read as little of a checkpoint as possible."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import psutil
import torch

from sinkscope.errors import SinkscopeError, UnsupportedError
from sinkscope.files.progress import world_size
from sinkscope.models.adapters import DRAFT, layer_kinds
from sinkscope.models.checkpoints.checkpoint import SafetensorsSource, is_quantised, open_weights
from sinkscope.models.checkpoints.config import check_vocabulary, parse_device, parse_dtype, read_config, read_tokenizer
from sinkscope.models.checkpoints.locate import BUNDLED, locate
from sinkscope.models.checkpoints.quiet import loading_errors, quiet
from sinkscope.models.checkpoints.stream import LayerStore
from sinkscope.models.inputs import tokenizer_of
from sinkscope.models.target import Target
from sinkscope.opening.inference.find import adapter_of
from sinkscope.opening.live import avoid_misreading, target_of
from sinkscope.opening.load import load

SHARE = 0.5  # of the free memory that weights may take: the rest is for what is computed
_BYTES = {"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2}
"""Bytes per number, by the dtype's name in safetensors; dtypes that are missing here take 1."""


def free_memory(device: torch.device) -> int:
    """Return bytes that are free on a device and on the host, whichever are fewer: weights pass through both."""
    host = psutil.virtual_memory().available
    if device.type == "cuda":
        return min(host, torch.cuda.mem_get_info(device)[0])
    return host


def fits(weights: int, device: torch.device) -> bool:
    """Return whether weights of this many bytes leave enough memory free."""
    return 0 < weights <= SHARE * free_memory(device)


def stored_bytes(folder: Path, dtype: torch.dtype | None = None) -> int:
    """Return the bytes that the safetensors of a folder take in memory, in their own dtypes or another one."""
    total = 0
    for file in folder.glob("*.safetensors"):
        with open_weights(file) as tensors:
            for name in tensors.keys():
                part = tensors.get_slice(name)
                size = _BYTES.get(part.get_dtype(), 1) if dtype is None else dtype.itemsize
                total += size * prod(part.get_shape())
    return total


def fits_in_memory(
    model: object, device: torch.device | str | None = None, dtype: torch.dtype | str | None = None
) -> bool:
    """Return whether a folder of safetensors takes at most half of the memory that is free where it would be loaded.

    It is False of anything else.

    Args:
        model: The folder.
        device: As for `load`.
        dtype: As for `load`.
    """
    if not isinstance(model, str | os.PathLike) or not Path(model).is_dir():
        return False
    return fits(stored_bytes(Path(model), parse_dtype(dtype)), parse_device(device))


LAYER_BYTES = 1 << 30
"""Layers of a streamed model stay in memory up to this size, so small models are read once."""


def open_target(
    model: object,
    tokenizer: Any = None,
    revision: str | None = None,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | None = None,
    *,
    needed: bool = True,
    whole: bool = False,
) -> Target:
    """Open a live model, the bundled model (in memory), or a named model (streamed from disk if possible).

    With `whole`, a named model is loaded into memory, too.

    Raises:
        SinkscopeError: `model` is not a model, cannot be read, or has no tokenizer although it is `needed`.
    """
    if model is None or isinstance(model, str | os.PathLike):
        options: dict[str, Any] = {"dtype": dtype, "device": device, "tokenizer": tokenizer}
        source, is_bundled = locate(model, revision), model in (None, BUNDLED)
        target = None
        if not (whole or world_size() > 1 or is_bundled or source.kind == "gguf" or source.planted):
            with suppress(UnsupportedError), quiet(), loading_errors(source):  # else it is loaded whole, or refused
                tensors = SafetensorsSource(source.where, revision=source.revision)
                target = open_stream(tensors, name=source.name, **options)
        if target is None:
            # The bundled model needs no probe at every start, because the tests check its circuit.
            target = target_of(load(model, revision=revision, probe=not is_bundled, **options))
    else:
        target = target_of(model, tokenizer)
    if needed:
        tokenizer_of(target)
    if target.tokenizer is None:
        target = replace(target, tokenizer=target.available_tokenizer)
    return target


def dtype_on(device: torch.device, config: Any) -> torch.dtype:
    """Return the dtype of computation: the checkpoint's; on a CPU float32, because half precision is slow there."""
    own = config.dtype or config.get_text_config().dtype
    if device.type == "cpu" or own is None:
        return torch.float32
    return own


def open_stream(
    source: SafetensorsSource | str | Path,
    *,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | None = None,
    resident: int | None = None,
    tokenizer: Any = None,
    name: str | None = None,
) -> Target:
    """Open a checkpoint as a model whose layers are read when they are called and freed afterwards.

    Args:
        source: A folder (a Path), a hub id (a str), or an opened source, as in
            ``SafetensorsSource("org/name", revision="v2")``.
        dtype: Dtype of the weights in memory. None uses that of the checkpoint, but float32 on a CPU.
        device: Device on which layers are computed. None uses the first cuda device if there is one, else the CPU.
        resident: Number of layers in memory at a time. None keeps as many as take a gigabyte.
        tokenizer: Tokenizer of the Target. None uses that beside the weights.
        name: Name of the Target; by default the name of the source.

    Raises:
        SinkscopeError: The checkpoint is incomplete.
        UnsupportedError: The checkpoint is quantised or has no safetensors, or its architecture has no adapter; such
            models must be loaded whole.
    """
    place = parse_device(device)
    if not isinstance(source, SafetensorsSource):
        source = SafetensorsSource(source)
    name = name or source.name
    config = read_config(name, source.folder)
    kind = parse_dtype(dtype) or dtype_on(place, config)
    try:
        if is_quantised(config):
            raise UnsupportedError("it is quantised")
        # Two layers, while the adapter is proposed and proved.
        store = LayerStore(source, config.get_text_config(), device=place, dtype=kind, resident=max(resident or 2, 2))
        target = Target(store.causal, store.causal, "hf", DRAFT, tokenizer, name, store)
        target = replace(target, adapter=adapter_of(target))
        avoid_misreading(target)
        target.forward(
            torch.zeros(1, 4, dtype=torch.long), last_layer=max(layer_kinds(target.layers))
        )  # or it is loaded whole
    except (MemoryError, OSError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        if isinstance(error, SinkscopeError) and not isinstance(error, UnsupportedError):
            raise
        raise UnsupportedError(  # its layers, or the part around them, may be such that they cannot be made alone
            f"{source.name} cannot be read layer by layer ({error}); load it whole with sinkscope.load(...)"
        ) from error
    layer_bytes = kind.itemsize * sum(parameter.numel() for parameter in target.layers[-1].parameters())
    store.resident = resident or max(1, LAYER_BYTES // max(layer_bytes, 1))
    if tokenizer is None:
        source.fetch_tokenizer()
        target = replace(target, tokenizer=read_tokenizer(name, source.folder))
    check_vocabulary(target.tokenizer, target.hf)
    return target
