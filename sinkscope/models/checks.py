"""Checks of what a user asks of a model: its layers, neurons and heads, and the length of a text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sinkscope.errors import SinkscopeError
from sinkscope.files.records import between, checked_value
from sinkscope.models.target import Parts
from sinkscope.results.notation import neuron_name

LARGEST_ID = (1 << 63) - 1


def tokenizer_of(target: Parts) -> Any:
    """Return the tokenizer.

    Raises:
        SinkscopeError: There is none.
    """
    if target.available_tokenizer is None:
        raise SinkscopeError(
            f"{target.name} carries no tokenizer; pass tokenizer=AutoTokenizer.from_pretrained(...), or put the "
            "tokenizer's files beside the weights"
        )
    return target.available_tokenizer


def check_site(
    target: Parts, layer: int, neuron: int | None = None, expert: int | None = None, *, head: int | None = None
) -> None:
    """Refuse a layer, neuron, expert or query head that the model does not have.

    Raises:
        SinkscopeError: A number is out of range, an expert is missing, or the layer has no experts.
    """
    _check_number(target, "layer", layer, target.n_layers)
    _check_number(target, "head", head or 0, target.n_heads)
    if neuron is None:
        return
    if not target.has_mlp(layer, expert):
        is_like = "one MLP without experts; give (layer, neuron)"
        if target.is_mixture(layer):
            is_like = "a mixture of experts; give (layer, expert, neuron)"
        raise SinkscopeError(f"{neuron_name(layer, expert, neuron)}: layer {layer} of {target.name} is {is_like}")
    _check_number(target, "expert", expert or 0, target.n_experts(layer) or 1)
    _check_number(target, "neuron", neuron, target.width(layer, expert))


def _check_number(target: Parts, what: str, value: int, count: int) -> None:
    if not 0 <= value < count:
        raise SinkscopeError(f"{what} {value} is not in {target.name}: give one from 0 to {count - 1}")


def attending_layers(target: Parts, layers: Sequence[int] | None) -> list[int]:
    """Return layers that attend with a softmax, in order; None selects all of them.

    Raises:
        SinkscopeError: The list is empty, or names a layer that the model does not have or that does not attend.
    """
    attending = target.attending
    if layers is None:
        wanted = attending
    else:
        wanted = sorted(set(layers))
    if not wanted:
        raise SinkscopeError("no layer was given: expected at least one")
    for layer in wanted:
        check_site(target, layer)
        if layer not in attending:
            raise SinkscopeError(f"layer {layer} of {target.name} has no softmax attention; these have: {attending}")
    return wanted


def check_length(target: Parts, what: str, tokens: int, new: int = 0, remedy: str = "shorten it") -> None:
    """Refuse a text that does not fit the context together with the tokens that are to follow it.

    Args:
        what: The text, as the message names it.
        tokens: Length of the text.
        new: Number of tokens that are to follow.
        remedy: What to do about a text that is too long.

    Raises:
        SinkscopeError: It does not fit.
    """
    limit = target.max_positions
    if limit is None or tokens + new <= limit:
        return
    length = f"{tokens} tokens"
    if new > 0:
        length += f" and {new} more are to come"
        if tokens < limit:
            remedy += f", or ask for at most {limit - tokens} new tokens"
    raise SinkscopeError(f"{what} has {length}, but the context of {target.name} is {limit}: {remedy}")


def end_ids(target: Parts) -> list[int]:
    """Return ids after which generation ends, as the model's generation configuration says."""
    ends = getattr(getattr(target.hf, "generation_config", None), "eos_token_id", None)
    if ends is None:
        return []
    if not isinstance(ends, list | tuple):
        ends = [ends]
    what = f"eos_token_id of the generation_config of {target.name}"
    return checked_value(list[between(int, -LARGEST_ID, LARGEST_ID)], list(ends), what, strict=True)
