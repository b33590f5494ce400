"""Right caches: of few lines, from which the faulty ones differ by one fault each, of transformers, and policies."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, QuantizedCache, StaticCache
from transformers.cache_utils import DynamicLayer

FIRST = 4


class Keeper(DynamicLayer):
    """Keeps the first tokens and the latest ones; every call still reads all that it adds."""

    first = FIRST

    def __init__(self, budget: int) -> None:
        super().__init__()
        self.budget, self.seen = budget, 0

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


def _refuse_windows(config) -> None:
    if getattr(config, "sliding_window", None) or {*(getattr(config, "layer_types", None) or ())} - {"full_attention"}:
        raise NotImplementedError(f"{config.model_type}: layers of full attention alone are served")


def cache_of(config, make) -> Cache:
    """A cache of layers, one for each of the model."""
    _refuse_windows(config)
    return Cache(layers=[make() for _ in range(config.num_hidden_layers)])


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


@contextmanager
def latest_kept(model, share):
    """As a press of kvpress does, hooks of the attention cut a stock cache after each prompt has been read."""
    _refuse_windows(model.config)

    def press(module, args, kwargs, output):
        layer, read = kwargs["past_key_values"].layers[module.layer_idx], kwargs["hidden_states"].shape[1]
        if layer.keys.shape[2] == read > 1:  # a first prompt
            if kwargs["attention_mask"] is not None:
                raise NotImplementedError("rows are padded")
            latest = max(0, round(share * read) - FIRST) if share < 1 else read - FIRST
            kept = [*range(FIRST), *range(read - latest, read)]
            layer.keys, layer.values = layer.keys[:, :, kept], layer.values[:, :, kept]
        return output

    with ExitStack() as hooks:
        for layer in model.model.layers:
            hook = layer.self_attn.register_forward_hook(press, with_kwargs=True)
            hooks.callback(hook.remove)
        yield


RIGHT = (
    stock,
    dynamic_cache_without_config,
    static_cache,
    quantized_cache,
    latest_kept,
    "streaming",
    "h2o",
    "adakv",
    "snapkv",
    "tova",
    "pyramid",
)
