"""patch.json: what a patch is, on disk."""

from __future__ import annotations

import json
from os import PathLike
from pathlib import Path
from typing import Any

from sinkscope.errors import SinkscopeError
from sinkscope.output import write_atomic

SCHEMA, KIND = 1, "sink-patch"
_PAGE = "patch-file"


def write_patch(path: str | PathLike[str], content: dict[str, Any]) -> None:
    """Write beside the file and rename, so that a reader never sees half of it.

    Raises:
        SinkscopeError: the path cannot be written.
    """
    write_atomic(path, json.dumps({"schema": SCHEMA, "kind": KIND, **content}, indent=2) + "\n")


def read_patch(path: str | PathLike[str]) -> dict[str, Any]:
    """The checked content of a patch file: model, site, value, sites.

    Raises:
        SinkscopeError: with the field that is wrong.
    """
    name = Path(path).name
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise SinkscopeError(
            f"cannot read {path}: {error.strerror or error}; make a patch with `sinkscope patch make`", page=_PAGE
        ) from None
    except ValueError as error:
        raise SinkscopeError(f"{name} is not JSON ({error}): expected a patch file of sinkscope", page=_PAGE) from None
    if not isinstance(content, dict) or content.get("kind") != KIND:
        kind = content.get("kind") if isinstance(content, dict) else type(content).__name__
        raise SinkscopeError(f'{name} has kind {kind!r}: expected a patch file, with kind "{KIND}"', page=_PAGE)
    if content.get("schema") != SCHEMA:
        raise SinkscopeError(
            f"{name} has schema {content.get('schema')!r}, this version reads {SCHEMA}: make the patch again",
            page=_PAGE,
        )
    checks: dict[str, tuple[bool, str]] = {
        "site": (content.get("site") in ("post", "up"), '"post" or "up"'),
        "value": (
            content.get("value") in ("second", "calibrated") or _number(content.get("value")),
            '"second", "calibrated" or a number',
        ),
        "sites": (isinstance(content.get("sites"), list) and bool(content["sites"]), "a list of sites"),
        "model": (isinstance(content.get("model"), dict | None), "an object or null"),
    }
    for field, (good, expected) in checks.items():
        _require(name, field, content.get(field), good, expected)
    for i, entry in enumerate(content["sites"]):
        _require(name, f"sites[{i}]", entry, isinstance(entry, dict), "an object")
        for field in ("layer", "neuron", "expert"):
            value = entry.setdefault(field, None)
            good = (isinstance(value, int) and not isinstance(value, bool) and value >= 0) or (
                field == "expert" and value is None
            )
            _require(name, f"sites[{i}].{field}", value, good, "a whole number from 0")
        value = entry.setdefault("calibrated", None)
        _require(name, f"sites[{i}].calibrated", value, value is None or _number(value), "a number or null")
    return {
        "site": content["site"],
        "value": content["value"],
        "sites": content["sites"],
        "model": content.get("model"),
    }


def _require(name: str, field: str, value: object, good: bool, expected: str) -> None:
    if not good:
        what = "is missing" if value is None else f"is {json.dumps(value)[:80]}"
        raise SinkscopeError(f"{name}: field {field} {what}; expected {expected}", page=_PAGE)


def _number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < float("inf")
