"""What LoopGuard does besides cutting the cache: it removes a loop from the output, bans n-grams and draws tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import DynamicCache, StoppingCriteria, StoppingCriteriaList

from sinkscope.errors import SinkscopeError
from sinkscope.interventions.base import Run

PENALTY = 5.0
"""What a banned token loses of its logit at the first rung; at each further one as much again."""
BAN_LENGTH = 4
"""Length of the n-grams banned at the first rung; at each further one they are a token shorter, down to pairs."""
DRAWS = 64
"""Number of tokens that are drawn after one loop."""
MIN_P = 0.1
"""Tokens with less than this share of the largest probability are not drawn."""
DRAWN = 100.0
"""By how much the logit of a drawn token exceeds all others."""


@dataclass(eq=False)
class Steering:
    """How a row that looped is steered away from its loops. Tokens are counted from the prompt on.

    Attributes:
        banned_until: Last token before which n-grams are banned.
        penalty: What the logit of a token that would complete one of them loses.
        following: Tokens that complete a banned n-gram, keyed by the tokens before them.
        draws_until: Last token that is followed by a drawn one.
        rewound_at: Number of the generated token at which each loop was taken back.
    """

    banned_until: int = 0
    penalty: float = 0.0
    following: dict[tuple[int, ...], set[int]] = field(default_factory=dict)
    draws_until: int = 0
    rewound_at: list[int] = field(default_factory=list)

    def ban(self, loop: Sequence[int], rung: int, now: int, until: int) -> None:
        """At token `now`, also ban every n-gram of a loop, and extend the ban."""
        if now > self.banned_until:
            self.following = {}
        self.banned_until = until
        self.penalty = rung * PENALTY
        length = max(2, BAN_LENGTH + 1 - rung)
        for end in range(length - 1, len(loop)):
            before = tuple(loop[end - length + 1 : end])
            self.following.setdefault(before, set()).add(loop[end])

    def banned(self, tokens: Sequence[int]) -> list[int]:
        """The ids that would complete an n-gram after these tokens."""
        latest = tuple(tokens[1 - BAN_LENGTH :])
        ids: set[int] = set()
        for begin in range(len(latest)):
            ids.update(self.following.get(latest[begin:], ()))
        return sorted(ids)


def draw(logits: Float[Tensor, " vocab"], random: torch.Generator) -> None:
    """Draw a likely token, and raise its logit in place above all others.

    The others keep their logits, so that a later processor that forbids the drawn token leaves the likeliest one.
    """
    probabilities = logits.float().softmax(-1)
    likely = torch.where(probabilities >= MIN_P * probabilities.max(), probabilities, 0)
    token = torch.multinomial(likely, 1, generator=random)
    logits[token] = logits.max() + DRAWN


@dataclass(eq=False)
class Rewinder(StoppingCriteria):
    """Tells the generating code what a guard removes: `generate` runs in pieces, each ending where a loop was found.

    Attributes:
        required: Whether code that cannot remove tokens is refused.
        allowance: Number of tokens of each row that may still be removed. None if generation does not run in pieces.
        read: Tokens in the cache after a removal, by row: False at padding and at removed tokens. None if nothing has
            to be removed.
        again: The last token that stays of each row that lost some; it is read again.
        ended: Rows that have ended, as the guard knows it.
        full_at: Length at which each row of this piece has all its tokens; 0 for a row that has ended. Empty if
            generation does not run in pieces.
    """

    required: bool
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

    Raises:
        SinkscopeError: A streamer is given under `rewind=True`.
    """
    session = None if run is None else run.session
    rewinder: Rewinder | None = None if session is None else session.rewinder
    if rewinder is not None and rewinder.required and options.get("streamer") is not None:
        raise SinkscopeError("rewind=True takes back tokens that a streamer has already shown: leave out the streamer")
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
