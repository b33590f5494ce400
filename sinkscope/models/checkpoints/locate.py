"""Where a model comes from: a name, hub id, folder or file, resolved without reading weights."""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Literal

from sinkscope.errors import SinkscopeError
from sinkscope.files.output import path_of, reason_of
from sinkscope.files.plain import in_one_line

BUNDLED = "bundled"
"""Name of the model inside the package."""
RECALL = "recall"
"""Name of the model inside the package that answers questions about facts of earlier turns."""
TWO_HOPS = "recall-2hop"
"""The recall model with another circuit, which answers over two hops; its weights are made while it is loaded."""


ADAPTER_CONFIG = "adapter_config.json"


def refuse_adapter(name: str) -> SinkscopeError:
    """Return the error for a folder or hub id that holds an adapter (LoRA and others of peft)."""
    return SinkscopeError(
        f"{name} holds an adapter ({ADAPTER_CONFIG}), so it is no model alone: load its base with sinkscope.load(...), "
        f"put the adapter on it with peft.PeftModel.from_pretrained(base, {name!r}), and measure that; or merge them; "
        "or give the model without the adapter"
    )


@dataclass(frozen=True)
class ModelEntry:
    """A public model: short name, id on the Hugging Face hub, `model_type`."""

    name: str
    hub_id: str
    family: str


@cache
def _entries() -> dict[str, ModelEntry]:
    """Every entry of names.toml by its short name."""
    content = tomllib.loads(resources.files("sinkscope.models.checkpoints").joinpath("names.toml").read_text("utf-8"))
    entries: dict[str, ModelEntry] = {}
    for family, hub_ids in content["models"].items():
        for name, hub_id in hub_ids.items():
            entries[name] = ModelEntry(name, hub_id, family)
    return entries


SHOWN = 5  # short names that an error lists


def list_models() -> list[ModelEntry]:
    """Return every model with a short name, family by family."""
    return list(_entries().values())


def find(name: str) -> ModelEntry | None:
    """Return a model by its short name, its hub id, or the last part of a hub id or path; case does not matter."""
    last = name.strip().rstrip("/").lower().rpartition("/")[2]
    for entry in list_models():
        if last in (entry.name, entry.hub_id.lower().rpartition("/")[2]):
            return entry
    return None


def hub_id_of(name: str) -> str:
    """Return the hub id of a short name (`llama-2-7b`), or of the last part of a hub id (`Llama-2-7b-hf`).

    Raises:
        SinkscopeError: The name is unknown; the message lists the closest short names.
    """
    entry = None if "/" in name else find(name)
    if entry is not None:
        return entry.hub_id
    near = difflib.get_close_matches(name.lower(), _entries(), n=SHOWN, cutoff=0.0)
    raise SinkscopeError(
        f"unknown model {name!r}: expected a short name such as {', '.join(near)} (`sinkscope.list_models()` has all "
        f"{len(_entries())}), a hub id such as org/name, a folder such as ./my-model, or a .gguf file"
    )


_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


@dataclass(frozen=True)
class ModelSource:
    """Where a model comes from.

    Attributes:
        kind: "folder", "gguf" (one file) or "hub".
        where: Path of the folder or file, or hub id.
        name: Name used in reports: a short name, hub id, or base name.
        revision: Branch, tag or commit of a hub id.
        planted: File in the folder whose numbers replace weights after loading; "" for none.
    """

    kind: Literal["folder", "gguf", "hub"]
    where: Path | str
    name: str
    revision: str | None = None
    planted: str = ""


_HERE = Path(__file__).parents[1]
_IN_PACKAGE = {name: ModelSource("folder", _HERE / name, name) for name in (BUNDLED, RECALL)}
_IN_PACKAGE[TWO_HOPS] = ModelSource("folder", _HERE / RECALL, TWO_HOPS, planted="two_hops.npz")


def locate(model: str | os.PathLike[str] | None, revision: str | None = None) -> ModelSource:
    """Resolve `model`: None is the bundled model; otherwise it is a short name, hub id, folder or `.gguf` file.

    No weights are read. An existing folder or file takes precedence over a hub id or short name of the same spelling.

    Raises:
        SinkscopeError: `model` cannot be resolved, or `revision` is given for something that has no revisions.
    """
    try:
        if model is None or model in _IN_PACKAGE:
            source = _IN_PACKAGE[str(model or BUNDLED)]
        else:
            source = _outside(model, revision)
    except OSError as error:
        raise SinkscopeError(f"cannot read {model}: {reason_of(error)}; give another model") from None
    if revision is not None and source.kind != "hub":
        raise SinkscopeError(
            f"revision {revision!r} means nothing for the {source.kind} {source.name}; revisions belong to hub ids"
        )
    return source


def _outside(model: str | os.PathLike[str], revision: str | None) -> ModelSource:
    text = os.fspath(model)
    path = path_of(text)
    name = in_one_line(path.resolve().name)
    is_path = not isinstance(model, str) or text.startswith((".", "~", os.sep)) or path.suffix == ".gguf"
    if (path / ADAPTER_CONFIG).is_file():
        raise refuse_adapter(text)
    # A folder that only shares its name with a model (`gpt2/` with notes in it) does not hide the model.
    if text and path.is_dir() and (is_path or (path / "config.json").is_file()):
        return ModelSource("folder", path, name)
    if path.suffix == ".gguf" and path.is_file():
        return ModelSource("gguf", path, name)
    if is_path or path.is_file():
        raise SinkscopeError(
            f"{text!r} is no model that is here: give a .gguf file or a folder, a hub id org/name or a short name"
        )
    return ModelSource("hub", text if _HUB_ID.fullmatch(text) else hub_id_of(text), text, revision)
