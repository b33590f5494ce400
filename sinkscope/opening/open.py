"""Open a model as a `Target`, and read as little of a checkpoint as possible."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import torch

from sinkscope.errors import UnsupportedError
from sinkscope.files.processes import world_size
from sinkscope.models.checkpoints.checkpoint import SafetensorsSource
from sinkscope.models.checkpoints.locate import ModelSource, locate
from sinkscope.models.checkpoints.names import BUNDLED
from sinkscope.models.checks import tokenizer_of
from sinkscope.models.loading.config import check_vocabulary, parse_device, parse_dtype, read_tokenizer
from sinkscope.models.loading.quiet import quiet
from sinkscope.models.loading.refusals import loading_errors
from sinkscope.models.target import Target
from sinkscope.opening.live import target_of
from sinkscope.opening.load import load
from sinkscope.opening.stream import open_stream

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
        target = _named(model, tokenizer, revision, dtype, device, whole)
    else:
        target = target_of(model, tokenizer)
    if needed:
        tokenizer_of(target)
    if target.tokenizer is None:
        target = replace(target, tokenizer=target.available_tokenizer)
    return target


def _named(
    model: str | os.PathLike[str] | None,
    tokenizer: Any,
    revision: str | None,
    dtype: torch.dtype | str | None,
    device: torch.device | str | None,
    whole: bool,
) -> Target:
    source, is_bundled = locate(model, revision), model in (None, BUNDLED)
    if not (whole or world_size() > 1 or is_bundled or source.kind == "gguf" or source.planted):
        try:
            with quiet(), loading_errors(source):
                return _stream(source, tokenizer, dtype, device)
        except UnsupportedError as error:
            if error.page != "not-streamable":
                raise
    # The bundled model needs no probe at every start, because the tests check its circuit.
    options: dict[str, Any] = {"revision": revision, "dtype": dtype, "device": device, "tokenizer": tokenizer}
    return target_of(load(model, **options, probe=not is_bundled))


def _stream(
    source: ModelSource, tokenizer: Any, dtype: torch.dtype | str | None, device: torch.device | str | None
) -> Target:
    place = parse_device(device)
    # On a CPU half precision is slow, and only a few layers are in memory at a time.
    kind = parse_dtype(dtype) or (torch.float32 if place.type == "cpu" else torch.bfloat16)
    tensors = SafetensorsSource(source.where, revision=source.revision)
    target = open_stream(tensors, dtype=kind, device=place, resident=1, tokenizer=tokenizer, name=source.name)
    per_layer = sum(p.numel() for p in target.layers[-1].parameters()) * kind.itemsize
    target.store.resident = max(1, LAYER_BYTES // max(per_layer, 1))
    if tokenizer is None:
        tensors.fetch_tokenizer()
        target = replace(target, tokenizer=read_tokenizer(target.name, tensors.folder))
    check_vocabulary(target.tokenizer, target.hf)
    return target
