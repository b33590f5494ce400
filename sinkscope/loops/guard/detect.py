"""Detection of loops: one monitor for each row, and a logits processor that reports or ends loops without a guard."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import LogitsProcessor

from sinkscope.errors import SinkscopeError, UnsupportedError
from sinkscope.hooks.edit.base import Event
from sinkscope.loops.text.monitor import Monitor, MonitorSettings, Step
from sinkscope.loops.text.outputs import is_plain, split


class RowMonitors:
    """One monitor for each row. Rows that have ended are ignored.

    Args:
        settings: Settings of the monitors.
        rows: Number of rows.
        ends: Ids that end a row.
        tokenizer: Tells numbers and signs, whose repetition may be honest, from words.

    Attributes:
        tokens: Generated tokens of each row that its monitor has seen.
    """

    def __init__(
        self, settings: MonitorSettings, rows: int, ends: Collection[int], tokenizer: Any | None = None
    ) -> None:
        self._settings = settings
        self._tokenizer = tokenizer
        self._monitors = [self._monitor() for _ in range(rows)]
        self._ends = ends
        self.tokens: list[list[int]] = [[] for _ in range(rows)]

    def _monitor(self) -> Monitor:
        """A new monitor, which knows numbers and signs if there is a tokenizer."""
        tokenizer = self._tokenizer
        if tokenizer is None:
            return Monitor(self._settings)
        return Monitor(self._settings, lambda ids: is_plain(split(tokenizer.decode(ids))))

    def push(self, tokens: Int[Tensor, " row"], p_max: Float[Tensor, " row"] | None) -> dict[int, Step]:
        """Add the next token of every row, and the largest probability of the token after it.

        Returns:
            What the monitors of the rows that trigger report.
        """
        numbers: list[int] = tokens.tolist()
        probabilities: list[float | None] = [None] * len(numbers)
        if p_max is not None:
            probabilities = p_max.tolist()
        alarms: dict[int, Step] = {}
        for row, (token, monitor) in enumerate(zip(numbers, self._monitors, strict=True)):
            if monitor.ended:
                continue
            if token in self._ends:
                monitor.end()
                continue
            self.tokens[row].append(token)
            step = monitor.update(token, probabilities[row])
            if step.trigger:
                alarms[row] = step
        return alarms

    def take_back(self, row: int, count: int) -> None:
        """Forget all but the first `count` tokens of a row, as if the others had never arrived."""
        self.tokens[row] = self.tokens[row][:count]
        self._monitors[row] = self._monitor()
        for token in self.tokens[row]:
            self._monitors[row].update(token, 0.0)

    def last(self, row: int) -> Step:
        """What the monitor of a row reported last."""
        return self._monitors[row].last

    @property
    def ended(self) -> list[bool]:
        """Which rows have ended."""
        return [monitor.ended for monitor in self._monitors]


def largest_probability(logits: Float[Tensor, "row vocab"]) -> Float[Tensor, " row"]:
    """Largest probability of any token, max_v Pr(v), in float32."""
    logits = logits.detach().float()
    return (logits.amax(-1) - logits.logsumexp(-1)).exp()


class LoopReporter(LogitsProcessor):
    """Report loops, or end them: `model.generate(..., logits_processor=[LoopReporter(eos_token_id=2)])`.

    It needs no session and no cache of sinkscope. Place it after processors that change the logits, so that it sees the
    distribution from which tokens are sampled. Use one reporter per call of `generate`, or reuse one for successive
    calls: it starts again when a sequence does not continue the last one by one token. It refuses beam search and
    cannot follow assisted generation.

    Args:
        settings: Settings of the monitor. By default it finds three copies of anything.
        eos_token_id: Id or ids that end a row; needed for more than one row. A different padding id may be included.
        stop: Whether a row that loops is ended: the first id of `eos_token_id` is then its next token. Otherwise
            no logit changes.

    Attributes:
        events: One event of kind "loop" for each trigger of the last generation. `step` is the number of the generated
            token (1 is the first), `position` its column in the batch (a padded row counts its padding), `data` the
            period of the repetition at the end (None if there is none) and the number of signals that voted.

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
        stop: bool = False,
    ) -> None:
        self._ends: list[int] = [] if eos_token_id is None else torch.tensor(eos_token_id).reshape(-1).tolist()
        if stop and not self._ends:
            raise SinkscopeError("stop=True ends a row with eos_token_id: give model.generation_config.eos_token_id")
        self._settings = settings or MonitorSettings()
        self._stop = stop
        self._rows = RowMonitors(self._settings, 0, ())
        self._ids: Int[Tensor, "row pos"] | None = None  # those of the step before
        self._prompt = 0
        self.events: list[Event] = []

    def __call__(self, input_ids: Int[Tensor, "row pos"], scores: Float[Tensor, "row vocab"]) -> Any:
        """Record the last token of every row and the next token's distribution."""
        batch, length = input_ids.shape
        earlier = self._ids
        self._ids = input_ids
        if earlier is None or earlier.shape != (batch, length - 1):
            self._begin(batch, length)
            return scores
        if not torch.equal(earlier, input_ids[:, :-1]):
            raise UnsupportedError(
                "the tokens before the newest are not those of the step before: rows changed places, as in beam search "
                "(use num_beams=1), or another generation began (use a new object for each)"
            )
        for row, step in self._rows.push(input_ids[:, -1], largest_probability(scores)).items():
            data = {"period": None if step.tail is None else step.tail.period, "votes": step.votes}
            self.events.append(Event(row, step.step, self._prompt + step.step - 1, None, None, "loop", data))
            if self._stop:
                scores = scores.clone()
                scores[row] = -torch.inf
                scores[row, self._ends[0]] = 0
        return scores

    def _begin(self, batch: int, prompt: int) -> None:
        """Start with new monitors."""
        if batch > 1 and not self._ends:
            raise SinkscopeError(
                f"a batch of {batch} rows and no eos_token_id: a row that has ended goes on as padding, which looks "
                "like a loop; give eos_token_id=model.generation_config.eos_token_id"
            )
        self._rows = RowMonitors(self._settings, batch, self._ends)
        self._prompt = prompt
        self.events = []
