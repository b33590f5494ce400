"""Where a model comes from: a name, hub id, folder or file, resolved without reading weights."""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from functools import cache
from importlib import resources
from pathlib import Path
from typing import NamedTuple

from sinkscope.errors import SinkscopeError
from sinkscope.files.output import path_of
from sinkscope.files.plain import in_one_line

BUNDLED = "bundled"
"""Name of the model inside the package."""
RECALL = "recall"
"""Name of the model inside the package that answers questions about facts of earlier turns."""
ADAPTER_CONFIG = "adapter_config.json"
SHOWN = 5  # short names that an error lists
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


@cache
def list_models() -> dict[str, str]:
    """Return the id on the Hugging Face hub of every model with a short name, family by family."""
    content = tomllib.loads(resources.files("sinkscope.models.checkpoints").joinpath("names.toml").read_text("utf-8"))
    names: dict[str, str] = {}
    for hub_ids in content["models"].values():
        names |= hub_ids
    return names


def hub_id_of(name: str) -> str:
    """Return the hub id of a short name (`llama-2-7b`), or of the last part of a hub id (`Llama-2-7b-hf`).

    Raises:
        SinkscopeError: The name is unknown; the message lists the closest short names.
    """
    names = list_models()
    for short, hub_id in names.items():
        if name.lower() in (short, hub_id.lower().rpartition("/")[2]):
            return hub_id
    near = difflib.get_close_matches(name.lower(), names, n=SHOWN, cutoff=0.0)
    raise SinkscopeError(
        f"unknown model {name!r}: expected a short name such as {', '.join(near)} (`sinkscope.list_models()` has all "
        f"{len(names)}), a hub id such as org/name, a folder such as ./my-model, or a .gguf file"
    )


class ModelSource(NamedTuple):
    """Where a model comes from.

    Attributes:
        where: Path of the folder or `.gguf` file, or hub id.
        name: Name used in reports: a short name, hub id, or base name.
        revision: Branch, tag or commit of a hub id.
    """

    where: Path | str
    name: str
    revision: str | None = None

    @property
    def is_gguf(self) -> bool:
        """Whether it is one file."""
        return isinstance(self.where, Path) and self.where.is_file()


def locate(model: str | os.PathLike[str] | None, revision: str | None = None) -> ModelSource:
    """Resolve `model`: None is the bundled model; otherwise it is a short name, hub id, folder or `.gguf` file.

    No weights are read. An existing folder or file takes precedence over a hub id or short name of the same spelling.

    Raises:
        SinkscopeError: `model` cannot be resolved, or `revision` is given for something that has no revisions.
    """
    given = BUNDLED if model is None else os.fspath(model)
    path = path_of(given)
    is_path = isinstance(model, os.PathLike) or given.startswith((".", "~", os.sep)) or path.suffix == ".gguf"
    # A folder that only shares its name with a model (`gpt2/` with notes in it) does not hide the model.
    holds = any(os.path.isfile(path / name) for name in ("config.json", ADAPTER_CONFIG))
    if given in (BUNDLED, RECALL) and not is_path:
        source = ModelSource(Path(__file__).parents[1] / given, given)
    elif (given and os.path.isdir(path) and (is_path or holds)) or (path.suffix == ".gguf" and os.path.isfile(path)):
        source = ModelSource(path, in_one_line(path.resolve().name))
    elif is_path or os.path.isfile(path):
        raise SinkscopeError(
            f"{given!r} is no model that is here: give a .gguf file or a folder, a hub id org/name or a short name"
        )
    else:
        return ModelSource(given if _HUB_ID.fullmatch(given) else hub_id_of(given), given, revision)
    if revision is not None:
        kind = "file" if source.is_gguf else "folder"
        raise SinkscopeError(
            f"revision {revision!r} means nothing for the {kind} {source.name}; revisions belong to hub ids"
        )
    return source
