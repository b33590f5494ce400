"""Detection without intervention, for a plain `model.generate`: report loops, or stop the rows that loop.

Neither needs a session or a sinkscope cache, and neither changes sampling or streamers.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import LogitsProcessor, StoppingCriteria

from sinkscope.errors import SinkscopeError, UnsupportedError
from sinkscope.files.records import Natural, conform
from sinkscope.interventions.base import Event
from sinkscope.loops.monitor import Monitor, MonitorSettings, Step

POLL = 8  # tokens decided at once where reading them means waiting for a device


@dataclass(frozen=True)
class Found:
    """A trigger of one row.

    Attributes:
        row: Number of the row in the batch.
        step: What the monitor reported; `step.step` is the number of the generated token, from 1.
    """

    row: int
    step: Step


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
        self._monitors = [Monitor(settings) for _ in range(rows)]
        self._ends, self._poll = frozenset(ends), poll
        self._waiting: list[Tensor] = []
        self._copied: tuple[Tensor, torch.Event | None] | None = None
        self.tokens: list[list[int]] = [[] for _ in range(rows)]

    def __len__(self) -> int:
        return len(self._monitors)

    def push(self, tokens: Int[Tensor, " row"], p_max: Float[Tensor, " row"] | None = None) -> list[Found]:
        """Add the next token of every row, and the largest probability of the token after it.

        Returns:
            Triggers found among the tokens checked in this call; none while tokens are only being collected.
        """
        if self._poll == 1 and tokens.device.type == "cpu":
            return self._decide([[tokens.tolist(), *([] if p_max is None else [p_max.tolist()])]])
        # One tensor needs only one copy; float32 holds ids below 2**24 exactly.
        pair = tokens.detach().float()[None]
        if p_max is not None:
            pair = torch.cat([pair, p_max.detach().float()[None].to(pair.device)])
        self._waiting.append(pair)
        if self._poll == 1:
            return self.flush()
        found = self._read()
        if len(self._waiting) >= self._poll:
            self._copy()
        return found

    def flush(self) -> list[Found]:
        """Check all collected tokens; this waits for the device."""
        found = self._read()
        self._copy()
        return found + self._read()

    def end(self, row: int) -> None:
        """Note that the row has ended."""
        self._monitors[row].end()

    def take_back(self, count: int) -> None:
        """Forget all but the first `count` tokens of a single row, as if the others had never arrived."""
        settings, self.tokens = self._monitors[0].settings, [self.tokens[0][:count]]
        self._monitors, self._waiting, self._copied = [Monitor(settings)], [], None
        for token in self.tokens[0]:
            self._monitors[0].update(token, 0.0)

    def _copy(self) -> None:
        if not self._waiting:
            return
        stacked = torch.stack(self._waiting)
        self._waiting = []
        if stacked.device.type != "cuda":
            self._copied = (stacked.cpu(), None)
            return
        host = torch.empty(stacked.shape, dtype=stacked.dtype, pin_memory=True)
        host.copy_(stacked, non_blocking=True)
        event = torch.Event(device=stacked.device)
        event.record(torch.cuda.current_stream(stacked.device))  # not of the current device, which may be another
        self._copied = (host, event)

    def _read(self) -> list[Found]:
        if self._copied is None:
            return []
        (host, event), self._copied = self._copied, None
        if event is not None:
            event.synchronize()
        return self._decide(host.tolist())

    def _decide(self, steps: list[list[list[Any]]]) -> list[Found]:
        found: list[Found] = []
        for step in steps:
            ids, probs = step[0], step[1] if len(step) > 1 else [None] * len(step[0])
            for row, (token, p_max) in enumerate(zip(ids, probs, strict=True)):
                if (made := self._update(row, int(token), p_max)) is not None and made.trigger:
                    found.append(Found(row, made))
        return found

    def _update(self, row: int, token: int, p_max: float | None) -> Step | None:
        monitor = self._monitors[row]
        if monitor.ended:
            return None
        if token in self._ends:
            monitor.end()
            return None
        self.tokens[row].append(token)
        return monitor.update(token, p_max)


def largest_probability(logits: Float[Tensor, "row vocab"]) -> Float[Tensor, " row"]:
    """Largest probability of any token, max_v Pr(v), in float32."""
    logits = logits.detach().float()
    return (logits.amax(-1) - logits.logsumexp(-1)).exp()


def poll_of(poll: int | None, device: torch.device) -> int:
    """Number of tokens checked at once: 1 on a CPU, where reading them costs nothing, and 8 elsewhere."""
    return poll if poll is not None else 1 if device.type == "cpu" else POLL


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
        self._settings, self._poll = settings or MonitorSettings(), poll
        self._ends = frozenset([eos_token_id] if isinstance(eos_token_id, int) else eos_token_id or ())
        self.rows: RowMonitors | None = None
        self._prompt = self._length = 0
        self._last: Tensor | None = None
        self._moved: Tensor | None = None
        self._events: list[Event] = []

    @property
    def events(self) -> list[Event]:
        """One event of kind "loop" for each trigger of the last generation; waits for the device once.

        `step` is the number of the generated token (1 is the first), `position` its column in the batch (a padded row
        counts its padding), `data` the signals and the period found.
        """
        if self.rows is not None:
            self._note(self.rows.flush())
            self._check()
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
            if batch > 1 and not self._ends:
                raise SinkscopeError(
                    f"a batch of {batch} rows and no eos_token_id: a row that has ended goes on as padding, which "
                    "looks like a loop; give eos_token_id=model.generation_config.eos_token_id"
                )
            rows = self.rows = RowMonitors(self._settings, batch, self._ends, poll_of(self._poll, ids.device))
            self._prompt, self._moved, self._events = prompt, None, []
        elif self._last is not None:
            # In beam search rows change places, and the tokens before the newest are not those that were seen.
            moved = (ids[:, -2] != self._last).any()
            self._moved = moved if self._moved is None else self._moved | moved
        self._length, self._last = length, ids[:, -1].clone()
        if length > self._prompt and (found := rows.push(ids[:, -1], p_max)):
            self._check()
            self._note(found)

    def _check(self) -> None:
        """Check that the rows have not been reordered."""
        if self._moved is not None and bool(self._moved):
            raise UnsupportedError(
                "the tokens before the newest are not those of the step before: rows changed places, as in beam search "
                "(use num_beams=1), or another generation began (use a new object for each)"
            )

    def _note(self, found: list[Found]) -> None:
        for one in found:
            step = one.step
            data = {**signals(step), "period": None if step.tail is None else step.tail.period}
            position = self._prompt + step.step - 1
            self._events.append(Event(one.row, step.step, position, None, None, "loop", data))


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
        self._alone = reporter is None
        self._reporter = reporter or LoopReporter(settings, eos_token_id=eos_token_id, poll=poll)
        self._answer: Tensor | None = None
        self.stopped: frozenset[int] = frozenset()
        """Rows of the last generation that were stopped for looping."""

    def __call__(self, input_ids: Int[Tensor, "row pos"], scores: Any, **kwargs: Any) -> Any:
        """Say which rows have to stop: bool `[row]`."""
        if self._alone:
            self._reporter.follow(input_ids, input_ids.shape[1] - 1, None)
        batch, before, self.stopped = input_ids.shape[0], self.stopped, self._reporter.rows_looping()
        for row in self.stopped - before:
            assert self._reporter.rows is not None
            self._reporter.rows.end(row)
        if self._answer is None or len(self._answer) != batch or self.stopped != before:  # no copy at every token
            self._answer = torch.tensor([row in self.stopped for row in range(batch)], device=input_ids.device)
        return self._answer
