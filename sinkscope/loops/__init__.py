"""Repetition in plain token ids: signals, LoopGuard's online monitor, and a checker of texts.

Nothing here loads torch until `DRY` is first used.
"""

from typing import TYPE_CHECKING, Any

from sinkscope.loops.text.answers import Piece
from sinkscope.loops.text.check import LoopCheck, check, check_file
from sinkscope.loops.text.monitor import Monitor, MonitorSettings, PaperSettings
from sinkscope.loops.text.signals import (
    Step,
    Tail,
    compression_ratio,
    ends_in_loop,
    is_loop,
    tail_period,
    type_token_ratio,
)
from sinkscope.loops.text.watch import CheckedOutput, Watch

if TYPE_CHECKING:
    from sinkscope.loops.guard.steer import DRY

__all__ = [
    "DRY",
    "CheckedOutput",
    "LoopCheck",
    "Monitor",
    "MonitorSettings",
    "PaperSettings",
    "Piece",
    "Step",
    "Tail",
    "Watch",
    "check",
    "check_file",
    "compression_ratio",
    "ends_in_loop",
    "is_loop",
    "tail_period",
    "type_token_ratio",
]


def __getattr__(name: str) -> Any:
    if name == "DRY":
        from sinkscope.loops.guard.steer import DRY

        return DRY
    raise AttributeError(f"module 'sinkscope.loops' has no attribute {name!r}")
