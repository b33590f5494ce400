"""What a user gives to a model (texts, token ids, a tokenizer's output) or asks of it (layers, neurons), checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import compress
from typing import Annotated, Any

import torch
from jaxtyping import Int
from pydantic import Field
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from sinkscope.errors import SinkscopeError
from sinkscope.files.plain import check_encodable, plain
from sinkscope.files.records import checked_value
from sinkscope.models.target import Target, tokenizer_of
from sinkscope.models.text import note_second_bos, resolve_bos
from sinkscope.models.weights import is_plain
from sinkscope.results.notation import Neuron


def check_site(
    target: Target, layer: int, neuron: int | None = None, expert: int | None = None, *, head: int | None = None
) -> None:
    """Refuse a layer, neuron, expert or query head that the model does not have.

    Raises:
        SinkscopeError: A number is out of range, an expert is missing, or the layer has no experts.
    """
    _check_number(target, "layer", layer, target.n_layers)
    _check_number(target, "head", head, target.n_heads)
    if neuron is None:
        return
    is_mixture = layer in target.mixtures
    has_both = is_mixture and "down" in target.paths[layer]
    if is_mixture != (expert is not None) and not has_both:
        has = "a mixture of experts; give (layer, expert, neuron)" if is_mixture else "no experts; give (layer, neuron)"
        raise SinkscopeError(f"{Neuron(layer, expert, neuron)}: layer {layer} of {target.name} has {has}")
    _check_number(target, "expert", expert, target.n_experts(layer))
    _check_number(target, "neuron", neuron, target.width(layer, expert))


def _check_number(target: Target, name: str, value: int | None, count: int) -> None:
    if value is not None and not 0 <= value < count:
        raise SinkscopeError(f"{name} {value} is not in {target.name}: give one from 0 to {count - 1}")


def attending_layers(target: Target, layers: Sequence[int] | None) -> list[int]:
    """Return layers that attend with a softmax, in order; None selects all of them.

    Raises:
        SinkscopeError: The list is empty, or names a layer that the model does not have or that does not attend.
    """
    wanted = target.attending if layers is None else sorted({*layers})
    if not wanted:
        raise SinkscopeError("no layer was given: expected at least one")
    for layer in wanted:
        if layer not in target.attending:
            attending = ", ".join(map(str, target.attending))
            raise SinkscopeError(f"layer {layer} of {target.name} has no softmax attention; these have: {attending}")
    return wanted


def check_length(target: Target, name: str, tokens: int, new: int = 0, remedy: str = "shorten it") -> None:
    """Refuse a text that does not fit the context together with the tokens that are to follow it.

    Args:
        name: The text, as the message names it.
        tokens: Length of the text.
        new: Number of tokens that are to follow.
        remedy: What to do about a text that is too long.

    Raises:
        SinkscopeError: It does not fit.
    """
    limit = target.max_positions
    if limit is not None and tokens + new > limit:
        length = f"{tokens} tokens"
        if new:
            length += f" and {new} more are to come"
            remedy += ", or ask for fewer new tokens"
        raise SinkscopeError(f"{name} has {length}, but the context of {target.name} is {limit}: {remedy}")


def end_ids(target: Target) -> list[int]:
    """Return ids after which generation ends, as the model's generation configuration says."""
    ends = getattr(getattr(target.hf, "generation_config", None), "eos_token_id", None)
    if ends is None:
        return []
    return [ends] if isinstance(ends, int) else ends


Ids = Int[Tensor, "batch pos"]


@dataclass(frozen=True)
class Inputs:
    """Rows of token ids.

    Attributes:
        rows: The real ids of each row.
        ids: Token ids as given; rows of different lengths are padded on the right.
        mask: 1 for real tokens, 0 for padding. None if there is no padding.
        was_padded: Whether rows were given in different lengths.
    """

    rows: list[list[int]]
    ids: Ids
    mask: Ids | None
    was_padded: bool = False


