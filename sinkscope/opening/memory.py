"""Does a model fit in memory: its weights as they would be loaded, beside what is free where they would be."""

from __future__ import annotations

import os
from math import prod
from pathlib import Path

import psutil
import torch

from sinkscope.models.checkpoints.checkpoint import open_weights
from sinkscope.models.loading.config import parse_device, parse_dtype

SHARE = 0.5  # of the free memory that weights may take: the rest is for what is computed
_BYTES = {"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2}
"""Bytes of a number by its name in safetensors; of all others 1."""


def free_memory(device: torch.device) -> int:
    """Return bytes that are free on a device and on the host, whichever are fewer: weights pass through both."""
    host = psutil.virtual_memory().available
    if device.type == "cuda":
        return min(host, torch.cuda.mem_get_info(device)[0])
    return host


def fits(weights: int, device: torch.device) -> bool:
    """Return whether so many bytes of weights leave enough memory free."""
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
