"""Adapters that were inferred before, kept in the user's cache folder, so that a second process need not infer them.

A kept adapter is proved on the model like any other. What cannot be read, or does not belong here, is ignored.
"""

from __future__ import annotations

import hashlib
import json
import os
from contextlib import suppress
from dataclasses import asdict, fields
from functools import cache
from importlib.metadata import version
from pathlib import Path

from sinkscope.errors import SinkscopeError
from sinkscope.files.output import write_atomic
from sinkscope.files.plain import parse_json
from sinkscope.files.records import build
from sinkscope.models.adapters import Adapter

_KIND = "adapter"
_LARGEST = 1 << 16  # bytes of a file


def cache_adapter(key: str, adapter: Adapter) -> None:
    """Keep an adapter under what it depends on; a folder that cannot be written is left as it is."""
    path = _path(key)
    row = asdict(adapter)
    del row["unproved"]
    content = {"schema": 1, "kind": _KIND, "key": path.stem, "result": row}
    with suppress(OSError, SinkscopeError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, json.dumps(content, indent=1) + "\n")


def cached_adapter(key: str) -> Adapter | None:
    """The adapter that was kept under this key; None if there is none, or none that is whole."""
    path = _path(key)
    try:
        if path.stat().st_size > _LARGEST:
            return None
        content = parse_json(path.read_bytes())
        is_whole = set(content["result"]) == {field.name for field in fields(Adapter)} - {"unproved"}
        if content["kind"] != _KIND or content["key"] != path.stem or not is_whole:
            return None
        return build(Adapter, content["result"], path.name)
    except (OSError, ValueError, KeyError, TypeError, SinkscopeError):
        return None


def _path(key: str) -> Path:
    """The file of a key. What infers adapters, and the version of transformers, belong to the key."""
    digest = hashlib.sha256("\n".join([_maker(), key]).encode()).hexdigest()[:32]
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(base) / "sinkscope" / "adapters" / f"{digest}.json"


@cache
def _maker() -> str:
    """Versions, and the code that infers adapters, which may change within a version while it is developed."""
    code = hashlib.sha256()
    for file in sorted(Path(__file__).parent.glob("*.py")):
        code.update(file.read_bytes())
    return f"sinkscope {version('sinkscope')} transformers {version('transformers')} {code.hexdigest()}"
