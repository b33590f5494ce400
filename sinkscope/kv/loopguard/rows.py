"""The monitors of a batch: one per row, fed from tensors, on an accelerator without waiting for it at every token."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sinkscope.errors import SinkscopeError
from sinkscope.loops.monitor import Monitor, MonitorSettings, Step

POLL = 8  # tokens decided at once where reading them means waiting for a device


@dataclass(frozen=True)
class Found:
    """A trigger of one row.

    Attributes:
        row: of the batch.
        step: what the monitor said; `step.step` is the number of the generated token, from 1.
    """

    row: int
    step: Step


class RowMonitors:
    """One monitor per row; rows that are over are left alone.

    With `poll` > 1 tokens stay on the device until there are `poll` of them; their copy is started then and read when
    the next token comes, so that nothing waits. Monitors see the same tokens in the same order as with `poll=1`, so
    their signals and triggers are the same; only what follows from a trigger comes up to `poll` tokens later.

    Attributes:
        tokens: generated tokens of each row that its monitor has seen.
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
        """Take the next token of every row, and the largest probability of what may follow it.

        Returns:
            Triggers of the tokens that were decided now; none while they are only collected.
        """
        # One tensor, so one copy; float32 holds ids below 2**24 exactly.
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
        """Decide everything that was collected; waits for the device."""
        found = self._read()
        self._copy()
        return found + self._read()

    def end(self, row: int) -> None:
        """The row is over."""
        self._monitors[row].end()

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
        event.record()
        self._copied = (host, event)

    def _read(self) -> list[Found]:
        if self._copied is None:
            return []
        (host, event), self._copied = self._copied, None
        if event is not None:
            event.synchronize()
        found: list[Found] = []
        for step in host.tolist():
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
    """max_v Pr(v), in float32."""
    logits = logits.detach().float()
    return (logits.amax(-1) - logits.logsumexp(-1)).exp()


def poll_of(poll: int | None, device: torch.device) -> int:
    """How many tokens are decided at once: 1 on a CPU, where reading them costs nothing, and 8 elsewhere."""
    return poll if poll is not None else 1 if device.type == "cpu" else POLL


def check_poll(poll: int | None) -> None:
    """Refuse a poll that could not work.

    Raises:
        SinkscopeError: not None and not a number from 1.
    """
    if poll is not None and (not isinstance(poll, int) or isinstance(poll, bool) or poll < 1):
        raise SinkscopeError(f"poll={poll!r}: expected a number of tokens from 1, or None")


def signals(step: Step) -> dict[str, float | int | bool | None]:
    """What an event says of a monitor's step."""
    names = ("ttr", "cr", "streak", "novelty", "votes", "stall", "tail_rep")
    return {name: getattr(step, name) for name in names}
