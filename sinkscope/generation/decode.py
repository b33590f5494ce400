"""What a model generates next by the likeliest tokens, by drawn or by given ones.

`decode` is one request of `model.generate`, from which a guard can take tokens back. Then `_written` is its loop, for
each token:

1. The model reads the newest token (`generate` has prepared the prompt, the processors and the criteria).
2. If the guard has taken tokens back in this call, cache included, they leave the text as well, and the last one that
   stays is read again.
3. Else processors see the text as it is now, the next token is chosen, and criteria say whether the text has ended.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import DynamicCache, LogitsProcessor

from sinkscope.engine.run import Run
from sinkscope.engine.step import Draft
from sinkscope.errors import SinkscopeError
from sinkscope.hooks.edit.base import Intervention, under
from sinkscope.models.call_cache import cache_argument
from sinkscope.models.checkpoints.config import check_finite
from sinkscope.models.draws import draws, gumbel
from sinkscope.models.inputs import end_ids
from sinkscope.models.target import Target

_NO_CHOICE = ("bos_token_id", "eos_token_id", "pad_token_id", "transformers_version", "max_length", "max_new_tokens")
"""Settings of a checkpoint that do not say how tokens are chosen."""
_ELSEWHERE = ("streamer", "stop_strings", "return_dict_in_generate")
"""Options that show what could be removed later, or that only the loop of `generate` itself takes."""


def decoding(target: Target, **ours: Any) -> dict[str, Any]:
    """Return options of `generate` that fix how tokens are chosen, whatever the generation_config.json says.

    Only the special tokens of the checkpoint's settings are used.

    Args:
        target: The model.
        ours: Settings to use, such as `do_sample=False`; all others take transformers' neutral defaults.

    Returns:
        `ours`, plus the neutral default of every other setting of the checkpoint.
    """
    config = target.hf.generation_config
    neutral = config._get_default_generation_params()
    settings = dict[str, Any](ours)
    for name in config.to_diff_dict():
        if name not in _NO_CHOICE and not name.startswith("_"):
            settings.setdefault(name, neutral.get(name))
    return settings


def stops_of(target: Target, options: Mapping[str, Any]) -> list[int]:
    """Return the tokens that end a text under options of `generate`: the model's own unless they name others."""
    stops = options.get("eos_token_id", end_ids(target))
    return [] if stops is None else torch.as_tensor(stops).flatten().tolist()


@dataclass
class ForcedAnswer(LogitsProcessor):
    """Forbids every token except the next one of a given answer, so that `generate` returns this answer.

    It writes all scores itself: also where the model's are NaN, the answer is given.

    Args:
        answers: Token ids of each row's answer.
        start: Number of tokens before the answers, padding included.
        pad: Token for rows whose answer has ended.
    """

    answers: list[list[int]]
    start: int
    pad: int = 0

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        """Scores `[row vocab]`; in each row all but one are minus infinity."""
        step = input_ids.shape[1] - self.start
        tokens = [answer[step] if step < len(answer) else self.pad for answer in self.answers]
        return _allow_only(scores, torch.tensor(tokens, device=scores.device))


