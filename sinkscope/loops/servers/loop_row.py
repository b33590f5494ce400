"""The monitor of one request in a server, and what it does against a loop; `vllm` and `sglang` call it.

This module imports no server.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal

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
    """What is done against the loops of a request.

    Attributes:
        tokens: Ids of a sequence that the model is made to say at the first trigger of the monitor, such as the end of
            its reasoning. At the next trigger, or at the first one if there are none, the request is ended.
        end: Id of the token that ends the request; None uses the server's end token. In vLLM it becomes a stop token of
            the request, so one that the model never writes tells a request that was cut from one that ended.
        monitor: Settings of the monitor. It gets no probabilities, because reading them would make every step wait.
    """

    tokens: tuple[Whole, ...] = ()
    end: Whole | None = None
    monitor: MonitorSettings = MonitorSettings()

    def __post_init__(self) -> None:
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
        raise SinkscopeError(f'{name} is {value!r}: expected JSON such as {{"end": 2}}, or false')
    return {str(key): item for key, item in value.items()}


class LoopRow:
    """One request: its monitor, and what is done against its loop.

    Positions count the tokens of the request, from any fixed origin.

    Args:
        settings: Settings of the request.
        end: Id of its end token. None if there is none; the request then cannot be ended.
    """

    def __init__(self, settings: ServingSettings, end: int | None) -> None:
        self.settings = settings
        self.end = end if settings.end is None else settings.end
        self.begun = 0  # how often something was begun
        self.mark = -1  # a position that the caller remembers
        self._monitor = Monitor(settings.monitor)
        self._due = False  # whether something is to begin
        self._start = 0
        self._until = -math.inf
        if self.end is None:
            _log.warning("A request has no end token, so its loops cannot be stopped: set `end`.")

    def feed(self, tokens: Iterable[int]) -> None:
        """Process the next output tokens."""
        for token in tokens:
            if self._monitor.update(token).trigger:
                self._due = True

    def follow(self, output: Sequence[int]) -> None:
        """Process the new part of a list of all output tokens."""
        self.feed(output[self._monitor.last.step :])

    def busy(self, position: int) -> bool:
        """Whether `edit` would change the logits at this position or a later one."""
        return self._due or position < self._until

    def edit(self, logits: Tensor, position: int) -> None:
        """Do at a position what is due there.

        Args:
            logits: Logits of the token at that position, changed in place. Shape `[vocab]`. A token that something else
                has forbidden (minus infinity) stays forbidden.
            position: Position of the token that is chosen from these logits.
        """
        tokens = self.settings.tokens
        if self._due:
            self._due = False
            self.begun += 1
            self._start, self._until = position, math.inf
            if tokens and self.begun == 1:
                self._until = position + len(tokens)
        if not self._start <= position < self._until:
            return
        token = self.end
        if self._until < math.inf:
            token = tokens[position - self._start]
        if token is None or token >= logits.shape[-1]:
            return
        logit = logits[token].clone()
        logits.masked_fill_(logit.isfinite(), -math.inf)
        logits[token] = logit
