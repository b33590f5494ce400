"""Where a model comes from: a name, hub id, folder or file, resolved without reading weights."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from sinkscope.errors import SinkscopeError
from sinkscope.files.output import path_of, reason_of
from sinkscope.models.checkpoints.names import BUNDLED, ORGANISM, RECALL, TWO_HOPS, find, hub_id_of
from sinkscope.models.checkpoints.side_files import ADAPTER_CONFIG, refuse_adapter

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
_IN_PACKAGE = {name: ModelSource("folder", _HERE / name, name) for name in (BUNDLED, RECALL, ORGANISM)}
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
    if not text.strip():
        raise SinkscopeError("the model name is empty; expected a short name, hub id org/name, folder or .gguf file")
    path = path_of(text)
    if path.is_file():
        if path.suffix != ".gguf":
            raise SinkscopeError(
                f"{path.name} is not a model: expected a .gguf file or a folder, such as {path.parent}"
            )
        return ModelSource("gguf", path, path.name)
    is_hub_id = _HUB_ID.fullmatch(text) is not None
    is_short_name = "/" not in text and find(text) is not None
    is_path = not isinstance(model, str) or text.startswith((".", "~", os.sep)) or path.suffix == ".gguf"
    # A folder that only shares its name with a model (`gpt2/` with notes in it) does not hide the model.
    holds_model = any((path / name).is_file() for name in ("config.json", ADAPTER_CONFIG))
    is_meant = is_path or not (is_hub_id or is_short_name) or holds_model
    if path.is_dir() and is_meant:
        if (path / ADAPTER_CONFIG).is_file():
            raise refuse_adapter(text)
        return ModelSource("folder", path, path.resolve().name)
    if is_path:
        raise SinkscopeError(
            f"there is no file or folder {text!r}; give an existing one, a hub id org/name or a short name"
        )
    return ModelSource("hub", text if is_hub_id else hub_id_of(text), text, revision)
