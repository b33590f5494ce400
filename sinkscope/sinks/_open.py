"""From what the user names to a Target, reading as little as possible."""

from __future__ import annotations

import hashlib
import json
import os
from typing import Any

import torch

from sinkscope.errors import SinkscopeError, UnsupportedError
from sinkscope.models.target import Target


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
    from sinkscope.models.load import load

    options: dict[str, Any] = {"revision": revision, "dtype": dtype, "device": device, "tokenizer": tokenizer}
    if model is None or (isinstance(model, str | os.PathLike) and str(model).endswith(".gguf")):
        live = load(model, backend="hf", trust_remote_code=trust_remote_code, **options)
        return _with_tokenizer(Target.of(live, tokenizer))
    if not isinstance(model, str | os.PathLike):
        return _with_tokenizer(Target.of(model, tokenizer))
    from sinkscope.models.stream import open_stream

    try:
        return _with_tokenizer(open_stream(model, **options))
    except UnsupportedError as error:
        if error.page != "streaming":
            raise
    return _with_tokenizer(Target.of(load(model, backend="hf", trust_remote_code=trust_remote_code, **options)))


def _with_tokenizer(target: Target) -> Target:
    if target.tokenizer is not None:
        return target
    where = getattr(target.hf, "name_or_path", "") or getattr(target.config, "_name_or_path", "")
    if where:
        from transformers import AutoTokenizer

        try:
            found = AutoTokenizer.from_pretrained(where)
        except (OSError, ValueError):
            found = None
        if found is not None:
            return Target(
                target.model, target.hf, target.kind, target.adapter, found, target.name, target.resident
            )  # fmt: skip
    raise SinkscopeError(f"model {target.name!r} carries no tokenizer; pass tokenizer=AutoTokenizer.from_pretrained(...)")


def fingerprint(target: Target) -> str:
    """Of the configuration and every parameter's name, shape and type; no weights are read for it."""
    known = getattr(target, "fingerprint", None)
    if isinstance(known, str):
        return known
    hf = target.hf
    named = [(n, tuple(p.shape), str(p.dtype)) for n, p in hf.named_parameters()]
    config = {k: v for k, v in hf.config.to_dict().items() if not k.startswith("_") and k != "transformers_version"}
    text = json.dumps([config, sorted(named)], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