class RowSampler(LogitsProcessor):
    """Sampling whose random numbers depend only on the seed and on the name of the row's prompt.

    Gumbel noise is added to logits divided by the temperature, and the argmax of the sum is a sample from the softmax.
    All other tokens are forbidden, so that `generate` with `do_sample` returns it, and edits can see that it samples.

    Args:
        temperature: Temperature, above 0.
        seed: Seed of the sampling.
        prompts: Names of the rows' prompts.
    """

    def __init__(self, temperature: float, seed: int, prompts: Sequence[str]) -> None:
        self._temperature = temperature
        self._generators = [draws(seed, prompt) for prompt in prompts]

    def __call__(self, input_ids: Tensor, scores: Float[Tensor, "row vocab"]) -> Float[Tensor, "row vocab"]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return scores that are minus infinity for all tokens but the one that was drawn."""
        noise = [gumbel(scores.shape[1], torch.float64, generator) for generator in self._generators]
        exact = scores.double() / self._temperature + torch.stack(noise).to(scores.device)
        return _allow_only(scores, exact.argmax(-1))


def _allow_only(scores: Any, tokens: Any) -> Any:
    """Scores `[row vocab]` that forbid every token but one of each row, `[row]`."""
    return torch.full_like(scores, -torch.inf).scatter_(1, tokens[:, None], 0.0)


def padded(
    rows: Sequence[Sequence[int]], pad: int, device: torch.device
) -> tuple[Int[Tensor, "row pos"], Int[Tensor, "row pos"]]:
    """Return rows of ids that are filled up on the left, and which of them are real, as attention masks say it."""
    ids = [torch.tensor(row, device=device) for row in rows]
    real = [torch.ones_like(row) for row in ids]
    return (
        pad_sequence(ids, batch_first=True, padding_value=pad, padding_side="left"),
        pad_sequence(real, batch_first=True, padding_side="left"),
    )


@torch.no_grad()
def decode(
    target: Target,
    prompts: Sequence[Sequence[int]],
    new: int,
    edit: Intervention | None = None,
    forced: list[list[int]] | None = None,
    *,
    cache: Any = None,
    sampler: LogitsProcessor | None = None,
    **options: Any,
) -> tuple[list[list[int]], Run | None]:
    """Continue prompts, by the likeliest tokens by default, by drawn or by given ones.

    Under a guard that takes tokens back, a text that loops loses what follows the first copy, in the cache and in the
    output, and goes on from there. Processors, criteria and clocks of transformers are made once, from the prompt. At
    most `new` tokens are removed in all; later loops are only cut from the cache. With given tokens, several rows, a
    streamer, stop strings or `return_dict_in_generate` nothing is taken back.

    Args:
        target: The model, with all its layers.
        prompts: Token ids.
        new: Maximum number of new tokens.
        edit: Interventions and observers to apply.
        forced: Tokens to use instead of the likeliest ones, at least `new` of them for each prompt.
        cache: The cache to go on with; a new one if it is None.
        sampler: Draws the tokens; None for the likeliest ones.
        options: Further arguments of `model.generate`.

    Returns:
        The new ids of each row, up to and including the end-of-sequence token unless tokens were given; and the run of
        the edit, where the step of an event is that of the call, 0 for the prompt.

    Raises:
        SinkscopeError: Logits are NaN, where every token would be token 0.
        UnsupportedError: The model has no language head.
    """
    target.check_head()
    model: Any = target.hf
    pad = max(0, min(end_ids(target), default=0))
    stops = stops_of(target, options)
    ids, mask = padded(prompts, pad, target.device)
    processors: list[Any] = [partial(_finite, target), *(options.pop("logits_processor", None) or [])]
    if sampler is not None:
        processors.append(sampler)
        options["do_sample"] = True
    if forced is not None:
        processors = [ForcedAnswer(forced, ids.shape[1])]
        options["eos_token_id"] = None
    settings = decoding(target, **{"do_sample": False, "pad_token_id": pad, **options})
    settings |= {"input_ids": ids, "attention_mask": mask, "max_new_tokens": new, "logits_processor": processors}
    with under(edit, target) as run:
        rewinds = run is not None and run.takes_back and forced is None and len(ids) == 1
        rewinds = rewinds and not any(options.get(name) for name in _ELSEWHERE)
        if rewinds and cache is None:
            cache = DynamicCache(config=model.config)
        if cache is not None:
            settings |= cache_argument(model, cache)
        if run is not None and rewinds:
            run.draft = Draft(cache, new)
            settings["custom_generate"] = partial(_written, run.draft)
        out = model.generate(**settings)
    answers = out[:, ids.shape[1] :].tolist()
    if forced is None:
        answers = [to_end(answer, stops) for answer in answers]
    return answers, run


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


def _finite(target: Target, ids: Tensor, scores: Tensor) -> Tensor:
    """The logits as they are, a processor of `generate`; NaN is refused."""
    if scores.isnan().any() or scores.isposinf().any():
        check_finite(target.hf)  # names the tensor if the weights are the reason
        if scores.isnan().any():
            raise SinkscopeError(
                f"the logits of {target.name} are NaN after {ids.shape[1]} tokens, and its weights are finite: load it "
                "with dtype=float32, or leave out what edits it"
            )
    return scores


def to_end(answer: list[int], ends: Collection[int]) -> list[int]:
    """Return the tokens up to and including the first that ends a sequence."""
    for place, token in enumerate(answer, 1):
        if token in ends:
            return answer[:place]
    return answer
