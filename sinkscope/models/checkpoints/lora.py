"""Folders and repos of adapters (LoRA and others of peft), which are no whole models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sinkscope.errors import SinkscopeError
from sinkscope.files.output import read_json

ADAPTER_CONFIG = "adapter_config.json"


def refuse_adapter(file: Path, name: str, *, beside: bool) -> SinkscopeError:
    """The error for a checkpoint that holds an adapter.

    Args:
        file: Its adapter_config.json.
        name: Folder or hub id.
        beside: Whether there is a config.json, so that a whole model may be beside the adapter.
    """
    content: Any = read_json(file, "download it again", page="lora-folder")
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
