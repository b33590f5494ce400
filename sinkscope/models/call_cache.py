"""The cache of keys and values among the arguments and outputs of a call, whatever transformers calls it there.

transformers 5.24 renamed `past_key_values` to `cache`. No other file of sinkscope uses these names.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, get_args

from torch import nn

from sinkscope.models.hooks import Args, Hook, Kwargs, parameters_of
from sinkscope.models.target import Target

CACHE_NAMES = ("cache", "past_key_values")
"""Names of the cache; where a call has several, transformers reads the first of them."""

_IN_BRIDGES = "past_key_values"  # in the attention of TransformerLens, up to 4.3


def cache_in(given: Any) -> Any:
    """Return the cache among arguments by name, or in a model's output; None if there is none."""
    is_by_name = isinstance(given, dict)
    for name in CACHE_NAMES:
        cache: Any = given.get(name) if is_by_name else getattr(given, name, None)
        if cache is not None:
            return cache
    return None


def tokens_in(cache: Any) -> int:
    """Return the number of tokens that a cache of transformers has read, with padding.

    Where the first layer keeps a state and no keys, as in MiniMax, it says that there are none.
    """
    count = int(cache.get_seq_length())
    if count == 0:
        for layer in getattr(cache, "layers", None) or []:
            if hasattr(layer, "get_seq_length"):
                count = max(count, int(layer.get_seq_length()))
    return count


def cache_parameter(module: nn.Module) -> inspect.Parameter | None:
    """Return the parameter for the cache of a module; None if there is none of a known name."""
    parameters = parameters_of(type(module))
    for name in CACHE_NAMES:
        if name in parameters:
            return parameters[name]
    return None


def cache_argument(model: nn.Module, cache: Any) -> dict[str, Any]:
    """Return the cache as an argument by name, for the `forward` and the `generate` of a model."""
    parameter = cache_parameter(model)
    if parameter is not None:
        return {parameter.name: cache}
    from transformers.modeling_outputs import BaseModelOutputWithPast

    # Arguments are passed on as they are, to a model of transformers.
    return {name: cache for name in CACHE_NAMES if name in BaseModelOutputWithPast.__dataclass_fields__}


def with_cache(model: nn.Module, arguments: Mapping[str, Any], cache: Any) -> dict[str, Any]:
    """Return arguments by name, with a cache in place of theirs; without any if it is None."""
    if cache is not None and cache_in(arguments) is cache:  # at every token, without a look at the model's signature
        return dict(arguments)
    kept = {name: value for name, value in arguments.items() if name not in CACHE_NAMES}
    if cache is None:
        return kept
    return {**kept, **cache_argument(model, cache)}


def new_call_cache(arguments: Mapping[str, Any], target: Target) -> Any:
    """Return a new cache for a call with these arguments, which brings none; None if it is to use none."""
    use_cache = arguments.get("use_cache")
    if use_cache is None:
        use_cache = getattr(target.config, "use_cache", True)
    return new_cache(target) if use_cache else None


def new_cache(target: Target) -> Any:
    """Return an empty cache, of the class that the model asks for."""
    from transformers import DynamicCache

    asked = cache_parameter(target.base)
    for kind in get_args(getattr(asked, "annotation", None)):
        if isinstance(kind, type) and issubclass(kind, DynamicCache) and kind is not DynamicCache:
            return kind()
    return DynamicCache(config=target.config)


def by_name(module: nn.Module, args: Args, kwargs: Kwargs) -> dict[str, Any]:
    """Return all arguments of a call by the names of the parameters."""
    return {**dict(zip(parameters_of(type(module)), args, strict=False)), **kwargs}


def bridge_hooks(bridge: nn.Module) -> list[Hook]:
    """Return hooks by which the attention of a TransformerBridge finds the cache, whatever transformers calls it.

    TransformerLens 4.3 reads one name only, and under transformers 5.24 each generated token attends to itself alone.
    """
    from transformer_lens.model_bridge.generalized_components import AttentionBridge

    return [(module, "pre", _rename) for module in bridge.modules() if isinstance(module, AttentionBridge)]


def _rename(_module: nn.Module, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs] | None:
    cache = cache_in(kwargs)
    if cache is None or _IN_BRIDGES in kwargs:
        return None
    kept = {name: value for name, value in kwargs.items() if name not in CACHE_NAMES}
    return args, {**kept, _IN_BRIDGES: cache}
