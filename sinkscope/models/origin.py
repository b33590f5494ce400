"""The checkpoint that a model came from, by its fingerprint."""

from __future__ import annotations

import contextlib
from pathlib import Path

from sinkscope.errors import SinkscopeError
from sinkscope.models.checkpoints.fingerprint import fingerprint
from sinkscope.models.checkpoints.stream import StreamTarget
from sinkscope.models.target import Target


def fingerprint_of(target: Target) -> str:
    """Fingerprint of the checkpoint being read or loaded by `load`, or of the live model.

    A model whose weights have changed since it was loaded gets a fingerprint of its own.
    """
    if isinstance(target, StreamTarget):
        return fingerprint(target.store.source)
    here = fingerprint(target.hf)
    files, loaded = getattr(target.hf, "sinkscope_origin", ("", ""))
    if here == loaded:
        return files
    return here


def is_checkpoint(target: Target, wanted: str) -> bool:
    """Whether the model, or the checkpoint from which transformers says it was loaded, has this fingerprint."""
    where = Path(getattr(target.hf.config, "_name_or_path", "") or "/dev/null")
    if wanted in (fingerprint_of(target), getattr(target.hf.config, "_commit_hash", None)):
        return True
    with contextlib.suppress(SinkscopeError, OSError):
        return not hasattr(target.hf, "sinkscope_origin") and where.is_dir() and fingerprint(where) == wanted
    return False
