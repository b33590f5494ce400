"""Where attention on columns and bands is computed: by Triton on CUDA, by PyTorch on a CPU."""

from __future__ import annotations

import importlib
import os
from functools import cache
from types import ModuleType

import torch

from sinkscope.errors import UnsupportedError, warn


def lack_of_library(device: torch.device) -> str | None:
    """Say why attention on columns and bands cannot be computed on a device; None if it can."""
    if device.type not in ("cpu", "cuda"):
        return "only CPUs and CUDA do that"
    if _by_kernel(device) and _module("triton") is None:
        return "triton is not installed"
    return None


def triton_module(device: torch.device, name: str) -> ModuleType | None:
    """Find the module of kernels of this name; None where PyTorch computes.

    Raises:
        UnsupportedError: The device is neither a CPU nor CUDA, or triton is not installed.
    """
    reason = lack_of_library(device)
    if reason is not None:
        raise UnsupportedError(
            f"attention on lines cannot be computed on {device.type}: {reason}; install triton on CUDA"
        )
    return _module(name) if _by_kernel(device) else None


def _by_kernel(device: torch.device) -> bool:
    """Whether Triton computes there; on a CPU, its interpreter does if it was asked for."""
    return device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"


@cache
def _module(name: str) -> ModuleType | None:
    """A module of kernels; None, with one warning, if triton is not installed."""
    try:
        return importlib.import_module(f"sinkscope.sparse.{name}")
    except ImportError as error:
        warn(f"attention on lines is not computed: {error}; install triton")
    return None
