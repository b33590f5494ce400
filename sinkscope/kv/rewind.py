"""Generation in pieces: a guard ends a piece where it takes tokens back, and the next piece continues from there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import DynamicCache, StoppingCriteria, StoppingCriteriaList

from sinkscope.engine.block import Run
from sinkscope.errors import warn
from sinkscope.kv.cache_state import Generation
from sinkscope.kv.session import Session
from sinkscope.models.call_cache import cache_argument

_OF_A_PIECE = ("scores", "logits", "attentions", "hidden_states")
"""What an output of `generate` has for each of its steps."""


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


def generate_with_rewind(
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
    """Call `model.generate`; under a guard that rewinds, again each time a loop is removed from the output.

    At a loop the piece ends. The row loses what follows the first copy, in the cache and in the output, and the next
    piece continues from there, up to the same total of new tokens; other rows go on where they were. At most
    `max_new_tokens` tokens of a row are removed in all; later loops are only cut from the cache. With a streamer,
    which would show tokens that are later removed, the guard does not rewind.

    Args:
        run: The run that acts on the model, if any.
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
    session = Session.in_run(run)
    rewinder = None if session is None else session.rewinder
    if cache is not None:
        options.update(cache_argument(model, cache))
    if session is None or rewinder is None or options.get("streamer") is not None:
        return model.generate(input_ids=ids, attention_mask=attention_mask, max_new_tokens=max_new_tokens, **options)
    if cache is None:
        cache = DynamicCache(config=model.config)
        options.update(cache_argument(model, cache))
    options["stopping_criteria"] = StoppingCriteriaList([*(options.get("stopping_criteria") or ()), rewinder])
    rewinder.allowance = [0 if fixed else max_new_tokens] * len(ids)
    rewinder.ended = [False] * len(ids)
    try:
        return _pieces(session.generation, rewinder, model, ids, attention_mask, max_new_tokens, cache, options)
    finally:
        rewinder.allowance = None
        rewinder.end_lengths = []
        session.generation.resuming = False


def _pieces(
    generation: Generation,
    rewinder: Rewinder,
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
        rewinder.limit(written, ids.shape[1] + max_new_tokens)
        left = max(rewinder.end_lengths) - ids.shape[1]
        if left <= 0:
            break
        if least:
            options["min_new_tokens"] = max(0, least - max(written))
        output = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=left, **options)
        ids = getattr(output, "sequences", output)
        mask = torch.nn.functional.pad(mask, (0, ids.shape[1] - mask.shape[1]), value=1)
        if rewinder.kept_mask is None:
            break
        ids, mask = rewinder.continued(ids, mask)
        ids[:, width:].masked_fill_(mask[:, width:] == 0, pad)  # what was removed is no repetition to be penalised
        for layer in cache.layers:
            layer.crop(mask.shape[1] - 1 - layer.seen)  # a call that ran before the piece ended
        generation.resuming = True  # what comes next reads a generated token and no prompt
    whole = _closed(ids, mask, width, max_new_tokens, pad)
    if isinstance(output, Tensor):
        return whole
    output.sequences = whole
    if generation.resuming:
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
