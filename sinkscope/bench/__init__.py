"""Benchmarks: prompts built by a rule, methods run on them, and tables that include the papers' numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from sinkscope.bench import tasks as tasks  # which registers them
from sinkscope.bench.benchmark import run
from sinkscope.bench.record import read_prompts
from sinkscope.bench.table import bench_table
from sinkscope.bench.tasks.loops import DATA as LOOPBENCH
from sinkscope.bench.tasks.loops import Loops
from sinkscope.bench.tasks.recall import POSITIONS, Recall, recall_dialogue
from sinkscope.bench.tasks.text import TextFidelity
from sinkscope.errors import no_such_name

__all__ = [
    "LOOPBENCH",
    "POSITIONS",
    "Loops",
    "Recall",
    "TextFidelity",
    "bench_table",
    "read_prompts",
    "recall_dialogue",
    "run",
    "tasks",
]

if not TYPE_CHECKING:

    def __getattr__(name: str) -> NoReturn:
        """Refuse a name that is not here, with the nearest one."""
        raise no_such_name(__name__, name, __all__)
