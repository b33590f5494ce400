"""Files beside the weights: transformers ignores many that it cannot read, and the model then behaves differently."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from sinkscope.errors import SinkscopeError
from sinkscope.files.output import read_json

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


def check_side_files(folder: Path, names: Iterable[str]) -> None:
    """Check that the JSON files of a checkpoint, as far as they are there, hold an object each.

    Args:
        folder: The checkpoint.
        names: Names of its files.

    Raises:
        SinkscopeError: One cannot be read, or is damaged.
    """
    for name in names:
        file, remedy = folder / name, "download it again"
        if not name.endswith(".json") or not file.exists():
            continue
        if not isinstance(read_json(file, remedy), dict):
            raise SinkscopeError(f"{name} is no JSON object; {remedy}")


def refuse_adapter(name: str) -> SinkscopeError:
    """Return the error for a folder or hub id that holds an adapter (LoRA and others of peft)."""
    return SinkscopeError(
        f"{name} holds an adapter ({ADAPTER_CONFIG}), so it is no model alone: load its base with sinkscope.load(...), "
        f"put the adapter on it with peft.PeftModel.from_pretrained(base, {name!r}), and measure that; or merge them; "
        "or give the model without the adapter"
    )
