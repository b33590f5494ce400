"""The loop monitor as logits processors of vLLM and SGLang: it ends a loop during generation in the server.

`VllmLoopProcessor` implements both interfaces of vLLM, `vllm.v1.sample.logits_processor` (batch updates) and
`vllm.v1.worker.gpu.sample.logits_processor` (Model Runner V2, request slots), and `SglangLoopProcessor` implements
SGLang's `CustomLogitProcessor`. Both are created on first access, because their base classes belong to the servers;
this module itself imports neither server, and nothing else in sinkscope imports it.

All of them share `LoopRow`: the monitor of one request, and the current action against its loop.
"""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from types import new_class
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from sinkscope.errors import SinkscopeError
from sinkscope.files.plain import parse_json
from sinkscope.files.records import Natural, Whole, checked
from sinkscope.loops import Monitor, MonitorSettings

KEY = "sinkscope"  # where a request puts its settings: in `extra_args` of vLLM, in `custom_params` of SGLang
ENVIRONMENT = "SINKSCOPE_SERVING"  # variable with the settings of requests that send none, as JSON
GREEDY = 1e-5  # servers decode greedily below this temperature
LARGEST = 1_000_000  # in a request's monitor settings, so that no request takes a server's memory or ends its worker

_log = logging.getLogger(__name__)


@checked
class ServingSettings:
    """Actions against the loops of a request.

    Attributes:
        actions: Actions for the first, second, ... trigger of the monitor; further triggers repeat the last one. "stop"
            ends the request with its end token. "force" makes the model say `tokens`. "heat" raises the temperature for
            the next `span` tokens.
        tokens: Ids of the sequence that "force" writes, such as the end of the reasoning.
        end: Id of the token that "stop" writes; None uses the server's end token.
        temperature: Temperature of the tokens after "heat". A request with a higher one keeps its own.
        span: Number of tokens that "heat" lasts.
        monitor: Settings of the monitor. It gets no probabilities, because reading them would make every step wait.
    """

    actions: Annotated[tuple[Literal["stop", "force", "heat"], ...], Field(min_length=1)] = ("stop",)
    tokens: tuple[Whole, ...] = ()
    end: Whole | None = None
    temperature: Annotated[float, Field(gt=0, le=100, allow_inf_nan=False)] = 1.0
    span: Natural = 32
    monitor: MonitorSettings = MonitorSettings()

    def __post_init__(self) -> None:
        if "force" in self.actions and not self.tokens:
            raise SinkscopeError('the action "force" needs tokens, the ids of the sequence to write')
        for name, value in vars(self.monitor).items():
            if isinstance(value, int | float) and value > LARGEST:
                raise SinkscopeError(f"monitor.{name} is {value}: expected at most {LARGEST}")
        Monitor(self.monitor).update(0)  # settings that need probabilities are refused here, not in a server's worker

    @classmethod
    def of(cls, given: Any) -> ServingSettings | None:
        """The settings of a request.

        Args:
            given: What the request sent under `KEY`: fields as a mapping or as JSON, which replace those of
                `ENVIRONMENT`; False for no monitor; None if it sent nothing.

        Returns:
            The settings; None for a request that is not monitored, because it opted out or because neither it nor the
            environment has settings.

        Raises:
            SinkscopeError: A setting is unknown or invalid.
        """
        usual, own = _fields(os.environ.get(ENVIRONMENT), ENVIRONMENT), _fields(given, KEY)
        if own is False or not (own or own == {} or usual or usual == {}):
            return None
        return cls(**{**(usual or {}), **(own or {})})


def _fields(given: Any, name: str) -> dict[str, Any] | Literal[False] | None:
    """Settings as a mapping; False and None as they are."""
    why = ""
    try:
        value = parse_json(given) if isinstance(given, str) else given
    except json.JSONDecodeError:
        value = given
    except ValueError as error:  # JSON that is refused all the same
        value, why = given, f"{error}; "
    if value is None or value is False:
        return value
    if not isinstance(value, Mapping):
        raise SinkscopeError(f'{name} is {given!r}: {why}expected JSON such as {{"actions": ["stop"]}}, or false')
    return {str(key): item for key, item in value.items()}


