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
from sinkscope.files.records import Natural, conform
from sinkscope.interventions.base import Event
from sinkscope.loops.monitor import Monitor, MonitorSettings, Step

POLL = 8
"""Tokens decided at once where reading them means waiting for a device."""


@dataclass(frozen=True)
class LoopAlarm:
    """A trigger of one row.

    Attributes:
        row: Number of the row in the batch.
        step: What the monitor reported; `step.step` is the number of the generated token, from 1.
    """

    row: int
    step: Step


@dataclass(frozen=True)
class HostCopy:
    """Tokens on their way to the host, `[step (token, p_max) row]`.

    Attributes:
        values: Where they arrive.
        arrived: What to wait for; None if they are there.
    """

    values: Tensor
    arrived: torch.Event | None = None

    @classmethod
    def of(cls, values: Tensor) -> HostCopy:
        """Start to copy, without waiting for a CUDA device."""
        if values.device.type != "cuda":
            return cls(values.cpu())
        host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        host.copy_(values, non_blocking=True)
        arrived = torch.Event(device=values.device)
        arrived.record(torch.cuda.current_stream(values.device))  # not of the current device, which may be another
        return cls(host, arrived)

    def steps(self) -> list[list[list[float]]]:
        """The numbers, by step; waits until they have arrived."""
        if self.arrived is not None:
            self.arrived.synchronize()
        return self.values.tolist()


class RowMonitors:
    """One monitor for each row. Rows that have ended are ignored.

    With `poll` > 1, tokens stay on the device until `poll` of them have been collected. A copy to the host then starts
    and is read when the next token arrives, so that nothing waits. Monitors see the same tokens in the same order as
    with `poll=1`, so their signals and triggers are identical; only the response to a trigger is delayed by up to
    `poll` tokens.

    Attributes:
        tokens: Generated tokens of each row that its monitor has seen.
    """

    def __init__(self, settings: MonitorSettings, rows: int, ends: Collection[int], poll: int) -> None:
        self._settings = settings
        self._monitors = [Monitor(settings) for _ in range(rows)]
        self._ends = frozenset(ends)
        self._poll = poll
        self._collected: list[Float[Tensor, "kind row"]] = []
        self._copy: HostCopy | None = None
        self.tokens: list[list[int]] = [[] for _ in range(rows)]

    def __len__(self) -> int:
        return len(self._monitors)

    def push(self, tokens: Int[Tensor, " row"], p_max: Float[Tensor, " row"] | None = None) -> list[LoopAlarm]:
        """Add the next token of every row, and the largest probability of the token after it.

        Returns:
            Triggers among the tokens checked in this call; none while tokens are only being collected.
        """
        if self._poll == 1 and tokens.device.type == "cpu":
            return self._check_step(tokens.tolist(), None if p_max is None else p_max.tolist())
        # One tensor needs only one copy; float32 holds ids below 2**24 exactly.
        numbers = [tokens.detach().float()]
        if p_max is not None:
            numbers.append(p_max.detach().float().to(tokens.device))
        self._collected.append(torch.stack(numbers))
        if self._poll == 1:
            return self.flush()
        alarms = self._read_copy()
        if len(self._collected) >= self._poll:
            self._start_copy()
        return alarms

    def flush(self) -> list[LoopAlarm]:
        """Check all collected tokens; this waits for the device."""
        alarms = self._read_copy()
        self._start_copy()
        return alarms + self._read_copy()

    def end(self, row: int) -> None:
        """Note that the row has ended."""
        self._monitors[row].end()

    def take_back(self, row: int, count: int) -> None:
        """Forget all but the first `count` tokens of a row, as if the others had never arrived; after `flush`."""
        self.tokens[row] = self.tokens[row][:count]
        self._monitors[row] = Monitor(self._settings)
        for token in self.tokens[row]:
            self._monitors[row].update(token, 0.0)

    @property
    def ended(self) -> list[bool]:
        """Which rows have ended."""
        return [monitor.ended for monitor in self._monitors]

    def _start_copy(self) -> None:
        if self._collected:
            self._copy = HostCopy.of(torch.stack(self._collected))
            self._collected = []

    def _read_copy(self) -> list[LoopAlarm]:
        copy = self._copy
        self._copy = None
        alarms: list[LoopAlarm] = []
        if copy is not None:
            for tokens, *p_max in copy.steps():
                alarms += self._check_step([int(token) for token in tokens], p_max[0] if p_max else None)
        return alarms

    def _check_step(self, tokens: list[int], p_max: list[float] | None) -> list[LoopAlarm]:
        """Pass the tokens of one step to the monitors."""
        alarms: list[LoopAlarm] = []
        for row, (token, monitor) in enumerate(zip(tokens, self._monitors, strict=True)):
            if monitor.ended:
                continue
            if token in self._ends:
                monitor.end()
                continue
            self.tokens[row].append(token)
            step = monitor.update(token, None if p_max is None else p_max[row])
            if step.trigger:
                alarms.append(LoopAlarm(row, step))
        return alarms


