"""The form of every measurement: a frozen `Result`, a function of a `Setup`, and a figure, under one decorator."""

from sinkscope.files.progress import Progress
from sinkscope.files.provenance import ModelInfo, Provenance
from sinkscope.files.records import Natural, Whole
from sinkscope.measure.measurement import EDIT_PARAMETERS, SETUP_PARAMETERS, Measurement, measurement
from sinkscope.measure.setup import PIECE, Setup
from sinkscope.models.text import typical_text
from sinkscope.results.result import Number, Result

__all__ = [
    "EDIT_PARAMETERS",
    "PIECE",
    "SETUP_PARAMETERS",
    "Measurement",
    "ModelInfo",
    "Natural",
    "Number",
    "Progress",
    "Provenance",
    "Result",
    "Setup",
    "Whole",
    "measurement",
    "typical_text",
]
