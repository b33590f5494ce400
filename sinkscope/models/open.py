"""Open a model as a `Target`; as little of a checkpoint is read as possible."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from sinkscope.errors import UnsupportedError
from sinkscope.models.checkpoint import (
    TOKENIZER_FILES,
    ModelSource,
    SafetensorsSource,
    fingerprint,
    locate,
    optional_file,
)
from sinkscope.models.config import read_tokenizer, without_cache
from sinkscope.models.load import explained, load, quiet
from sinkscope.models.names import BUNDLED
from sinkscope.models.stream import StreamTarget, open_stream
from sinkscope.models.target import Target

_FIRST_LAYERS = 8  # of a GGUF file, whose layers cannot be read one by one; doubled until they suffice
_HELD_BYTES = 1 << 30  # layers of a streamed model stay in memory up to this size, so that small ones are read once


@dataclass(frozen=True, eq=False)
class PartTarget(Target):
    """The first layers of a model that is deeper.

    Attributes:
        depth: decoder layers of the whole model.
        reopen: opens it again with more layers.
    """

    depth: int = 0
    reopen: Callable[[int], Target] | None = None

    @property
    def n_layers(self) -> int:
        """Number of decoder layers of the whole model."""
        return self.depth

    def more(self) -> Target:
        """The same with twice the layers, or whole."""
        assert self.reopen is not None
        return self.reopen(2 * len(self.layers))


def open_target(
    model: object,
    tokenizer: Any,
    revision: str | None,
    dtype: torch.dtype | str | None,
    device: torch.device | str | None,
    trust_remote_code: bool,
) -> Target:
    """Open a live model, the bundled one (in memory), or a named one (streamed from disk where that is possible).

    Raises:
        SinkscopeError: `model` is not a model, cannot be read, or has no tokenizer.
    """
    if model == BUNDLED:  # by its name or by none
        model = None
    options: dict[str, Any] = {
        "revision": revision,
        "dtype": dtype,
        "device": device,
        "trust_remote_code": trust_remote_code,
    }
    if not (model is None or isinstance(model, str | os.PathLike)):
        return _with_tokenizer(Target.of(model, tokenizer))
    source = None if model is None else locate(model, revision)
    if source is not None and source.kind != "gguf" and not trust_remote_code:
        try:
            with quiet(), explained(source):
                return _stream(source, tokenizer, dtype, device)
        except UnsupportedError as error:
            if error.page != "not-streamable":
                raise

    def opened(layers: int | None) -> Target:
        # The model of the package needs no probe at every start: the tests hold it to its circuit.
        hf = load(model, backend="hf", tokenizer=tokenizer, layers=layers, probe=model is not None, **options)
        return _with_tokenizer(Target.of(hf))

    if source is None or source.kind != "gguf":
        return opened(None)
    return _first_layers(opened, _gguf_depth(Path(source.where)), _FIRST_LAYERS)


def _first_layers(opened: Callable[[int | None], Target], depth: int, layers: int) -> Target:
    if layers >= depth:
        return opened(None)
    t = opened(layers)
    return PartTarget(
        t.model,
        t.hf,
        t.kind,
        t.adapter,
        t.tokenizer,
        t.name,
        resident=False,
        depth=depth,
        reopen=lambda more: _first_layers(opened, depth, more),
    )


def _gguf_depth(file: Path) -> int:
    """Layers of the whole model; 0 where the file does not say, which `load` then explains."""
    from transformers import AutoConfig

    try:
        return int(AutoConfig.from_pretrained(file.parent, gguf_file=file.name).get_text_config().num_hidden_layers)
    except Exception:  # a damaged file may fail in any way
        return 0


def _stream(
    source: ModelSource, tokenizer: Any, dtype: torch.dtype | str | None, device: torch.device | str | None
) -> Target:
    from sinkscope.models.config import check_vocabulary, parse_device, parse_dtype

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
        found = read_tokenizer(target.name, _tokenizer_folder(target.store.source))
    elif where:
        from transformers import AutoTokenizer

        with contextlib.suppress(Exception):  # what a live model says of its origin need not be true any more
            found = without_cache(AutoTokenizer.from_pretrained(where, trust_remote_code=False))
            found = found if len(found("a text", add_special_tokens=False)["input_ids"]) else None  # made of no files
    target = replace(target, tokenizer=found)
    target.need_tokenizer()
    return target


def _tokenizer_folder(source: SafetensorsSource) -> Path:
    """The folder with the tokenizer's files; those of a hub repo are downloaded first."""
    if source.commit is not None:
        for name in TOKENIZER_FILES:
            optional_file(source.name, name, source.commit)
    return source.folder


def fingerprint_of(target: Target) -> str:
    """Fingerprint of the checkpoint that is being read, or of the live model; no weights are read for it."""
    return fingerprint(target.store.source if isinstance(target, StreamTarget) else target.hf)
