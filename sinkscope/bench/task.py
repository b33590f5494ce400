"""A task: prompts for a model, and the score of each answer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pkgutil import resolve_name
from typing import Any, ClassVar, Literal, get_type_hints

from sinkscope.bench.answer import Answer, Batch, BenchModel, answer_rows, top_probability
from sinkscope.bench.methods import FULL, SAMPLING
from sinkscope.bench.prompt import Prompt, Turn, read_prompts, with_controls
from sinkscope.bench.record import BenchRecord, Metrics
from sinkscope.bench.samplers import RowSampler
from sinkscope.bench.scores import score
from sinkscope.errors import SinkscopeError
from sinkscope.files.output import path_of
from sinkscope.files.records import Budget, check_fields, read_settings
from sinkscope.models.target import Target

TASKS = {
    "loops": "sinkscope.bench.tasks.loops:Loops",
    "recall": "sinkscope.bench.tasks.recall:Recall",
    "needle": "sinkscope.bench.tasks.needle:Needle",
    "text": "sinkscope.bench.tasks.text:TextFidelity",
}
"""Tasks by name; any other text is the name of a file of prompts."""


@dataclass(frozen=True, kw_only=True)
class Task(ABC):
    """Base of all tasks: a frozen dataclass of settings. Prompts may have several turns.

    Attributes:
        name: Name in records and tables.
        main: Metric by which methods are compared.
        low_is_good: Whether a small value of that metric is good.
        said: What the metric says of a method, as the end of a sentence; `{}` stands for the value.
        control: Method whose value a conclusion states beside the best one.
        columns: Further metrics that tables show.
        budget: Budget of methods that state none.
        model: Model that answers by default; None for the bundled model.
        together: Whether all methods answer a batch in one pass.
        metric: Score of turns that name none, see `sinkscope.bench.scores`.
        history: "gold": turns follow the first correct answers. "model": turns follow the method's own answers.
        chat: Whether turns are wrapped in the tokenizer's chat template.
    """

    name: ClassVar[str]
    main: ClassVar[str] = "score"
    low_is_good: ClassVar[bool] = False
    said: ClassVar[str] = "scores {:.0%}"
    control: ClassVar[str] = FULL
    columns: ClassVar[tuple[str, ...]] = ("chance",)
    budget: ClassVar[Budget] = 0.125
    model: ClassVar[str | None] = None
    together: ClassVar[bool] = False
    metric: ClassVar[str] = "contains"

    history: Literal["gold", "model"] = "gold"
    chat: bool = False

    def __post_init__(self) -> None:
        check_fields(self)

    @abstractmethod
    def prompts(self, target: Target) -> list[Prompt]:
        """The prompts for a model."""

    @abstractmethod
    def new_tokens(self, target: Target) -> int:
        """Maximum length of an answer, if the user gives none."""

    def encode(self, model: BenchModel, texts: Sequence[str]) -> list[int]:
        """Ids of a conversation that ends with a prompt."""
        return model.encode(texts, self.chat)

    def spoken(self, model: BenchModel, answer: Answer) -> str:
        """An answer as the next turn reads it."""
        return answer.text

    def turn_lengths(self, model: BenchModel, prompt: Prompt, new: int) -> list[int]:
        """Length of each turn with all turns before it; the model's own answers may be as long as is allowed."""
        texts: list[str] = []
        lengths: list[int] = []
        for number, turn in enumerate(prompt.turns):
            length = len(self.encode(model, [*texts, turn.text]))
            said = ""
            if self.history == "model":
                length += number * new
            else:
                said = self.gold(prompt, number)
            lengths.append(length)
            texts += [turn.text, said]
        return lengths

    def gold(self, prompt: Prompt, number: int) -> str:
        """The first correct answer of a turn, as the history holds it.

        Raises:
            SinkscopeError: A turn before the last has none.
        """
        answers = prompt.turns[number].answers
        last = number == len(prompt.turns) - 1
        if not answers and not last:
            raise SinkscopeError(
                f"prompt {prompt.id!r}: turn {number + 1} has no answer for the history: give answers, or history=model"
            )
        if not answers:
            return ""
        return answers[0]

    def answers(self, model: BenchModel, batch: Batch) -> list[BenchRecord]:
        """Answer all turns of the prompts, turn after turn."""
        method = batch.methods[0]
        temperature = 1.0 if method.name == SAMPLING else batch.temperature
        texts: dict[str, list[str]] = {prompt.id: [] for prompt in batch.prompts}
        records: list[BenchRecord] = []
        for number in range(max(len(prompt.turns) for prompt in batch.prompts)):
            prompts = [prompt for prompt in batch.prompts if number < len(prompt.turns)]
            rows = [self.encode(model, [*texts[prompt.id], prompt.turns[number].text]) for prompt in prompts]
            sampler: RowSampler | None = None
            if temperature:
                sampler = RowSampler(temperature, batch.seed, [prompt.id for prompt in prompts])
            written = answer_rows(model, rows, batch.new, method.make(), measure=top_probability, sampler=sampler)
            for prompt, answer in zip(prompts, written, strict=True):
                turn = prompt.turns[number]
                records.append(batch.record(method, prompt, number, answer, self.score(model, batch, turn, answer)))
                said = self.spoken(model, answer)
                if self.history == "gold":
                    said = self.gold(prompt, number)
                texts[prompt.id] += [turn.text, said]
        return records

    def score(self, model: BenchModel, batch: Batch, turn: Turn, answer: Answer) -> Metrics:
        """Metrics of an answer; `main` is among them.

        By default the score against the correct answers, and against those of another prompt, which is the control.
        """
        return {
            "score": self.compare(answer, turn.answers, turn.metric) if turn.answers else None,
            "chance": self.compare(answer, turn.control, turn.metric) if turn.control else None,
        }

    def compare(self, answer: Answer, answers: Sequence[str], metric: str) -> float:
        """The score against these correct answers."""
        return score(metric or self.metric, answer.text, answers)


