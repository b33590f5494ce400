"""One row for each answer, kept in a folder that survives a killed run."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import AfterValidator
from typing_extensions import TypedDict

from sinkscope.bench.methods import Method
from sinkscope.errors import SinkscopeError
from sinkscope.files.output import PathName, path_of, read_json
from sinkscope.files.plain import pathless
from sinkscope.files.records import Finite, checked_value
from sinkscope.files.store import RECORDS, SETTINGS, Keyed, read_lines

COMMAND = "bench"
VERSION = 9
"""Version of the records; a change of what they hold is another setting."""
EndReason = Literal["eos", "cap"]
Metrics = dict[str, Finite | int | None]
"""Numbers by name; None where a number does not exist."""


class _PromptSettings(TypedDict):
    """What tables ask of every record's settings; prompts may have more."""

    set: str
    temperature: Finite


class _Costs(TypedDict):
    """What tables ask of every record's metrics; tasks have more."""

    seconds: Finite | None


class _Model(TypedDict):
    """A model as the settings of a run have it."""

    name: str
    family: str
    n_layers: int
    d_model: int
    d_mlp: int
    fingerprint: str


class _RunSettings(TypedDict):
    """What tables ask of the settings of a run."""

    model: _Model
    device: str
    dtype: str
    attention: str


def _checked_settings(settings: dict[str, Any]) -> dict[str, Any]:
    checked_value(_PromptSettings, settings, "", strict=True)
    return settings


def _checked_metrics(metrics: Metrics) -> Metrics:
    checked_value(_Costs, metrics, "", strict=True)
    return metrics


@dataclass(frozen=True)
class BenchRecord(Keyed):
    """One turn of one prompt, answered by one method.

    Attributes:
        model: Fingerprint of the model.
        task: Name of the task.
        method: The method with its settings.
        prompt: Id of the prompt.
        turn: Number of the turn, from 0.
        seed: Seed of the sampling.
        settings: The prompt's set, part and other properties, and the temperature.
        metrics: Scores and costs by name; None where a number does not exist for this answer.
        tokens: Ids of the answer, up to and including the end of sequence if it occurred.
        text: The decoded answer.
        ended: Why it ended: by the end of sequence, or at the maximum of new tokens.
        events: Actions of the method, as `Event` has them. Step s follows s new tokens.
        steps: Numbers for each new token by name, such as the probability of the model's top prediction.
    """

    identity = ("model", "task", "method", "prompt", "turn", "seed")

    model: str
    task: str
    method: Method
    prompt: str
    turn: int
    seed: int
    settings: Annotated[dict[str, Any], AfterValidator(_checked_settings)]
    metrics: Annotated[Metrics, AfterValidator(_checked_metrics)]
    tokens: tuple[int, ...]
    text: str
    ended: EndReason
    events: tuple[dict[str, Any], ...] = ()
    steps: dict[str, tuple[float, ...]] = field(default_factory=dict)


class BenchRun(list[BenchRecord]):
    """Records of a run, as they were finished or as they were asked for.

    Attributes:
        settings: Settings of the run.
    """

    def __init__(self, records: Iterable[BenchRecord], settings: dict[str, Any]) -> None:
        super().__init__(records)
        self.settings = settings


def read_run(folder: PathName) -> BenchRun:
    """Read a folder of `sinkscope bench`, even while it is being written.

    Raises:
        SinkscopeError: The folder is missing or belongs to another command, or a file in it is damaged.
    """
    remedy = "give what --out was given"
    path = path_of(folder, remedy)
    name = pathless(str(folder))
    settings = read_json(path / SETTINGS, remedy)
    if not isinstance(settings, dict) or settings.get("command") != COMMAND:
        raise SinkscopeError(f"{name} is no folder of `sinkscope bench`: {remedy}")
    if settings.get("version") != VERSION:
        raise SinkscopeError(
            f"{name} was written by another version of sinkscope: run its command again with a new --out"
        )
    then = f"; {SETTINGS} is damaged: run its command again with a new --out"
    checked_value(_RunSettings, settings, f"{name}/{SETTINGS}", strict=True, then=then)
    records: list[BenchRecord] = []
    if (path / RECORDS).is_file():
        records, _ = read_lines(path / RECORDS, name, BenchRecord)
    return BenchRun(records, settings)
