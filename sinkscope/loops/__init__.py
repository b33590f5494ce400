"""Repetition in plain token ids: signals, LoopGuard's online monitor, and a checker of texts.

Nothing here loads torch; `sinkscope.loops.guard` has what acts on a model.
"""

from typing import TYPE_CHECKING, NoReturn

from sinkscope.errors import no_such_name
from sinkscope.loops.text.answers import Piece
from sinkscope.loops.text.check import LoopCheck, check, check_file
from sinkscope.loops.text.monitor import Monitor, MonitorSettings, PaperSettings
from sinkscope.loops.text.signals import (
    Step,
    Tail,
    compression_ratio,
    is_loop,
    tail_period,
    type_token_ratio,
)
from sinkscope.loops.text.watch import CheckedOutput, Watch

__all__ = [
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
    "is_loop",
    "tail_period",
    "type_token_ratio",
]

if not TYPE_CHECKING:

    def __getattr__(name: str) -> NoReturn:
        """Refuse a name that is not here, with the nearest one."""
        raise no_such_name(__name__, name, __all__)