@dataclass(frozen=True, kw_only=True)
class PromptFile(Task):
    """The user's own prompts (see `read_prompts`).

    Attributes:
        file: Path of the file; empty if the prompts are given.
        given: The prompts.
        new: Maximum length of an answer.
    """

    name: ClassVar[str] = "file"

    file: str = ""
    given: tuple[Prompt, ...] = ()
    new: int = 64

    def prompts(self, target: Target) -> list[Prompt]:
        """The prompts of the file."""
        return with_controls(self.given or read_prompts(self.file))

    def new_tokens(self, target: Target) -> int:
        """64, unless set."""
        return self.new


MOST = 1 << 20
"""Largest setting of a task that is a number of things."""


def read_task(spec: str) -> Task:
    """Parse a text such as `needle:lengths=640,1024` or `prompts.jsonl:history=model`.

    Args:
        spec: Name in `TASKS`, or a file of prompts; then settings as `key=value`, separated by colons.

    Raises:
        SinkscopeError: The task or a setting is unknown, or a value has the wrong type.
    """
    name, *parts = spec.split(":")
    cls: Any = task_class(name)
    hints = get_type_hints(cls, include_extras=True)
    types = {each.name: hints[each.name] for each in fields(cls) if each.name not in ("file", "given")}
    options = read_settings(parts, types, f"--task {name}")
    for key, value in options.items():
        if key != "seed" and isinstance(value, int) and value > MOST:
            raise SinkscopeError(f"--task {name}: {key}={value}: expected at most {MOST}")
    if cls is PromptFile:
        if not path_of(name).is_file():
            raise SinkscopeError(f"--task {name!r}: expected {', '.join(TASKS)}, or a file of prompts")
        options["file"] = name
    return cls(**options)


def task_class(name: str) -> type[Task]:
    """The class of a task by the name in its records."""
    if name not in TASKS:
        return PromptFile
    return resolve_name(TASKS[name])
