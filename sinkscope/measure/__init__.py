"""The form of every measurement: a frozen `Result`, a function of a `Setup`, and a figure, under one decorator."""

from sinkscope.files.progress import Progress
from sinkscope.files.provenance import ModelInfo, Provenance
from sinkscope.files.records import Natural, Whole
from sinkscope.measure.margin import mean_of
from sinkscope.measure.measurement import Measurement, measurement
from sinkscope.measure.setup import PIECE, Setup
from sinkscope.models.text import typical_text
from sinkscope.results.result import Result
from sinkscope.results.row import Mean, Row, row_of

__all__ = [
    "PIECE",
    "Mean",
    "Measurement",
    "ModelInfo",
    "Natural",
    "Progress",
    "Provenance",
    "Result",
    "Row",
    "Setup",
    "Whole",
    "mean_of",
    "measurement",
    "row_of",
    "typical_text",
]
