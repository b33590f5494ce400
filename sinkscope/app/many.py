"""`scan_many` scans several models, each into a folder of its own, on any executor."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sinkscope.app.processes import Processes
from sinkscope.app.scan import scan
from sinkscope.errors import SinkscopeError
from sinkscope.files.plain import pathless, visible

_TURN = threading.Lock()
"""Scans change what belongs to a whole process, such as its random numbers: threads of one process take turns."""


@dataclass(frozen=True)
class Outcome:
    """What became of one model.

    Attributes:
        folder: Name of its folder.
        problem: Why it has no card; None if it has one.
    """

    folder: str
    problem: str | None = None


def scan_one(model: str, folder: str, settings: Mapping[str, Any]) -> Outcome:
    """Scan a model in a worker; what goes wrong with it is part of the answer."""
    try:
        with _TURN:
            scan(model, out=folder, **settings)
    except Exception as error:
        if isinstance(error, SinkscopeError):
            return Outcome(Path(folder).name, str(error))
        return Outcome(Path(folder).name, f"{type(error).__name__}: {visible(pathless(str(error)))}")
    return Outcome(Path(folder).name)


def scan_many(models: Sequence[str | Path], out: str | Path, executor: Any = None, **settings: Any) -> list[Outcome]:
    """Scan several models, each into a folder of its own below `out`.

    Args:
        models: Short names, hub ids, folders or .gguf files.
        out: Folder for the folders of the scans.
        executor: Any object with `submit(function, *arguments)` whose results have `result()`.
        settings: As for `scan`.
    """
    if executor is None:
        with Processes(2) as pool:
            return scan_many(models, out, pool, **settings)
    jobs: list[Any] = []
    for model in models:
        jobs.append(executor.submit(scan_one, str(model), str(Path(out) / Path(model).name), settings))
    return [job.result() for job in jobs]
