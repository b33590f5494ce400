"""Published results about models' sinks, as records."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

SET_QUANTITIES = ("layers", "neurons", "residual_dims")
"""Quantities of which a source may list a part: the measured set has to contain it."""


@dataclass(frozen=True)
class Published:
    """A published result.

    Attributes:
        model: Short name, or id on the hub.
        quantity: What is reported; a "note" is a fact that nothing here measures.
        value: What is reported.
        source: Who reports it.
        where: Section, table or file of the source.
        tolerance: Largest difference, in the unit of the value, with which a measured number agrees.
        revision: Branch, tag or commit on the hub, if the source names it.
        primary: Whether the source itself was read.
    """

    model: str
    quantity: str
    value: Any
    source: str
    where: str = ""
    tolerance: float = 0.0
    revision: str | None = None
    primary: bool = False

    def fits(self, measured: Any) -> bool:
        """Return whether a measured value agrees: a set contains what is reported, a number is within the tolerance."""
        if self.quantity in SET_QUANTITIES:
            return set(self.value) <= set(measured)
        if np.shape(self.value) != np.shape(measured):
            return False
        return bool(np.allclose(self.value, measured, rtol=0, atol=self.tolerance + 1e-9))


@cache
def published() -> tuple[Published, ...]:
    """Return the records beside this file."""
    content = tomllib.loads(Path(__file__).with_name("published.toml").read_text(encoding="utf-8"))
    records = list[Published]()
    for record in content["record"]:
        value = record["value"]
        records.append(Published(**record | {"value": tuple(value) if isinstance(value, list) else value}))
    return tuple(records)
