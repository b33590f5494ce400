"""Published results about models' sinks, as records: the table of the package, and files of one's own."""

from __future__ import annotations

import os
import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import Field

from sinkscope.errors import SinkscopeError
from sinkscope.files.output import read_text
from sinkscope.files.records import Finite, Natural, Share, Whole, build

SOME = Field(min_length=1)
Words = Annotated[str, SOME]
Name = Annotated[str, Field(pattern=r"^L\d+\.(E\d+\.)?N\d+$")]
Numbers = Annotated[tuple[Whole, ...], SOME]

QUANTITIES: dict[str, Any] = {
    "layers": Numbers,
    "neurons": Annotated[tuple[Name, ...], SOME],
    "residual_dims": Numbers,
    "repeats": Natural,
    "massive_layers": tuple[Whole, Whole],
    "sink_rate": Share,
    "note": Words,
}
"""The quantities that a record may have, and the type of their values; a note is a fact that nothing here measures."""
SET_QUANTITIES = ("layers", "neurons", "residual_dims")
"""Quantities of which a source may list a part: the measured set has to contain it."""


@dataclass(frozen=True)
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
        value = build(QUANTITIES[self.quantity], self.value, self.quantity, "what the source reports")
        object.__setattr__(self, "value", value)

    def fits(self, measured: Any) -> bool:
        """Return whether a measured value agrees: a set contains what is reported, a number is within the tolerance."""
        if self.quantity in SET_QUANTITIES:
            return set(self.value) <= set(measured)
        if np.shape(self.value) != np.shape(measured):
            return False
        return bool(np.allclose(self.value, measured, rtol=0, atol=self.tolerance + 1e-9))


@dataclass
class RecordFile:
    """A file of published results: its tables [[record]]."""

    record: Annotated[tuple[Published, ...], SOME]


def read_published(path: str | os.PathLike[str]) -> tuple[Published, ...]:
    """Return the records of a TOML file, which are its tables [[record]].

    Raises:
        SinkscopeError: It cannot be read, or a record is not valid; the message names the first.
    """
    try:
        content = tomllib.loads(read_text(str(path)))
    except tomllib.TOMLDecodeError as error:
        raise SinkscopeError(f"{path} is not TOML: {error}; expected tables [[record]]") from None
    return build(RecordFile, content, str(path), "tables [[record]] with model, quantity, value and source").record


@cache
def published() -> tuple[Published, ...]:
    """Return the records of the package."""
    return read_published(Path(__file__).with_name("published.toml"))
