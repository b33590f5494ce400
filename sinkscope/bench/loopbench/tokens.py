"""The tokenizer that the length of prompts is counted with; no weights are read or downloaded for it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from sinkscope.errors import SinkscopeError
from sinkscope.models.checkpoint import TOKENIZER_FILES, hub_file, locate, optional_file
from sinkscope.models.config import read_tokenizer


def open_tokenizer(
    model: str | os.PathLike[str] | None = None,
    folder: str | os.PathLike[str] | None = None,
    revision: str | None = None,
) -> tuple[Any, str]:
    """The tokenizer of a model, or the one in a folder, and its name.

    Args:
        model: short name, hub id, folder, `.gguf` file, or "bundled".
        folder: that of a tokenizer alone; instead of `model`.
        revision: branch, tag or commit of a hub id.

    Raises:
        SinkscopeError: neither or both given, or no tokenizer there.
    """
    if (model is None) == (folder is None):
        given = "both were given" if model is not None else "neither was given"
        raise SinkscopeError(
            f"lengths are counted in tokens: give --model NAME or --tokenizer FOLDER ({given})", page="no-tokenizer"
        )
    if folder is not None and revision is not None:
        raise SinkscopeError(f"revision {revision!r} means nothing for --tokenizer, a folder; it belongs to --model")
    if folder is not None:
        place, name, gguf = Path(folder).expanduser(), Path(folder).resolve().name, None
        if not place.is_dir():
            raise SinkscopeError(
                f"--tokenizer {os.fspath(folder)!r} is not a folder: give one that holds tokenizer.json"
            )
    else:
        source = locate(model, revision)
        name, gguf = source.name, None
        if source.kind == "hub":
            place = _downloaded(str(source.where), revision)
        elif source.kind == "gguf":
            place, gguf = Path(source.where).parent, Path(source.where).name
        else:
            place = Path(source.where)
    found = read_tokenizer(name, place, gguf=gguf)
    if found is None:
        raise SinkscopeError(
            f"{name} has no tokenizer in it (expected tokenizer.json, tokenizer.model or vocab.json): give --tokenizer "
            "FOLDER",
            page="no-tokenizer",
        )
    return found, name


def _downloaded(repo: str, revision: str | None) -> Path:
    try:
        folder = hub_file(repo, "config.json", revision).parent
    except FileNotFoundError:
        raise SinkscopeError(
            f"{repo} has no config.json, so it is no transformers model; give one that has", page="no-config"
        ) from None
    for name in TOKENIZER_FILES:
        optional_file(repo, name, folder.name)  # the cache names a snapshot after its commit
    return folder
