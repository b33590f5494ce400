"""Models of the paper's tables: published weights, or those in a folder."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from sinkscope.errors import SinkscopeError

ABSENT = "no weights at hand"
_NOT_HAD = ("hub-unreachable", "gated-repo")  # pages of the errors that mean it
Measured = TypeVar("Measured")


def measured(models: Sequence[str], measure: Callable[[str, str], Measured]) -> dict[str, Measured]:
    """What `measure(name, model)` gives for each NAME or NAME=FOLDER, without what cannot be had here."""
    found: dict[str, Measured] = {}
    for entry in models:
        name, given, folder = entry.partition("=")
        if given and not Path(folder).is_dir():
            raise SinkscopeError(f"--models {entry!r}: expected NAME=FOLDER with a folder that is there")
        try:
            found[name] = measure(name, folder or name)
        except SinkscopeError as error:
            if error.page not in _NOT_HAD:
                raise
            print(f"{name}: {error}", file=sys.stderr)
    return found
