"""The record of a forward call, made once at its begin; whatever acts in the call reads it.

A call may be a whole prompt, a chunk of one, one generated token, a later turn, or (without a cache) the whole prefix
again; rows may be padded on either side. What is known of the rows from earlier calls lies on their cache
(`hooks.rows`). `begin_call` does, in this order:

1. The cache says how many tokens it holds, and what this run knows of its rows.
2. The mask says which of the other tokens are real.
3. Each real token gets its position: the number of real tokens before it in its row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from einops import reduce
from jaxtyping import Bool, Int
from torch import Tensor

from sinkscope.errors import SinkscopeError, UnsupportedError
from sinkscope.hooks.rows import RowState, TokenPositions, rows_on
from sinkscope.models.call_cache import cache_in, tokens_in
from sinkscope.tap.rows import shown


@dataclass(eq=False)
class Call:
    """One forward call of the model.

    Attributes:
        step: Number of the call within the run, from 0.
        rows: Number of rows.
        past: Number of tokens (with padding) in the cache before the call.
        new: Number of tokens of a row that the call reads.
        ids: Ids of these tokens, if they are given as ids.
        cache: The cache that the call continues; None if it was given none.
        earlier: The tokens before the call.
        tokens: All tokens so far.
        state: What is known about these rows from earlier calls.
    """

    step: int
    rows: int
    past: int
    new: int
    ids: Int[Tensor, "batch pos"] | None
    cache: Any
    earlier: TokenPositions
    tokens: TokenPositions
    state: RowState
    _by_device: dict[torch.device, Int[Tensor, "batch pos"]] = field(default_factory=dict)

    @cached_property
    def index(self) -> Int[Tensor, "batch pos"]:
        """True position of each new token among the real tokens of its row; -1 at padding."""
        return self.tokens.pos[:, self.past :]

    @property
    def columns(self) -> Int[Tensor, "batch seen"]:
        """The same for every token so far, the new ones last."""
        return self.tokens.pos

    @property
    def before(self) -> Int[Tensor, " batch"]:
        """Number of real tokens in each row before the call."""
        return self.earlier.length

    def on(self, device: torch.device) -> Int[Tensor, "batch pos"]:
        """Return `index` on the device of a layer; a model may be spread over several."""
        if self.index.device == device:
            return self.index
        if device not in self._by_device:
            self._by_device[device] = self.index.to(device)
        return self._by_device[device]

    def check_read(self, what: str, remedy: str, enough: int = 0) -> None:
        """Refuse a call that continues tokens of which an edit had to remember something, and which it did not see.

        Args:
            what: What is not known, as the end of "so ... is not known".
            remedy: What to do instead of entering the run first.
            enough: Number of first tokens that need not be seen.

        Raises:
            SinkscopeError: Such tokens were read before the run was entered, or into a cache that was put together
                from others.
        """
        if self.state.partial and self.past > enough:
            raise SinkscopeError(
                f"the first {self.past} tokens were read before this run was entered, so {what} is not known: enter "
                f"the run first, or {remedy}"
            )


def begin_call(run: int, step: int, given: Mapping[str, Any]) -> Call:
    """Make the record of a forward call.

    Args:
        run: Number of the run that acts in the call.
        step: Number of the call within the run.
        given: Arguments of the call by name. The mask may be 2-D (1 = real), 4-D (bool or additive), a dict of these
            by layer type, or None. Tokens that were read in an earlier call keep the mask of that call.
    """
    ids: Tensor | None = given.get("input_ids")
    tokens: Tensor = given["inputs_embeds"] if ids is None else ids
    cache, mask = cache_in(given), given.get("attention_mask")
    batch, new = tokens.shape[:2]
    past = 0 if cache is None else tokens_in(cache)
    state = rows_on(cache, run) if past else None
    if state is None or len(state.tokens.pos) != batch:
        state = RowState(TokenPositions.none(batch, tokens.device), partial=past > 0)
    earlier = state.tokens.first(past)  # tokens may have been taken back
    # Some may have been read in calls that this run did not act on; they come first.
    if isinstance(mask, dict):  # per layer type, as generation builds it for caches of fixed size
        mask = mask.get("full_attention", next(iter(mask.values()), None))
    missing = past + new - earlier.seen
    if mask is None:
        real = torch.ones(batch, missing, dtype=torch.bool, device=tokens.device)
    else:
        real = _real(mask, batch, earlier.seen, past, new).to(tokens.device)
    everything = earlier.read(real)
    state.tokens = everything
    before = earlier if earlier.seen == past else everything.first(past)
    return Call(step, batch, past, new, ids, cache, before, everything, state)


def _real(mask: Any, batch: int, read: int, past: int, new: int) -> Bool[Tensor, "batch more"]:
    """Which tokens from index `read` on are real; earlier ones are not checked again."""
    total = past + new
    if isinstance(mask, Tensor) and mask.ndim == 2 and mask.shape[1] >= total:
        return mask[:, read:total].bool()
    if isinstance(mask, Tensor) and mask.ndim == 4:
        # A real token is seen by itself; padding is seen by nobody. A window hides old tokens: those are history.
        start = min(past, mask.shape[-1] - new)
        part = shown(mask[..., start : start + new])
        seen = reduce(part, "batch head query key -> batch key", "any").expand(batch, -1)
        return torch.cat([seen.new_ones(batch, past - read), seen], 1)
    raise UnsupportedError(
        f"attention mask of type {type(mask).__name__} and shape {tuple(getattr(mask, 'shape', ()))}: the true "
        f"positions of {total} tokens cannot be read from it; pass a mask of shape (batch, tokens) with 1 at real "
        "tokens, or none"
    )
