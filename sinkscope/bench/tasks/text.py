"""Fidelity on text: how close a method stays to full attention along the same tokens.

Every method reads the same prompt and is then fed the same continuation token by token, whatever it would have
generated itself: the text's own, or the greedy answer of full attention for prompts without answers.

- kl: sum of p (log p - log q) over the vocabulary, in nats; p of full attention, q of the method, at every token. The
  first one depends on the prompt alone: it is 0 if a method does not change prompts.
- agree: both have the same top prediction at that token.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, ClassVar

from jaxtyping import Bool, Float
from torch import Tensor

from sinkscope.bench.answer import (
    Answer,
    Batch,
    BenchModel,
    CacheCounts,
    cells_of,
    generate_rows,
    held_counts,
    read_counts,
    row_events,
)
from sinkscope.bench.prompt import Prompt, Turn, read_prompts, single
from sinkscope.bench.record import BenchRecord, Metrics
from sinkscope.bench.task import Task
from sinkscope.errors import SinkscopeError
from sinkscope.files.records import Natural
from sinkscope.interventions.base import Event, Intervention
from sinkscope.interventions.decode import ForcedAnswer
from sinkscope.kv import Full
from sinkscope.models.target import Target
from sinkscope.models.text import typical_text


@dataclass(frozen=True, kw_only=True)
class TextFidelity(Task):
    """Divergence from full attention along a text.

    Attributes:
        count: Number of consecutive pieces of the typical text.
        prompt: Tokens of each prompt; fewer if the context or the text is shorter.
        answer: Tokens that follow and are compared.
        source: File of prompts to read instead of the typical text; prompts without answers are compared along the
            greedy answer of full attention.
    """

    name: ClassVar[str] = "text"
    main: ClassVar[str] = "kl"
    low_is_good: ClassVar[bool] = True
    said: ClassVar[str] = "diverges from full attention by {:.3g} nats a token"
    control: ClassVar[str] = "random"
    columns: ClassVar[tuple[str, ...]] = ("agree", "first")
    together: ClassVar[bool] = True

    count: Natural = 4
    prompt: Natural = 768
    answer: Natural = 32
    source: str = ""

    def prompts(self, target: Target) -> list[Prompt]:
        """Consecutive pieces of the text."""
        if self.source:
            return read_prompts(self.source)
        tokenizer = target.need_tokenizer()
        ids = tokenizer(typical_text(), add_special_tokens=False, verbose=False)["input_ids"]
        room = (target.max_positions or self.prompt + self.answer) - self.answer
        length = min(self.prompt, room - 2, len(ids) // self.count - self.answer)
        if length < 1:
            raise SinkscopeError(f"count={self.count}: the text has {len(ids)} tokens; give fewer or shorter pieces")
        prompts: list[Prompt] = []
        for number in range(self.count):
            start = number * (length + self.answer)
            middle = start + length
            answer = tokenizer.decode(ids[middle : middle + self.answer])
            prompts.append(single(f"text-{number}", tokenizer.decode(ids[start:middle]), [answer], "text"))
        return prompts

    def new_tokens(self, target: Target) -> int:
        """The length of the continuation."""
        return self.answer

    def score(self, model: BenchModel, batch: Batch, ids: list[int], turn: Turn, answer: Answer) -> Metrics:
        """Nothing: `answers` compares methods itself."""
        return {}

    def answers(self, model: BenchModel, batch: Batch) -> list[BenchRecord]:
        """Run full attention, and every method along its answers."""
        rows = [self.encode(model, [prompt.turns[0].text]) for prompt in batch.prompts]
        full = FullLogits()
        forced = _given_answers(model, batch)
        written = _generate_along(model, rows, forced, batch.new, Full(), full)[0]
        along = forced or [model.cut(row)[0] for row in written]
        compared: list[_Compared] = []
        for method in batch.methods:
            started = time.perf_counter()
            logits = LogitsComparison(full.values)
            counts = CacheCounts()
            edit = method.make() or Full()
            events = _generate_along(model, rows, along, batch.new, edit | counts, logits)[1]
            seconds = (time.perf_counter() - started) / len(rows)
            compared.append(_Compared(logits, counts, events, seconds))
        records: list[BenchRecord] = []
        for number, method in enumerate(batch.methods):
            for row, prompt in enumerate(batch.prompts):
                tokens = along[row]
                answer = compared[number].answer(model, row, len(rows[row]), tokens)
                steps = {
                    "kl": compared[number].logits.row_kl(row, len(tokens)),
                    "agree": compared[number].logits.row_agreement(row, len(tokens)),
                }
                metrics = metrics_of(steps, answer)
                records.append(batch.record(method, prompt, 0, answer, metrics, steps))
        return records


def metrics_of(steps: Mapping[str, Sequence[float]], answer: Answer) -> Metrics:
    """Means over the steps from the first on that left something out; over all, if none did.

    The first token comes from the prompt, and some policies then read everything for a while. Those steps lose nothing,
    unless the prompt itself was read along lines.
    """
    full_steps = 0
    while full_steps < len(answer.read) and answer.read[full_steps] >= answer.prompt_tokens + full_steps + 1:
        full_steps += 1
    begin = full_steps + 1
    if full_steps == len(answer.read) or answer.cells is not None:
        begin = 0
    metrics: Metrics = {"first": steps["kl"][0]}
    for name, values in steps.items():
        metrics[name] = fmean(values[begin:])
    return metrics


def _given_answers(model: BenchModel, batch: Batch) -> list[list[int]]:
    """Ids of the correct answers; empty if no prompt has one."""
    given: list[list[int]] = []
    for prompt in batch.prompts:
        if not prompt.turns[0].answers:
            continue
        ids = model.target.tokenizer(prompt.turns[0].answers[0], add_special_tokens=False, verbose=False)["input_ids"]
        tokens = model.cut([int(token) for token in ids][: batch.new])[0]
        if not tokens:
            raise SinkscopeError(f"prompt {prompt.id!r}: its answer has no tokens; give a text, or leave answers out")
        given.append(tokens)
    if given and len(given) < len(batch.prompts):
        raise SinkscopeError("some prompts have answers and others have none: give answers to all or to none")
    return given


def _generate_along(
    model: BenchModel,
    rows: list[list[int]],
    answers: list[list[int]],
    new: int,
    edit: Intervention,
    hook: Any = None,
) -> tuple[list[list[int]], list[Event]]:
    """New tokens and events; with `answers` these are the new tokens, whatever the model would have generated."""
    if not answers:
        return generate_rows(model, rows, new, edit, hook)
    forced = ForcedAnswer(answers, max(map(len, rows)), model.pad)
    return generate_rows(model, rows, max(map(len, answers)), edit, hook, logits_processor=[forced])


@dataclass(frozen=True)
class _Compared:
    logits: LogitsComparison
    counts: CacheCounts
    events: list[Event]
    seconds: float

    def answer(self, model: BenchModel, row: int, prompt: int, tokens: list[int]) -> Answer:
        return Answer(
            prompt_tokens=prompt,
            tokens=tokens,
            text=model.decode(tokens),
            ended="cap",
            events=row_events(self.events, row, len(tokens)),
            read=read_counts(self.counts.readable, row, prompt, len(tokens)),
            cached=held_counts(self.counts.held, row, prompt, len(tokens)),
            cells=cells_of(self.events, row),
            seconds=self.seconds,
        )


class FullLogits:
    """Logits of full attention at every step.

    Attributes:
        values: `[row vocab]` for each step.
    """

    def __init__(self) -> None:
        self.values: list[Float[Tensor, "row vocab"]] = []

    def __call__(self, _module: Any, _args: Any, _kwargs: Any, output: Any) -> None:
        """Keep the logits of a call of the model."""
        self.values.append(output.logits[:, -1].float())


class LogitsComparison:
    """How far the logits of a method are from those of full attention at every step."""

    def __init__(self, full: Sequence[Float[Tensor, "row vocab"]]) -> None:
        self._full = full
        self._kl: list[Float[Tensor, " row"]] = []
        self._agree: list[Bool[Tensor, " row"]] = []

    def __call__(self, _module: Any, _args: Any, _kwargs: Any, output: Any) -> None:
        """Compare the logits of a call of the model."""
        logits = output.logits[:, -1].float()
        full = self._full[len(self._kl)]
        self._kl.append(divergence(full, logits).cpu())
        self._agree.append((full.argmax(-1) == logits.argmax(-1)).cpu())

    def row_kl(self, row: int, tokens: int) -> tuple[float, ...]:
        """Divergence at each token of a row."""
        return tuple(round(float(step[row]), 6) for step in self._kl[:tokens])

    def row_agreement(self, row: int, tokens: int) -> tuple[float, ...]:
        """1 at each token of a row with the same top prediction."""
        return tuple(float(step[row]) for step in self._agree[:tokens])


def divergence(full: Float[Tensor, "row vocab"], other: Float[Tensor, "row vocab"]) -> Float[Tensor, " row"]:
    """KL(full || other) between two rows of logits, in nats."""
    p, q = full.double().log_softmax(-1), other.double().log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1).clamp(min=0)
