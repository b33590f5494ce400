"""Open a checkpoint as a model whose layers are read when they are called."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from sinkscope.errors import SinkscopeError, UnsupportedError
from sinkscope.models.checkpoints.checkpoint import SafetensorsSource
from sinkscope.models.checkpoints.stored import is_quantised
from sinkscope.models.checkpoints.stream import LayerLoader, LayerStore
from sinkscope.models.loading.config import read_config
from sinkscope.models.modules.stack import DRAFT, first_of_kinds
from sinkscope.models.target import Target
from sinkscope.opening.inference.find import adapter_of


def open_stream(
    source: SafetensorsSource | str | Path,
    *,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    resident: int = 2,
    tokenizer: Any = None,
    name: str | None = None,
) -> Target:
    """Open a checkpoint as a model whose layers are read when they are called and freed afterwards.

    Args:
        source: A folder (a Path), a hub id (a str), or an opened source, as in
            ``SafetensorsSource("org/name", revision="v2")``.
        dtype: Dtype of the weights in memory, whatever it is on disk.
        device: Device on which layers are computed.
        resident: Number of layers in memory at a time.
        tokenizer: Tokenizer of the Target.
        name: Name of the Target; by default the name of the source.

    Raises:
        SinkscopeError: The checkpoint is incomplete.
        UnsupportedError: The checkpoint is quantised or has no safetensors, or its architecture has no adapter; such
            models must be loaded whole.
    """
    if not isinstance(source, SafetensorsSource):
        source = SafetensorsSource(source)
    config = read_config(name or source.name, source.folder)
    try:
        if is_quantised(config):
            raise UnsupportedError("it is quantised", page="unsupported-model")
        loader = LayerLoader(source, config.get_text_config(), device=device, dtype=dtype)
        causal = loader.causal
        setattr(causal, causal.base_model_prefix, loader.base())
        layers = list(causal.get_submodule(loader.stack).children())
        store = LayerStore(source, loader, layers, max(resident, 2))  # two, while the adapter is proposed and proved
        target = Target(causal, causal, "hf", DRAFT, tokenizer, name or source.name, store)
        target = replace(target, adapter=adapter_of(target))
        target.forward(torch.zeros(1, 4, dtype=torch.long), upto=max(first_of_kinds(target)))  # or it is loaded whole
        store.resident = resident
        return target
    except (MemoryError, OSError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        if isinstance(error, SinkscopeError) and error.page not in ("unsupported-model", "missing-tensors"):
            raise
        raise UnsupportedError(  # its layers, or the part around them, may be such that they cannot be made alone
            f"{source.name} cannot be read layer by layer ({error}); load it whole with sinkscope.load(...)",
            page="not-streamable",
        ) from error
