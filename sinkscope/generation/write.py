"""The writer of texts: one request of `model.generate`, from which a guard can take tokens back.

In `_written`, the loop, for each token:

1. The model reads the newest token of each row (`generate` has prepared the prompt, the processors and the criteria).
2. Processors see the text of each row as it is now, and the next token is chosen.
3. What the guard has taken back in this call, cache included, leaves the text as well; the row goes on from there.
4. Criteria say which rows have ended.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import DynamicCache, StoppingCriteriaList
from transformers.generation import GenerateDecoderOnlyOutput, StopStringCriteria

from sinkscope.engine.run import Run
from sinkscope.engine.step import Draft, TakeBack
from sinkscope.errors import warn
from sinkscope.models.call_cache import cache_argument


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
    `max_new_tokens` tokens of a row are removed in all; later loops are only cut from the cache. With a streamer, which
    would show tokens that are later removed, nothing is taken back.

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
        What `model.generate` returns. Where something was removed, it has no scores, logits, attentions and hidden
        states, which would be those of other tokens as well.
    """
    if cache is not None:
        options.update(cache_argument(model, cache))
    options |= {"input_ids": ids, "attention_mask": attention_mask, "max_new_tokens": max_new_tokens}
    if run is None or not run.takes_back or options.get("streamer") is not None:
        return model.generate(**options)
    if cache is None:
        cache = DynamicCache(config=model.config)
        options.update(cache_argument(model, cache))
    tokenizer = options.pop("tokenizer", None)
    ends = options.pop("stop_strings", None)
    if ends is not None and tokenizer is not None:  # `generate` gives its own loop alone the tokenizer
        criteria = options.get("stopping_criteria") or ()
        options["stopping_criteria"] = StoppingCriteriaList([*criteria, StopStringCriteria(tokenizer, ends)])
    rows = len(ids)
    draft = Draft(cache, [0 if fixed else max_new_tokens] * rows, [False] * rows)
    with run.writing(draft):
        return model.generate(custom_generate=partial(_written, draft), **options)


@dataclass(eq=False)
class _Text:
    """The prompts and what is written after them, by the columns of the cache.

    Attributes:
        ids: The tokens.
        real: Where a row has a token, of what was written; everywhere in the prompts.
        width: Number of columns of the prompts.
        pad: Stands where a row has no token.
    """

    ids: Int[Tensor, "row column"]
    real: Bool[Tensor, "row column"]
    width: int
    pad: int

    def append(self, tokens: Int[Tensor, " row"]) -> None:
        """Append a token to each row."""
        self.ids = torch.cat([self.ids, tokens[:, None]], 1)
        self.real = torch.nn.functional.pad(self.real, (0, 1), value=True)

    def take_back(self, back: TakeBack) -> None:
        """Remove tokens; columns that no row has any more leave."""
        count = back.kept_columns.shape[1]
        self.real = back.kept_columns.to(self.real.device, copy=True)
        self.real[:, : self.width] = True
        self.ids = self.ids[:, :count].masked_fill(~self.real, self.pad)

    def of(self, row: int) -> Int[Tensor, " pos"]:
        """Return the text of a row."""
        return self.ids[row, self.real[row]]

    def asked(self, fn: Callable[[Tensor, Any], Tensor], numbers: Tensor, waits: Collection[int]) -> Tensor:
        """Return what a function of texts and their numbers gives for each row; rows differ once tokens were removed.

        Args:
            fn: Called with ids `[row pos]` and numbers.
            numbers: Numbers of each row.
            waits: Rows that are not asked; they keep their numbers.
        """
        if not waits and bool(self.real.all()):
            return fn(self.ids, numbers)
        given = numbers.clone()
        for row in range(len(self.ids)):
            if row not in waits:
                given[row] = fn(self.of(row)[None], numbers[row : row + 1])[0]
        return given

    def closed(self, most: int) -> Int[Tensor, "row pos"]:
        """Return prompts and at most so many new tokens, without those that were removed, padded on the right."""
        rows = [self.of(row)[self.width : self.width + most] for row in range(len(self.ids))]
        new = pad_sequence(rows, batch_first=True, padding_value=self.pad)
        return torch.cat([self.ids[:, : self.width], new], 1)


_STEPS = ("scores", "logits", "attentions", "hidden_states")
"""What a caller may ask to see of each step."""


def _written(
    draft: Draft,
    model: Any,
    input_ids: Int[Tensor, "row pos"],
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: Any,
    **inputs: Any,
) -> Any:
    """Write behind prompts as `generate` does, and take back what the draft says; called by `generate`."""
    settings = generation_config
    steps: dict[str, list[Any]] = {}
    if settings.return_dict_in_generate:
        steps = {name: [] for name in _STEPS if getattr(settings, f"output_{name}", False)}
    pad = 0 if settings.pad_token_id is None else int(settings.pad_token_id)
    text = _Text(input_ids, torch.ones_like(input_ids, dtype=torch.bool), input_ids.shape[1], pad)
    ended = torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)
    output = model._prefill(input_ids, settings, inputs)
    while True:
        inputs = model._update_model_kwargs_for_generation(output, inputs)
        back = draft.taken
        draft.taken = None
        reread: dict[int, int] = {} if back is None else back.reread
        logits = output.logits[:, -1].to(torch.float32, copy=True)
        scores = text.asked(logits_processor, logits, reread)
        given = scores, logits, output.attentions, output.hidden_states
        for name, values in zip(_STEPS, given, strict=True):
            if name in steps:
                steps[name].append(values)
        chosen = scores.argmax(-1)
        if settings.do_sample:
            chosen = torch.multinomial(scores.softmax(-1), num_samples=1)[:, 0]
        tokens = torch.where(ended, pad, chosen)
        if back is not None:
            for name in steps:  # of which some wrote tokens that are removed now
                warn(f"a loop was removed from the text, and there are no {name} of it: ask for them with act='cut'")
            steps = {}
            text.take_back(back)
            inputs.update(_told(inputs, back))
            for row, token in reread.items():
                tokens[row] = token
        text.append(tokens)
        step_scores = tuple(steps["scores"]) if "scores" in steps else None
        ended = text.asked(partial(_ended, stopping_criteria, step_scores), ended, reread)
        draft.ended = ended.tolist()
        if all(draft.ended):
            break
        arguments = model.prepare_inputs_for_generation(text.ids, next_sequence_length=1, **inputs)
        output = model(**arguments, return_dict=True)
    sequences: Any = text.closed(settings.max_length - text.width)
    if not settings.return_dict_in_generate:
        return sequences
    seen: dict[str, Any] = {name: tuple(values) for name, values in steps.items()}
    return GenerateDecoderOnlyOutput(sequences=sequences, past_key_values=draft.cache, **seen)


def _ended(criteria: Any, steps: Any, ids: Int[Tensor, "row pos"], ended: Bool[Tensor, " row"]) -> Bool[Tensor, " row"]:
    """Which rows have ended, those that had before included."""
    return ended | criteria(ids, steps)


def _told(inputs: dict[str, Any], back: TakeBack) -> dict[str, Tensor]:
    """What the model is told of the rows from which tokens were taken, and of the next token of each."""
    mask = torch.nn.functional.pad(back.kept_columns, (0, 1), value=True).to(inputs["attention_mask"])
    told = {"attention_mask": mask}
    if inputs.get("position_ids") is not None:
        told["position_ids"] = (mask.long().cumsum(1) - 1).clamp(min=0)
    return told
