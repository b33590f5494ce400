"""Detection without intervention, for a plain `model.generate`: report loops, or stop the rows that loop.

Neither needs a session or a sinkscope cache, and neither changes sampling or streamers.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import LogitsProcessor, StoppingCriteria

from sinkscope.errors import SinkscopeError, UnsupportedError
from sinkscope.interventions.base import Event
from sinkscope.loops.monitor import Monitor, MonitorSettings, Step


@dataclass(frozen=True)
class LoopAlarm:
    """A trigger of one row.

    Attributes:
        row: Number of the row in the batch.
        step: What the monitor reported; `step.step` is the number of the generated token, from 1.
    """

    row: int
    step: Step


class RowMonitors:
    """One monitor for each row. Rows that have ended are ignored.

    Attributes:
        tokens: Generated tokens of each row that its monitor has seen.
    """

    def __init__(self, settings: MonitorSettings, rows: int, ends: Collection[int]) -> None:
        self._settings = settings
        self._monitors = [Monitor(settings) for _ in range(rows)]
        self._ends = frozenset(ends)
        self.tokens: list[list[int]] = [[] for _ in range(rows)]

    def __len__(self) -> int:
        return len(self._monitors)

    def push(self, tokens: Int[Tensor, " row"], p_max: Float[Tensor, " row"] | None = None) -> list[LoopAlarm]:
        """Add the next token of every row, and the largest probability of the token after it.

        Returns:
            The triggers, at most one for each row.
        """
        numbers: list[int] = tokens.tolist()
        probabilities: list[float | None] = [None] * len(numbers)
        if p_max is not None:
            probabilities = p_max.tolist()
        alarms: list[LoopAlarm] = []
        for row, (token, monitor) in enumerate(zip(numbers, self._monitors, strict=True)):
            if monitor.ended:
                continue
            if token in self._ends:
                monitor.end()
                continue
            self.tokens[row].append(token)
            step = monitor.update(token, probabilities[row])
            if step.trigger:
                alarms.append(LoopAlarm(row, step))
        return alarms

    def end(self, row: int) -> None:
        """Note that the row has ended."""
        self._monitors[row].end()

    def take_back(self, row: int, count: int) -> None:
        """Forget all but the first `count` tokens of a row, as if the others had never arrived."""
        self.tokens[row] = self.tokens[row][:count]
        self._monitors[row] = Monitor(self._settings)
        for token in self.tokens[row]:
            self._monitors[row].update(token, 0.0)

    @property
    def ended(self) -> list[bool]:
        """Which rows have ended."""
        return [monitor.ended for monitor in self._monitors]


def largest_probability(logits: Float[Tensor, "row vocab"]) -> Float[Tensor, " row"]:
    """Largest probability of any token, max_v Pr(v), in float32."""
    logits = logits.detach().float()
    return (logits.amax(-1) - logits.logsumexp(-1)).exp()


def signals(step: Step) -> dict[str, float | int | bool | None]:
    """The signals of a monitor's step, as events report them."""
    names = ("ttr", "cr", "streak", "novelty", "votes", "stall", "tail_rep")
    return {name: getattr(step, name) for name in names}


