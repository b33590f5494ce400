"""The command `sinkscope models`."""

from __future__ import annotations

import json
from typing import Annotated

from sinkscope.files.console import emit
from sinkscope.files.options import Option
from sinkscope.files.plain import plain
from sinkscope.files.tables import Grid
from sinkscope.models.names import models


def print_models(
    *, json_file: Annotated[str | None, Option("--json", metavar="FILE|-", writes=True)] = None, wide: bool = False
) -> None:
    """List the short names of public models, and the layers in which papers found their sinks.

    Args:
        json_file: Write the list as JSON; - is standard output.
        wide: Show the published neurons, the residual dimensions and the source as well.

    Example:
        sinkscope models
    """
    known = models()
    if json_file is not None:
        emit(json_file, json.dumps({"schema": 1, "kind": "models", "result": plain(known)}, indent=1) + "\n")
    if json_file == "-":
        return
    with_sink = sum(entry.published is not None for entry in known)
    print(f"Conclusion: papers report a sink or massive activation for {with_sink} of these {len(known)} models.\n")
    head = ("name", "hub id", "published sink", "source") if wide else ("name", "hub id", "sink layer")
    rows: list[tuple[str, ...]] = []
    for entry in known:
        if entry.published is None:
            rows.append((entry.name, entry.hub_id, *("-" for _ in head[2:])))
        elif wide:
            rows.append((entry.name, entry.hub_id, *entry.published.shown()))
        else:
            rows.append((entry.name, entry.hub_id, ", ".join(map(str, entry.published.layers))))
    print(Grid(head, rows).text())
