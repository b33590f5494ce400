"""The writer of texts: one request of `model.generate`, from which a guard can take tokens back.

In `_written`, the loop, for each token:

1. The model reads the newest token of each row (`generate` has prepared the prompt, the processors and the criteria).
2. Processors see the text of each row as it is now, and the next token is chosen.
3. What the guard has taken back in this call, cache included, leaves the text as well; the row goes on from there.
4. Criteria say which rows have ended.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor
from torch.nn.functional import pad as padded_by
from torch.nn.utils.rnn import pad_sequence
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

    A row that loops loses what follows the first copy, in the cache and in the output, and goes on from there; other
    rows go on where they were. Processors, criteria and clocks of transformers are made once, from the prompt. At most
    `max_new_tokens` tokens of a row are removed in all; later loops are only cut from the cache. With a streamer, stop
    strings or `return_dict_in_generate` nothing is taken back.

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
    rewinds = run is not None and run.takes_back and not any(options.get(name) for name in _ELSEWHERE)
    if rewinds and cache is None:
        cache = DynamicCache(config=model.config)
    if cache is not None:
        options.update(cache_argument(model, cache))
    options |= {"input_ids": ids, "attention_mask": attention_mask, "max_new_tokens": max_new_tokens}
    if run is None or not rewinds:
        return model.generate(**options)
    draft = Draft(cache, [0 if fixed else max_new_tokens] * len(ids), [False] * len(ids))
    with run.writing(draft):
        return model.generate(custom_generate=partial(_written, draft), **options)


def _written(
    draft: Draft,
    model: Any,
    input_ids: Int[Tensor, "row pos"],
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: Any,
    **inputs: Any,
) -> Int[Tensor, "row written"]:
    """Write behind prompts as `generate` does, and take back what the draft says; called by `generate`."""
    settings = generation_config
    pad = 0 if settings.pad_token_id is None else int(settings.pad_token_id)
    width = input_ids.shape[1]
    ids = input_ids
    real = torch.ones_like(ids, dtype=torch.bool)  # where a row has a token, of what is written
    ended = torch.zeros(len(ids), dtype=torch.bool, device=ids.device)
    output = model._prefill(ids, settings, inputs)
    while True:
        inputs = model._update_model_kwargs_for_generation(output, inputs)
        back = draft.taken
        draft.taken = None
        reread: dict[int, int] = {} if back is None else back.reread
        logits = output.logits[:, -1].to(torch.float32, copy=True)
        scores = _asked(logits_processor, ids, real, logits, reread)
        chosen = scores.argmax(-1)
        if settings.do_sample:
            chosen = torch.multinomial(scores.softmax(-1), num_samples=1)[:, 0]
        tokens = torch.where(ended, pad, chosen)
        if back is not None:  # columns that no row has any more leave
            real = back.kept_columns.to(real.device, copy=True)
            real[:, :width] = True
            ids = ids[:, : real.shape[1]].masked_fill(~real, pad)
            mask = padded_by(back.kept_columns, (0, 1), value=True).to(inputs["attention_mask"])
            inputs["attention_mask"] = mask
            if inputs.get("position_ids") is not None:
                inputs["position_ids"] = (mask.long().cumsum(1) - 1).clamp(min=0)
            for row, token in reread.items():
                tokens[row] = token
        ids = torch.cat([ids, tokens[:, None]], 1)
        real = padded_by(real, (0, 1), value=True)
        ended = ended | _asked(stopping_criteria, ids, real, ended, reread)
        draft.ended = ended.tolist()
        if all(draft.ended):
            break
        arguments = model.prepare_inputs_for_generation(ids, next_sequence_length=1, **inputs)
        output = model(**arguments, return_dict=True)
    rows = [row[kept][width : settings.max_length] for row, kept in zip(ids, real, strict=True)]
    return torch.cat([input_ids, pad_sequence(rows, batch_first=True, padding_value=pad)], 1)


def _asked(
    fn: Callable[[Tensor, Any], Tensor],
    ids: Int[Tensor, "row pos"],
    real: Bool[Tensor, "row pos"],
    numbers: Tensor,
    waits: Collection[int],
) -> Tensor:
    """What processors or criteria give for each text and its numbers; texts differ in length once tokens were removed.

    Rows that wait are not asked, and keep their numbers.
    """
    if not waits and bool(real.all()):
        return fn(ids, numbers)
    given = numbers.clone()
    for row, text in enumerate(ids):
        if row not in waits:
            given[row] = fn(text[real[row]][None], numbers[row : row + 1])[0]
    return given