def read_inputs(target: Target, inputs: Any, mask: Any = None, *, special: bool = True) -> Inputs:
    """Read a user's input for a model.

    Args:
        target: The model, whose tokenizer encodes texts.
        inputs: One or several texts; ids as a list, lists, an array or a tensor; or a mapping with `input_ids` and
            `attention_mask`, such as a `BatchEncoding`.
        mask: 1 for real tokens, 0 for padding; of a mapping, by default its `attention_mask`.
        special: Whether the tokenizer adds its special tokens to texts.

    Raises:
        SinkscopeError: The input is none of these or empty, an id or mask is invalid, or there is no tokenizer.
    """
    if isinstance(inputs, Mapping):
        mask = inputs.get("attention_mask") if mask is None else mask
        inputs = inputs.get("input_ids")
    if isinstance(inputs, str):
        inputs = [inputs]
    if isinstance(inputs, list | tuple) and inputs and all(isinstance(text, str) for text in inputs):
        inputs = _encoded(target, inputs, special)
    weight = getattr(target.embedding, "weight", None)
    size = len(weight) if is_plain(weight) else target.config.vocab_size
    rows = _numbers(inputs, size, "tokens", strict=True)
    real = [[1] * len(row) for row in rows]
    was_padded = len({*map(len, rows)}) > 1
    if mask is not None:
        real = _numbers(mask, 2, "attention_mask")  # often of bools, or of numbers that are not whole
        if [*map(len, real)] != [*map(len, rows)] or not all(map(any, real)):
            raise SinkscopeError(
                "attention_mask: expected 1 at real tokens and 0 at padding, one for each token id, and a real token "
                "in every row"
            )
    ids = pad_sequence([torch.tensor(row) for row in rows], batch_first=True)
    padded = pad_sequence([torch.tensor(row) for row in real], batch_first=True)
    rows = [[*compress(row, kept)] for row, kept in zip(rows, real, strict=True)]
    return Inputs(rows, ids, None if padded.all() else padded, was_padded)


def _numbers(values: Any, size: int, name: str, *, strict: bool = False) -> list[list[int]]:
    """A list for each row of a tensor, an array, or lists, of whole numbers below a size."""
    with suppress(SinkscopeError):  # it is of no kind that holds numbers
        values = plain(values)
    if isinstance(values, list) and not any(isinstance(row, list) for row in values):
        values = [values]
    row = Annotated[list[Annotated[int, Field(ge=0, lt=size)]], Field(min_length=1)]
    return checked_value(list[row], values, name, strict=strict)


def _encoded(target: Target, texts: Sequence[str], special: bool) -> list[list[int]]:
    """The tokens of each text."""
    tokenizer = tokenizer_of(target)
    bos = resolve_bos(tokenizer, None)
    rows: list[list[int]] = []
    for number, text in enumerate(texts, 1):
        check_encodable(text, f"prompt {number}")
        rows.append(tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"])
        if not text.strip():
            raise SinkscopeError(f"prompt {number} is empty: write at least one word")
        note_second_bos(rows[-1], bos, f"prompt {number}")
    return rows


def read_row(target: Target, inputs: Any, name: str = "the input", *, special: bool = True) -> list[int]:
    """Return the ids of one text, or of one row of ids.

    Args:
        target: The model, whose tokenizer encodes a text.
        inputs: A text; or ids as a list, an array or a tensor.
        name: What it is, as errors name it.
        special: Whether the tokenizer adds its special tokens to a text.

    Raises:
        SinkscopeError: As for `read_inputs`; or there are several rows.
    """
    try:
        rows = read_inputs(target, inputs, special=special).rows
    except SinkscopeError as error:
        raise SinkscopeError(f"{name}: {error}") from None
    if len(rows) > 1:
        raise SinkscopeError(f"{name} has {len(rows)} rows: expected one text, or one row of token ids")
    return rows[0]
