"""Published results about models' sinks, as records: the table of the package, and files of one's own."""

from __future__ import annotations

import os
import tomllib
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import Field

from sinkscope.errors import SinkscopeError
from sinkscope.files.output import read_text
from sinkscope.files.records import Finite, Natural, Share, Whole, check, checked

TABLE = Path(__file__).with_name("published.toml")
SOME = Field(min_length=1)
Words = Annotated[str, SOME]
Numbers = Annotated[tuple[Whole, ...], SOME]

QUANTITIES: dict[str, Any] = {
    "layers": Numbers,
    "neurons": Annotated[tuple[tuple[Whole, Whole], ...], SOME],
    "residual_dims": Numbers,
    "repeats": Natural,
    "massive_layers": tuple[Whole, Whole],
    "massive_values": Annotated[tuple[tuple[Whole, Finite], ...], SOME],
    "top_dims": Numbers,
    "sink_rate": Share,
    "sink_rate_random": Share,
    "sink_rate_repeated": Share,
    "attention_to_first": Share,
    "note": Words,
}
"""The quantities that a record may have, and the type of their values; a note is a fact that nothing here measures."""
SETS = ("layers", "neurons", "residual_dims", "top_dims")
"""Quantities of which a source may list a part: the measured set has to contain it."""


@checked
class Published:
    """A published result.

    Attributes:
        model: Short name, or id on the hub.
        quantity: One of `QUANTITIES`.
        value: What is reported.
        source: Who reports it.
        where: Section, table or file of the source.
        tolerance: Largest difference, in the unit of the value, with which a measured number agrees.
        revision: Branch, tag or commit on the hub, if the source names it.
        primary: Whether the source itself was read.
    """

    model: Words
    quantity: str
    value: Any
    source: Words
    where: str = ""
    tolerance: Annotated[Finite, Field(ge=0)] = 0.0
    revision: str | None = None
    primary: bool = False

    def __post_init__(self) -> None:
        if self.quantity not in QUANTITIES:
            raise SinkscopeError(f"quantity {self.quantity!r} is unknown, expected one of {', '.join(QUANTITIES)}")
        value = check(self.value, QUANTITIES[self.quantity], self.quantity, "what the source reports")
        object.__setattr__(self, "value", value)

    def agrees(self, measured: Any) -> bool:
        """Whether a measured value agrees: a set contains what is reported, a number is within the tolerance."""
        if self.quantity in SETS:
            return set(self.value) <= set(measured)
        if np.shape(self.value) != np.shape(measured):
            return False
        return bool(np.allclose(self.value, measured, rtol=0, atol=self.tolerance + 1e-9))

    def contradicts(self, other: Published) -> bool:
        """Whether another record of the same model and quantity cannot be right as well."""
        if self.quantity == "note" or (self.model, self.quantity) != (other.model, other.quantity):
            return False
        return not (self.agrees(other.value) or other.agrees(self.value))


def read_published(path: str | os.PathLike[str]) -> tuple[Published, ...]:
    """The records of a TOML file, which are its tables [[record]].

    Raises:
        SinkscopeError: It cannot be read, or a record is not valid; the message names the first.
    """
    try:
        given = tomllib.loads(read_text(str(path))).get("record", [])
    except tomllib.TOMLDecodeError as error:
        raise SinkscopeError(f"{path} is not TOML: {error}") from None
    return check(given, Annotated[tuple[Published, ...], SOME], f"record of {path}", "tables [[record]]")


@cache
def published() -> tuple[Published, ...]:
    """The records of the package."""
    return read_published(TABLE)
