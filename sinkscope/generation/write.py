"""The writer of texts: one request of `model.generate`, from which a guard can take tokens back.

In `_written`, the loop, for each token:

1. The model reads the newest token (`generate` has prepared the prompt, the processors and the criteria).
2. If the guard has taken tokens back in this call, cache included, they leave the text as well, and the last one that
   stays is read again.
3. Else processors see the text as it is now, the next token is chosen, and criteria say whether the text has ended.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import DynamicCache

from sinkscope.engine.run import Run
from sinkscope.engine.step import Draft
from sinkscope.models.call_cache import cache_argument

_ELSEWHERE = ("streamer", "stop_strings", "return_dict_in_generate")
"""Options that show what could be removed later, or that only the loop of `generate` itself takes."""


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
    """Call `model.generate`; under a guard that takes tokens back, with a loop of our own in it.

    A text that loops loses what follows the first copy, in the cache and in the output, and goes on from there.
    Processors, criteria and clocks of transformers are made once, from the prompt. At most `max_new_tokens` tokens are
    removed in all; later loops are only cut from the cache. With several rows, a streamer, stop strings or
    `return_dict_in_generate` nothing is taken back.

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
        What `model.generate` returns.
    """
    rewinds = run is not None and run.takes_back and not fixed and len(ids) == 1
    rewinds = rewinds and not any(options.get(name) for name in _ELSEWHERE)
    if rewinds and cache is None:
        cache = DynamicCache(config=model.config)
    if cache is not None:
        options.update(cache_argument(model, cache))
    options |= {"input_ids": ids, "attention_mask": attention_mask, "max_new_tokens": max_new_tokens}
    if run is None or not rewinds:
        return model.generate(**options)
    draft = Draft(cache, max_new_tokens)
    with run.writing(draft):
        return model.generate(custom_generate=partial(_written, draft), **options)


def _written(
    draft: Draft,
    model: Any,
    input_ids: Int[Tensor, "1 pos"],
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: Any,
    **inputs: Any,
) -> Int[Tensor, "1 written"]:
    """Write behind a prompt as `generate` does, and take back what the draft says; called by `generate`."""
    ids = input_ids
    output = model._prefill(ids, generation_config, inputs)
    while True:
        inputs = model._update_model_kwargs_for_generation(output, inputs)
        back = draft.taken
        draft.taken = None
        if back is None:
            scores = logits_processor(ids, output.logits[:, -1].to(torch.float32, copy=True))
            token = scores.argmax(-1, keepdim=True)
            if generation_config.do_sample:
                token = torch.multinomial(scores.softmax(-1), num_samples=1)
            ids = torch.cat([ids, token], 1)
            if bool(stopping_criteria(ids, scores).all()):
                return ids
        else:
            ids = torch.cat([ids[:, : back.length], ids.new_tensor([[back.reread]])], 1)
            for name in ("attention_mask", "position_ids"):  # `generate` leaves out a mask of ones
                if inputs.get(name) is not None:
                    inputs[name] = inputs[name][:, : back.length + 1]
        arguments = model.prepare_inputs_for_generation(ids, next_sequence_length=1, **inputs)
        output = model(**arguments, return_dict=True)
