"""Samplers that a benchmark compares with caches and guards: what they do to the scores of the next token."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from pydantic import Field

from sinkscope.files.records import Natural, check_fields
from sinkscope.loops.guard.steer import DRY

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


@dataclass(frozen=True, kw_only=True)
class Sampler(ABC):
    """Base of samplers: a frozen dataclass of settings.

    Attributes:
        unnamed: The setting that may stand alone after the name, as in "temperature:0.7".
        temperature: The temperature; 0 is greedy, and None that of the run.
    """

    unnamed: ClassVar[str]
    temperature: ClassVar[float | None] = None

    def __post_init__(self) -> None:
        check_fields(self)

    @abstractmethod
    def processors(self, pad: int) -> list[Any]:
        """Return what changes the scores, for rows that are padded with an id."""


@dataclass(frozen=True, kw_only=True)
class Temperature(Sampler):
    """Sampling at a temperature.

    Attributes:
        value: The temperature, above 0.
    """

    unnamed: ClassVar[str] = "value"

    value: Positive = 0.7

    @property
    def temperature(self) -> float:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Return the temperature."""
        return self.value

    def processors(self, pad: int) -> list[Any]:
        """Return nothing: the task draws, so that its draws depend on the seed and the prompt alone."""
        return []


@dataclass(frozen=True, kw_only=True)
class Dry(Sampler):
    """DRY, as `ss.loops.DRY` has it.

    Attributes:
        multiplier: As for `ss.loops.DRY`.
        base: As for `ss.loops.DRY`.
        allowed_length: As for `ss.loops.DRY`.
    """

    unnamed: ClassVar[str] = "multiplier"

    multiplier: Positive = 0.8
    base: Annotated[float, Field(ge=1, allow_inf_nan=False)] = 1.75
    allowed_length: Natural = 2

    def processors(self, pad: int) -> list[Any]:
        """Return the sampler, for which padding repeats nothing."""
        return [DRY(self.multiplier, self.base, self.allowed_length, ignore=(pad,))]


@dataclass(frozen=True, kw_only=True)
class RepetitionPenalty(Sampler):
    """The repetition penalty of transformers (Keskar et al. 2019, CTRL, section 4.1).

    Attributes:
        penalty: Divides positive scores of tokens that were there, and multiplies negative ones.
    """

    unnamed: ClassVar[str] = "penalty"

    penalty: Positive = 1.1

    def processors(self, pad: int) -> list[Any]:
        """Return the sampler."""
        from transformers import RepetitionPenaltyLogitsProcessor

        return [RepetitionPenaltyLogitsProcessor(self.penalty)]


SAMPLERS: dict[str, type[Sampler]] = {"temperature": Temperature, "dry": Dry, "repetition-penalty": RepetitionPenalty}
"""The samplers by the names of their methods."""