class LoopRow:
    """One request: its monitor, and the current action against its loop.

    Positions count the tokens of the request, from any fixed origin. The action at a position depends on the position
    alone, so it is correct for drafts that are accepted and for drafts that are rejected.

    Args:
        settings: Settings of the request.
        end: Id of its end token. None if there is none; "stop" then does nothing.
        temperature: Temperature of the request.
        seed: Seed of the random numbers that "heat" needs in a request decoded greedily.
    """

    def __init__(self, settings: ServingSettings, end: int | None, temperature: float, seed: int | None = None) -> None:
        self.settings, self.temperature, self.seed = settings, temperature, seed or 0
        self.end = end if settings.end is None else settings.end
        self.taken = 0  # actions begun
        self._monitor, self._seen, self._last, self._judged = Monitor(settings.monitor), 0, -1, 0
        self._due: list[int] = []  # positions from which on an action is due
        self._action, self._start, self._until = "", 0, -math.inf
        self.mark = -1  # a position that the caller remembers
        self._noise: torch.Generator | None = None
        if self.end is None and "stop" in settings.actions:
            _log.warning("A request has no end token, so its loops cannot be stopped: set `end`.")

    def feed(self, tokens: Iterable[int], due: int = 0) -> None:
        """Process the next output tokens.

        Args:
            tokens: Token ids; a negative one stands for a token that is not known yet and ends the reading.
            due: Position from which an action is due if one of the tokens triggers; at once by default.
        """
        for token in tokens:
            if token < 0:
                return
            trigger = self._monitor.update(token).trigger
            self._seen, self._last = self._seen + 1, token
            if self._seen > self._judged:
                self._judged, self._due = self._seen, [*self._due, due] if trigger else self._due

    def follow(self, output: Sequence[int]) -> None:
        """Process the new part of a list of all output tokens; if tokens were taken back, reread it from the start."""
        if self._seen and (len(output) < self._seen or output[self._seen - 1] != self._last):
            self._monitor, self._seen = Monitor(self.settings.monitor), 0
            self._judged = min(self._judged, len(output))  # what is read again has had its actions
        self.feed(output[self._seen :])

    def replay(self, output: Sequence[int], origin: int = 0, lag: int = 0) -> None:
        """Process the output of an earlier stay in the batch, and resume the action that was in progress then.

        Args:
            output: Ids of its tokens.
            origin: Position of the first token.
            lag: Number of tokens between a trigger and its action.
        """
        for position, token in enumerate(output, origin):
            self._begin_due(position)
            self.feed((token,), position + 1 + lag)

    def busy(self, position: int) -> bool:
        """Whether `edit` would change the logits at this position or a later one."""
        return bool(self._due) or position < self._until

    def edit(self, logits: Tensor, position: int) -> None:
        """Apply the action that is due at a position.

        Args:
            logits: Logits of the token at that position, changed in place. Shape `[vocab]`. A token that something else
                has forbidden (minus infinity) stays forbidden.
            position: Position of the token that is chosen from these logits. Rows of drafts come in order.
        """
        self._begin_due(position)
        if not self._start <= position < self._until:
            return
        if self._action == "heat":
            self._heat(logits)
            return
        token = self.end if self._action == "stop" else self.settings.tokens[position - self._start]
        if token is not None and token < logits.shape[-1]:
            kept = logits[token].clone()
            logits.masked_fill_(kept.isfinite(), -math.inf)
            logits[token] = kept

    def _begin_due(self, position: int) -> None:
        """Begin the next action there, if one is due."""
        s, later = self.settings, [due for due in self._due if due > position]
        if later == self._due:
            return
        self._action = s.actions[min(self.taken, len(s.actions) - 1)]
        self._start, self._due, self.taken = position, later, self.taken + 1
        self._until = position + {"stop": math.inf, "force": len(s.tokens), "heat": s.span}[self._action]
        _log.info("A request repeats itself after %d output tokens: %s", self._seen, self._action)

    def _heat(self, logits: Tensor) -> None:
        """Raise the temperature. Where the server takes the largest logit, Gumbel noise makes that an exact sample."""
        hot = max(self.settings.temperature, self.temperature)
        if self.temperature >= GREEDY:
            logits.mul_(self.temperature / hot)
            return
        if self._noise is None:  # of its own: every worker draws the same, and other requests' numbers stay theirs
            self._noise = torch.Generator(logits.device).manual_seed(self.seed)
        logits.sub_(torch.empty_like(logits, dtype=torch.float32).exponential_(generator=self._noise).log_(), alpha=hot)


