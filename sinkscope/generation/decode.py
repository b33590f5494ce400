"""What a model generates next by the likeliest tokens, by drawn or by given ones.

`decode` is one request of `model.generate`, from which a guard can take tokens back. Then `_written` is its loop, for
each token:

1. The model reads the newest token (`generate` has prepared the prompt, the processors and the criteria).
2. If the guard has taken tokens back in this call, cache included, they leave the text as well, and the last one that
   stays is read again.
3. Else processors see the text as it is now, the next token is chosen, and criteria say whether the text has ended.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import DynamicCache

from sinkscope.engine.run import Run
from sinkscope.engine.step import Draft
from sinkscope.errors import SinkscopeError, warn
from sinkscope.generation.processor_state import state_of
from sinkscope.hooks.edit.base import Intervention, under
from sinkscope.models.call_cache import cache_argument
from sinkscope.models.checkpoints.config import check_finite
from sinkscope.models.draws import draws, gumbel
from sinkscope.models.inputs import end_ids
from sinkscope.models.target import Target

Processor = Callable[[Tensor, Tensor], Tensor]
"""Takes all ids so far, and scores `[row vocab]` of the next token, which it changes: a logits processor."""
_NO_CHOICE = ("bos_token_id", "eos_token_id", "pad_token_id", "transformers_version", "max_length", "max_new_tokens")
"""Settings of a checkpoint that do not say how tokens are chosen."""


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
    stated = [name for name in config.to_diff_dict() if name not in _NO_CHOICE and not name.startswith("_")]
    return {name: neutral.get(name) for name in stated} | ours


def padding_of(target: Target) -> int:
    """Return the token that fills rows up: one that ends a text, or 0."""
    return max(0, min(end_ids(target), default=0))


def forced_answers(answers: Sequence[Sequence[int]], start: int) -> Processor:
    """Return what forbids every token except the next one of given answers, so that `generate` returns them.

    It writes all scores itself: also where the model's are NaN, the answer is given.

    Args:
        answers: Token ids of each row's answer, as many in each.
        start: Number of tokens before the answers, padding included.
    """
    forced = torch.tensor(answers)

    def process(ids: Tensor, scores: Tensor) -> Tensor:
        return _allow_only(scores, forced[:, ids.shape[1] - start])

    return process


def row_sampler(temperature: float, seed: int, prompts: Sequence[str]) -> Processor:
    """Return what samples with random numbers that depend only on the seed and on the name of the row's prompt.

    Gumbel noise is added to logits divided by the temperature, and the argmax of the sum is a sample from the softmax.
    All other tokens are forbidden, so that `generate` with `do_sample` returns it, and edits can see that it samples.

    Args:
        temperature: Temperature, above 0.
        seed: Seed of the sampling.
        prompts: Names of the rows' prompts.
    """
    generators = [draws(seed, prompt) for prompt in prompts]

    def process(ids: Tensor, scores: Tensor) -> Tensor:
        noise = [gumbel(scores.shape[1], torch.float64, generator) for generator in generators]
        exact = scores.double() / temperature + torch.stack(noise).to(scores.device)
        return _allow_only(scores, exact.argmax(-1))

    return process


def _allow_only(scores: Float[Tensor, "row vocab"], tokens: Int[Tensor, " row"]) -> Float[Tensor, "row vocab"]:
    """Scores that forbid every token but one of each row."""
    return torch.full_like(scores, -torch.inf).scatter_(1, tokens.to(scores.device)[:, None], 0.0)


@torch.no_grad()
def decode(
    target: Target,
    prompts: Sequence[Sequence[int]],
    new: int,
    edit: Intervention | None = None,
    forced: Sequence[Sequence[int]] | None = None,
    *,
    sampler: Processor | None = None,
    may_keep_state: bool = False,
    cache: Any = None,
    **options: Any,
) -> tuple[list[list[int]], Run | None]:
    """Continue prompts of one length, by the likeliest tokens by default, by drawn or by given ones.

    Under a guard that takes tokens back, a text that loops loses what follows the first copy, in the cache and in the
    output, and goes on from there. Processors, criteria and clocks of transformers are made once, from the prompt. At
    most `new` tokens are removed in all; later loops are only cut from the cache. With given tokens, several rows, a
    streamer, or a processor that keeps a state between tokens nothing is taken back.

    Args:
        target: The model, with all its layers.
        prompts: Token ids.
        new: Maximum number of new tokens.
        edit: Interventions and observers to apply.
        forced: Tokens to use instead of the likeliest ones, at least `new` of them for each prompt.
        sampler: What draws tokens and forbids all others; it sees the scores last.
        may_keep_state: Whether nothing is taken back once processors or criteria among the options keep a state.
        cache: The cache to go on with; a new one if it is None.
        options: Further arguments of `model.generate`.

    Returns:
        The new ids of each row, up to and including the end-of-sequence token unless tokens were given; and the run of
        the edit, where the step of an event is that of the call, 0 for the prompt.

    Raises:
        SinkscopeError: Logits are NaN, where every token would be token 0, or infinite.
        UnsupportedError: The model has no language head.
    """
    target.check_head()
    model: Any = target.hf
    ids = torch.tensor(prompts, device=target.device)
    processors: list[Any] = [partial(_finite, target), *(options.pop("logits_processor", None) or [])]
    ours = (processors[0], sampler)
    if forced is not None:
        processors = [forced_answers(forced, ids.shape[1])]
        options["eos_token_id"] = None
    if sampler is not None:
        processors.append(sampler)
        options["do_sample"] = True  # by which edits know that tokens are drawn
    settings = _settings_of(target, ids, new, options) | {"logits_processor": processors}
    with under(edit, target) as run:
        if run is not None and run.takes_back and forced is None and len(ids) == 1 and not options.get("streamer"):
            cache = DynamicCache(config=model.config) if cache is None else cache
            run.draft = Draft(cache, new)
            settings["custom_generate"] = partial(_written, run.draft, ours, may_keep_state)
        if cache is not None:
            settings |= cache_argument(cache)
        answers = model.generate(**settings)[:, ids.shape[1] :].tolist()
    if forced is None:
        answers = _without_padding(target, answers)
    return answers, run


def _without_padding(target: Target, answers: list[list[int]]) -> list[list[int]]:
    """Several answers up to their ends, after which rows are filled up."""
    if len(answers) == 1:
        return answers
    ends = end_ids(target)
    return [to_end(answer, ends) for answer in answers]


def _settings_of(target: Target, ids: Int[Tensor, "row pos"], new: int, options: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of `generate`, but for processors and the cache."""
    settings = decoding(target, **{"pad_token_id": padding_of(target), **options})
    if settings.get("stop_strings"):
        settings.setdefault("tokenizer", target.available_tokenizer)
    return settings | {"input_ids": ids, "attention_mask": torch.ones_like(ids), "max_new_tokens": new}


