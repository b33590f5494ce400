"""Files beside the weights: transformers ignores many that it cannot read, and the model then behaves differently."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from sinkscope.errors import SinkscopeError
from sinkscope.files.output import read_bytes, read_json

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "generation_config.json",
)
_REMEDY = "download it again"


def check_beside(folder: Path, names: Iterable[str], page: str) -> None:
    """Check that files of a checkpoint are files that can be read, and that those of JSON hold an object.

    Args:
        folder: The checkpoint.
        names: Names of the files; those that are not there are skipped.
        page: Documentation page to name in errors.

    Raises:
        SinkscopeError: One is a folder, a pipe, a device or a broken link, cannot be read, or is damaged.
    """
    for name in names:
        file = folder / name
        if not (file.exists() or file.is_symlink()):
            continue
        if not name.endswith(".json"):
            read_bytes(file, _REMEDY, page=page)
        elif not isinstance(read_json(file, _REMEDY, page=page), dict):
            raise SinkscopeError(f"{name} is no JSON object; {_REMEDY}", page=page)
