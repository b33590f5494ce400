"""The checkpoint that a model came from, by its fingerprint."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sinkscope.errors import SinkscopeError, warn
from sinkscope.models.checkpoints.checkpoint import Files
from sinkscope.models.checkpoints.fingerprint import fingerprint
from sinkscope.models.target import Target


def fingerprint_of(target: Target) -> str:
    """Return the fingerprint of the checkpoint that a model is read or was loaded from, or of the live model.

    A model whose weights have changed since it was loaded gets a fingerprint of its own.
    """
    if target.store is not None:
        return fingerprint(target.store.source)
    here = fingerprint(target.hf)
    files, loaded = getattr(target.hf, "sinkscope_origin", ("", ""))
    if here == loaded:
        return files
    return here


def check_made_for(target: Target, model: Mapping[str, Any]) -> None:
    """Compare a model with the one that a patch was made for, as far as that is described.

    A fine-tuned version is accepted, and a `SinkscopeWarning` says so.

    Args:
        target: The model.
        model: Name, family, sizes and fingerprint of the other.

    Raises:
        SinkscopeError: The model has another shape.
    """
    origin = model.get("name")
    shape = {
        "family": target.config.model_type,
        "n_layers": target.n_layers,
        "d_model": target.d_model,
        "d_mlp": target.d_mlp,
    }
    for name, here in shape.items():
        there = model.get(name, here)
        if there != here:
            raise SinkscopeError(
                f"the patch was made for {origin}, whose {name} is {there}, and that of {target.name} is {here}: "
                "give that model, or make a patch for this one"
            )
    wanted, config = model.get("fingerprint"), target.hf.config
    if not wanted or wanted in (getattr(config, "_commit_hash", None), fingerprint_of(target)):
        return
    where = Path(getattr(config, "_name_or_path", "") or "/dev/null")  # from where transformers says it was loaded
    with contextlib.suppress(SinkscopeError, OSError):
        if not hasattr(target.hf, "sinkscope_origin") and where.is_dir() and fingerprint(Files(where)) == wanted:
            return
    warn(
        f"the patch was made for {origin} (fingerprint {wanted}), and {target.name} has the same shape "
        f"and other weights, so its sink may have other neurons: make a patch for this model"
    )
