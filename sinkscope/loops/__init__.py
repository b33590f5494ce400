"""Repetition in plain token ids: signals, LoopGuard's online monitor, and a checker of texts. Loads no torch."""

from sinkscope.loops.checker import Checked, LoopCalibration, LoopCheck, calibrate, check
from sinkscope.loops.follow import Alarm, Watch
from sinkscope.loops.monitor import VARIANTS, Monitor, MonitorSettings, Step
from sinkscope.loops.signals import (
    Tail,
    collapse_point,
    compression_ratio,
    distinct,
    diversity,
    ends_in_loop,
    is_loop,
    novelty,
    seq_rep,
    survival,
    tail_period,
    type_token_ratio,
)

__all__ = [
    "VARIANTS",
    "Alarm",
    "Checked",
    "LoopCalibration",
    "LoopCheck",
    "Monitor",
    "MonitorSettings",
    "Step",
    "Tail",
    "Watch",
    "calibrate",
    "check",
    "collapse_point",
    "compression_ratio",
    "distinct",
    "diversity",
    "ends_in_loop",
    "is_loop",
    "novelty",
    "seq_rep",
    "survival",
    "tail_period",
    "type_token_ratio",
]
