"""The shape of every measurement: a frozen `Result`, a function of a `Setup`, a figure, under one decorator."""

from sinkscope.measure.measurement import Measurement, Output, command, measurement
from sinkscope.measure.setup import PIECE, Rows, Setup, read_whole
from sinkscope.progress import Progress
from sinkscope.registry import Count, Hidden, Option, Positive
from sinkscope.results import ModelInfo, Provenance, Result

__all__ = [
    "PIECE",
    "Count",
    "Hidden",
    "Measurement",
    "ModelInfo",
    "Option",
    "Output",
    "Positive",
    "Progress",
    "Provenance",
    "Result",
    "Rows",
    "Setup",
    "command",
    "measurement",
    "read_whole",
]