def _vllm_row(params: Any) -> LoopRow | None:
    """The row of a vLLM request; None: it is not monitored."""
    settings = ServingSettings.of((params.extra_args or {}).get(KEY))
    end = getattr(params, "eos_token_id", None)
    end = min(params.all_stop_token_ids, default=None) if end is None else end
    return settings and LoopRow(settings, end, params.temperature, params.seed)


class _Batch:
    """vLLM's batch interface: rows are places in the batch, and their tokens are in lists that the server extends."""

    def __init__(self, vllm_config: Any, device: Any, is_pin_memory: bool) -> None:
        self._rows: dict[int, tuple[LoopRow, list[int]]] = {}

    def update_state(self, batch_update: Any) -> None:
        for index in batch_update.removed if batch_update else ():
            self._rows.pop(index, None)
        for index, params, _, output in batch_update.added if batch_update else ():
            self._rows.pop(index, None)
            if row := _vllm_row(params):
                row.replay(output)
                self._rows[index] = row, output
        for source, target, direction in batch_update.moved if batch_update else ():
            row, other = self._rows.pop(source, None), self._rows.pop(target, None)
            if row:
                self._rows[target] = row
            if other and direction.name == "SWAP":
                self._rows[source] = other

    def apply(self, logits: Tensor) -> Tensor:
        for index, (row, output) in self._rows.items():
            row.follow(output)
            if row.busy(len(output)):
                row.edit(logits[index], len(output))
        return logits


class _Slots:
    """vLLM's interface of Model Runner V2: requests have slots, and their tokens are on the device.

    Each step starts copying the latest tokens to the host and reads the copy that the previous step started. No step
    therefore waits for its own forward pass, and an action begins one step later than with `_Batch`.
    """

    def __init__(self, vllm_config: Any, req_states: Any) -> None:
        drafts = getattr(vllm_config, "speculative_config", None)
        self._width = 1 + (drafts.num_speculative_tokens if drafts else 0)
        self._states, self._rows = req_states, dict[int, LoopRow]()
        self._sent: tuple[Tensor, Any, list[LoopRow | None]] | None = None

    def add_request(self, req_idx: int, sampling_params: Any) -> bool:
        self._rows.pop(req_idx, None)
        if row := _vllm_row(sampling_params):
            self._rows[req_idx] = row
        return row is not None

    def apply(self, logits: Tensor, ctx: Any) -> Tensor:
        self._receive()
        slots = ctx.idx_mapping_np.tolist()
        rows = {slot: row for slot in slots if (row := self._rows.get(slot))}
        for slot, row in rows.items():
            if row.mark < 0:  # new here; one that comes back has generated before
                prompt, row.mark = int(self._states.prompt_len.np[slot]), int(self._states.prefill_len.np[slot])
                before = self._states.all_token_ids.gpu[slot, prompt : row.mark]
                row.replay(before.tolist() if row.mark > prompt else (), prompt, lag=1)
        if rows:
            self._send(ctx.idx_mapping.long(), [rows.get(slot) for slot in slots])
        busy = {slot: row for slot, row in rows.items() if row.busy(row.mark)}
        if busy:
            # Lengths on the host are exact without drafts. With them the device must be asked, while an action lasts.
            positions = ctx.seq_lens_upper_bound_np.tolist()
            if self._width > 1:
                slots, positions = ctx.expanded_idx_mapping.tolist(), (ctx.pos + 1).tolist()
            for i, (slot, position) in enumerate(zip(slots, positions, strict=True)):
                if slot in busy:
                    busy[slot].edit(logits[i], position)
        return logits

    def _send(self, slots: Tensor, rows: list[LoopRow | None]) -> None:
        """Begin to copy each request's length and its latest tokens to the host."""
        total = self._states.total_len.gpu[slots].long()
        at = total[:, None] - torch.arange(self._width, 0, -1, device=total.device)
        latest = self._states.all_token_ids.gpu[slots[:, None], at.clamp(min=0)]
        copy = torch.cat([total[:, None], latest], 1).to("cpu", non_blocking=True)  # pinned, if it comes from a GPU
        event = torch.cuda.Event() if total.is_cuda else None
        if event:
            event.record()
        self._sent = copy, event, rows

    def _receive(self) -> None:
        """Feed the monitors what the step before has sent. Every worker waits for it, so all of them do the same."""
        (copy, event, rows), self._sent = self._sent or (torch.empty(0), None, []), None
        if event:
            event.synchronize()
        for (total, *latest), row in zip(copy.tolist(), rows, strict=True):
            if row and total > row.mark:
                row.feed(latest[row.mark - total :])
                row.mark = total


