"""Check that hooks count on where the prompt ended, in a prompt and two steps of generation."""

from __future__ import annotations

import torch
from torch import nn

from sinkscope.errors import UnsupportedError
from sinkscope.models.call_cache import CACHE_NAMES, by_name, cache_in, tokens_in
from sinkscope.models.hooks import Args, Kwargs
from sinkscope.models.loading.quiet import quiet
from sinkscope.models.passes.short import token_ids
from sinkscope.models.target import Target

_LENGTH = 9  # tokens of the prompt
_NEW = 3  # tokens: the first follows the prompt, and each other one a step on the cache


@torch.no_grad()
def check_positions(target: Target) -> None:
    """Refuse a model on which hooks would count positions wrong; one that does not generate is not refused.

    A model that is read layer by layer does not generate.

    Raises:
        UnsupportedError: They would.
    """
    if not target.resident:
        return
    expected, counted = list(range(_LENGTH - 1, _LENGTH - 1 + _NEW)), list[int]()

    def count(module: nn.Module, args: Args, kwargs: Kwargs) -> None:
        given = by_name(module, args, kwargs)
        cache, tokens = cache_in(given), given.get("input_ids")
        if tokens is None:
            tokens = given["inputs_embeds"]
        counted.append(tokens.shape[1] - 1)
        if cache is not None:
            counted[-1] += tokens_in(cache)

    prompt = token_ids(target, _LENGTH)
    settings = {"do_sample": False, "num_beams": 1, "eos_token_id": None, "pad_token_id": 0, "use_cache": True}
    try:
        with quiet(), target.hooks((target.base, "pre", count)):
            target.hf.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=_NEW, **settings)
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception:  # it does not generate
        return
    if counted != expected:
        raise UnsupportedError(
            f"positions cannot be counted in {target.name}: {_NEW} calls while it generates end at positions "
            f"{expected}, and are counted to {counted}, because its cache does not come as {' or '.join(CACHE_NAMES)}, "
            "or does not hold what earlier calls have read; rename that argument, or install the versions in "
            "constraints.txt"
        )
