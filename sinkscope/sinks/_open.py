"""From what the user names to a Target, reading as little as possible."""

from __future__ import annotations

import contextlib
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from sinkscope.errors import SinkscopeError, UnsupportedError
from sinkscope.models.checkpoint import SafetensorsSource, fingerprint, hub_file
from sinkscope.models.load import load
from sinkscope.models.source import TOKENIZER_FILES, Source, locate
from sinkscope.models.stream import StreamTarget, open_stream
from sinkscope.models.target import Target

_HELD_BYTES = 1 << 30  # layers of a streamed model stay in memory up to this size, so that small ones are read once


def open_target(
    model: object,
    tokenizer: Any,
    revision: str | None,
    dtype: torch.dtype | str | None,
    device: torch.device | str | None,
    trust_remote_code: bool,
) -> Target:
    """A Target of a live model, of the bundled one (in memory), or of a named one (streamed where it can be).

    Raises:
        SinkscopeError: nothing can be made of `model`, or it has no tokenizer.
    """
    options: dict[str, Any] = {
        "revision": revision, "dtype": dtype, "device": device, "trust_remote_code": trust_remote_code,
    }  # fmt: skip
    if not (model is None or isinstance(model, str | os.PathLike)):
        return _with_tokenizer(Target.of(model, tokenizer))
    source = None if model is None else locate(model, revision)
    if source is not None and source.kind != "gguf" and not trust_remote_code:
        try:
            return _with_tokenizer(_stream(source, tokenizer, dtype, device))
        except UnsupportedError as error:
            if error.page != "not-streamable":
                raise
    return _with_tokenizer(Target.of(load(model, backend="hf", tokenizer=tokenizer, **options)))


def _stream(
    source: Source, tokenizer: Any, dtype: torch.dtype | str | None, device: torch.device | str | None
) -> Target:
    from sinkscope.models.checks import check_vocabulary, parse_device, parse_dtype

    place = parse_device(device)
    # Half precision is slow on a CPU, and layers are few at a time: there the default is float32.
    kind = parse_dtype(dtype) or (torch.float32 if place.type == "cpu" else torch.bfloat16)
    where = Path(source.where) if source.kind == "folder" else str(source.where)
    tensors = SafetensorsSource(where, revision=source.revision)
    target = open_stream(tensors, dtype=kind, device=place, resident=1, tokenizer=tokenizer, name=source.name)
    per_layer = sum(p.numel() for p in target.layers[-1].parameters()) * kind.itemsize
    target.store.hold(max(1, _HELD_BYTES // max(per_layer, 1)))
    target = _with_tokenizer(target)
    check_vocabulary(target.tokenizer, target.hf)
    return target


def _with_tokenizer(target: Target) -> Target:
    if target.tokenizer is not None:
        return target
    found, where = None, getattr(target.config, "_name_or_path", "")
    if isinstance(target, StreamTarget):
        where = _tokenizer_folder(target.store.source)
    if where:
        from transformers import AutoTokenizer

        try:
            found = AutoTokenizer.from_pretrained(where)
        except (OSError, ValueError):
            found = None
    if found is None:
        raise SinkscopeError(
            f"{target.name} carries no tokenizer; pass tokenizer=AutoTokenizer.from_pretrained(...), or put the "
            "tokenizer's files beside the weights"
        )
    return replace(target, tokenizer=found)


def _tokenizer_folder(source: SafetensorsSource) -> Path:
    """The folder of the tokenizer's files, which of a hub repo are downloaded first."""
    if source.commit is not None:
        for name in TOKENIZER_FILES:
            with contextlib.suppress(FileNotFoundError):
                hub_file(source.name, name, source.commit)
    return source.folder


def fingerprint_of(target: Target) -> str:
    """Of the checkpoint where one is read, else of the live model; no weights are read for it."""
    return fingerprint(target.store.source if isinstance(target, StreamTarget) else target.hf)
