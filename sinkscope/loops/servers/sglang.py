"""The loop monitor as a custom logit processor of SGLang. This module does not import SGLang."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from sinkscope.errors import SinkscopeError
from sinkscope.loops.servers.loop_row import KEY, LoopRow, ServingSettings

ROW_KEY = "__sinkscope__"  # where the row of a request lies in its own parameters
_log = logging.getLogger(__name__)


class SglangLoops:
    """Watches each request for loops and ends them; `ServingSettings` says how. For SGLang, but not for drafts."""

    def __call__(self, logits: Tensor, custom_param_list: Sequence[Any] | None = None) -> Tensor:
        """Apply the actions that are due to logits `[row vocab]`, a row for each request; not those of drafts."""
        requests = custom_param_list or ()
        if logits.shape[0] != len(requests):
            return logits
        for place, params in enumerate(requests):
            row = self._row(params or {})
            if row is None:
                continue
            output = params["__req__"].output_ids
            row.follow(output)
            # With overlapped scheduling the list lacks the latest token now and then; each call makes one more.
            row.mark = max(len(output), row.mark + 1)
            row.edit(logits[place], row.mark)
        return logits

    @staticmethod
    def _row(params: dict[str, Any]) -> LoopRow | None:
        """The row of a request, which lives in the request's own parameters; None: it is not monitored."""
        request = params.get("__req__")
        if request is None or ROW_KEY in params:
            return params.get(ROW_KEY)
        params[ROW_KEY] = None
        try:  # SGLang has no way to refuse a request here, and an exception would end its scheduler
            settings = ServingSettings.of_request(params.get(KEY))
        except SinkscopeError as error:
            _log.warning("A request is not monitored: %s", error)
            return None
        if settings is None:
            return None
        ends = [*sorted(request.eos_token_ids or ()), getattr(request.tokenizer, "eos_token_id", None)]
        params[ROW_KEY] = LoopRow(settings, ends[0])
        return params[ROW_KEY]
