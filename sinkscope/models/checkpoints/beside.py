"""Files beside the weights: transformers ignores many that it cannot read, and the model then behaves differently."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

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
ADAPTER_CONFIG = "adapter_config.json"
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


def refuse_adapter(file: Path, name: str, *, beside: bool) -> SinkscopeError:
    """The error for a checkpoint that holds an adapter (LoRA and others of peft), which is no whole model.

    Args:
        file: Its adapter_config.json.
        name: Folder or hub id.
        beside: Whether there is a config.json, so that a whole model may be beside the adapter.
    """
    content: Any = read_json(file, _REMEDY, page="lora-folder")
    kind = base = None
    if isinstance(content, dict):
        kind, base = content.get("peft_type"), content.get("base_model_name_or_path")
    base = base or "its base model"
    what, alone = f"{name} is an adapter ({kind}) of {base}, not a whole model", ""
    if beside:
        what = f"{name} holds an adapter ({kind}) of {base} beside a model, so it is unclear which of them to measure"
        alone = f"; or give a folder without {ADAPTER_CONFIG} to measure the model alone"
    return SinkscopeError(
        f"{what}: load the base with sinkscope.load({base!r}), put the adapter on it with "
        f"peft.PeftModel.from_pretrained(base, {name!r}), and measure that; or merge them{alone}",
        page="lora-folder",
    )
