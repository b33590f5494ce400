"""Short names of public models."""

from __future__ import annotations

import difflib
import tomllib
from dataclasses import dataclass
from functools import cache
from importlib import resources

from sinkscope.errors import SinkscopeError

BUNDLED = "bundled"
"""Name of the model inside the package."""
RECALL = "recall"
"""Name of the model inside the package that answers questions about facts of earlier turns."""
TWO_HOPS = "recall-2hop"
"""The recall model with another circuit, which answers over two hops; its weights are made while it is loaded."""
ORGANISM = "organism"
"""Name of the model inside the package whose loops are held by copies in the cache; it repeats nothing else."""


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
    entry = None
    if "/" not in name:
        entry = find(name)
    if entry is not None:
        return entry.hub_id
    near = difflib.get_close_matches(name.lower(), _entries(), n=3, cutoff=0.6)
    meant = f"; did you mean {' or '.join(near)}?" if near else ""
    raise SinkscopeError(
        f"unknown model {name!r}: expected a short name (`sinkscope models` lists them), a hub id such as org/name, a "
        f"folder such as ./my-model, or a .gguf file{meant}"
    )
