"""Open a model as a `Target`, and read as little of a checkpoint as possible."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import torch

from sinkscope.errors import UnsupportedError
from sinkscope.files.processes import world_size
from sinkscope.models.checkpoints.beside import TOKENIZER_FILES
from sinkscope.models.checkpoints.checkpoint import SafetensorsSource
from sinkscope.models.checkpoints.hub import hub_folder
from sinkscope.models.checkpoints.locate import ModelSource, locate
from sinkscope.models.checkpoints.names import BUNDLED
from sinkscope.models.checkpoints.stream import StreamTarget
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
    tokenizer: Any,
    revision: str | None,
    dtype: torch.dtype | str | None,
    device: torch.device | str | None,
    needed: bool = True,
    whole: bool = False,
) -> Target:
    """Open a live model, the bundled model (in memory), or a named model (streamed from disk if possible).

    With `whole`, a named model is loaded into memory, too.

    Raises:
        SinkscopeError: `model` is not a model, cannot be read, or has no tokenizer although it is `needed`.
    """
    is_bundled = model is None or model == BUNDLED
    if not (model is None or isinstance(model, str | os.PathLike)):
        return _with_tokenizer(target_of(model, tokenizer), needed)
    source = locate(model, revision)
    whole = whole or world_size() > 1
    if not (whole or is_bundled or source.kind == "gguf" or source.planted):
        try:
            with quiet(), loading_errors(source):
                return _stream(source, tokenizer, dtype, device)
        except UnsupportedError as error:
            if error.page != "not-streamable":
                raise

    # The bundled model needs no probe at every start, because the tests check its circuit.
    hf = load(
        model,
        revision=revision,
        dtype=dtype,
        device=device,
        tokenizer=tokenizer,
        probe=not is_bundled,
    )
    return _with_tokenizer(target_of(hf), needed)


def streamed_dtype(place: torch.device) -> torch.dtype:
    """The type in which layers are read one by one on a device, if none is asked for.

    On a CPU half precision is slow, and only a few layers are in memory at a time.
    """
    return torch.float32 if place.type == "cpu" else torch.bfloat16


def _stream(
    source: ModelSource, tokenizer: Any, dtype: torch.dtype | str | None, device: torch.device | str | None
) -> Target:
    place = parse_device(device)
    kind = parse_dtype(dtype) or streamed_dtype(place)
    tensors = SafetensorsSource(source.where, revision=source.revision)
    target = open_stream(tensors, dtype=kind, device=place, resident=1, tokenizer=tokenizer, name=source.name)
    per_layer = sum(p.numel() for p in target.layers[-1].parameters()) * kind.itemsize
    target.store.resident = max(1, LAYER_BYTES // max(per_layer, 1))
    target = _with_tokenizer(target)
    check_vocabulary(target.tokenizer, target.hf)
    return target


def _with_tokenizer(target: Target, needed: bool = True) -> Target:
    if target.tokenizer is not None:
        return target
    if isinstance(target, StreamTarget):
        source = target.store.source
        if source.commit is not None:
            hub_folder(source.name, source.commit, TOKENIZER_FILES)
        tokenizer = read_tokenizer(target.name, source.folder)
    else:
        tokenizer = target.available_tokenizer
    target = replace(target, tokenizer=tokenizer)
    if needed:
        tokenizer_of(target)
    return target
