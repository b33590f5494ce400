"""The form of every measurement: a frozen `Result`, a function of a `Setup`, and a figure, under one decorator."""

from typing import TYPE_CHECKING, NoReturn

from sinkscope.errors import no_such_name
from sinkscope.files.records import Natural, Whole
from sinkscope.measure.margin import mean_of
from sinkscope.measure.measurement import Measurement, measurement
from sinkscope.measure.setup import Setup
from sinkscope.models.text import typical_text
from sinkscope.results.mean import Mean
from sinkscope.results.notation import Component, Head, Neuron
from sinkscope.results.result import Result
from sinkscope.results.table import Row, Subject, column, detail, optional

__all__ = [
    "Component",
    "Head",
    "Mean",
    "Measurement",
    "Natural",
    "Neuron",
    "Result",
    "Row",
    "Setup",
    "Subject",
    "Whole",
    "column",
    "detail",
    "mean_of",
    "measurement",
    "optional",
    "typical_text",
]

if not TYPE_CHECKING:

    def __getattr__(name: str) -> NoReturn:
        """Refuse a name that is not here, with the nearest one."""
        raise no_such_name(__name__, name, __all__)
