"""The record of a forward call, which everything that acts in the call reads.

A call may be a whole prompt, a chunk of one, one generated token, a later turn, or (without a cache) the whole prefix
again; rows may be padded on either side. `begin_step` makes the record at the beginning of the call:

1. The cache says how many columns it holds, and what this block knows of its rows.
2. The mask says which of the new tokens are real, and which share a document.
3. Each real token gets its position in its document.

transformers takes position ids that jump for packed texts and hides earlier ones, if there is neither mask nor cache.
Whether a model does so is read from the mask that its first layer gets (`Step.note_mask`), before the positions of such
a call are asked for.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NoReturn

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from sinkscope.engine.rows import ROWS, RowState
from sinkscope.engine.tokens import TokenPositions
from sinkscope.engine.visible import shown
from sinkscope.errors import SinkscopeError, UnsupportedError
from sinkscope.models.call_cache import CACHE_NAMES


@dataclass(eq=False)
class Step:
    """One forward call of the model.

    Attributes:
        number: Number of the call within the block, from 0.
        rows: Number of rows.
        past: Number of columns (tokens with padding) in the cache before the call.
        new: Number of columns that the call reads.
        ids: Ids of these tokens, if they are given as ids.
        cache: The cache that the call continues; None if it was given none.
        arguments: The arguments of the call, by name.
        earlier: The tokens before the call.
        state: What is known about these rows from earlier calls.
        layers: The layers of the cache that can evict; empty if nothing owns the cache.
        decodes: Whether it reads a generated token into a cache that can evict.
        prefill_ended: Whether this is the first single-token call after a prompt.
        prompting: Whether `generate` is reading a prompt, so that even a single token is a part of it.
        has_gaps: Whether the cache lacks tokens, so that the place of a key is not its column.
        settings: Settings of the `generate` that makes the call; None outside of one.
        logits: Logits of the last token of each row, once they exist; actors may change them in place.
        may_take_back: How many tokens of each row the caller can still take back; None if it can take back none.
        room: Number of columns with which each row is full; None if the caller does not count them.
        jumps: Where position ids do not count on, if texts may be packed in this call.
        is_over: Whether the caller ends this piece of the text, because tokens were taken back.
        notes: What actors note for their later moments in the call, by their keys.
        unsure: Column of a token that may be padding or not; None if there is none.
    """

    number: int
    rows: int
    past: int
    new: int
    ids: Int[Tensor, "batch pos"] | None
    cache: Any
    arguments: Mapping[str, Any]
    earlier: TokenPositions
    state: RowState
    layers: list[Any] = field(default_factory=list)
    decodes: bool = False
    prefill_ended: bool = False
    prompting: bool = False
    has_gaps: bool = False
    settings: Any = None
    logits: Tensor | None = None
    may_take_back: list[int] | None = None
    room: list[int] | None = None
    is_over: bool = False
    notes: dict[Hashable, Any] = field(default_factory=dict)
    jumps: Bool[Tensor, "batch pos"] | None = None
    unsure: int | None = None
    _tokens: TokenPositions | None = None
    _by_device: dict[torch.device, Int[Tensor, "batch pos"]] = field(default_factory=dict)

    @property
    def tokens(self) -> TokenPositions:
        """All tokens so far."""
        if self._tokens is None:  # no layer has told its mask: the model has none that it passes on
            self.note_mask(None, packs_in_kernel=False)
        assert self._tokens is not None
        return self._tokens

    def note_mask(self, mask: Any, *, packs_in_kernel: bool) -> None:
        """Read from the mask that the first layer gets whether texts are packed.

        Args:
            mask: The mask: 4-D, a `BlockMask`, or None.
            packs_in_kernel: Whether the model's attention takes position ids that jump for packed texts by itself.
        """
        if self._tokens is not None:
            return
        starts = self.jumps
        sees = _sees_previous(mask, self.rows, self.new)
        if sees is not None and starts is not None:
            starts = starts & ~sees.to(starts.device)
        elif not packs_in_kernel:
            starts = None
        real = torch.ones(self.rows, self.new, dtype=torch.bool, device=self.earlier.pos.device)
        self.set_tokens(self.earlier.read(real, starts))

    def set_tokens(self, tokens: TokenPositions) -> None:
        """Say where the tokens stand, once it is known."""
        self._tokens = self.state.tokens = tokens
        if self.earlier.seen != self.past:  # some were read in calls on which the block did not act
            self.earlier = tokens.first(self.past)

    @cached_property
    def index(self) -> Int[Tensor, "batch pos"]:
        """Position of each new token in its document; -1 at padding."""
        return self.tokens.pos[:, self.past :]

    @property
    def documents(self) -> Int[Tensor, "batch pos"] | None:
        """Document of each new token; None if each row is one document."""
        document = self.tokens.document
        return None if document is None else document[:, self.past :]

    @property
    def columns(self) -> Int[Tensor, "batch seen"]:
        """The same for every token so far, the new ones last."""
        return self.tokens.pos

    @property
    def before(self) -> Int[Tensor, " batch"]:
        """Number of real tokens in each row before the call."""
        return self.earlier.length

    @property
    def is_padded(self) -> bool:
        """Whether there is padding among the new tokens; whoever asks first waits for the device."""
        return self.new > 1 and self.tokens.padded > self.past

    def on(self, device: torch.device) -> Int[Tensor, "batch pos"]:
        """Return `index` on the device of a layer; a model may be spread over several."""
        if self.index.device == device:
            return self.index
        if device not in self._by_device:
            self._by_device[device] = self.index.to(device)
        return self._by_device[device]

    def refuse_unsure(self, column: int) -> NoReturn:
        """Refuse a call of which it is not known whether the token in a column is padding.

        Raises:
            UnsupportedError: In any case.
        """
        raise UnsupportedError(
            f"the token in column {column} was read before this run was entered, and no query sees it, so that it is "
            "not known whether it is padding: enter the run first, or pass a 2-D mask"
        )

    def check_read(self, what: str, remedy: str, enough: int = 0) -> None:
        """Refuse a call that continues tokens which an edit had to see and did not.

        Args:
            what: What is not known, as the end of "so ... is not known".
            remedy: What to do instead of entering the block first.
            enough: Number of first tokens that need not be seen.

        Raises:
            SinkscopeError: Such tokens were read before the block was entered, or into a cache that was put together
                from others.
        """
        if self.state.partial and self.past > enough:
            raise SinkscopeError(
                f"the first {self.past} tokens were read before this run was entered, so {what} is not known: enter "
                f"the run first, or {remedy}"
            )


def cache_in(holder: Any) -> Any:
    """Return the cache that a call's arguments, or a model's output, hold; None if there is none."""
    is_by_name = isinstance(holder, dict)
    for name in CACHE_NAMES:
        cache: Any = holder.get(name) if is_by_name else getattr(holder, name, None)
        if cache is not None:
            return cache
    return None


def tokens_in(cache: Any) -> int:
    """Return the number of tokens that a cache of transformers has read, with padding.

    Where the first layer keeps a state and no keys, as in MiniMax, it says that there are none.
    """
    count = int(cache.get_seq_length())
    if count == 0:
        for layer in getattr(cache, "layers", None) or []:
            if hasattr(layer, "get_seq_length"):
                count = max(count, int(layer.get_seq_length()))
    return count


def begin_step(run: int, number: int, arguments: Mapping[str, Any], cache: Any) -> Step:
    """Make the record of a forward call.

    Args:
        run: Number of the block that acts in the call.
        number: Number of the call within the block.
        arguments: Arguments of the call by name. The mask may be 2-D (1 = real), 4-D (bool or additive), a dict of
            such masks by layer type, or None. Tokens that were read in an earlier call keep the mask of that call.
        cache: The cache among them.
    """
    ids: Tensor | None = arguments.get("input_ids")
    tokens: Tensor = arguments["inputs_embeds"] if ids is None else ids
    mask = arguments.get("attention_mask")
    batch, new = tokens.shape[:2]
    past = 0 if cache is None else tokens_in(cache)
    states: dict[int, RowState] = getattr(cache, ROWS, None) or {}
    state = states.get(run) if past else None
    if state is None or len(state.tokens.pos) != batch:
        state = RowState(TokenPositions.none(batch, tokens.device), partial=past > 0)
    earlier = state.tokens
    if past < earlier.seen:  # tokens were taken back
        earlier = earlier.first(past)
    step = Step(number, batch, past, new, ids, cache, arguments, earlier, state)
    if isinstance(mask, dict):  # per layer type, as generation builds it for caches of fixed size
        mask = mask.get("full_attention", next(iter(mask.values()), None))
    if mask is None:
        if past == 0 and cache is None:
            step.jumps = _jumps(arguments.get("position_ids"), batch, new)
        if step.jumps is None:
            real = torch.ones(batch, past + new - earlier.seen, dtype=torch.bool, device=tokens.device)
            step.set_tokens(earlier.read(real))
        return step
    step.set_tokens(_read(step, mask, tokens.device))
    return step


def _read(step: Step, mask: Any, device: torch.device) -> TokenPositions:
    """The tokens before a call and the new ones, by a mask; earlier ones are not checked again."""
    earlier, new, total = step.earlier, step.new, step.past + step.new
    if isinstance(mask, Tensor) and mask.ndim == 2 and mask.shape[1] >= total:
        return earlier.read(mask[:, earlier.seen : total].bool().to(device))
    if isinstance(mask, Tensor) and mask.ndim == 4 and mask.shape[-1] >= new and mask.shape[-2] in (1, new):
        sees = shown(mask).any(1).expand(step.rows, new, -1).to(device)[:, :, :total]
        sees = torch.nn.functional.pad(sees, (total - sees.shape[2], 0))  # a window may show the latest columns alone
        if earlier.seen < step.past:
            earlier = _read_elsewhere(step, sees.any(1))
        return earlier.read_under(sees)
    raise UnsupportedError(
        f"attention mask of type {type(mask).__name__} and shape {tuple(getattr(mask, 'shape', ()))}: the true "
        f"positions of {total} tokens cannot be read from it; pass a mask of shape (batch, tokens) with 1 at real "
        "tokens, one of shape (batch, heads, queries, keys), or none"
    )


def _read_elsewhere(step: Step, is_seen: Bool[Tensor, "batch seen"]) -> TokenPositions:
    """The tokens before a call, some of which were read in calls on which the block did not act.

    A layer of ours knows its tokens, also if it was saved and loaded. Of others, the first ones of a row are padding if
    no query of the call sees them; of one behind these that none sees, it is not known (`Step.unsure`).
    """
    for layer in getattr(step.cache, "layers", None) or []:
        tokens = getattr(layer, "columns", None)
        if isinstance(tokens, TokenPositions) and tokens.pos.shape == (step.rows, step.past):
            return tokens
    start = step.earlier.seen
    real = (is_seen.cumsum(1) > 0)[:, start : step.past]
    unsure = (real & ~is_seen[:, start : step.past]).any(0).nonzero()
    if len(unsure):
        step.unsure = start + int(unsure[0])
    return step.earlier.read(real)


def _jumps(position_ids: Any, batch: int, new: int) -> Bool[Tensor, "batch pos"] | None:
    """Where position ids do not count on; None if they do, or are not given."""
    if not isinstance(position_ids, Tensor) or position_ids.ndim != 2 or new < 2:
        return None
    jumps = torch.nn.functional.pad(position_ids.diff(dim=1) != 1, (1, 0))
    return jumps.expand(batch, -1) if bool(jumps.any()) else None


def _sees_previous(mask: Any, rows: int, new: int) -> Bool[Tensor, "batch pos"] | None:
    """Whether each token sees the one before it, under a mask; None if there is none that says it."""
    if isinstance(mask, dict):
        mask = mask.get("full_attention", next(iter(mask.values()), None))
    if isinstance(mask, Tensor) and mask.ndim == 4 and mask.shape[-1] == mask.shape[-2] == new:
        sees = shown(mask).any(1).diagonal(-1, 1, 2)
    else:
        mask_mod: Any = getattr(mask, "mask_mod", None)  # of a BlockMask, which FlexAttention takes
        if mask_mod is None:
            return None
        row, query = torch.arange(rows)[:, None], torch.arange(1, new)
        sees = mask_mod(row, torch.zeros_like(row), query, query - 1)
    return torch.nn.functional.pad(sees.expand(rows, -1), (1, 0), value=False)
