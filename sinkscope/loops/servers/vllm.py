"""The loop monitor as a logits processor of vLLM, in the interface of Model Runner V2; imports no vLLM."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sinkscope.errors import UnsupportedError
from sinkscope.loops.servers.loop_row import KEY, LoopRow, ServingSettings


class VllmLoops:
    """Watches each request for loops and ends them; `ServingSettings` says how. For vLLM without speculative decoding.

    Requests have slots, and their tokens are on the device. Each step starts copying the latest tokens to the host and
    reads the copy that the previous step started. No step therefore waits for its own forward pass, and an action
    begins one token later.
    """

    def __init__(self, vllm_config: Any, req_states: Any) -> None:
        if getattr(vllm_config, "speculative_config", None):
            raise UnsupportedError("loops cannot be ended under speculative decoding: leave one of them out")
        self._states = req_states
        self._rows: dict[int, LoopRow] = {}
        self._copy: Tensor | None = None  # of each request's length and latest token, on their way to the host
        self._copied: Any = None  # says when they are there; None: they are
        self._copied_rows: list[LoopRow | None] = []

    @classmethod
    def validate_params(cls, sampling_params: Any) -> None:
        """Refuse a request whose settings are wrong; its `end` becomes a stop token, which `stop_reason` then names."""
        settings = ServingSettings.of_request((sampling_params.extra_args or {}).get(KEY))
        if settings is None or settings.end is None:
            return
        stops: list[int] = list(sampling_params.stop_token_ids or ())
        if settings.end not in stops:
            sampling_params.stop_token_ids = [*stops, settings.end]
            sampling_params.all_stop_token_ids.add(settings.end)

    def add_request(self, req_idx: int, sampling_params: Any) -> bool:
        """Begin a request in a slot; whether it is monitored."""
        self._rows.pop(req_idx, None)
        settings = ServingSettings.of_request((sampling_params.extra_args or {}).get(KEY))
        if settings is None:
            return False
        end = getattr(sampling_params, "eos_token_id", None)
        if end is None:
            end = min(sampling_params.all_stop_token_ids, default=None)
        self._rows[req_idx] = LoopRow(settings, end)
        return True

    def apply(self, logits: Tensor, ctx: Any) -> Tensor:
        """Read what the step before has sent, and apply the actions that are due."""
        self._receive()
        slots: list[int] = ctx.idx_mapping_np.tolist()
        rows = [self._rows.get(slot) for slot in slots]
        for slot, row in zip(slots, rows, strict=True):
            if row is not None and row.mark < 0:  # what it wrote before it came here is not watched
                row.mark = int(self._states.prefill_len.np[slot])
        watched = [row for row in rows if row is not None]
        if watched:
            self._send(ctx.idx_mapping.long(), rows)
        if not any(row.busy(row.mark) for row in watched):
            return logits
        for place, (row, position) in enumerate(zip(rows, ctx.seq_lens_upper_bound_np.tolist(), strict=True)):
            if row is not None:
                row.edit(logits[place], position)
        return logits

    def _send(self, slots: Tensor, rows: list[LoopRow | None]) -> None:
        """Begin to copy each request's length and its latest token to the host."""
        total = self._states.total_len.gpu[slots].long()
        latest = self._states.all_token_ids.gpu[slots, (total - 1).clamp(min=0)]
        self._copy = torch.stack([total, latest.long()], 1).to("cpu", non_blocking=True)  # pinned, if it is of a GPU
        self._copied_rows = rows
        if total.is_cuda:
            self._copied = torch.cuda.Event()
            self._copied.record()

    def _receive(self) -> None:
        """Feed the monitors what the step before has sent. Every worker waits for it, so all of them do the same."""
        copy = self._copy
        self._copy = None
        if copy is None:
            return
        if self._copied is not None:
            self._copied.synchronize()
        for (total, latest), row in zip(copy.tolist(), self._copied_rows, strict=True):
            if row is not None and total > row.mark:
                row.feed([latest])
                row.mark = total
