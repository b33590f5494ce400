"""The tokenizer of a model, without its weights; used by scripts that only count tokens."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from sinkscope.errors import SinkscopeError
from sinkscope.models.checkpoints.config import TOKENIZER_FILES, read_tokenizer
from sinkscope.models.checkpoints.hub import hub_folder, optional_file
from sinkscope.models.checkpoints.locate import locate


def open_tokenizer(model: str | os.PathLike[str] | None = None) -> Any:
    """The tokenizer of a short name, hub id or folder (also one that holds only a tokenizer); None: the bundled one.

    Raises:
        SinkscopeError: There is no tokenizer.
    """
    source = locate(model)
    folder = Path(source.where)
    if source.kind == "hub":
        folder = hub_folder(str(source.where), None)
        for name in TOKENIZER_FILES:
            optional_file(str(source.where), name, folder.name)
    tokenizer = read_tokenizer(source.name, folder)
    if tokenizer is None:
        raise SinkscopeError(f"{source.name} has no tokenizer in it: give a model or a folder that has one")
    return tokenizer
