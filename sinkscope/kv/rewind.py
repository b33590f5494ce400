"""Generation in pieces: a guard ends a piece where it takes tokens back, and the next piece continues from there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor
from torch.nn.functional import pad
from transformers import DynamicCache, StoppingCriteria, StoppingCriteriaList

from sinkscope.errors import warn
from sinkscope.hooks.edit.base import Run
from sinkscope.kv.generation import Generation
from sinkscope.models.call_cache import cache_argument

_OF_A_PIECE = ("scores", "logits", "attentions", "hidden_states")
"""What an output of `generate` has for each of its steps."""


@dataclass(eq=False)
class Rewinder(StoppingCriteria):
    """Tells the generating code what a guard removes: `generate` runs in pieces, each ending where a loop was found.

    Attributes:
        allowance: Number of tokens that may still be removed; 0 if generation does not run in pieces.
        kept_tokens: Number of tokens that the cache holds after a removal. None if nothing has to be removed.
    """

    allowance: int = 0
    kept_tokens: int | None = None

    def __call__(self, input_ids: Int[Tensor, "row pos"], scores: Any, **kwargs: Any) -> Any:
        """Say whether this piece ends: bool `[row]`."""
        return torch.full((len(input_ids),), self.kept_tokens is not None, device=input_ids.device)


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

    At a loop the piece ends. The text loses what follows the first copy, in the cache and in the output, and the next
    piece continues from there, up to the same total of new tokens. At most `max_new_tokens` tokens are removed in all;
    later loops are only cut from the cache. The guard does not rewind several rows, which would wait for each other,
    nor with a streamer, which would show tokens that are later removed.

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
        The output of the last call of `model.generate`. Where something was removed, it has no scores, logits,
        attentions and hidden states, which would be those of the last piece.
    """
    session = None if run is None else run.session
    if cache is not None:
        options.update(cache_argument(model, cache))
    is_one_piece = fixed or len(ids) > 1 or options.get("streamer") is not None
    rewinder: Rewinder | None = None if session is None else session.rewinder
    if session is None or rewinder is None or is_one_piece:
        return model.generate(input_ids=ids, attention_mask=attention_mask, max_new_tokens=max_new_tokens, **options)
    if cache is None:
        cache = DynamicCache(config=model.config)
        options.update(cache_argument(model, cache))
    options["stopping_criteria"] = StoppingCriteriaList([*(options.get("stopping_criteria") or ()), rewinder])
    rewinder.allowance = max_new_tokens
    try:
        return _pieces(session.generation, rewinder, model, ids, attention_mask, max_new_tokens, cache, options)
    finally:
        rewinder.allowance = 0
        session.generation.resuming = False


def _pieces(
    generation: Generation,
    rewinder: Rewinder,
    model: Any,
    ids: Int[Tensor, "1 pos"],
    mask: Int[Tensor, "1 pos"],
    max_new_tokens: int,
    cache: Any,
    options: dict[str, Any],
) -> Any:
    """Generate one piece after the other; the output of the last."""
    least: int = options.pop("min_new_tokens", None) or 0
    width = ids.shape[1]
    while True:
        written = ids.shape[1] - width
        if least:
            options["min_new_tokens"] = max(0, least - written)
        output = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=max_new_tokens - written, **options)
        kept, rewinder.kept_tokens = rewinder.kept_tokens, None
        if kept is None:
            break
        ids = getattr(output, "sequences", output)[:, : kept + 1]  # the last token is read again
        mask = pad(mask, (0, kept + 1 - mask.shape[1]), value=1)
        for layer in cache.layers:
            layer.crop(kept - layer.seen)  # a call that ran before the piece ended
        generation.resuming = True  # what comes next reads a generated token and no prompt
    if generation.resuming and not isinstance(output, Tensor):
        for name in _OF_A_PIECE:
            if getattr(output, name, None) is not None:
                setattr(output, name, None)
                warn(f"a loop was removed from the text, and there are no {name} of it: ask for them with act='cut'")
    return output
