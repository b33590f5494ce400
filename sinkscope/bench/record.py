"""Prompts with their turns and correct answers, and one row for each answer, in a folder that survives a kill.

Prompts may be a file of JSON lines that a user gives.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Field
from typing_extensions import TypedDict

from sinkscope.errors import SinkscopeError
from sinkscope.files.envelope import ModelInfo
from sinkscope.files.output import PathName, path_of, read_json
from sinkscope.files.plain import pathless
from sinkscope.files.records import Finite, Wording, build, check_known, read_rows
from sinkscope.files.store import RECORDS, SETTINGS, Keyed, read_lines

PROMPT_FILE = 'JSON lines with "prompt" (or "turns", each with a "prompt") and "answers"'
COMMAND = "bench"
VERSION = 11
"""Version of the records; a change of what they hold is another setting."""
EndReason = Literal["eos", "cap"]
Metrics = dict[str, Finite | int | None]
"""Numbers by name; None where a number does not exist."""


class _RunSettings(TypedDict):
    """What tables ask of the settings of a run."""

    task: str
    model: ModelInfo
    device: str
    dtype: str
    attention: str


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One answer and what it cost.

    Attributes:
        tokens: Ids of the answer, up to and including the end of sequence if it occurred.
        text: The decoded answer.
        ended: Why it ended: by the end of sequence, or at the maximum of new tokens.
        metrics: Scores and costs by name; None where a number does not exist for this answer. Costs are the
            `prompt_tokens`, with BOS; `length` of the answer; `read`, the cached tokens that a decoding step after the
            first attended to, and `cached_peak`, the most that stayed cached after one, means over layers and kv heads;
            `cells`, the share of the prompt's causal cells that attention covered (None if the method does not change
            prompts); `seconds` of wall-clock time of its batch, divided by the rows; `first_lossy`, the first decoding
            step after the first that read less than with a full cache, which is a sliding window in some layers.
        events: Actions of the method, as `Event` has them. Step s follows s new tokens.
        steps: Numbers for each new token by name.
    """

    tokens: tuple[int, ...]
    text: str
    ended: EndReason
    metrics: Metrics
    events: tuple[dict[str, Any], ...] = ()
    steps: dict[str, tuple[float, ...]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class BenchRecord(Answer, Keyed):
    """One turn of one prompt, answered by one method.

    Attributes:
        method: The method with its settings.
        prompt: Id of the prompt.
        turn: Number of the turn, from 0.
        seed: Seed of the sampling.
        set: Set of the prompt.
        part: Part of the set.
    """

    identity = ("method", "prompt", "turn", "seed")

    method: str
    prompt: str
    turn: int
    seed: int
    set: str
    part: str = ""


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
    path, name = path_of(folder, remedy), pathless(str(folder))
    settings = read_json(path / SETTINGS, remedy)
    if not isinstance(settings, dict) or (settings.get("command"), settings.get("version")) != (COMMAND, VERSION):
        raise SinkscopeError(
            f"{name} is no folder of `sinkscope bench`: {remedy}, or run its command again if another version wrote it"
        )
    build(_RunSettings, settings, f"{name}/{SETTINGS}", "a new --out to its command, because this file is damaged")
    records, _ = read_lines(path / RECORDS, name, BenchRecord)
    return BenchRun(records, settings)


@dataclass(frozen=True)
class Turn:
    """One question of a prompt.

    Attributes:
        text: What the user says.
        answers: Correct answers. The first one is the history of later turns.
        metric: Name of the score of `sinkscope.bench.scores`.
        scored: Whether the model answers it and the answer counts. False: it is only what was said before.
    """

    text: Annotated[str, Field(validation_alias="prompt", pattern=r"\S"), Wording("a text")]
    answers: tuple[str, ...] = ()
    metric: str = "contains"
    scored: Annotated[bool, Field(validation_alias="score")] = True


@dataclass(frozen=True)
class Prompt:
    """What a model is asked: one turn, or several that follow one another.

    Attributes:
        id: Unique in its task.
        turns: The turns in order.
        set: Set that the prompt belongs to; tables have separate rows for each set.
        part: Part of the set, such as a position of the question.
    """

    id: str
    turns: Annotated[tuple[Turn, ...], Field(min_length=1)]
    set: str
    part: str = ""

    @property
    def scored_turns(self) -> list[int]:
        """The numbers of the turns that the model answers, from 0."""
        return [number for number, turn in enumerate(self.turns) if turn.scored]


TURN_FIELDS = ("prompt", "answers", "metric", "score")
PROMPT_FIELDS = ("id", "set", "part")
"""What a record of a file of prompts may have, with "turns" in place of the fields of its only turn."""


def read_prompts(path: PathName) -> list[Prompt]:
    """Read prompts from JSON lines, or from one JSON array.

    A record has `prompt`, `answers`, `metric` and `score`, or `turns`, each of which has them. It may have `id`, `set`
    and `part`.

    Raises:
        SinkscopeError: The file cannot be read, or a record has no prompt or a field that is unknown (names the line).
    """
    prompts: list[Prompt] = []
    for where, row in read_rows(path, PROMPT_FILE):
        if isinstance(row, dict):
            _check_fields(row, where)
            row = {"set": "file", "turns": [row], **row, "id": str(row.get("id", len(prompts)))}
        prompts.append(build(Prompt, row, where, PROMPT_FILE))
    return prompts


def _check_fields(row: dict[str, Any], where: str) -> None:
    """Refuse fields of a record, or of one of its turns, that nothing reads."""
    turns = row.get("turns")
    if turns is None:
        check_known(row, (*PROMPT_FIELDS, "turns", *TURN_FIELDS), where)
        return
    check_known(row, (*PROMPT_FIELDS, "turns"), where)
    if isinstance(turns, list):
        for number, turn in enumerate(turns):
            if isinstance(turn, dict):
                check_known(turn, TURN_FIELDS, f"{where}: turns[{number}]")
