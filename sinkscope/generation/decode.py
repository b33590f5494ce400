"""What a model generates next by the likeliest tokens, or by given ones."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import LogitsProcessor

from sinkscope.engine.run import Run
from sinkscope.generation.write import write
from sinkscope.hooks.edit.base import Intervention, under
from sinkscope.models.inputs import end_ids
from sinkscope.models.target import Target

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
        return allow_only(scores, torch.tensor(tokens, device=scores.device))


def allow_only(scores: Any, tokens: Any) -> Any:
    """Return scores `[row vocab]` that forbid every token but one of each row, `[row]`."""
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
    **options: Any,
) -> tuple[list[list[int]], Run | None]:
    """Continue prompts, by the likeliest tokens by default, or by given ones.

    Args:
        target: The model, with all its layers.
        prompts: Token ids.
        new: Maximum number of new tokens.
        edit: Interventions and observers to apply.
        forced: Tokens to use instead of the likeliest ones, at least `new` of them for each prompt.
        cache: The cache to go on with; a new one if it is None.
        options: Further arguments of `model.generate`.

    Returns:
        The new ids of each row, up to and including the end-of-sequence token unless tokens were given; and the run of
        the edit, where the step of an event is that of the call, 0 for the prompt.
    """
    pad = max(0, min(end_ids(target), default=0))
    stops = stops_of(target, options)
    ids, mask = padded(prompts, pad, target.device)
    if forced is not None:
        options |= {"logits_processor": [ForcedAnswer(forced, ids.shape[1])], "eos_token_id": None}
    settings = decoding(target, **{"do_sample": False, "pad_token_id": pad, **options})
    with under(edit, target) as run:
        out = write(
            run,
            target.hf,
            ids,
            attention_mask=mask,
            max_new_tokens=new,
            cache=cache,
            fixed=forced is not None,
            **settings,
        )
    answers = out[:, ids.shape[1] :].tolist()
    if forced is None:
        answers = [to_end(answer, stops) for answer in answers]
    return answers, run


def to_end(answer: list[int], ends: Collection[int]) -> list[int]:
    """Return the tokens up to and including the first that ends a sequence."""
    for i, token in enumerate(answer):
        if token in ends:
            return answer[: i + 1]
    return answer
