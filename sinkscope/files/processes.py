"""The processes that torchrun started together; read from its variables, without torch."""

from __future__ import annotations

import os


def world_size() -> int:
    """Return the number of processes that torchrun started together; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def is_first() -> bool:
    """Return whether this is the process that prints and writes."""
    return os.environ.get("RANK", "0") == "0"
