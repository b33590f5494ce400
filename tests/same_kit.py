"""Whether two results say the same: numbers up to rounding, and everything else exactly."""

from __future__ import annotations

import json
from typing import Any


def plain(value: Any) -> Any:
    """Tensors, arrays and results as lists and numbers."""
    if hasattr(value, "to_json"):
        whole = json.loads(value.to_json())
        return {name: whole[name] for name in ("result", "settings")}
    if hasattr(value, "detach"):
        value = value.detach().float()
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, dict):
        return {str(name): plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple | set):
        return [plain(item) for item in value]
    return value if isinstance(value, int | float | str | None) else str(value)


def differences(wanted: Any, found: Any, near: float = 1e-5, *, lacks: bool = False, where: str = "") -> list[str]:
    """Where two plain values differ; how long something took is not compared.

    Args:
        wanted: What it should be.
        found: What it is.
        near: By how much numbers may differ, as a share of those above one.
        lacks: Whether None may stand for any value.
        where: Its place in the whole.
    """
    if lacks and found is None:
        return []
    if isinstance(wanted, list) and isinstance(found, list):
        wanted, found = dict(enumerate(wanted)), dict(enumerate(found))
    if isinstance(wanted, dict) and isinstance(found, dict) and wanted.keys() == found.keys():
        said = []
        for part in wanted:
            if "seconds" not in str(part):
                said += differences(wanted[part], found[part], near, lacks=lacks, where=f"{where}[{part!r}]")
        return said
    same = wanted == found or (wanted != wanted and found != found)  # both are NaN
    if isinstance(wanted, float) and isinstance(found, int | float):
        same |= abs(wanted - found) <= near * max(1, abs(wanted))
    return [] if same else [f"{where}: {str(wanted)[:120]} became {str(found)[:120]}"]
