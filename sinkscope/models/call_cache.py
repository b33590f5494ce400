"""The cache of keys and values among the arguments and outputs of a call, whatever transformers calls it there.

transformers 5.24 renamed `past_key_values` to `cache`. No other file of sinkscope uses these names.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, get_args

from torch import nn

from sinkscope.models.hooks import Args, Hook, Kwargs, forward_parameters
from sinkscope.models.target import Target

_NOW, _IN_BRIDGES = "cache", "past_key_values"  # the second in the attention of TransformerLens, up to 4.3
CACHE_NAMES = (_NOW, _IN_BRIDGES)
"""Names of the cache; where a call has several, transformers reads the first of them."""


def cache_parameter(module: nn.Module) -> inspect.Parameter | None:
    """Return the parameter for the cache of a module; None if there is none of a known name."""
    parameters = forward_parameters(type(module))
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
    """Return arguments by name, which bring no cache, with one."""
    others = {name: value for name, value in arguments.items() if name not in CACHE_NAMES}
    return {**others, **cache_argument(model, cache)}


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
    asked = cache_parameter(target.base)
    for kind in get_args(getattr(asked, "annotation", None)):
        if isinstance(kind, type) and issubclass(kind, DynamicCache) and kind is not DynamicCache:
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


def _rename(_module: nn.Module, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs] | None:
    if _IN_BRIDGES in kwargs or kwargs.get(_NOW) is None:
        return None
    others = {name: value for name, value in kwargs.items() if name != _NOW}
    return args, {**others, _IN_BRIDGES: kwargs[_NOW]}