def largest_probability(logits: Float[Tensor, "row vocab"]) -> Float[Tensor, " row"]:
    """Largest probability of any token, max_v Pr(v), in float32."""
    logits = logits.detach().float()
    return (logits.amax(-1) - logits.logsumexp(-1)).exp()


def poll_of(poll: int | None, device: torch.device) -> int:
    """Number of tokens checked at once: 1 on a CPU, where reading them costs nothing, and 8 elsewhere."""
    if poll is not None:
        return poll
    return 1 if device.type == "cpu" else POLL


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
        poll: Number of tokens checked at once. By default 1 on a CPU and 8 elsewhere.

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
        poll: int | None = None,
    ) -> None:
        conform(Natural | None, poll, "poll")
        if eos_token_id is None:
            eos_token_id = ()
        elif isinstance(eos_token_id, int):
            eos_token_id = (eos_token_id,)
        self._settings = settings or MonitorSettings()
        self._poll = poll
        self._ends = frozenset(eos_token_id)
        self.rows: RowMonitors | None = None
        self._prompt = 0
        self._length = 0
        self._last: Int[Tensor, " row"] | None = None
        self._reordered: Bool[Tensor, ""] | None = None
        self._events: list[Event] = []

    @property
    def events(self) -> list[Event]:
        """One event of kind "loop" for each trigger of the last generation; waits for the device once.

        `step` is the number of the generated token (1 is the first), `position` its column in the batch (a padded row
        counts its padding), `data` the signals and the period found.
        """
        if self.rows is not None:
            self._note(self.rows.flush())
            self._check_order()
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
        elif self._last is not None:
            # In beam search rows change places, and the tokens before the newest are not those of the last call.
            reordered = (ids[:, -2] != self._last).any()
            self._reordered = reordered if self._reordered is None else self._reordered | reordered
        self._length = length
        self._last = ids[:, -1].clone()
        if length > self._prompt:
            alarms = rows.push(ids[:, -1], p_max)
            if alarms:
                self._check_order()
                self._note(alarms)

    def _begin(self, ids: Int[Tensor, "row pos"], prompt: int) -> RowMonitors:
        """Start with new monitors."""
        batch = len(ids)
        if batch > 1 and not self._ends:
            raise SinkscopeError(
                f"a batch of {batch} rows and no eos_token_id: a row that has ended goes on as padding, which looks "
                "like a loop; give eos_token_id=model.generation_config.eos_token_id"
            )
        self.rows = RowMonitors(self._settings, batch, self._ends, poll_of(self._poll, ids.device))
        self._prompt = prompt
        self._reordered = None
        self._events = []
        return self.rows

    def _check_order(self) -> None:
        """Check that the rows have not been reordered."""
        if self._reordered is not None and bool(self._reordered):
            raise UnsupportedError(
                "the tokens before the newest are not those of the step before: rows changed places, as in beam search "
                "(use num_beams=1), or another generation began (use a new object for each)"
            )

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
        poll: Number of tokens checked at once. By default 1 on a CPU and 8 elsewhere.

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
        poll: int | None = None,
    ) -> None:
        if reporter is not None and (settings is not None or eos_token_id is not None or poll is not None):
            raise SinkscopeError("a reporter was given: settings, eos_token_id and poll are its own, leave them out")
        self._follows_alone = reporter is None
        self._reporter = reporter or LoopReporter(settings, eos_token_id=eos_token_id, poll=poll)
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
