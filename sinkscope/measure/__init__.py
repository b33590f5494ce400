"""The form of every measurement: a frozen `Result`, a function of a `Setup`, and a figure, under one decorator."""

from typing import TYPE_CHECKING, NoReturn

from sinkscope.errors import no_such_name
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

if not TYPE_CHECKING:

    def __getattr__(name: str) -> NoReturn:
        """Refuse a name that is not here, with the nearest one."""
        raise no_such_name(__name__, name, __all__)
