"""The cache of keys and values among the arguments and outputs of a call, whatever transformers calls it there.

transformers 5.24 renamed `past_key_values` to `cache`. No other file of sinkscope uses these names.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

from torch import nn

from sinkscope.models.hooks import Args, Hook, Kwargs, forward_parameters
from sinkscope.models.target import Target

CACHE_NAMES = ("cache", "past_key_values")
"""Names of the cache; where a call has several, transformers reads the first of them."""


def cache_argument(cache: Any) -> dict[str, Any]:
    """Return the cache as an argument by name, for the `forward` and the `generate` of a model."""
    from transformers.modeling_outputs import BaseModelOutputWithPast

    fields = BaseModelOutputWithPast.__dataclass_fields__
    return {name: cache for name in CACHE_NAMES if name in fields}


def new_call_cache(arguments: Mapping[str, Any], target: Target) -> Any:
    """Return a new cache for a call with these arguments, which brings none; None if it is to use none.

    It is of the class that the model asks for.
    """
    from transformers import DynamicCache

    use_cache = arguments.get("use_cache")
    if use_cache is None:
        use_cache = getattr(target.config, "use_cache", True)
    if not use_cache:
        return None
    for parameter in forward_parameters(type(target.base)).values():
        for kind in get_args(parameter.annotation):
            if DynamicCache in getattr(kind, "__bases__", ()):
                return kind()
    return DynamicCache(config=target.config)


def by_name(module: nn.Module, args: Args, kwargs: Kwargs) -> dict[str, Any]:
    """Return all arguments of a call by the names of the parameters."""
    return {**dict(zip(forward_parameters(type(module)), args, strict=False)), **kwargs}


def bridge_hooks(bridge: nn.Module) -> list[Hook]:
    """Return hooks by which the attention of a TransformerBridge finds the cache, whatever transformers calls it.

    TransformerLens 4.3 reads one name only, and under transformers 5.24 each generated token attends to itself alone.
    """
    from transformer_lens.model_bridge.generalized_components import AttentionBridge

    return [(module, "pre", _rename) for module in bridge.modules() if isinstance(module, AttentionBridge)]


def _rename(_module: nn.Module, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
    if "cache" in kwargs:
        kwargs["past_key_values"] = kwargs.pop("cache")
    return args, kwargs
