"""Models of the paper's tables: published weights, or those in a folder."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from sinkscope.errors import SinkscopeError
from sinkscope.models.checkpoints.hub import HubError

ABSENT = "no weights at hand"
Measured = TypeVar("Measured")


def measured(models: Sequence[str], measure: Callable[[str, str], Measured]) -> dict[str, Measured]:
    """What `measure(name, model)` gives for each NAME or NAME=FOLDER, without what cannot be had here."""
    wanted: dict[str, str] = {}
    for entry in models:  # all are checked before the first is measured, which takes long
        name, given, folder = entry.partition("=")
        if given and not (name and folder and Path(folder).is_dir()):
            raise SinkscopeError(f"--models {entry!r}: expected NAME=FOLDER with a folder that is there")
        wanted[name] = folder or name
    found: dict[str, Measured] = {}
    for name, model in wanted.items():
        try:
            found[name] = measure(name, model)
        except HubError as error:
            print(f"{name}: {error}", file=sys.stderr)
    return found
