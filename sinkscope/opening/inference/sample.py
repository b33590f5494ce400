"""A small random model of a configuration, which is called in place of one that cannot be called."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import torch

from sinkscope.models.loading.config import cut_depth, new_model
from sinkscope.models.modules.stack import DRAFT, first_of_kinds, stack_of
from sinkscope.models.target import Target

_TOKENS = 64  # in its vocabulary


def sample_of(hf: Any) -> Any:
    """A random model of a model's configuration, in float32: the first layer of each kind and those before it."""
    config = copy.deepcopy(hf.config)
    config.distributed_config = None  # it is whole in every process
    text = config.get_text_config()
    kinds = first_of_kinds(Target(hf, hf, "hf", replace(DRAFT, layers=stack_of(hf))))
    cut_depth(text, max(*kinds, 1) + 1)  # at least two
    text.vocab_size, text.pad_token_id = _TOKENS, 0
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return new_model(config).float().eval().requires_grad_(False)
