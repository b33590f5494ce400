"""A task: prompts for a model, and the score of each answer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from pydantic import Field, Strict

from sinkscope.bench.answer import Batch, answer_rows, conversation_ids
from sinkscope.bench.checks import check_answers, check_prompts
from sinkscope.bench.methods import FULL, SAMPLING, make_method
from sinkscope.bench.record import Answer, BenchRecord, Metrics, Prompt, Turn, read_prompts
from sinkscope.bench.scores import score
from sinkscope.errors import SinkscopeError
from sinkscope.files.output import path_of
from sinkscope.files.records import Budget, Wording, check_fields, read_settings, setting_types
from sinkscope.generation.decode import row_sampler
from sinkscope.models.target import Target

TASKS: dict[str, type[Task]] = {}
"""Tasks by name."""
Size = Annotated[int, Strict(), Field(ge=1, le=1 << 20), Wording(f"a whole number from 1 to {1 << 20}")]
"""A setting of a task that is a number of things."""


@dataclass(frozen=True, kw_only=True)
class Task(ABC):
    """Base of all tasks: a frozen dataclass of settings. Prompts may have several turns, which follow correct answers.

    A subclass with a `name` is found by it, which must be no other's.

    Attributes:
        name: Name in records and tables.
        main: Metric by which methods are compared.
        low_is_good: Whether a small value of that metric is good.
        unit: What the metric counts, in words.
        share: Whether it is a share, 0 to 1.
        control: Method whose value a conclusion states beside the best one.
        columns: Further metrics that tables show.
        budget: Budget of methods that state none.
        model: Model that answers by default; None for the bundled model.
        together: Whether all methods answer a batch in one pass.
        by_answers: Whether answers are scored by the right ones that prompts have.
        chat: Whether turns are wrapped in the tokenizer's chat template.
    """

    name: ClassVar[str]
    main: ClassVar[str] = "score"
    low_is_good: ClassVar[bool] = False
    unit: ClassVar[str] = "score"
    share: ClassVar[bool] = True
    control: ClassVar[str] = FULL
    columns: ClassVar[tuple[str, ...]] = ()
    budget: ClassVar[Budget] = 0.125
    model: ClassVar[str | None] = None
    together: ClassVar[bool] = False
    by_answers: ClassVar[bool] = False

    chat: bool = False

    def __init_subclass__(cls) -> None:
        if "name" in vars(cls) and TASKS.setdefault(cls.name, cls) is not cls:
            raise SinkscopeError(f"two tasks are called {cls.name!r}: give one of them another name")

    def __post_init__(self) -> None:
        check_fields(self)

    @abstractmethod
    def prompts(self, target: Target) -> Sequence[Prompt]:
        """Return the prompts for a model."""

    def prompts_of_file(self) -> Sequence[Prompt] | None:
        """Return the prompts that a file has, which are checked before a model is read; None if the task makes them."""
        return None

    def check(self, prompts: Sequence[Prompt]) -> None:
        """Refuse prompts that cannot be answered or scored.

        Raises:
            SinkscopeError: The first such prompt is named.
        """
        check_prompts(prompts)
        if self.by_answers:
            check_answers(prompts)

    def new_tokens(self, target: Target) -> int:
        """Return the maximum length of an answer, if the user gives none."""
        return 64

    def answers(self, target: Target, batch: Batch) -> list[BenchRecord]:
        """Answer all scored turns of the prompts, turn after turn."""
        method, records = batch.methods[0], list[BenchRecord]()
        for number in range(max(len(prompt.turns) for prompt in batch.prompts)):
            prompts = [prompt for prompt in batch.prompts if number in prompt.scored_turns]
            if not prompts:
                continue
            rows = [conversation_ids(target, prompt, number, self.chat) for prompt in prompts]
            temperature, sampler = 1.0 if method == SAMPLING else batch.temperature, None
            if temperature:
                sampler = row_sampler(temperature, batch.seed, [prompt.id for prompt in prompts])
            written = answer_rows(target, rows, batch.new, make_method(method), sampler=sampler)
            for prompt, answer in zip(prompts, written, strict=True):
                metrics = self.score(target, batch, prompt.turns[number], answer)
                records.append(batch.record(method, prompt, number, answer, metrics))
        return records

    def score(self, target: Target, batch: Batch, turn: Turn, answer: Answer) -> Metrics:
        """Return metrics of an answer; `main` is among them. By default the score against the correct answers."""
        if not turn.answers:
            return {"score": None}
        return {"score": score(turn.metric, answer.text, turn.answers)}


@dataclass(frozen=True, kw_only=True)
class PromptFile(Task):
    """The user's own prompts (see `read_prompts`).

    Attributes:
        given: The prompts.
        new: Maximum length of an answer.
    """

    name = "file"
    by_answers = True

    given: tuple[Prompt, ...]
    new: Size = 64

    def prompts_of_file(self) -> Sequence[Prompt]:
        """Return the prompts."""
        return self.given

    def prompts(self, target: Target) -> Sequence[Prompt]:
        """Return the prompts."""
        return self.given

    def new_tokens(self, target: Target) -> int:
        """Return `new`."""
        return self.new


def read_task(spec: str) -> Task:
    """Parse a text such as `recall:lengths=640,1024` or `prompts.jsonl:chat=true`.

    Args:
        spec: Name of a registered task, or a file of prompts; then settings as `key=value`, separated by colons.

    Raises:
        SinkscopeError: The task or a setting is unknown, or a value has the wrong type.
    """
    name, *parts = spec.split(":")
    cls: Any = task_class(name)
    types = setting_types(cls)
    settings: dict[str, Any] = {}
    if cls is PromptFile:
        if not path_of(name, "give a file of prompts").is_file():
            raise SinkscopeError(f"--task {name!r}: expected {', '.join(sorted(TASKS))}, or a path of prompts")
        settings["given"] = tuple(read_prompts(name))
        types.pop("given")
    return cls(**settings, **read_settings(parts, types, f"--task {name}"))


def task_class(name: str) -> type[Task]:
    """Return the class of a task by the name in its records; those without a name are files of prompts."""
    return TASKS.get(name, PromptFile)
