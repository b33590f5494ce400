"""What sinkscope uses of transformers that is not public there: one file, and a test that fails when a name moves."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

FOLLOWED = ("_prefill", "_get_candidate_generator")
"""Methods of a model that `generate` calls: to read a prompt, and to begin assisted generation."""


def attention_name(config: Any) -> str:
    """The attention that modules with this configuration ask for."""
    return str(config._attn_implementation)


def set_attention(config: Any, name: str) -> None:
    """Modules with this configuration ask for this attention from now on."""
    config._attn_implementation = name


def eager_attention(module: Any) -> Callable[..., Any]:
    """The attention that the model's own file defines."""
    return sys.modules[type(module).__module__].eager_attention_forward


def sdpa_attention() -> Callable[..., Any]:
    """The attention by `torch.nn.functional.scaled_dot_product_attention`."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    return sdpa_attention_forward


@contextmanager
def following_generate(
    model: Any, prompting: Callable[[bool], None], check: Callable[[str, dict[str, Any]], None]
) -> Iterator[None]:
    """For the length of a `with`, `generate` tells what only it knows: which calls read a prompt.

    A prompt that comes in chunks may end with a chunk of one token, which looks like a generated one from below.

    Args:
        model: the causal language model.
        prompting: called with True before a prompt is read, and with False after it.
        check: called with the name of the method in `FOLLOWED` and the arguments of the forward call; may raise.
    """

    def prefill(*args: Any, **kwargs: Any) -> Any:
        check("_prefill", kwargs["model_kwargs"] if "model_kwargs" in kwargs else args[2])
        prompting(True)
        try:
            return type(model)._prefill(model, *args, **kwargs)
        finally:
            prompting(False)

    def candidates(*args: Any, **kwargs: Any) -> Any:
        check("_get_candidate_generator", {})
        return type(model)._get_candidate_generator(model, *args, **kwargs)

    ours = {name: fn for name, fn in zip(FOLLOWED, (prefill, candidates), strict=True) if hasattr(type(model), name)}
    for name, fn in ours.items():
        setattr(model, name, fn)
    try:
        yield
    finally:
        for name in ours:
            delattr(model, name)
