"""What `generate` is doing in a run that owns the cache, and what a guard takes back of what it has written."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor
from transformers import StoppingCriteria

from sinkscope.errors import UnsupportedError
from sinkscope.models.call_cache import cache_in


class Generation(threading.local):
    """What `generate` is doing in the current thread.

    Attributes:
        prompting: Whether it is reading a prompt, so that even a single-token call is a part of it.
        resuming: Whether it goes on after tokens were taken back, so that it reads no prompt.
        settings: Settings of the latest `generate`; None without one.
    """

    prompting: bool = False
    resuming: bool = False
    settings: Any = None

    def set_prompting(self, reads: bool) -> None:
        """Note that a prompt is going to be read, or was."""
        self.prompting = reads and not self.resuming


def check_token_by_token(method: str, options: Mapping[str, Any]) -> None:
    """Refuse kinds of generation in which nothing could act on generated tokens.

    Args:
        method: The method of a model that `generate` calls: `_prefill`, or another for assisted generation.
        options: Arguments of the forward call.

    Raises:
        UnsupportedError: Generation is assisted, or runs without a cache.
    """
    if method != "_prefill":
        raise UnsupportedError(
            "assisted generation reads several tokens at a time and takes some back, and a cache policy acts on "
            "tokens that come one by one: generate without an assistant, or use Full"
        )
    if not options.get("use_cache") and cache_in(options) is None:
        raise UnsupportedError(
            "use_cache=False: there is no cache that a cache policy or a guard could act on: generate with "
            "use_cache=True, or without them"
        )


@dataclass(eq=False)
class Rewinder(StoppingCriteria):
    """Tells the generating code what a guard removes: `generate` runs in pieces, each ending where a loop was found.

    Attributes:
        allowance: Number of tokens of each row that may still be removed. None if generation does not run in pieces.
        kept_mask: Tokens in the cache after a removal, by row: False at padding and at removed tokens. None if nothing
            has to be removed.
        reread_tokens: The last token that stays of each row that lost some; it is read again.
        ended: Rows that have ended, as the guard knows it.
        end_lengths: Length at which each row of this piece has all its tokens; 0 for a row that has ended. Empty if
            generation does not run in pieces.
    """

    allowance: list[int] | None = None
    kept_mask: Bool[Tensor, "row pos"] | None = None
    reread_tokens: dict[int, int] = field(default_factory=dict)
    ended: list[bool] = field(default_factory=list)
    end_lengths: list[int] = field(default_factory=list)

    def __call__(self, input_ids: Int[Tensor, "row pos"], scores: Any, **kwargs: Any) -> Any:
        """Say which rows of this piece end: bool `[row]`."""
        if self.kept_mask is not None:
            return torch.ones(len(input_ids), dtype=torch.bool, device=input_ids.device)
        return torch.tensor(self.end_lengths, device=input_ids.device) <= input_ids.shape[1]

    def limit(self, written: Sequence[int], most: int) -> None:
        """Set the end of each row so that it has at most `most` new tokens, `written` of which exist."""
        self.end_lengths = []
        for count, has_ended in zip(written, self.ended, strict=True):
            self.end_lengths.append(0 if has_ended else most - count)

    def continued(
        self, ids: Int[Tensor, "row pos"], mask: Int[Tensor, "row pos"]
    ) -> tuple[Int[Tensor, "row next"], Int[Tensor, "row next"]]:
        """Return what the cache holds with the token with which each row goes on, and which tokens are real."""
        assert self.kept_mask is not None
        read, self.kept_mask = self.kept_mask.to(mask), None
        seen = read.shape[1]
        newest = ids[:, min(seen, ids.shape[1] - 1)].clone()  # the next one, or that in `reread_tokens`
        for row, token in self.reread_tokens.items():
            newest[row] = token
        return torch.cat([ids[:, :seen], newest[:, None]], 1), torch.nn.functional.pad(read, (0, 1), value=1)
