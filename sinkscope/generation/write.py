"""The writer of texts: `model.generate` in pieces, each of which ends where an actor takes tokens back.

A guard that finds a loop returns a `TakeBack` after the call whose token set it off, and has cut the cache. The writer
ends the piece there, takes the same tokens out of the output, and lets `generate` go on from what is left.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import DynamicCache, StoppingCriteria, StoppingCriteriaList

from sinkscope.engine.actor import TakeBack
from sinkscope.engine.block import Run
from sinkscope.errors import warn
from sinkscope.models.call_cache import cache_argument

_OF_A_PIECE = ("scores", "logits", "attentions", "hidden_states")
"""What an output of `generate` has for each of its steps."""


@dataclass(eq=False)
class Pieces(StoppingCriteria):
    """What a text in pieces has come to; `generate` asks it whether a piece ends.

    Attributes:
        allowance: Number of tokens of each row that may still be removed.
        room: Length at which each row of this piece has all its tokens; 0 for a row that has ended.
        taken: What an actor has taken back in this piece; None if nothing.
        ended: Rows that have ended.
        goes_on: Whether a piece follows another, so that it reads a generated token and no prompt.
    """

    allowance: list[int]
    room: list[int]
    ended: list[bool]
    taken: TakeBack | None = None
    goes_on: bool = False

    def __call__(self, input_ids: Int[Tensor, "row pos"], scores: Any, **kwargs: Any) -> Any:
        """Say which rows of this piece end: bool `[row]`."""
        if self.taken is not None:
            return torch.ones(len(input_ids), dtype=torch.bool, device=input_ids.device)
        return torch.tensor(self.room, device=input_ids.device) <= input_ids.shape[1]

    def take(self, back: TakeBack) -> None:
        """Take tokens back: the piece ends."""
        self.taken, self.ended = back, back.ended

    def limit(self, written: Sequence[int], most: int) -> None:
        """Set the end of each row so that it has at most `most` new tokens, `written` of which exist."""
        self.room = []
        for count, has_ended in zip(written, self.ended, strict=True):
            self.room.append(0 if has_ended else most - count)

    def continued(
        self, ids: Int[Tensor, "row pos"], mask: Int[Tensor, "row pos"]
    ) -> tuple[Int[Tensor, "row next"], Int[Tensor, "row next"]]:
        """Return what the cache holds with the token with which each row goes on, and which tokens are real."""
        assert self.taken is not None
        kept_columns, reread = self.taken.kept_columns.to(mask), self.taken.reread
        self.taken, self.goes_on = None, True
        seen = kept_columns.shape[1]
        newest = ids[:, min(seen, ids.shape[1] - 1)].clone()  # the next one, or that which is read again
        for row, token in reread.items():
            newest[row] = token
        return torch.cat([ids[:, :seen], newest[:, None]], 1), torch.nn.functional.pad(kept_columns, (0, 1), value=1)


def write(
    run: Run | None,
    model: Any,
    ids: Int[Tensor, "row pos"],
    *,
    attention_mask: Int[Tensor, "row pos"],
    max_new_tokens: int,
    cache: Any = None,
    fixed: bool = False,
    **options: Any,
) -> Any:
    """Call `model.generate`, again each time tokens are taken back, up to the same total of new tokens.

    At a loop the piece ends. The row loses what follows the first copy, in the cache and in the output, and the next
    piece continues from there; other rows go on where they were. At most `max_new_tokens` tokens of a row are removed
    in all; later loops are only cut from the cache. With a streamer, which would show tokens that are later removed,
    nothing is taken back.

    Args:
        run: The block that acts on the model, if any.
        model: The Hugging Face model.
        ids: Token ids of the prompts, padded on the left.
        attention_mask: Which of them are real.
        max_new_tokens: Maximum number of new tokens.
        cache: The cache that `generate` goes on with; a new one if it is None.
        fixed: Whether the answer is given in advance, so that nothing may be removed.
        options: Further arguments of `model.generate`.

    Returns:
        The output of the last call of `model.generate`, with the ids of the whole answers. Where something was removed,
        it has no scores, logits, attentions and hidden states, which would be those of the last piece.
    """
    if cache is not None:
        options.update(cache_argument(model, cache))
    if run is None or not run.takes_back or options.get("streamer") is not None:
        return model.generate(input_ids=ids, attention_mask=attention_mask, max_new_tokens=max_new_tokens, **options)
    if cache is None:
        cache = DynamicCache(config=model.config)
        options.update(cache_argument(model, cache))
    rows = len(ids)
    pieces = Pieces([0 if fixed else max_new_tokens] * rows, [], [False] * rows)
    options["stopping_criteria"] = StoppingCriteriaList([*(options.get("stopping_criteria") or ()), pieces])
    with run.writing(pieces):
        return _in_pieces(pieces, model, ids, attention_mask, max_new_tokens, cache, options)


def _in_pieces(
    pieces: Pieces,
    model: Any,
    ids: Int[Tensor, "row pos"],
    mask: Int[Tensor, "row pos"],
    max_new_tokens: int,
    cache: Any,
    options: dict[str, Any],
) -> Any:
    """Generate one piece after the other; the output of the last, with the ids of the whole answers."""
    least: int = options.pop("min_new_tokens", None) or 0
    pad: int = options.get("pad_token_id") or 0
    width = ids.shape[1]
    output: Any = ids
    while True:
        written: list[int] = mask[:, width:].sum(1).tolist()
        pieces.limit(written, ids.shape[1] + max_new_tokens)
        left = max(pieces.room) - ids.shape[1]
        if left <= 0:
            break
        if least:
            options["min_new_tokens"] = max(0, least - max(written))
        output = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=left, **options)
        ids = getattr(output, "sequences", output)
        mask = torch.nn.functional.pad(mask, (0, ids.shape[1] - mask.shape[1]), value=1)
        if pieces.taken is None:
            break
        ids, mask = pieces.continued(ids, mask)
        ids[:, width:].masked_fill_(mask[:, width:] == 0, pad)  # what was removed is no repetition to be penalised
        for layer in cache.layers:
            layer.crop(mask.shape[1] - 1 - layer.seen)  # a call that ran before the piece ended
    whole = _closed(ids, mask, width, max_new_tokens, pad)
    if isinstance(output, Tensor):
        return whole
    output.sequences = whole
    if pieces.goes_on:
        for name in _OF_A_PIECE:
            if getattr(output, name, None) is not None:
                setattr(output, name, None)
                warn(f"a loop was removed from the text, and there are no {name} of it: ask for them with act='cut'")
    return output


def _closed(
    ids: Int[Tensor, "row pos"], mask: Int[Tensor, "row pos"], width: int, most: int, pad: int
) -> Int[Tensor, "row left"]:
    """Prompts of a width and new tokens without those that were removed, padded on the right."""
    rows = [row[real.bool()][:most] for row, real in zip(ids[:, width:], mask[:, width:], strict=True)]
    return torch.cat([ids[:, :width], pad_sequence(rows, batch_first=True, padding_value=pad)], 1)
