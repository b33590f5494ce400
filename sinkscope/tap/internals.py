"""Everything non-public in transformers and torch that sinkscope uses, in one file."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

_BATCHING = "init_continuous_batching"


def attention_name(config: Any) -> str:
    """Return the name of the attention that modules with this configuration use."""
    # Past the look-up of configurations, which takes a dozen times as long, because it is asked for at every token.
    return str(object.__getattribute__(config, "_attn_implementation_internal"))


def set_attention(config: Any, name: str) -> None:
    """Make modules with this configuration use this attention from now on, and none with a part of it."""
    config._attn_implementation_internal = name  # the public setter changes the configurations inside as well


def eager_attention(module: Any) -> Callable[..., Any]:
    """Return the attention defined in the model's own file."""
    return sys.modules[type(module).__module__].eager_attention_forward


def sdpa_attention() -> Callable[..., Any]:
    """Return the attention by `torch.nn.functional.scaled_dot_product_attention`."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    return sdpa_attention_forward


def in_backward() -> bool:
    """Return whether this thread is in a backward pass, in which checkpointed layers are computed again."""
    return torch._C._current_graph_task_id() != -1  # pyright: ignore[reportPrivateUsage]


def is_checkpointing(layer: nn.Module) -> bool:
    """Return whether a layer keeps no activations for the backward pass, and no cache, but is computed again in it."""
    return layer.training and bool(getattr(layer, "gradient_checkpointing", False))


@contextmanager
def without_continuous_batching(model: Any, error: Exception) -> Iterator[None]:
    """Context manager in which `generate_batch` and what it is made of raise an error.

    They put the tokens of several texts into one row, so that a position says nothing about its place in a text.

    Args:
        model: The causal language model.
        error: What is raised.
    """

    def refused(*_: Any, **__: Any) -> Any:
        raise error

    before = vars(model).get(_BATCHING)
    if hasattr(type(model), _BATCHING):
        setattr(model, _BATCHING, refused)
    try:
        yield
    finally:
        vars(model).pop(_BATCHING, None)
        if before is not None:
            setattr(model, _BATCHING, before)


@contextmanager
def following_generate(
    model: Any, prompting: Callable[[bool], None], check: Callable[[str, dict[str, Any], Any], None]
) -> Iterator[None]:
    """Context manager in which `generate` reports which calls read a prompt, which only it knows.

    A chunked prompt may end with a chunk of one token, which looks like a generated token to the model.

    Args:
        model: The causal language model.
        prompting: Called with True before a prompt is read, and with False afterwards.
        check: Called with the name of a method of the model that `generate` calls, `_prefill` or (for assisted
            generation) `_get_candidate_generator`, the arguments of the forward call, and the generation settings; may
            raise.
    """

    def prefill(input_ids: Any, generation_config: Any, model_kwargs: dict[str, Any], **more: Any) -> Any:
        check("_prefill", model_kwargs, generation_config)
        prompting(True)
        try:
            return type(model)._prefill(model, input_ids, generation_config, model_kwargs, **more)
        finally:
            prompting(False)

    def candidates(*args: Any, **kwargs: Any) -> Any:
        check("_get_candidate_generator", {}, None)
        return type(model)._get_candidate_generator(model, *args, **kwargs)

    model._prefill = prefill
    model._get_candidate_generator = candidates
    try:
        yield
    finally:
        del model._prefill, model._get_candidate_generator
