"""A small random model of the class and configuration of another one, in which nothing is alike by chance."""

from __future__ import annotations

import copy
import re
from contextlib import suppress
from typing import Any

import torch
from transformers import PreTrainedModel

from sinkscope.models.adapters import layer_kinds, layers_at, stack_of
from sinkscope.models.checkpoints.config import cpu_by_default, cut_depth
from sinkscope.opening.proof import TOKENS

_VOCABULARY = 64
_WIDE = re.compile("intermediate_size|ffn_dim|ffn_hidden|n_inner|d_ff")
_REACH = re.compile("sliding_window|window_size|attention_chunk_size|local_attention|index_topk$")
_BLOCK = re.compile("index_topk_blocks|index_block_size")
_MOST = ((_WIDE, 32), (_REACH, 6), (_BLOCK, 2))
"""Sizes in configurations, and what they are at most in a sample."""


def model_within(hf: Any) -> Any:
    """Return the model of transformers inside a wrapper, whose class alone takes a configuration."""
    for module in hf.modules():
        if isinstance(module, PreTrainedModel):
            return module
    return hf


def kinds_of(hf: Any) -> list[int]:
    """Return, for each layer of a model, the number of the first of its kind in an unchanged model of the class."""
    layers = layers_at(hf, stack_of(hf))
    with suppress(Exception):  # a class may take no configuration alone
        with torch.device("meta"):
            plain = type(model_within(hf))(copy.deepcopy(hf.config))
        kinds = layer_kinds(layers_at(plain, stack_of(plain)))
        if len(kinds) == len(layers):
            return kinds
    return layer_kinds(layers)


def sample_of(hf: Any, kinds: list[int]) -> Any:
    """Return a small random model of the class of another one, in float32 on the CPU.

    It has the first layer of each kind and those before it, narrow MLPs, and windows of a few tokens.

    Args:
        hf: The other model, whose weights are not read.
        kinds: What `kinds_of` says of it.
    """
    config = copy.deepcopy(hf.config)
    config.distributed_config = None  # it is whole in every process
    config._attn_implementation = "eager"
    text = config.get_text_config()
    cut_depth(text, max(*kinds, 1) + 1)  # at least two
    text.vocab_size, text.pad_token_id = _VOCABULARY, 0
    for name in ("max_position_embeddings", "n_positions"):
        if isinstance(getattr(text, name, None), int):
            setattr(text, name, max(TOKENS, getattr(text, name)))
    for name, value in list(vars(text).items()):
        for pattern, most in _MOST:
            if pattern.search(name) and isinstance(value, int) and value > most:
                setattr(text, name, most)
    with cpu_by_default(), torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        sample = type(model_within(hf))(config).float().eval().requires_grad_(False)
        _copy_factors(hf, sample)
        _randomise(sample)
    return sample


def _copy_factors(hf: Any, sample: Any) -> None:
    """Give modules the constants that follow from the depth of the whole model, as those of MiniCPM3."""
    for path, module in sample.named_modules():
        with suppress(AttributeError):  # the user's model may lack the module
            there = vars(hf.get_submodule(path))
            vars(module).update({name: there[name] for name in there if isinstance(there[name], float)})


def _randomise(sample: Any) -> None:
    """Draw weights with which every part gives numbers of about one size."""
    for name, weight in sample.named_parameters():
        if weight.ndim >= 2 and "conv" not in name:
            weight.normal_(std=min(0.5, weight.shape[-1] ** -0.5))
        else:
            weight.nan_to_num_().add_(0.1 * torch.randn_like(weight))
