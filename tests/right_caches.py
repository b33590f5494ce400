"""Right caches: of few lines, from which the faulty ones differ by one fault each, of transformers, and policies."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, QuantizedCache, StaticCache
from transformers.cache_utils import DynamicLayer

from sinkscope.kv import H2O, AdaKV, StreamingLLM

FIRST = 4


class Keeper(DynamicLayer):
    """Keeps the first tokens and the latest ones; every call still reads all that it adds."""

    def __init__(self, budget: int, first: int = FIRST) -> None:
        super().__init__()
        self.budget, self.first, self.seen = budget, first, 0

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs):
        keys, values = super().update(key_states, value_states)
        self.seen += key_states.shape[2]
        self.evict()
        return keys, values

    def evict(self) -> None:
        self.keys, self.values = self.kept(self.keys), self.kept(self.values)

    def kept(self, states: Tensor) -> Tensor:
        if states.shape[2] <= self.budget:
            return states
        return torch.cat([states[:, :, : self.first], states[:, :, self.first - self.budget :]], 2)

    def get_seq_length(self) -> int:
        return self.seen

    def get_mask_sizes(self, query_length) -> tuple[int, int]:
        held = 0 if not self.is_initialized else self.keys.shape[2]
        return held + query_length, self.seen - held

    def crop(self, tokens_to_remove: int) -> None:
        self.keys, self.values = self.keys[:, :, :tokens_to_remove], self.values[:, :, :tokens_to_remove]
        self.seen += tokens_to_remove

    def reset(self) -> None:
        super().reset()
        self.is_initialized = False
        self.seen = 0


class HeadKeeper(Keeper):
    """Keeps the first, the latest and the largest values, which differ from head to head."""

    def evict(self) -> None:
        if self.keys.shape[2] <= self.budget:
            return
        worth = self.values.norm(dim=-1)
        worth[:, :, : self.first] = worth[:, :, -2:] = torch.inf
        chosen = worth.topk(self.budget, -1).indices.sort(-1).values
        self.keys, self.values = self.chosen(self.keys, chosen), self.chosen(self.values, chosen)

    def chosen(self, states: Tensor, slots: Tensor) -> Tensor:
        return states.gather(2, slots[..., None].expand(-1, -1, -1, states.shape[-1]))


def cache_of(config, make) -> Cache:
    """A cache of layers, one for each of the model."""
    if getattr(config, "sliding_window", None) or config.model_type == "lfm2":
        raise NotImplementedError(f"{config.model_type}: layers of full attention alone are served")
    layers = []
    for _ in range(config.num_hidden_layers):
        layers.append(make())
    return Cache(layers=layers)


def keeper(config, budget):
    return cache_of(config, lambda: Keeper(budget))


def head_keeper(config, budget):
    return cache_of(config, lambda: HeadKeeper(budget))


def stock(config):
    return DynamicCache(config=config)


def dynamic_cache_without_config():
    return DynamicCache()


def static_cache(config, max_cache_len):
    return StaticCache(config=config, max_cache_len=max_cache_len)


def quantized_cache(config):
    return QuantizedCache("quanto", config, q_group_size=16)


def streaming_llm(budget):
    return StreamingLLM(budget=budget)


def h2o(budget):
    return H2O(budget=budget)


def ada_kv(budget):
    return AdaKV(budget=budget)


ROUNDING = {"quantized_cache": 0.5}
"""Errors of logits, in standard deviations, that are allowed to those that round."""
RIGHT = (
    stock,
    dynamic_cache_without_config,
    static_cache,
    quantized_cache,
    streaming_llm,
    h2o,
    ada_kv,
)
