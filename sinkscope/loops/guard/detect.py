"""Detection of loops: one monitor for each row, and a logits processor that reports or ends loops without a guard."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import LogitsProcessor

from sinkscope.errors import SinkscopeError, UnsupportedError
from sinkscope.hooks.edit.base import Event
from sinkscope.loops.guard.steer import Steering
from sinkscope.loops.text.monitor import Monitor, MonitorSettings
from sinkscope.loops.text.outputs import is_tabular, split


class WatchedRow:
    """One row and its monitor, since its last prompt.

    Args:
        monitor: Makes its monitor.
        prompt: Number of real tokens before its first generated token.
        prompt_ids: The ids of the latest of them that are known.

    Attributes:
        monitor: Its monitor.
        ids: Its latest ids, up to the newest that the monitor has seen.
        steering: How a guard steers it since it looped.
    """

    def __init__(self, monitor: Callable[[], Monitor], prompt: int = 0, prompt_ids: Sequence[int] = ()) -> None:
        self._new_monitor = monitor
        self.monitor = monitor()
        self.prompt = prompt
        self.ids = list(prompt_ids)
        self._prompt_ids = len(self.ids)
        self.steering: Steering | None = None

    @property
    def written(self) -> int:
        """Number of its generated tokens that the monitor has seen."""
        return len(self.ids) - self._prompt_ids

    @property
    def length(self) -> int:
        """Number of its tokens."""
        return self.prompt + self.written

    @property
    def tokens(self) -> list[int]:
        """Its generated tokens that the monitor has seen."""
        return self.ids[self._prompt_ids :]

    def take_back(self, count: int) -> None:
        """Forget the last `count` tokens, as if they had never arrived."""
        del self.ids[len(self.ids) - count :]
        looped = self.monitor.looped
        self.monitor = self._new_monitor()
        for token in self.tokens:
            self.monitor.update(token, 0.0)
        self.monitor.looped = looped


@dataclass(eq=False)
class GuardedRows:
    """The rows that share a cache, since their last prompt.

    Attributes:
        rows: The rows.
        seen: Number of tokens in the cache after the last call.
        ends: Ids that end a row, or pad it.
        stops: Ids that end a row.
        count: Number of generated tokens of each row, with those after its end.
    """

    rows: list[WatchedRow]
    seen: int
    ends: Collection[int]
    stops: Sequence[int] = ()
    count: int = 0


def ids_of_setting(settings: Any, name: str) -> list[int]:
    """Return the token ids that a setting of the generation gives: none, one or several."""
    given = getattr(settings, name, None)
    if given is None:
        return []
    return torch.as_tensor(given).reshape(-1).tolist()


def monitors(settings: MonitorSettings, tokenizer: Any = None) -> Callable[..., Monitor]:
    """Return a function that makes monitors, which tell numbers and signs from words if there is a tokenizer."""
    if tokenizer is None:
        return partial(Monitor, settings)
    return partial(Monitor, settings, lambda ids: is_tabular(split(tokenizer.decode(ids))), numbers_of(tokenizer))


def numbers_of(tokenizer: Any) -> Callable[[int], bool]:
    """Return a function that says whether a token is a number or a part of one."""
    known: dict[int, bool] = {}

    def is_number(token: int) -> bool:
        found = known.get(token)
        if found is None:
            found = known[token] = tokenizer.decode([token]).strip().isdigit()
        return found

    return is_number


def push(
    rows: Sequence[WatchedRow],
    tokens: Int[Tensor, " row"],
    p_max: Float[Tensor, " row"] | None,
    ends: Collection[int],
) -> list[int]:
    """Add the next token of every row, and the largest probability of the token after it.

    Args:
        rows: The rows. Those that have ended are ignored.
        tokens: Their tokens.
        p_max: The probabilities; None if they are not needed.
        ends: Ids that end a row.

    Returns:
        The numbers of the rows whose monitor triggers.
    """
    probabilities: list[float | None] = [None] * len(rows)
    if p_max is not None:
        probabilities = p_max.tolist()
    alarms: list[int] = []
    for number, (row, token) in enumerate(zip(rows, tokens.tolist(), strict=True)):
        if token in ends:
            row.monitor.end()
        if row.monitor.ended:
            continue
        row.ids.append(token)
        if row.monitor.update(token, probabilities[number]).trigger:
            alarms.append(number)
    return alarms


def largest_probability(logits: Float[Tensor, "row vocab"]) -> Float[Tensor, " row"]:
    """Return the largest probability of any token, max_v Pr(v), in float32."""
    logits = logits.detach().float()
    return (logits.amax(-1) - logits.logsumexp(-1)).exp()


class LoopReporter(LogitsProcessor):
    """Report loops, or end them: `model.generate(..., logits_processor=[LoopReporter(eos_token_id=2)])`.

    It needs no session and no cache of sinkscope. Place it after processors that change the logits, so that it sees the
    distribution from which tokens are sampled. Use one reporter per call of `generate`. It refuses beam search and
    cannot follow assisted generation.

    Args:
        eos_token_id: Id or ids that end a row, as in `model.generation_config.eos_token_id`. A different padding id may
            be included; -1 if nothing ends a row.
        settings: Settings of the monitor. By default it finds three copies of anything.
        stop: Whether a row that loops is ended: the first id of `eos_token_id` is then its next token. Otherwise
            no logit changes.

    Attributes:
        events: One event of kind "loop" for each trigger. `step` is the number of the generated token (1 is the first),
            `position` its column in the batch (a padded row counts its padding), `data` the period of the repetition at
            the end (None if there is none).

    Example:
        >>> reporter = LoopReporter(eos_token_id=2)
        >>> reporter.events
        []
    """

    def __init__(
        self, eos_token_id: int | Sequence[int] | None, settings: MonitorSettings | None = None, *, stop: bool = False
    ) -> None:
        self._ends: list[int] = [] if eos_token_id is None else torch.tensor(eos_token_id).reshape(-1).tolist()
        if not self._ends:
            raise SinkscopeError("no eos_token_id: give the id that ends a row, or -1 if none does")
        self._monitor = monitors(settings or MonitorSettings())
        self._stop = stop
        self._rows: list[WatchedRow] = []
        self._ids: Int[Tensor, "row pos"] | None = None  # those of the step before
        self._prompt = 0
        self.events: list[Event] = []

    def __call__(self, input_ids: Int[Tensor, "row pos"], scores: Float[Tensor, "row vocab"]) -> Any:
        """Record the last token of every row and the next token's distribution."""
        earlier = self._ids
        self._ids = input_ids
        if earlier is None:
            self._rows = [WatchedRow(self._monitor) for _ in input_ids]
            self._prompt = input_ids.shape[1]
            return scores
        if not torch.equal(earlier, input_ids[:, :-1]):
            raise UnsupportedError(
                "the tokens before the newest are not those of the step before: rows changed places, as in beam search "
                "(use num_beams=1), or another generation began (use a new object for each)"
            )
        for row in push(self._rows, input_ids[:, -1], largest_probability(scores), self._ends):
            step = self._rows[row].monitor.last
            data = {"period": None if step.tail is None else step.tail.period}
            self.events.append(Event(row, step.step, self._prompt + step.step - 1, None, None, "loop", data))
            if self._stop:
                scores = scores.clone()
                scores[row] = -torch.inf
                scores[row, self._ends[0]] = 0
        return scores