class LoopReporter(LogitsProcessor):
    """Report loops and change nothing: `model.generate(..., logits_processor=[reporter])`.

    Place it after processors that change the logits, so that it sees the distribution from which tokens are sampled.
    Use one reporter per call of `generate`, or reuse one for successive calls: it starts again when a sequence does not
    continue the last one by one token. It refuses beam search and cannot follow assisted generation.

    Args:
        settings: Settings of the monitor. By default it finds three copies of anything.
        eos_token_id: Id or ids that end a row; needed for more than one row. A different padding id may be included.

    Attributes:
        rows: Monitors of the last generation; None before the first.

    Example:
        >>> reporter = LoopReporter(eos_token_id=2)
        >>> reporter.events
        []
    """

    def __init__(
        self,
        settings: MonitorSettings | None = None,
        *,
        eos_token_id: int | Sequence[int] | None = None,
    ) -> None:
        if eos_token_id is None:
            eos_token_id = ()
        elif isinstance(eos_token_id, int):
            eos_token_id = (eos_token_id,)
        self._settings = settings or MonitorSettings()
        self._ends = frozenset(eos_token_id)
        self.rows: RowMonitors | None = None
        self._prompt = 0
        self._length = 0
        self._last: Int[Tensor, " row"] | None = None
        self._events: list[Event] = []

    @property
    def events(self) -> list[Event]:
        """One event of kind "loop" for each trigger of the last generation.

        `step` is the number of the generated token (1 is the first), `position` its column in the batch (a padded row
        counts its padding), `data` the signals and the period found.
        """
        return list(self._events)

    def __call__(self, input_ids: Int[Tensor, "row pos"], scores: Float[Tensor, "row vocab"]) -> Any:
        """Record the last token and the next token's distribution; return `scores` unchanged."""
        self.follow(input_ids, input_ids.shape[1], largest_probability(scores))
        return scores

    def rows_looping(self) -> frozenset[int]:
        """Rows with a trigger among the tokens checked so far."""
        return frozenset(event.row for event in self._events)

    def follow(self, ids: Int[Tensor, "row pos"], prompt: int, p_max: Float[Tensor, " row"] | None) -> None:
        """Record the last token of every row.

        Args:
            ids: Prompt and generated tokens, as generation passes them at every step.
            prompt: Length of the prompt, used if this is the first step of a generation.
            p_max: Largest probability of the next token.
        """
        batch, length = ids.shape
        rows = self.rows
        if rows is None or len(rows) != batch or length != self._length + 1:
            rows = self._begin(ids, prompt)
        elif self._last is not None and not torch.equal(ids[:, -2], self._last):
            raise UnsupportedError(
                "the tokens before the newest are not those of the step before: rows changed places, as in beam search "
                "(use num_beams=1), or another generation began (use a new object for each)"
            )
        self._length = length
        self._last = ids[:, -1].clone()
        if length > self._prompt:
            self._note(rows.push(ids[:, -1], p_max))

    def _begin(self, ids: Int[Tensor, "row pos"], prompt: int) -> RowMonitors:
        """Start with new monitors."""
        batch = len(ids)
        if batch > 1 and not self._ends:
            raise SinkscopeError(
                f"a batch of {batch} rows and no eos_token_id: a row that has ended goes on as padding, which looks "
                "like a loop; give eos_token_id=model.generation_config.eos_token_id"
            )
        self.rows = RowMonitors(self._settings, batch, self._ends)
        self._prompt = prompt
        self._events = []
        return self.rows

    def _note(self, alarms: list[LoopAlarm]) -> None:
        for alarm in alarms:
            step = alarm.step
            period = None if step.tail is None else step.tail.period
            position = self._prompt + step.step - 1
            data = {**signals(step), "period": period}
            self._events.append(Event(alarm.row, step.step, position, None, None, "loop", data))


class LoopStopper(StoppingCriteria):
    """Stop the rows that loop: `model.generate(..., stopping_criteria=[LoopStopper(eos_token_id=...)])`.

    Stopping criteria see only tokens, not probabilities. Without a reporter there is therefore no top-1 streak, and the
    type-token ratio and the compression ratio must both vote. With a `LoopReporter` in the same call (`reporter=`) it
    stops the rows that the reporter flags, using all three votes, one token later.

    Args:
        settings: Settings of the monitor. By default it finds three copies of anything.
        eos_token_id: Id or ids that end a row; needed for more than one row.
        reporter: `LoopReporter` whose reports to act on, instead of a monitor of its own.

    Example:
        >>> reporter = LoopReporter(eos_token_id=2)
        >>> stopper = LoopStopper(reporter=reporter)
    """

    def __init__(
        self,
        settings: MonitorSettings | None = None,
        *,
        eos_token_id: int | Sequence[int] | None = None,
        reporter: LoopReporter | None = None,
    ) -> None:
        if reporter is not None and (settings is not None or eos_token_id is not None):
            raise SinkscopeError("a reporter was given: settings and eos_token_id are its own, leave them out")
        self._follows_alone = reporter is None
        self._reporter = reporter or LoopReporter(settings, eos_token_id=eos_token_id)
        self._stop: Bool[Tensor, " row"] | None = None
        self.stopped: frozenset[int] = frozenset()
        """Rows of the last generation that were stopped for looping."""

    def __call__(self, input_ids: Int[Tensor, "row pos"], scores: Any, **kwargs: Any) -> Any:
        """Say which rows have to stop: bool `[row]`."""
        if self._follows_alone:
            self._reporter.follow(input_ids, input_ids.shape[1] - 1, None)
        looping = self._reporter.rows_looping()
        for row in looping - self.stopped:
            assert self._reporter.rows is not None
            self._reporter.rows.end(row)
        batch = len(input_ids)
        if self._stop is None or len(self._stop) != batch or looping != self.stopped:  # no copy at every token
            self._stop = torch.tensor([row in looping for row in range(batch)], device=input_ids.device)
        self.stopped = looping
        return self._stop