class _Vllm:
    """Watches each request for loops and ends them; `ServingSettings` says how. For both interfaces of vLLM."""

    def __init__(self, vllm_config: Any, *where: Any) -> None:
        self._requests: Any = (_Slots if len(where) == 1 else _Batch)(vllm_config, *where)

    @classmethod
    def validate_params(cls, sampling_params: Any) -> None:
        ServingSettings.of((sampling_params.extra_args or {}).get(KEY))

    @classmethod
    def needs_output_token_ids(cls) -> bool:
        return True

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: Any) -> None:
        self._requests.update_state(batch_update)

    def add_request(self, req_idx: int, sampling_params: Any) -> bool:
        return self._requests.add_request(req_idx, sampling_params)

    def apply(self, logits: Tensor, *context: Any) -> Tensor:
        return self._requests.apply(logits, *context)


class _Sglang:
    """Watches each request for loops and ends them; `ServingSettings` says how. For SGLang."""

    def __call__(self, logits: Tensor, custom_param_list: Sequence[Any] | None = None) -> Tensor:
        drafts = logits.shape[0] // len(custom_param_list or "-")  # rows of a request, if the list has it once
        first: dict[int, int] = {}
        for i, params in enumerate(p for p in custom_param_list or () for _ in range(drafts)):
            row, request = self._row(params or {})
            if row is None:
                continue
            draft = i - first.setdefault(id(row), i)
            if draft == 0:
                row.follow(request.output_ids)
                # With overlapped scheduling the list lacks the latest token now and then; each call makes one more.
                row.mark = max(len(request.output_ids), row.mark + 1)
            if row.busy(row.mark + draft):
                row.edit(logits[i], row.mark + draft)
        return logits

    @staticmethod
    def _row(params: dict[str, Any]) -> tuple[LoopRow | None, Any]:
        """The row of a request, which lives in the request's own parameters, and the request."""
        request = params.get("__req__")
        if request is not None and _ROW not in params:
            params[_ROW] = None
            sampling = request.sampling_params
            ends = [*sorted(request.eos_token_ids or ()), getattr(request.tokenizer, "eos_token_id", None)]
            temperature = 0.0 if sampling.top_k == 1 else sampling.temperature  # this is how it decodes greedily
            try:  # SGLang has no way to refuse a request here, and an exception would end its scheduler
                if settings := ServingSettings.of(params.get(KEY)):
                    params[_ROW] = LoopRow(settings, ends[0], temperature, getattr(sampling, "sampling_seed", None))
            except SinkscopeError as error:
                _log.warning("A request is not monitored: %s", error)
        return params.get(_ROW), request


_ROW = "__sinkscope__"
_MADE: dict[str, tuple[type, tuple[tuple[str, str], ...]]] = {
    "VllmLoopProcessor": (
        _Vllm,
        (
            ("vllm.v1.sample.logits_processor", "LogitsProcessor"),
            ("vllm.v1.worker.gpu.sample.logits_processor", "LogitsProcessor"),
        ),
    ),
    "SglangLoopProcessor": (_Sglang, (("sglang.srt.sampling.custom_logit_processor", "CustomLogitProcessor"),)),
}


def __getattr__(name: str) -> Any:
    if name not in _MADE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    ours, homes = _MADE[name]
    bases: list[type] = []
    for module, base in homes:
        try:
            bases.append(getattr(import_module(module), base))
        except ImportError:  # a version of the server with one of the interfaces only
            continue
    if not bases:
        raise ImportError(f"{name} needs {homes[0][0].partition('.')[0]}, which is not installed here")
    globals()[name] = made = new_class(
        name, (ours, *bases), exec_body=lambda body: body.update(__module__=__name__, __doc__=ours.__doc__)
    )
    return made
