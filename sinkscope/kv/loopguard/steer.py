"""What LoopGuard does besides cutting the cache: it removes a loop from the output and lowers what would prolong it."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import DynamicCache, StoppingCriteria, StoppingCriteriaList

from sinkscope.interventions.base import Run

LENIENT = 2
"""Number of tokens that may be repeated without a loss, such as a name."""


@dataclass(eq=False)
class Steering:
    """How a row that looped is kept from looping again: the longer a repetition, the less likely is its next token.

    A token that would prolong a copy of the last n tokens loses `penalty` for each of them but the first two, for every
    copy that was written since the act and for the longest one before it; and more with every act in succession. This
    is DRY (p-e-w 2024), but it grows slowly and counts no tokens before the act: the loop is left where the model is
    least certain of it, and not where the alarm happened to come. Counting all copies ends sentences that come back
    with another word each time. An end of the text loses what the likeliest token lost, so that no text ends only
    because its next word is less likely.

    Attributes:
        penalty: What the logit of a token loses for each token of a copy.
        until: Last generated token that is followed by a steered one.
        since: Number of tokens of the row at the act, without those that were taken back.
        level: Number of acts before the last one, each soon after the one before.
    """

    penalty: float
    until: int = -1
    since: int = 0
    level: int = 0

    def act(self, ids: Sequence[int], taken_back: int, now: int, window: int) -> int:
        """Steer the next `window` tokens of a row.

        Args:
            ids: Ids of the row, with those that are taken back.
            taken_back: Number of the last ids that are taken back.
            now: Number of the generated token.
            window: Number of tokens within which an act is in succession of the one before.

        Returns:
            The level.
        """
        stay = len(ids) - taken_back
        if now <= self.until:
            self.level += 1
            self.since = min(self.since, stay)
        else:
            self.level = 0
            self.since = stay
        self.until = now + window
        return self.level

    def losses(self, ids: Sequence[int]) -> dict[int, float]:
        """What the logits of tokens lose after a row of ids."""
        strength = self.penalty * (self.level + 1)
        before: dict[int, float] = {}
        losses: dict[int, float] = {}
        for place, length in copies(ids, len(ids) - self.since):
            token, loss = ids[place], strength * (length - LENIENT)
            if loss <= 0:
                continue
            if place >= self.since:
                losses[token] = losses.get(token, 0.0) + loss
            else:
                before[token] = max(loss, before.get(token, 0.0))
        for token, loss in before.items():
            losses[token] = losses.get(token, 0.0) + loss
        return losses

    def steer(self, logits: Float[Tensor, " vocab"], ids: Sequence[int], ends: Collection[int]) -> None:
        """Lower the logits after a row of ids in place; `ends` are the ids that end it."""
        losses = self.losses(ids)
        if not losses:
            return
        lost = losses.get(int(logits.argmax()), 0.0)
        logits[list(losses)] -= torch.tensor(list(losses.values())).to(logits)
        logits[list(ends)] -= lost


def copies(ids: Sequence[int], longest: int) -> Iterator[tuple[int, int]]:
    """Where an earlier copy of the last ids is followed by a token, and the length of the copy, at most `longest`."""
    for end in range(len(ids) - 1):
        length = 0
        while length < min(end + 1, longest) and ids[end - length] == ids[-1 - length]:
            length += 1
        if length:
            yield end + 1, length


@dataclass(eq=False)
class Rewinder(StoppingCriteria):
    """Tells the generating code what a guard removes: `generate` runs in pieces, each ending where a loop was found.

    Attributes:
        allowance: Number of tokens of each row that may still be removed. None if generation does not run in pieces.
        read: Tokens in the cache after a removal, by row: False at padding and at removed tokens. None if nothing has
            to be removed.
        again: The last token that stays of each row that lost some; it is read again.
        ended: Rows that have ended, as the guard knows it.
        full_at: Length at which each row of this piece has all its tokens; 0 for a row that has ended. Empty if
            generation does not run in pieces.
    """

    allowance: list[int] | None = None
    read: Bool[Tensor, "row pos"] | None = None
    again: dict[int, int] = field(default_factory=dict)
    ended: list[bool] = field(default_factory=list)
    full_at: list[int] = field(default_factory=list)

    def __call__(self, input_ids: Int[Tensor, "row pos"], scores: Any, **kwargs: Any) -> Any:
        """Say which rows of this piece end: bool `[row]`."""
        if self.read is not None:
            return torch.ones(len(input_ids), dtype=torch.bool, device=input_ids.device)
        return torch.tensor(self.full_at, device=input_ids.device) <= input_ids.shape[1]

    def limit(self, written: Sequence[int], most: int) -> None:
        """Set where rows are full, which have `written` so many new tokens of a length of at most `most`."""
        self.full_at = []
        for count, has_ended in zip(written, self.ended, strict=True):
            self.full_at.append(0 if has_ended else most - count)


def generate_in_pieces(
    run: Run | None,
    model: Any,
    ids: Int[Tensor, "row pos"],
    *,
    attention_mask: Int[Tensor, "row pos"],
    max_new_tokens: int,
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
        fixed: Whether the answer is given in advance, so that nothing may be removed.
        options: Further arguments of `model.generate`.

    Returns:
        The output of the last call of `model.generate`, with the ids of the whole answers.
    """
    session = None if run is None else run.session
    rewinder: Rewinder | None = None if session is None else session.rewinder
    if session is None or rewinder is None or options.get("streamer") is not None:
        return model.generate(input_ids=ids, attention_mask=attention_mask, max_new_tokens=max_new_tokens, **options)
    cache: Any = options.pop("past_key_values", None)
    if cache is None:
        cache = DynamicCache(config=model.config)
    options["stopping_criteria"] = StoppingCriteriaList([*options.pop("stopping_criteria", ()), rewinder])
    least: int = options.pop("min_new_tokens", None) or 0
    width, mask = ids.shape[1], attention_mask
    output: Any = ids
    rewinder.allowance = [0 if fixed else max_new_tokens] * len(ids)
    rewinder.ended = [False] * len(ids)
    try:
        while True:
            written: list[int] = mask[:, width:].sum(1).tolist()
            rewinder.limit(written, ids.shape[1] + max_new_tokens)
            left = max(rewinder.full_at) - ids.shape[1]
            if left <= 0:
                break
            if least:
                options["min_new_tokens"] = max(0, least - max(written))
            output = model.generate(
                input_ids=ids, attention_mask=mask, max_new_tokens=left, past_key_values=cache, **options
            )
            ids = getattr(output, "sequences", output)
            mask = torch.nn.functional.pad(mask, (0, ids.shape[1] - mask.shape[1]), value=1)
            if rewinder.read is None:
                break
            read = rewinder.read.to(mask)
            ids = _continued(ids, read.shape[1], rewinder.again)
            mask = torch.nn.functional.pad(read, (0, 1), value=1)
            for layer in cache.layers:
                layer.crop(read.shape[1] - layer.seen)  # a call that ran before the piece ended
            rewinder.read = None
            session.resuming = True  # what comes next reads a generated token and no prompt
    finally:
        rewinder.allowance = None
        rewinder.full_at = []
        session.resuming = False
    whole = _closed(ids, mask, width, max_new_tokens, options.get("pad_token_id") or 0)
    if isinstance(output, Tensor):
        return whole
    output.sequences = whole
    return output


def _continued(ids: Int[Tensor, "row pos"], seen: int, again: dict[int, int]) -> Int[Tensor, "row next"]:
    """What the cache holds, and the token with which each row goes on: the next one, or that in `again`."""
    newest = ids[:, min(seen, ids.shape[1] - 1)].clone()
    for row, token in again.items():
        newest[row] = token
    return torch.cat([ids[:, :seen], newest[:, None]], 1)


def _closed(
    ids: Int[Tensor, "row pos"], mask: Int[Tensor, "row pos"], width: int, most: int, pad: int
) -> Int[Tensor, "row left"]:
    """Prompts of a width and new tokens without those that were removed, padded on the right."""
    rows = [row[real.bool()][:most] for row, real in zip(ids[:, width:], mask[:, width:], strict=True)]
    return torch.cat([ids[:, :width], pad_sequence(rows, batch_first=True, padding_value=pad)], 1)
