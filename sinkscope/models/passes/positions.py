"""Check that hooks count on where the prompt ended, in a prompt and two steps of generation."""

from __future__ import annotations

import torch
from jaxtyping import Int
from torch import Tensor, nn

from sinkscope.errors import UnsupportedError
from sinkscope.models.call_cache import CACHE_NAMES, by_name, cache_in, cache_parameter, tokens_in
from sinkscope.models.hooks import Args, Kwargs
from sinkscope.models.loading.quiet import quiet
from sinkscope.models.passes.short import token_ids
from sinkscope.models.target import Target

_LENGTH = 9  # tokens of the prompt
_NEW = 3  # tokens: the first follows the prompt, and each other one a step on the cache


@torch.no_grad()
def positions_problem(target: Target, prompt: Int[Tensor, "1 pos"]) -> str | None:
    """What is wrong with the positions that hooks count while the model generates; None if nothing is."""
    length = prompt.shape[1]
    expected, counted = list(range(length - 1, length - 1 + _NEW)), list[int]()

    def count(module: nn.Module, args: Args, kwargs: Kwargs) -> None:
        given = by_name(module, args, kwargs)
        cache, tokens = cache_in(given), given.get("input_ids")
        if tokens is None:
            tokens = given["inputs_embeds"]
        counted.append(tokens.shape[1] - 1)
        if cache is not None:
            counted[-1] += tokens_in(cache)

    settings = {"do_sample": False, "num_beams": 1, "eos_token_id": None, "pad_token_id": 0, "use_cache": True}
    with quiet(), target.hooks((target.base, "pre", count)):
        target.hf.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=_NEW, **settings)
    if counted == expected:
        return None
    reason = "the cache does not hold what earlier calls have read"
    if cache_parameter(target.base.forward) is None:
        names = " or ".join(CACHE_NAMES)
        reason = f"{type(target.base).__name__}.forward does not take its cache as {names}"
    return f"{_NEW} calls while it generates end at positions {expected}, and are counted to {counted}: {reason}"


def check_positions(target: Target) -> None:
    """Refuse a model on which hooks would count positions wrong; one that does not generate is not refused.

    A model that is read layer by layer does not generate.

    Raises:
        UnsupportedError: They would.
    """
    if not target.resident:
        return
    try:
        problem = positions_problem(target, token_ids(target, _LENGTH))
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception:  # it does not generate
        return
    if problem is not None:
        raise UnsupportedError(
            f"positions cannot be counted in {target.name}: {problem}; rename that argument, or install the "
            "versions in constraints.txt",
            page="unsupported-model",
        )
