"""The form of every measurement: a frozen `Result`, a function of a `Setup`, and a figure, under one decorator."""

from sinkscope.files.records import Natural, Whole
from sinkscope.measure.margin import mean_of
from sinkscope.measure.measurement import Measurement, measurement
from sinkscope.measure.setup import Setup
from sinkscope.models.text import typical_text
from sinkscope.results.result import Result
from sinkscope.results.row import Mean, Row, row_of

__all__ = [
    "Mean",
    "Measurement",
    "Natural",
    "Result",
    "Row",
    "Setup",
    "Whole",
    "mean_of",
    "measurement",
    "row_of",
    "typical_text",
]