def _written(
    draft: Draft,
    ours: Collection[Any],
    may_keep_state: bool,
    model: Any,
    input_ids: Int[Tensor, "1 pos"],
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: Any,
    **inputs: Any,
) -> Int[Tensor, "1 written"]:
    """Write behind a prompt as `generate` does, and take back what the draft says; called by `generate`.

    Args:
        draft: The text.
        ours: Processors that may go on as they are when tokens are taken back.
        may_keep_state: As for `decode`.
        model: The model; this and all others are arguments of `generate`.
        input_ids: The prompt.
        logits_processor: All processors.
        stopping_criteria: All criteria.
        generation_config: The settings.
        inputs: Further arguments of the model.
    """
    ids = input_ids
    output = model._prefill(ids, generation_config, inputs)
    callers = [process for process in (*logits_processor, *stopping_criteria) if process not in ours]
    while True:
        back, draft.taken = draft.taken, None
        if back is None:
            scores = logits_processor(ids, output.logits[:, -1].to(torch.float32, copy=True))
            token = scores.argmax(-1, keepdim=True)
            if generation_config.do_sample:
                token = torch.multinomial(scores.softmax(-1), num_samples=1)
            ids = torch.cat([ids, token], 1)
            if bool(stopping_criteria(ids, scores).all()):
                return ids
            if may_keep_state and draft.can_go_back is None:  # now that they have made what they keep for all texts
                draft.can_go_back = partial(_can_go_back, callers, state_of(callers))
        else:
            ids = torch.cat([ids[:, : back.length], ids.new_tensor([[back.reread]])], 1)
        output = model(input_ids=ids[:, -1:], use_cache=True, return_dict=True, **cache_argument(draft.cache))


def _can_go_back(processors: Sequence[Any], earlier: str | None) -> bool:
    """Whether processors and criteria hold what they held earlier; else a warning says why nothing is taken back."""
    if earlier is not None and state_of(processors) == earlier:
        return True
    warn(
        "a logits processor or a stopping criterion keeps a state between tokens, which cannot go back with the text: "
        "LoopGuard cuts the cache, and takes no token back"
    )
    return False


def _finite(target: Target, ids: Tensor, scores: Tensor) -> Tensor:
    """The logits as they are, a processor of `generate`; NaN and infinity are refused."""
    if bool((scores.isnan() | scores.isposinf()).any()):
        check_finite(target.hf)  # names the tensor if the weights are the reason
        raise SinkscopeError(
            f"the logits of {target.name} are NaN or infinite after {ids.shape[1]} tokens, and its weights are finite: "
            "load it with dtype=float32, or leave out what edits it"
        )
    return scores


def to_end(answer: list[int], ends: Collection[int]) -> list[int]:
    """Return the tokens up to and including the first that ends a sequence."""
    stop = next((count for count, token in enumerate(answer, 1) if token in ends), None)
    return answer[:stop]
