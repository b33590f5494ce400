"""What LoopGuard does besides cutting the cache: it bans n-grams and removes a loop from the output."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import DynamicCache, StoppingCriteria, StoppingCriteriaList

from sinkscope.errors import SinkscopeError
from sinkscope.interventions.base import Run
from sinkscope.kv.cache import refuse_states


@dataclass(eq=False)
class Ban:
    """N-grams that a row may not write for some time.

    Attributes:
        until: Number of the generated token up to which the ban holds.
        following: Tokens that complete a banned n-gram, keyed by the tokens before them.
    """

    until: int = 0
    following: dict[tuple[int, ...], set[int]] = field(default_factory=dict)

    def add(self, tokens: Sequence[int], length: int, until: int) -> None:
        """Also ban every n-gram of `tokens` of this length, and extend the ban."""
        self.until = until
        for end in range(length - 1, len(tokens)):
            before = tuple(tokens[end - length + 1 : end])
            self.following.setdefault(before, set()).add(tokens[end])

    def banned(self, latest: Sequence[int]) -> list[int]:
        """The tokens that would complete an n-gram after `latest`."""
        tokens: set[int] = set()
        for begin in range(len(latest)):
            tokens.update(self.following.get(tuple(latest[begin:]), ()))
        return sorted(tokens)


@dataclass(eq=False)
class Rewinder(StoppingCriteria):
    """Tells the generating code what a guard removes: `generate` runs in pieces, each ending where a loop was found.

    Attributes:
        allowance: Number of tokens that may still be removed. None if generation does not run in pieces.
        keep: Number of tokens to keep, including the prompt. None if nothing has to be removed.
    """

    allowance: int | None = None
    keep: int | None = None

    def __call__(self, input_ids: Int[Tensor, "row pos"], scores: Any, **kwargs: Any) -> Any:
        """Say whether this piece ends: bool `[row]`."""
        return torch.full((len(input_ids),), self.keep is not None, device=input_ids.device)


def generate_in_pieces(
    run: Run | None,
    model: Any,
    ids: Int[Tensor, "row pos"],
    *,
    max_new_tokens: int,
    fixed: bool = False,
    **options: Any,
) -> Any:
    """Call `model.generate`; under `LoopGuard(rewind=True)`, again each time a loop is removed from the output.

    At a loop the piece ends, ids and cache are cut back to where the second copy began, and the next piece continues
    from there, up to the same total of new tokens. At most `max_new_tokens` tokens are removed in all, so the cost is
    at most twice that of the answer; later loops are only cut from the cache.

    Args:
        run: The run that acts on the model, if any.
        model: The Hugging Face model.
        ids: Token ids of the prompt; a single row under such a guard.
        max_new_tokens: Maximum number of new tokens.
        fixed: Whether the answer is given in advance, so that nothing may be removed.
        options: Further arguments of `model.generate`.

    Returns:
        The output of the last call of `model.generate`, with the ids of the whole answer.

    Raises:
        SinkscopeError: There are several rows, or a streamer is given, which would show tokens that are later removed.
    """
    session = None if run is None else run.session
    if session is None or session.rewinder is None:
        return model.generate(input_ids=ids, max_new_tokens=max_new_tokens, **options)
    rewinder: Rewinder = session.rewinder
    if len(ids) > 1:
        raise SinkscopeError(
            f"rewind=True takes tokens back from one row at a time, and here are {len(ids)}: use batch_size=1"
        )
    if options.get("streamer") is not None:
        raise SinkscopeError("rewind=True takes back tokens that a streamer has already shown: leave out the streamer")
    cache: Any = options.pop("past_key_values", None)
    if cache is None:
        cache = DynamicCache(config=model.config)
    options["stopping_criteria"] = StoppingCriteriaList([*options.pop("stopping_criteria", ()), rewinder])
    longest = ids.shape[1] + max_new_tokens
    rewinder.allowance = 0 if fixed else max_new_tokens
    try:
        while True:
            options["attention_mask"] = torch.ones_like(ids)
            left = longest - ids.shape[1]
            output = model.generate(input_ids=ids, max_new_tokens=left, past_key_values=cache, **options)
            if rewinder.keep is None:
                return output
            ids = getattr(output, "sequences", output)[:, : rewinder.keep]
            rewinder.keep = None
            session.resuming = True  # what comes next reads a generated token and no prompt
            refuse_states(cache, "rewind=True")
            for layer in cache.layers:
                layer.crop(ids.shape[1] - 1 - layer.seen)
    finally:
        rewinder.allowance = None
        session.resuming = False
