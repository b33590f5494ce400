"""The monitor of one request in a server, and what it does against a loop; `vllm` and `sglang` call it.

This module imports no server.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Annotated, Any, Literal

from pydantic import Field
from torch import Tensor

from sinkscope.errors import SinkscopeError
from sinkscope.files.plain import parse_json
from sinkscope.files.records import Whole, checked
from sinkscope.loops import Monitor, MonitorSettings

KEY = "sinkscope"  # where a request puts its settings: in `extra_args` of vLLM, in `custom_params` of SGLang
ENVIRONMENT = "SINKSCOPE_SERVING"  # variable with the settings of requests that send none, as JSON
LARGEST = 1_000_000  # in a request's monitor settings, so that no request takes a server's memory or ends its worker

_log = logging.getLogger(__name__)


@checked
class ServingSettings:
    """Actions against the loops of a request.

    Attributes:
        actions: Actions for the first, second, ... trigger of the monitor; further triggers repeat the last one. "stop"
            ends the request with its end token. "force" makes the model say `tokens`.
        tokens: Ids of the sequence that "force" writes, such as the end of the reasoning.
        end: Id of the token that "stop" writes; None uses the server's end token. In vLLM it becomes a stop token of
            the request, so one that the model never writes tells a request that was cut from one that ended.
        monitor: Settings of the monitor. It gets no probabilities, because reading them would make every step wait.
    """

    actions: Annotated[tuple[Literal["stop", "force"], ...], Field(min_length=1)] = ("stop",)
    tokens: tuple[Whole, ...] = ()
    end: Whole | None = None
    monitor: MonitorSettings = MonitorSettings()

    def __post_init__(self) -> None:
        if "force" in self.actions and not self.tokens:
            raise SinkscopeError('the action "force" needs tokens, the ids of the sequence to write')
        for name, value in vars(self.monitor).items():
            if isinstance(value, int | float) and value > LARGEST:
                raise SinkscopeError(f"monitor.{name} is {value}: expected at most {LARGEST}")
        Monitor(self.monitor).update(0)  # settings that need probabilities are refused here, not in a server's worker

    @classmethod
    def of_request(cls, sent: Any) -> ServingSettings | None:
        """The settings of a request.

        Args:
            sent: What the request sent under `KEY`: fields as a mapping or as JSON, which replace those of
                `ENVIRONMENT`; False for no monitor; None if it sent nothing.

        Returns:
            The settings; None for a request that is not monitored, because it opted out or because neither it nor the
            environment has settings.

        Raises:
            SinkscopeError: A setting is unknown or invalid.
        """
        usual = _fields(os.environ.get(ENVIRONMENT), ENVIRONMENT)
        own = _fields(sent, KEY)
        if own is False:
            return None
        if own is None and not isinstance(usual, dict):
            return None
        return cls(**{**(usual or {}), **(own or {})})


def _fields(value: Any, name: str) -> dict[str, Any] | Literal[False] | None:
    """Settings as a mapping; False and None as they are."""
    if isinstance(value, str):
        with suppress(ValueError):
            value = parse_json(value)
    if value is None or value is False:
        return value
    if not isinstance(value, Mapping):
        raise SinkscopeError(f'{name} is {value!r}: expected JSON such as {{"actions": ["stop"]}}, or false')
    return {str(key): item for key, item in value.items()}


class LoopRow:
    """One request: its monitor, and the current action against its loop.

    Positions count the tokens of the request, from any fixed origin. The action at a position depends on the position
    alone, so it is correct for drafts that are accepted and for drafts that are rejected.

    Args:
        settings: Settings of the request.
        end: Id of its end token. None if there is none; "stop" then does nothing.
    """

    def __init__(self, settings: ServingSettings, end: int | None) -> None:
        self.settings = settings
        self.end = end if settings.end is None else settings.end
        self.actions_begun = 0
        self.mark = -1  # a position that the caller remembers
        self._monitor = Monitor(settings.monitor)
        self._tokens_read = 0
        self._last_token = -1
        self._due = False  # whether an action is to begin
        self._action = ""
        self._start = 0
        self._until = -math.inf
        if self.end is None and "stop" in settings.actions:
            _log.warning("A request has no end token, so its loops cannot be stopped: set `end`.")

    def feed(self, tokens: Iterable[int]) -> None:
        """Process the next output tokens; a negative one is not known yet and ends the reading."""
        for token in tokens:
            if token < 0:
                return
            if self._monitor.update(token).trigger:
                self._due = True
            self._tokens_read += 1
            self._last_token = token

    def follow(self, output: Sequence[int]) -> None:
        """Process the new part of a list of all output tokens; if tokens were taken back, reread it from the start."""
        read = self._tokens_read
        if read and (len(output) < read or output[read - 1] != self._last_token):
            self._monitor = Monitor(self.settings.monitor)
            self._tokens_read = 0
        self.feed(output[self._tokens_read :])

    @property
    def stopped(self) -> bool:
        """Whether "stop" has begun."""
        return self._action == "stop"

    def busy(self, position: int) -> bool:
        """Whether `edit` would change the logits at this position or a later one."""
        return self._due or position < self._until

    def edit(self, logits: Tensor, position: int) -> None:
        """Apply the action that is due at a position.

        Args:
            logits: Logits of the token at that position, changed in place. Shape `[vocab]`. A token that something else
                has forbidden (minus infinity) stays forbidden.
            position: Position of the token that is chosen from these logits. Rows of drafts come in order.
        """
        if self._due:
            self._begin(position)
        if not self._start <= position < self._until:
            return
        token = self.end
        if self._action == "force":
            token = self.settings.tokens[position - self._start]
        if token is None or token >= logits.shape[-1]:
            return
        logit = logits[token].clone()
        logits.masked_fill_(logit.isfinite(), -math.inf)
        logits[token] = logit

    def _begin(self, position: int) -> None:
        """Begin the next action there."""
        actions = self.settings.actions
        self._action = actions[min(self.actions_begun, len(actions) - 1)]
        self._start = position
        self._due = False
        self.actions_begun += 1
        if self._action == "stop":
            self._until = math.inf
        else:
            self._until = position + len(self.settings.tokens)
        _log.info("A request repeats itself after %d output tokens: %s", self._tokens_read, self._action)
